"""The read scheduler: which units are read next, and which are evicted."""

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from storesvc.restore.read_scheduler import Reader, ReadScheduler, Urgency


class Unit(NamedTuple):
    """A unit of a size."""

    number: int
    size: int = 10


def units(*numbers: int) -> list[Unit]:
    return [Unit(number) for number in numbers]


def put(scheduler: ReadScheduler[Unit], *numbers: int) -> None:
    """Reads units that fit the buffer."""
    for unit in units(*numbers):
        assert [] == scheduler.make_room(unit, Urgency.NEEDED)
        scheduler.mark_ready(unit)


def test_a_reader_takes_units_in_memory_before_earlier_ones() -> None:
    scheduler: ReadScheduler[Unit] = ReadScheduler(100)
    scheduler.join(units(1, 2, 3, 4))
    put(scheduler, 3, 2)
    late = scheduler.join(units(1, 2, 3, 4))

    taken = []
    while unit := scheduler.take(late):
        taken.append(unit.number)
        scheduler.finish(late)

    assert [3, 2] == taken
    assert Unit(1) == scheduler.next_needed(late)


def test_a_reader_finishes_its_unit_after_an_eviction() -> None:
    scheduler: ReadScheduler[Unit] = ReadScheduler(20)
    slow = scheduler.join(units(1, 2))
    put(scheduler, 1)
    assert Unit(1) == scheduler.take(slow)
    fast = scheduler.join(units(7, 8))
    put(scheduler, 7)
    assert Unit(7) == scheduler.take(fast)
    assert units(7) == scheduler.finish(fast)

    assert units(1) == scheduler.make_room(Unit(8, 20), Urgency.OVERDUE)
    scheduler.mark_ready(Unit(8, 20))

    assert scheduler.take(slow) is None
    assert Unit(1) == scheduler.next_needed(slow)


def test_a_unit_in_flight_is_not_read_twice() -> None:
    scheduler: ReadScheduler[Unit] = ReadScheduler(100)
    first, second = scheduler.join(units(1, 2)), scheduler.join(units(1, 2))
    assert Unit(1) == scheduler.next_needed(first)
    assert [] == scheduler.make_room(Unit(1), Urgency.NEEDED)

    assert scheduler.next_needed(first) is None
    assert scheduler.next_needed(second) is None
    assert Unit(2) == scheduler.next_ahead(second, 2)
    assert scheduler.next_ahead(second, 1) is None


def test_unwanted_units_are_evicted_and_wanted_ones_stay() -> None:
    scheduler: ReadScheduler[Unit] = ReadScheduler(20)
    one, other = scheduler.join(units(1, 2)), scheduler.join(units(2, 3))
    put(scheduler, 1, 2)
    assert scheduler.make_room(Unit(3), Urgency.NEEDED) is None

    assert Unit(1) == scheduler.take(one)
    assert units(1) == scheduler.finish(one)
    assert Unit(2) == scheduler.take(other)
    assert [] == scheduler.finish(other)
    assert units(2) == scheduler.leave(one)
    assert 0 == scheduler.size


def test_a_stream_that_keeps_others_waiting_loses_its_priority() -> None:
    scheduler: ReadScheduler[Unit] = ReadScheduler(30)
    stalled = scheduler.join(units(1, 2, 3, 4))
    others = [scheduler.join(units(2, 3, 4)) for _ in range(2)]
    put(scheduler, 1, 2, 3)

    assert units(1) == scheduler.make_room(Unit(4), Urgency.OVERDUE)
    scheduler.mark_ready(Unit(4))

    assert not stalled.has_priority
    for other in others:
        assert other.has_priority
        assert Unit(2) == scheduler.take(other)
        assert [] == scheduler.finish(other)
    assert scheduler.make_room(Unit(5), Urgency.AHEAD) is None
    assert units(2) == scheduler.make_room(Unit(5), Urgency.NEEDED)


def test_units_in_flight_are_not_evicted() -> None:
    scheduler: ReadScheduler[Unit] = ReadScheduler(20)
    assert [] == scheduler.make_room(Unit(1, 15), Urgency.NEEDED)

    assert scheduler.make_room(Unit(2), Urgency.OVERDUE) is None
    scheduler.drop(Unit(1, 15))
    assert [] == scheduler.make_room(Unit(2), Urgency.OVERDUE)


def test_the_last_reader_to_leave_frees_all_units() -> None:
    scheduler: ReadScheduler[Unit] = ReadScheduler(100)
    readers = [scheduler.join(units(1, 2)) for _ in range(2)]
    put(scheduler, 1, 2)

    assert [] == scheduler.leave(readers[0])
    assert units(1, 2) == scheduler.leave(readers[1])
    assert 0 == scheduler.size


LIMIT = 50
wants = st.lists(
    st.sets(st.integers(0, 20), min_size=1).map(sorted), min_size=1, max_size=5
)


@given(wants)
def test_every_reader_gets_all_it_wants_within_the_limit(
    wants: list[list[int]],
) -> None:
    scheduler: ReadScheduler[Unit] = ReadScheduler(LIMIT)
    readers = [scheduler.join(Unit(n, 5 + n) for n in numbers) for numbers in wants]
    coming: list[Unit] = []
    taken: dict[Reader[Unit], list[int]] = {reader: [] for reader in readers}

    for _ in range(sum(map(len, wants)) * 20):
        for reader in readers:
            if unit := scheduler.take(reader):
                taken[reader].append(unit.number)
                scheduler.finish(reader)
            elif needed := scheduler.next_needed(reader):
                is_last = reader is readers[-1]
                if (
                    scheduler.make_room(
                        needed, Urgency.OVERDUE if is_last else Urgency.NEEDED
                    )
                    is not None
                ):
                    coming.append(needed)
            assert scheduler.size <= LIMIT
        for unit in coming:
            scheduler.mark_ready(unit)
        coming.clear()

    assert wants == [sorted(taken[reader]) for reader in readers]
