"""Slow reads are hedged, late reads are retried, and hedges are few; log lines, too."""

import math

from storesvc.storage.hedging import (
    HEDGE_BURST,
    HEDGE_SHARE,
    LEAST_RECENT,
    PAUSE_SECONDS,
    Hedging,
    Limits,
    LogThrottle,
    Step,
)

MIB = 1 << 20

PATIENT = Limits(answer_seconds=1000)


def known(seconds: float, *, limits: Limits = PATIENT, size_bytes: int = 0) -> Hedging:
    """Returns a history of reads that all took the same time."""
    reads = Hedging(limits)
    for _ in range(LEAST_RECENT):
        reads.begin(size_bytes, now=0).record_answer(now=seconds)
    return reads


def test_a_read_is_slow_after_twice_the_high_percentile() -> None:
    read = known(3).begin(0, now=100)

    assert Step.WAIT is read.step(now=105.9)
    assert Step.HEDGE is read.step(now=106)
    assert Step.WAIT is read.step(now=200)


def test_rare_slow_reads_do_not_raise_the_threshold() -> None:
    reads = Hedging(PATIENT)
    for at in range(100):
        reads.begin(0, now=0).record_answer(now=1 if at % 50 else 60)

    assert 2 == reads.slow_seconds(0)


def test_small_jitter_is_not_slow() -> None:
    read = known(0.01, limits=Limits(floor_seconds=0.5)).begin(0, now=0)

    assert 0.5 == read.due


def test_the_first_reads_have_an_initial_threshold() -> None:
    assert PATIENT.unknown_seconds == Hedging(PATIENT).begin(0, now=0).due


def test_reads_are_compared_with_those_of_their_size() -> None:
    reads = known(3, size_bytes=8 * MIB)

    assert 6 == reads.slow_seconds(9 * MIB)
    assert PATIENT.unknown_seconds == reads.slow_seconds(0)
    assert PATIENT.unknown_seconds == reads.slow_seconds(32 * MIB)


def test_hedged_reads_are_limited_to_a_share_of_all_reads() -> None:
    reads, count = known(1), 1000

    under_way = [reads.begin(0, now=0) for _ in range(count)]
    twice = [read for read in under_way if read.step(now=2) is Step.HEDGE]
    assert HEDGE_BURST == len(twice)

    for _ in range(count):
        twice += [
            read for read in [reads.begin(0, now=0)] if read.step(now=2) is Step.HEDGE
        ]
    assert HEDGE_BURST < len(twice) <= HEDGE_BURST + HEDGE_SHARE * count


def test_a_read_without_a_hedge_budget_tries_again_later() -> None:
    reads = known(1)
    read, *_ = under_way = [reads.begin(0, now=0) for _ in range(int(HEDGE_BURST) + 1)]
    for other in under_way[1:]:
        assert Step.HEDGE is other.step(now=2)

    assert Step.WAIT is read.step(now=2)
    for _ in range(int(1 / HEDGE_SHARE)):
        reads.begin(0, now=2).record_answer(now=3)

    assert 4 == read.due
    assert Step.HEDGE is read.step(now=4)


def test_a_late_read_is_retried_some_times_and_then_fails() -> None:
    read = known(1, limits=Limits(answer_seconds=10, tries=3)).begin(0, now=0)

    assert Step.HEDGE is read.step(now=2)
    assert Step.RETRY is read.step(now=10)
    assert Step.HEDGE is read.step(now=12)
    assert Step.WAIT is read.step(now=29.9)
    assert Step.RETRY is read.step(now=30)
    assert Step.HEDGE is read.step(now=32)
    assert Step.FAIL is read.step(now=70)


def test_the_deadline_allows_for_other_bytes_in_flight() -> None:
    limits = Limits(floor_seconds=1000, answer_seconds=10, least_bytes_per_second=MIB)
    reads = Hedging(limits)
    others = [reads.begin(8 * MIB, now=0) for _ in range(4)]

    read = reads.begin(8 * MIB, now=0)
    assert Step.WAIT is read.step(now=49.9)
    assert Step.RETRY is read.step(now=50)

    for other in [*others, read]:
        other.record_abandonment()
    alone = reads.begin(8 * MIB, now=100)
    assert Step.WAIT is alone.step(now=117.9)
    assert Step.RETRY is alone.step(now=118)


def test_deadlines_follow_a_network_that_is_slower_than_assumed() -> None:
    writes = Hedging(Limits(answer_seconds=10, least_bytes_per_second=MIB))
    writes.begin(8 * MIB, now=0).record_answer(now=80)

    write = writes.begin(8 * MIB, now=100)
    assert Step.RETRY is not write.step(now=100 + 10 + 159)
    write.record_answer(now=105)

    assert 10 == writes.deadline_seconds
    writes.begin(8 * MIB, now=200)
    assert 18 == writes.deadline_seconds


def test_a_request_that_waits_has_its_deadline_from_when_it_is_sent() -> None:
    read = Hedging(Limits(answer_seconds=10)).begin(0, now=0)

    read.hold()
    assert math.inf == read.due
    assert Step.WAIT is read.step(now=100)
    read.resume(now=101)
    assert Step.RETRY is not read.step(now=110)
    assert Step.RETRY is read.step(now=111)


def test_later_calls_extend_the_deadline_of_earlier_ones() -> None:
    """The calls share one network, and all of them slow down."""
    calls = Hedging(Limits(answer_seconds=10, least_bytes_per_second=MIB))
    first, *_ = under_way = [calls.begin(64 * MIB, now=0) for _ in range(8)]
    assert 8 == len(under_way)

    assert Step.RETRY is not first.step(now=80)
    assert Step.RETRY is not first.step(now=10 + 8 * 64 - 1)
    assert Step.RETRY is first.step(now=10 + 8 * 64)


def test_one_line_per_key_is_admitted_every_ten_seconds() -> None:
    lines = LogThrottle()
    reported = [now for now in range(100) if lines.admits("late", now=float(now))]

    assert list(range(0, 100, int(PAUSE_SECONDS))) == reported


def test_lines_of_another_key_are_admitted_in_between() -> None:
    lines = LogThrottle()

    assert lines.admits("late", now=0.0)
    assert lines.admits("denied", now=1.0)
    assert not lines.admits("late", now=1.0)
