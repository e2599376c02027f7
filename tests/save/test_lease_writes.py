"""The lease of an upload is written once for all calls that renew it at a time, and not
by the process that began it a moment ago. The processes of many writers share it."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest

from storesvc.errors import StorageUnavailableError
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName
from storesvc.save.uploads import OpenUpload
from storesvc.server import app
from storesvc.storage.bucket import ALWAYS, Generation, WriteCondition
from storesvc.storage.kvstore import OpenedStorage
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.store import Store
from tests.catalog.test_journal import HandClock
from tests.save.uploads_in_process import begin, name_of
from tests.support.faulty_bucket import Call, Fault, FaultyBucket

RUN = RunName("tests", "leases")
LEASE = RunPaths(RUN).lease(name_of(RUN, 1).upload)
SECONDS = 20.0


class HeldBucket(TensorStoreBucket):
    """A bucket in which a lease is written only once it may be."""

    def __init__(self, opened: OpenedStorage) -> None:
        super().__init__(opened)
        self.is_writing = asyncio.Event()
        self.may_write = asyncio.Event()
        self.asked = self.written = 0
        self.fails = False

    async def write(
        self, path: str, data: bytes, *, condition: WriteCondition = ALWAYS
    ) -> Generation:
        if path == LEASE:
            self.asked += 1
            self.is_writing.set()
            await self.may_write.wait()
            if self.fails:
                raise StorageUnavailableError(f"{path}: no answer")
            self.written += 1
        return await super().write(path, data, condition=condition)


@asynccontextmanager
async def stored_lease() -> AsyncIterator[tuple[Store, HeldBucket, OpenUpload]]:
    """Yields a store in memory, and an upload in it that another replica began."""
    bucket = await HeldBucket.open("memory://")
    upload = await begin(await Store.open(bucket), RUN, 1)
    store = await Store.open(bucket)
    async with asyncio.timeout(SECONDS):
        yield store, bucket, upload


async def test_an_upload_that_was_begun_a_moment_ago_needs_no_write() -> None:
    bucket = await HeldBucket.open("memory://")
    store = await Store.open(bucket)
    upload = await begin(store, RUN, 1)

    until = await store.uploads.renew(upload)

    record = upload.record
    length = record.lease_duration.ToTimedelta()
    assert record.create_time.ToDatetime(UTC) + length == until
    assert 0 == bucket.asked


async def test_calls_at_the_same_time_share_one_write() -> None:
    async with stored_lease() as (store, bucket, upload):
        calls = [asyncio.create_task(store.uploads.renew(upload)) for _ in range(5)]
        await bucket.is_writing.wait()
        bucket.may_write.set()

        assert 1 == len({await call for call in calls})
        assert (1, 1) == (bucket.asked, bucket.written)


async def test_a_call_that_is_cancelled_leaves_the_write_to_the_others() -> None:
    async with stored_lease() as (store, bucket, upload):
        first, second = (
            asyncio.create_task(store.uploads.renew(upload)) for _ in range(2)
        )
        await bucket.is_writing.wait()
        first.cancel()
        bucket.may_write.set()

        await second
        assert first.cancelled()
        assert 1 == bucket.written


async def test_a_write_that_fails_fails_each_call_and_the_next_writes_again() -> None:
    async with stored_lease() as (store, bucket, upload):
        bucket.fails = True
        bucket.may_write.set()
        calls = [asyncio.create_task(store.uploads.renew(upload)) for _ in range(2)]
        for call in calls:
            with pytest.raises(StorageUnavailableError):
                await call

        bucket.fails = False
        await store.uploads.renew(upload)
        assert (2, 1) == (bucket.asked, bucket.written)


async def test_a_server_that_stops_leaves_no_write_of_a_lease_behind() -> None:
    async with stored_lease() as (store, bucket, upload):
        async with app.running(store, "127.0.0.1:0"):
            call = asyncio.create_task(store.uploads.renew(upload))
            await bucket.is_writing.wait()
            call.cancel()  # as gRPC does, at the end of the time to drain

        assert call.cancelled()
        assert [] == [task for task in asyncio.all_tasks() if "Leases" in repr(task)]
        bucket.may_write.set()
        await asyncio.sleep(0)
        assert 0 == bucket.written


class OwnClock:
    """The clock of a machine, which differs from the common time."""

    def __init__(self, common: HandClock, offset: timedelta) -> None:
        self._common, self._offset = common, offset

    def now(self) -> datetime:
        return self._common.now() + self._offset

    def elapsed(self) -> float:
        return self._common.elapsed() + self._offset.total_seconds()


PROCESSES = 64
LENGTH = timedelta(minutes=1)
"""The lease of ``begin``."""


async def renewals(
    offset: Callable[[int], timedelta], *, interval: int
) -> tuple[list[float], Counter[float]]:
    """Has processes write an upload for ten leases, each with its own clock; returns
    the times of the renewals, and the requests to write at each time, in seconds.

    Args:
        offset: Returns the error of the clock of a process.
        interval: Seconds between the calls of a process that renew.
    """
    bucket, common = await FaultyBucket.faulty("memory://"), HandClock()
    clocks = [OwnClock(common, offset(index)) for index in range(PROCESSES)]
    opened = [
        await Store.open(bucket.reopened(), clock=clocks[index])
        for index in range(PROCESSES)
    ]
    upload = await begin(opened[0], RUN, 1, writer_count=PROCESSES)
    start, tried = common.elapsed(), Counter[float]()
    seen, renewed = None, [0.0]

    def plan(call: Call) -> Fault:
        if (call.operation, call.path) == ("write", LEASE):
            tried[common.elapsed() - start] += 1
        return Fault.NONE

    for one in opened:
        assert isinstance(one.bucket, FaultyBucket)
        one.bucket.calls.follow(plan)
    for second in range(10 * round(LENGTH.total_seconds())):
        due = [
            one for at, one in enumerate(opened) if at % interval == second % interval
        ]
        await asyncio.gather(*(one.uploads.renew(upload) for one in due))
        stored = await bucket.read(LEASE)
        if stored and stored.data != seen:
            seen = stored.data
            renewed.append(common.elapsed() - start)
        common.turn(timedelta(seconds=1))
    return [*renewed, common.elapsed() - start], tried


def no_error(index: int) -> timedelta:
    del index
    return timedelta(0)


def some_error(index: int) -> timedelta:
    return timedelta(minutes=(-60, 45, 0, 7, -1)[index % 5])


@pytest.mark.parametrize(
    ("offset", "interval", "longest"),
    [
        pytest.param(no_error, 1, 15, id="progress"),
        pytest.param(no_error, 20, 30, id="no-progress"),
        pytest.param(some_error, 1, 30, id="progress-and-wrong-clocks"),
        pytest.param(some_error, 20, 45, id="no-progress-and-wrong-clocks"),
    ],
)
async def test_many_processes_renew_a_lease_in_time_and_seldom(
    offset: Callable[[int], timedelta], interval: int, longest: float
) -> None:
    renewed, tried = await renewals(offset, interval=interval)

    gaps = [after - before for before, after in itertools.pairwise(renewed)]
    assert max(gaps) <= longest < LENGTH.total_seconds()
    # Turns are drawn. A fifth of what a bucket bears, and few try it at once; processes
    # whose clocks differ renew without regard to each other, which it bears, too.
    are_right = offset is no_error
    assert len(renewed) <= 10 * LENGTH.total_seconds() / (5 if are_right else 2) + 3
    if are_right:
        assert max(tried.values()) <= PROCESSES / 2


async def test_one_process_that_is_left_renews_the_lease() -> None:
    bucket, clock = await FaultyBucket.faulty("memory://"), HandClock()
    opened = [await Store.open(bucket.reopened(), clock=clock) for _ in range(2)]
    upload = await begin(opened[0], RUN, 1, writer_count=2)

    for _ in range(6):
        clock.turn(LENGTH / 3)
        until = await opened[1].uploads.renew(upload)
        assert clock.now() + LENGTH / 2 <= until
