"""The lease of an upload is written once for all calls that renew it at a time, and not
by the process that began it a moment ago."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC

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
from tests.save.uploads_in_process import begin, name_of

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
