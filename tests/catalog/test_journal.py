"""Numbers of the journal are consecutive and never used twice, by any process."""

import asyncio
import uuid
from collections.abc import Awaitable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from storesvc.catalog import journal as journals
from storesvc.catalog import numbered
from storesvc.catalog.journal import LEAST_AGE, Journal
from storesvc.errors import (
    CorruptDataError,
    InvalidResumeTokenError,
    ResumeTokenExpiredError,
    StorageUnavailableError,
)
from storesvc.format import layout
from storesvc.format.names import RunName
from storesvc.format.seal import seal
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.support.faulty_bucket import (
    Call,
    Fault,
    FaultyBucket,
    at_change,
    no_faults,
    record_calls,
)
from tests.support.paged_bucket import PagedBucket


class HandClock:
    """A clock that stands still until it is turned."""

    def __init__(self) -> None:
        self.time = datetime(2030, 1, 1, tzinfo=UTC)

    def now(self) -> datetime:
        """Returns what it was turned to."""
        return self.time

    def elapsed(self) -> float:
        """Returns the same, in seconds."""
        return self.time.timestamp()

    def turn(self, by: timedelta) -> None:
        """Turns it forward."""
        self.time += by


@pytest.fixture(params=["memory", "file"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Awaitable[FaultyBucket]:
    """A fresh bucket of each kind."""
    root = "memory://" if request.param == "memory" else tmp_path.as_uri()
    return FaultyBucket.faulty(root)


def commit(step: int = 0) -> pb.Announcement:
    return pb.Announcement(
        kind=pb.Announcement.KIND_COMMIT, run="r", step=step, upload=uuid.uuid4().hex
    )


async def numbers(journal: Journal, namespace: str = "n") -> list[int]:
    first = [n for n in range(1, 500) if await journal.read(namespace, n) is not None]
    found = await journal.following(namespace, first[0] - 1, limit=1000)
    assert first == [number for number, _ in found]
    return first


async def test_a_list_after_a_place_leaves_out_all_up_to_it(
    bucket: FaultyBucket,
) -> None:
    for place in ("a/1", "a/2", "a/22", "a/3", "b/1"):
        await bucket.write(place, b"")

    assert ["a/22", "a/3"] == await bucket.list("a/", after="a/2")
    assert ["a/3"] == await bucket.list("a/", after="a/25")
    assert [] == await bucket.list("a/", after="a/3")
    assert ["a/1", "a/2", "a/22", "a/3"] == await bucket.list("a/")


async def test_numbers_begin_at_one_and_are_dense_in_each_namespace(
    bucket: FaultyBucket,
) -> None:
    journal = Journal(bucket, clock=HandClock())

    assert 0 == await journal.tail("n")
    assert [1, 2, 3] == [await journal.announce("n", commit()) for _ in range(3)]
    assert 1 == await journal.announce("other", commit())
    assert [1, 2, 3] == await numbers(journal)
    assert 3 == await journal.tail("n")


async def test_an_announcement_says_what_and_when(bucket: FaultyBucket) -> None:
    clock = HandClock()
    journal, announced = Journal(bucket, clock=clock), commit(step=7)

    await journal.announce("n", announced)

    ((number, found),) = await journal.following("n", 0, limit=10)
    assert 1 == number
    assert found is not None
    assert clock.now() == found.create_time.ToDatetime(UTC)
    assert (announced.upload, 7) == (found.upload, found.step)
    assert not announced.HasField("create_time")  # the caller's stays as it was


async def test_processes_that_announce_at_once_get_numbers_of_their_own(
    bucket: FaultyBucket,
) -> None:
    journals = [Journal(bucket.reopened(), clock=HandClock()) for _ in range(4)]
    await journals[0].announce("n", commit())

    got = await asyncio.gather(
        *(journal.announce("n", commit()) for journal in journals * 5)
    )

    assert list(range(2, 22)) == sorted(got)
    assert list(range(1, 22)) == await numbers(journals[0])


async def test_a_first_announcement_that_was_overtaken_may_stay_unused(
    bucket: FaultyBucket,
) -> None:
    journals = [Journal(bucket.reopened(), clock=HandClock()) for _ in range(4)]

    got = await asyncio.gather(
        *(journal.announce("n", commit()) for journal in journals * 5)
    )

    there = await numbers(journals[0])
    assert list(range(1, len(there) + 1)) == there
    assert 20 == len(set(got))
    # 1 follows nothing: overtaken at once, it looks like one trimmed long ago
    assert set(there) - set(got) <= {1}


async def test_a_write_that_landed_and_was_reported_as_a_conflict_announces_once(
    bucket: FaultyBucket,
) -> None:
    journal = Journal(bucket, clock=HandClock())
    await journal.announce("n", commit())
    bucket.calls.follow(at_change(0, Fault.RETRIED))

    assert 2 == await journal.announce("n", commit())
    assert 3 == await journal.announce("n", commit())
    assert [1, 2, 3] == await numbers(journal)


async def test_a_lost_response_leaves_an_unused_number(bucket: FaultyBucket) -> None:
    journal = Journal(bucket, clock=HandClock())
    bucket.calls.follow(at_change(0, Fault.LOST))

    with pytest.raises(StorageUnavailableError):
        await journal.announce("n", commit())

    assert 2 == await journal.announce("n", commit())
    assert [1, 2] == await numbers(journal)


async def test_a_journal_without_watchers_is_read_with_two_reads(
    bucket: FaultyBucket,
) -> None:
    journal = Journal(bucket, clock=HandClock())
    for _ in range(70):
        await journal.announce("n", commit())
    calls: list[Call] = []
    bucket.calls.follow(record_calls(calls))

    assert [] == await journal.following("n", 70, limit=100)

    assert ["read", "read"] == [call.operation for call in calls]
    bucket.calls.follow(no_faults)
    found = await journal.following("n", 3, limit=50)
    assert list(range(4, 54)) == [number for number, _ in found]
    found = await journal.following("n", 3, limit=500)
    assert list(range(4, 71)) == [number for number, _ in found]


async def test_the_last_announcement_is_never_trimmed(bucket: FaultyBucket) -> None:
    clock = HandClock()
    journal = Journal(bucket, clock=clock)
    for _ in range(40):
        await journal.announce("n", commit())
    clock.turn(timedelta(days=1000))

    assert 39 == await journal.trim("n", keep=0)
    assert 0 == await journal.trim("n", keep=0)
    assert [40] == await numbers(journal)
    fresh = Journal(bucket.reopened(), clock=clock)
    assert 41 == await fresh.announce("n", commit())
    assert 0 == await journal.trim("empty")


async def test_trimming_keeps_the_young_and_of_the_older_ones_the_newest(
    bucket: FaultyBucket,
) -> None:
    clock = HandClock()
    journal = Journal(bucket, clock=clock)
    for _ in range(10):
        await journal.announce("n", commit())
    assert 0 == await journal.trim("n", keep=1, older_than=timedelta(0))
    clock.turn(LEAST_AGE + timedelta(seconds=1))
    for _ in range(3):
        await journal.announce("n", commit())

    assert 0 == await journal.trim("n", keep=13)
    assert 2 == await journal.trim("n", keep=11)
    assert list(range(3, 14)) == await numbers(journal)
    assert 8 == await journal.trim("n", keep=1)
    assert [11, 12, 13] == await numbers(journal)
    clock.turn(timedelta(days=8))
    assert 2 == await journal.trim("n")
    assert [13] == await numbers(journal)


async def test_a_trim_that_dies_leaves_no_gap(bucket: FaultyBucket) -> None:
    clock = HandClock()
    journal = Journal(bucket, clock=clock)
    for _ in range(10):
        await journal.announce("n", commit())
    clock.turn(timedelta(days=30))
    bucket.calls.follow(at_change(4, Fault.UNAVAILABLE))

    with pytest.raises(StorageUnavailableError):
        await journal.trim("n")

    bucket.calls.follow(no_faults)
    assert list(range(5, 11)) == await numbers(journal)


async def test_a_process_that_slept_through_a_trim_announces_at_the_end(
    bucket: FaultyBucket,
) -> None:
    clock = HandClock()
    sleeper = Journal(bucket.reopened(), clock=clock)
    assert 1 == await sleeper.announce("n", commit())
    awake = Journal(bucket.reopened(), clock=clock)
    for _ in range(10):
        await awake.announce("n", commit())
    clock.turn(timedelta(days=30))
    await awake.trim("n")

    assert 12 == await sleeper.announce("n", commit())

    assert [11, 12] == await numbers(awake)
    clock.turn(timedelta(days=30))
    await awake.trim("n")
    assert 13 == await sleeper.announce("n", commit())


async def test_a_process_that_slept_while_it_announced_announces_at_the_end(
    bucket: FaultyBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = HandClock()
    own, asleep, woken = bucket.reopened(), asyncio.Event(), asyncio.Event()
    sleeper = Journal(own, clock=clock)
    awake = Journal(bucket.reopened(), clock=clock)
    assert 1 == await sleeper.announce("n", commit())
    write = own.write

    async def paused(*args: Any, **options: Any) -> Any:
        await asyncio.sleep(0.05)  # after its look at the last announcement
        asleep.set()
        await woken.wait()
        return await write(*args, **options)

    monkeypatch.setattr(own, "write", paused)
    announcing = asyncio.create_task(sleeper.announce("n", commit()))
    await asleep.wait()
    for _ in range(10):
        await awake.announce("n", commit())
    clock.turn(timedelta(days=30))
    await awake.trim("n")
    woken.set()

    assert 12 == await announcing
    assert [11, 12] == await numbers(awake)


async def test_who_saw_an_empty_journal_does_not_announce_its_first_number_again(
    bucket: FaultyBucket,
) -> None:
    clock = HandClock()
    sleeper = Journal(bucket.reopened(), clock=clock)
    assert 0 == await sleeper.tail("n")
    awake = Journal(bucket.reopened(), clock=clock)
    for _ in range(6):
        await awake.announce("n", commit())
    clock.turn(timedelta(days=30))
    assert 5 == await awake.trim("n")

    assert 7 == await sleeper.announce("n", commit())

    assert [6, 7] == await numbers(awake)


@pytest.mark.parametrize("known", [0, 1, 2])
async def test_a_number_just_before_those_that_are_left_is_none_to_announce_with(
    bucket: FaultyBucket, known: int
) -> None:
    clock = HandClock()
    sleeper = Journal(bucket.reopened(), clock=clock)
    awake = Journal(bucket.reopened(), clock=clock)
    for _ in range(known):
        await awake.announce("n", commit())
    assert known == await sleeper.tail("n")
    await awake.announce("n", commit())
    clock.turn(timedelta(days=30))
    await awake.announce("n", commit())
    assert known + 1 == await awake.trim("n")

    # the next one that it knows of is gone, and the one after it is there
    assert known + 3 == await sleeper.announce("n", commit())

    assert [known + 1, known + 2, known + 3] == await numbers(awake)


async def test_unused_namespaces_take_no_memory(bucket: FaultyBucket) -> None:
    journal = Journal(bucket, clock=HandClock(), max_known=3)
    for turn in (1, 2):
        for at in range(9):
            assert turn == await journal.announce(f"n{at}", commit())
            journal.landings(f"n{at}")

    assert 3 == len(journal._known)
    assert 0 == len(journal._announcing)
    assert 0 == len(journal._landings)


async def test_a_position_outside_the_journal_is_rejected(bucket: FaultyBucket) -> None:
    clock = HandClock()
    journal = Journal(bucket, clock=clock)
    for _ in range(10):
        await journal.announce("n", commit())
    clock.turn(timedelta(days=30))
    await journal.trim("n")

    assert [10] == [n for n, _ in await journal.following("n", 9, limit=5)]
    assert [] == await journal.following("n", 10, limit=5)
    with pytest.raises(ResumeTokenExpiredError, match="watch without a token"):
        await journal.following("n", 8, limit=5)
    with pytest.raises(ResumeTokenExpiredError):
        await journal.following("n", 0, limit=5)
    with pytest.raises(InvalidResumeTokenError, match="got announcement 11"):
        await journal.following("n", 11, limit=5)


async def test_a_foreign_object_is_no_number(bucket: FaultyBucket) -> None:
    await bucket.write(f"{layout.journal('n')}notes.txt", b"hello")
    journal = Journal(bucket, clock=HandClock())

    assert 1 == await journal.announce("n", commit())
    assert 1 == await journal.tail("n")


async def test_a_damaged_announcement_does_not_block_announcements(
    bucket: FaultyBucket,
) -> None:
    clock = HandClock()
    journal = Journal(bucket, clock=clock)
    await journal.announce("n", commit())
    await bucket.write(layout.announcement("n", 2), b"noise")

    assert 3 == await journal.announce("n", commit())

    (damaged, (number, _)) = await journal.following("n", 1, limit=5)
    assert ((2, None), 3) == (damaged, number)
    with pytest.raises(CorruptDataError):
        await journal.read("n", 2)
    assert range(1, 4) == await journal.recent("n", limit=5)
    assert range(2, 4) == await journal.recent("n", limit=2)
    clock.turn(timedelta(days=30))
    assert 2 == await journal.trim("n")
    assert [3] == await numbers(journal)


async def test_the_changes_of_an_upload_are_found_back_to_when_it_began(
    bucket: FaultyBucket,
) -> None:
    clock, run = HandClock(), RunName("n", "r")
    journal = Journal(bucket, clock=clock)
    sought, other = commit(), commit()
    began = clock.now()
    for at in range(100):
        await journal.announce("n", sought if at in (3, 50, 90) else other)
        clock.turn(timedelta(minutes=10))
    await bucket.write(layout.announcement("n", 60), b"noise")
    await journal.announce("elsewhere", sought)

    async def found(since: datetime) -> list[int]:
        changes = journal.changes(run, {sought.upload}, since=since)
        return [number async for number, _ in changes]

    assert [91, 51, 4] == await found(began)
    calls: list[Call] = []
    bucket.calls.follow(record_calls(calls))
    assert [91] == (await found(clock.now() - timedelta(hours=2)))[:1]
    assert len(calls) < 70  # two batches of reads, and a list
    bucket.calls.follow(no_faults)
    clock.turn(timedelta(days=30))
    await journal.announce("n", sought)
    await journal.trim("n")
    assert [101] == await found(began)
    assert [] == [c async for c in journal.changes(run, {"x"}, since=began)]


async def long_journal(clock: HandClock, count: int) -> PagedBucket:
    """Returns a bucket with a journal, of which few names fit in a page."""
    bucket = await PagedBucket.open("memory://")
    for number in range(1, count + 1):
        place, record = layout.announcement("n", number), commit()
        record.create_time.FromDatetime(clock.now())
        await bucket.write(place, seal(record, place=place))
    return bucket


@pytest.fixture
def short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few names fit in a page of a list."""
    for module in (numbered, journals):
        monkeypatch.setattr(module, "PAGE", 40)


@pytest.mark.usefixtures("short_pages")
async def test_a_new_process_does_not_list_the_whole_journal() -> None:
    clock = HandClock()
    bucket = await long_journal(clock, 2000)
    journal = Journal(bucket, clock=clock)
    bucket.clear()

    assert 2001 == await journal.announce("n", commit())
    assert bucket.lists <= 14  # of 50 pages
    bucket.clear()
    assert 2002 == await journal.announce("n", commit())
    assert 0 == bucket.lists


@pytest.mark.usefixtures("short_pages")
async def test_a_trim_reads_as_much_as_it_deletes() -> None:
    clock = HandClock()
    bucket = await long_journal(clock, 500)
    journal = Journal(bucket, clock=clock)
    await journal.tail("n")
    bucket.clear()

    assert 0 == await journal.trim("n")
    assert (2, 1) == (bucket.lists, bucket.reads)
    clock.turn(timedelta(days=30))
    assert 499 == await journal.trim("n")
    assert 500 == await journal.tail("n")


async def test_a_restored_journal_keeps_its_last_announcement() -> None:
    clock = HandClock()
    bucket = await long_journal(clock, 50)
    journal = Journal(bucket, clock=clock)
    assert 50 == await journal.tail("n")
    for number in range(31, 51):
        await bucket.delete(layout.announcement("n", number))
    clock.turn(timedelta(days=30))

    assert 29 == await journal.trim("n")
    assert 30 == await Journal(bucket, clock=clock).tail("n")
