"""Tables of objects that a writer put into a bucket itself. The objects are checked
while the table is written, so a table that is rejected must leave nothing."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from storesvc.catalog import slots
from storesvc.errors import (
    ChunksIncompleteError,
    InvalidChunkError,
    StorageUnavailableError,
)
from storesvc.format.names import RunName
from storesvc.save.receiver import CHECKED_AT_ONCE
from storesvc.save.uploads import OpenUpload
from storesvc.store import Store
from storesvc_proto.v1 import tree_pb2
from tests.save.uploads_in_process import begin, committed_chunks, finish
from tests.support.contract import placed_table, stored, sums
from tests.support.faulty_bucket import Call, Fault, FaultyBucket, Plan

RUN = RunName("tests", "objects")


@dataclasses.dataclass
class Placer:
    """A writer that puts objects into the bucket."""

    store: Store
    bucket: FaultyBucket
    upload: OpenUpload

    def file(self, chunk: int) -> str:
        return f"{self.upload.name.upload}/{chunk:032x}"

    async def put(self, *chunks: int) -> None:
        """Writes an object for each chunk."""
        for chunk in chunks:
            place = self.upload.places.data_file(self.file(chunk))
            await self.bucket.write_new(place, [stored(chunk)])

    def table(self, *chunks: int) -> tree_pb2.ChunkTable:
        """Returns the table of chunks, each in an object of its own."""
        return placed_table(*((self.file(chunk), 0, chunk) for chunk in chunks))

    async def report(self, *chunks: int) -> int:
        """Reports the table of chunks; returns the number of acknowledged ones."""

        async def parts() -> AsyncIterator[tree_pb2.ChunkTable]:
            yield self.table(*chunks)

        written = self.store.receiver.write(self.upload, 0, parts())
        return [durable async for durable in written][-1]

    async def tables(self) -> list[str]:
        """Returns the paths of the staging tables."""
        return await self.bucket.list(
            self.upload.places.staging_prefix(self.upload.name.upload)
        )


@asynccontextmanager
async def placing(chunks: int = 3) -> AsyncIterator[Placer]:
    """Yields the writer of an upload in a fresh store in memory."""
    bucket = await FaultyBucket.faulty("memory://")
    store = await Store.open(bucket)
    yield Placer(store, bucket, await begin(store, RUN, 1, chunks=chunks))


def on(operation: str, part: str, fault: Fault) -> Plan:
    """Returns a plan with a fault at each call of a method with a part of a path."""

    def plan(call: Call) -> Fault:
        hit = call.operation == operation and part in call.path
        return fault if hit else Fault.NONE

    return plan


async def test_the_first_missing_object_is_named_even_if_its_check_is_slow() -> None:
    async with placing() as placer:
        await placer.put(0)
        placer.bucket.calls.follow(on("read_range", placer.file(1), Fault.LATE))

        with pytest.raises(
            InvalidChunkError,
            match=f"expected 1004 bytes or more in the data file {placer.file(1)}, "
            "but it is missing or shorter.*; send its chunks again",
        ):
            await placer.report(0, 1, 2)


async def test_a_rejected_table_leaves_nothing_behind() -> None:
    async with placing() as placer:
        await placer.put(0)
        with pytest.raises(InvalidChunkError, match="missing or shorter"):
            await placer.report(0, 1)
        assert [] == await placer.tables()

        await placer.report(0)
        with pytest.raises(
            ChunksIncompleteError, match=r"2 chunks of the receipt are not stored"
        ):
            await finish(placer.store, placer.upload, sums(0, 1, 2))


async def test_a_rejected_table_is_deleted_even_if_its_write_takes_longest() -> None:
    async with placing() as placer:
        placer.bucket.calls.follow(on("write", "/staging/", Fault.LATE))

        with pytest.raises(InvalidChunkError, match="missing or shorter"):
            await placer.report(0)

        assert [] == await placer.tables()


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.LOST])
async def test_a_table_that_cannot_be_deleted_does_no_harm_and_goes_with_the_upload(
    fault: Fault,
) -> None:
    async with placing() as placer:
        await placer.put(0)
        placer.bucket.calls.follow(on("delete", "/staging/", fault))
        with pytest.raises(InvalidChunkError, match="missing or shorter"):
            await placer.report(0, 1, 2)
        assert (fault is Fault.UNAVAILABLE) == bool(await placer.tables())

        # Another server lists the table, and takes no chunk from it.
        other = await Store.open(placer.bucket.reopened())
        await placer.put(1, 2)
        await placer.report(0, 1, 2)
        name, epoch = placer.upload.name, placer.upload.record.epoch
        await finish(other, await other.uploads.open(name, epoch), sums(0, 1, 2))
        record = await other.commits.commit(name, epoch)

        assert slots.COMMITTED == record.state
        assert [stored(n) for n in range(3)] == await committed_chunks(other, RUN, 1)
        assert [] == await placer.tables()


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.LOST])
async def test_a_table_that_was_not_written_is_not_acknowledged(fault: Fault) -> None:
    async with placing() as placer:
        await placer.put(0, 1, 2)
        placer.bucket.calls.follow(on("write", "/staging/", fault))

        with pytest.raises(StorageUnavailableError):
            await placer.report(0, 1, 2)

        placer.bucket.calls.follow(lambda _: Fault.NONE)
        assert 3 == await placer.report(0, 1, 2)


async def test_a_missing_object_is_the_error_even_if_the_table_is_not_written() -> None:
    async with placing() as placer:
        await placer.put(0)
        placer.bucket.calls.follow(on("write", "/staging/", Fault.UNAVAILABLE))

        with pytest.raises(InvalidChunkError, match=placer.file(1)):
            await placer.report(0, 1)


async def test_checks_of_a_table_are_bounded_and_end_before_it_is_rejected() -> None:
    chunks, checked = range(3 * CHECKED_AT_ONCE), list[str]()

    def plan(call: Call) -> Fault:
        if call.operation == "read_range":
            checked.append(call.path)
        return Fault.LATE

    async with placing(chunks=len(chunks)) as placer:
        placer.bucket.calls.follow(plan)
        with pytest.raises(InvalidChunkError, match=placer.file(0)):
            await placer.report(*chunks)
        assert CHECKED_AT_ONCE == len(checked)
        assert {asyncio.current_task()} == asyncio.all_tasks()

        placer.bucket.calls.follow(plan)
        await placer.put(*chunks)
        assert len(chunks) == await placer.report(*chunks)
