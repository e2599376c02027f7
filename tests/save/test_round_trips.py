"""A call waits for several requests of a storage at the same time, where none needs the
response to another.

The storage here answers two of them only once both are sent: a call that sends them one
after another never ends.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from storesvc.catalog import slots
from storesvc.errors import (
    RequestIdReusedError,
    StorageUnavailableError,
    UploadNotFoundError,
    UploadSupersededError,
    WriterUnfinishedError,
)
from storesvc.format import layout
from storesvc.format.checksums import Buffer
from storesvc.format.layout import RunPaths
from storesvc.format.names import LATEST, CheckpointName, RunName
from storesvc.storage.bucket import ALWAYS, Generation, Stored, WriteCondition
from storesvc.storage.kvstore import OpenedStorage
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.storage.requests import background_task
from storesvc.store import Store
from tests.save.uploads_in_process import begin, finish, name_of, send
from tests.support.collecting_process import end_of
from tests.support.contract import stored, sums

RUN = RunName("tests", "trips")
PLACES = RunPaths(RUN)
SECONDS = 20.0


class MeetingBucket(TensorStoreBucket):
    """A bucket in which the first requests of some places wait for each other."""

    places: frozenset[str] = frozenset()
    only_writes = False
    """Whether only writes meet."""

    def __init__(self, opened: OpenedStorage) -> None:
        super().__init__(opened)
        self._prefix = ""
        self.reads: list[str] = []
        """Paths of the objects that were read."""

    def meet(self, *places: str) -> None:
        """Lets the next requests of these places wait for each other."""
        self.places = frozenset(places)
        self._left = set(places)
        self._all_asked = asyncio.Event()

    def meet_below(self, prefix: str, *places: str) -> None:
        """The same for the next request below a prefix."""
        self.meet(prefix, *places)
        self._prefix = prefix

    async def _meeting(self, place: str) -> None:
        if self._prefix and place.startswith(self._prefix):
            place = self._prefix
        if place in self.places:
            self._left.discard(place)
            if not self._left:
                self._all_asked.set()
            await self._all_asked.wait()

    async def read(self, path: str) -> Stored | None:
        if not self.only_writes:
            await self._meeting(path)
        self.reads.append(path)
        return await super().read(path)

    async def write(
        self, path: str, data: bytes, *, condition: WriteCondition = ALWAYS
    ) -> Generation:
        await self._meeting(path)
        return await super().write(path, data, condition=condition)

    async def write_new(self, path: str, parts: Sequence[Buffer]) -> None:
        await self._meeting(path)
        await super().write_new(path, parts)

    async def list(
        self, prefix: str, *, after: str = "", limit: int | None = None
    ) -> list[str]:
        await self._meeting(prefix)
        self.reads.append(prefix)
        return await super().list(prefix, after=after, limit=limit)


UPLOAD = name_of(RUN, 1)


async def finished(store: Store) -> int:
    """Does all but the commit of an upload of step 1; returns its epoch."""
    upload = await begin(store, RUN, 1)
    await send(store, upload, (0, 1, 2))
    await finish(store, upload, sums(0, 1, 2))
    return upload.record.epoch


@asynccontextmanager
async def fresh_store() -> AsyncIterator[tuple[Store, MeetingBucket]]:
    """Yields a fresh store in memory."""
    bucket = await MeetingBucket.open("memory://")
    async with asyncio.timeout(SECONDS):
        yield await Store.open(bucket), bucket


async def test_a_commit_reads_its_receipt_beside_the_slot() -> None:
    async with fresh_store() as (store, bucket):
        epoch = await finished(store)
        bucket.meet(PLACES.checkpoint(1), PLACES.receipt(UPLOAD.upload, 0))

        committed = await store.commits.commit(UPLOAD, epoch)

        assert slots.COMMITTED == committed.state


async def test_a_commit_reads_its_slot_beside_the_writes_of_its_objects() -> None:
    async with fresh_store() as (store, bucket):
        upload = await begin(store, RUN, 1)
        file = f"{UPLOAD.upload}/{'a' * 32}"
        data = b"".join(map(stored, range(3)))
        await bucket.write_new(PLACES.data_file(file), [data])
        root = PLACES.key_space(UPLOAD.upload, "").rstrip("/")
        bucket.meet_below(root, PLACES.checkpoint(1))

        end = end_of(file, (0, 0, 0))
        committed = await store.commits.commit(UPLOAD, upload.record.epoch, end)

        assert slots.COMMITTED == committed.state


async def test_a_receipt_needs_no_read_of_what_this_process_has_just_stored() -> None:
    async with fresh_store() as (store, bucket):
        await finished(store)

        staging = PLACES.staging_prefix(UPLOAD.upload)
        assert [] == [place for place in bucket.reads if place.startswith(staging)]


async def test_an_upload_reads_its_run_beside_the_slot() -> None:
    async with fresh_store() as (store, bucket):
        await begin(store, RUN, 1)
        bucket.meet(PLACES.checkpoint(2), layout.run_record(RUN))

        assert 1 == (await begin(store, RUN, 2)).record.epoch


async def test_an_upload_writes_its_leaf_table_beside_the_slot() -> None:
    async with fresh_store() as (store, bucket):
        await store.runs.create(RUN)
        slot = PLACES.checkpoint(1)
        bucket.meet_below(f"{PLACES.uploads}{UPLOAD.upload}/tree-", slot)
        bucket.only_writes = True

        assert 1 == (await begin(store, RUN, 1)).record.epoch


async def test_a_repeated_begin_writes_a_leaf_table_that_was_lost() -> None:
    class Lossy(MeetingBucket):
        """Loses the first leaf table, and writes the slot with it."""

        slot_written: asyncio.Event
        has_lost = False

        async def write(
            self, path: str, data: bytes, *, condition: WriteCondition = ALWAYS
        ) -> Generation:
            if "/tree-" in path and not self.has_lost:
                self.has_lost = True
                await self.slot_written.wait()
                raise StorageUnavailableError("no answer")
            generation = await super().write(path, data, condition=condition)
            if path == PLACES.checkpoint(1):
                self.slot_written.set()
            return generation

    bucket = await Lossy.open("memory://")
    bucket.slot_written = asyncio.Event()
    store = await Store.open(bucket)
    with pytest.raises(StorageUnavailableError):
        await begin(store, RUN, 1)
    assert await store.catalog.slot(RUN, 1) is not None

    # by any process
    store = await Store.open(bucket)
    record = await store.commits.commit(UPLOAD, await finished(store))

    assert slots.COMMITTED == record.state


async def test_a_begin_that_is_rejected_leaves_no_request_under_way() -> None:
    async with fresh_store() as (store, bucket):
        await begin(store, RUN, 1)
        # The read of the run waits for a second request, which never comes.
        bucket.meet(layout.run_record(RUN), "none")

        with pytest.raises(RequestIdReusedError):
            await begin(store, RUN, 2, request=1)

        assert {asyncio.current_task()} == asyncio.all_tasks()


async def test_an_upload_of_a_step_with_a_slot_reads_its_run_once() -> None:
    async with fresh_store() as (store, bucket):
        await begin(store, RUN, 1)
        await store.uploads.abort(UPLOAD)
        bucket.reads.clear()

        again = await begin(store, RUN, 1, request=2)

        assert 2 == again.record.epoch
        assert 1 == bucket.reads.count(layout.run_record(RUN))


async def test_an_epoch_floor_that_rises_while_an_upload_begins_is_not_missed() -> None:
    class Collected(MeetingBucket):
        """A collection raises the floor when the first slot has been read."""

        store: Store

        async def read(self, path: str) -> Stored | None:
            found = await super().read(path)
            if path == PLACES.checkpoint(1) and layout.run_record(RUN) in self.reads:
                await self.store.runs.raise_epoch_floor(RUN, 7)
            return found

    bucket = await Collected.open("memory://")
    bucket.store = store = await Store.open(bucket)
    await store.runs.create(RUN)
    bucket.meet(PLACES.checkpoint(1), layout.run_record(RUN))

    with pytest.raises(UploadNotFoundError, match="begin a new one"):
        await begin(store, RUN, 1)
    assert await store.catalog.slot(RUN, 1) is None

    # A client begins again with another request id; the first one stays rejected.
    assert 8 == (await begin(store, RUN, 1, request=2)).record.epoch
    with pytest.raises(UploadSupersededError):
        await begin(store, RUN, 1)


async def test_a_commit_that_another_server_has_made_reads_no_receipt() -> None:
    async with fresh_store() as (store, bucket):
        upload = await begin(store, RUN, 1, writer_count=9)
        await send(store, upload, (0, 1, 2))
        await finish(store, upload, sums(0, 1, 2))
        for writer in range(1, 9):
            await finish(store, upload, sums(), writer=writer)
        record = await store.commits.commit(UPLOAD, upload.record.epoch)
        other = await Store.open(bucket)
        bucket.reads.clear()

        assert record == await other.commits.commit(UPLOAD, upload.record.epoch)
        assert [PLACES.upload(UPLOAD.upload), PLACES.checkpoint(1)] == bucket.reads


async def test_a_commit_of_many_writers_lists_their_receipts_after_the_slot() -> None:
    async with fresh_store() as (store, bucket):
        upload = await begin(store, RUN, 1, writer_count=9)
        bucket.reads.clear()

        with pytest.raises(WriterUnfinishedError, match="9 have not finished"):
            await store.commits.commit(UPLOAD, upload.record.epoch)
        receipts = PLACES.receipts(UPLOAD.upload)
        assert [PLACES.checkpoint(1), receipts] == bucket.reads[:2]


async def test_an_upload_finds_its_base_beside_the_slot() -> None:
    async with fresh_store() as (store, bucket):
        await store.commits.commit(UPLOAD, await finished(store))
        bucket.meet(PLACES.checkpoint(2), PLACES.checkpoints)

        upload = await begin(store, RUN, 2, base=CheckpointName(RUN, LATEST))

        assert (1, UPLOAD.upload) == (upload.record.base_step, upload.record.base)


async def test_the_base_is_the_newest_checkpoint_of_any_process() -> None:
    async with fresh_store() as (store, bucket):
        await store.commits.commit(UPLOAD, await finished(store))
        other = await Store.open(bucket)
        second = await begin(other, RUN, 2)
        await send(other, second, (0, 1, 2))
        await finish(other, second, sums(0, 1, 2))
        await other.commits.commit(second.name, second.record.epoch)
        latest = CheckpointName(RUN, LATEST)

        assert 2 == (await begin(store, RUN, 3, base=latest)).record.base_step

        await other.lifecycle.delete(RUN, 2, purge_delay=None, etag="", write_id="a")
        assert 1 == (await begin(store, RUN, 4, base=latest)).record.base_step


async def test_a_repeated_commit_returns_its_record_with_the_receipts_gone() -> None:
    async with fresh_store() as (store, _):
        epoch = await finished(store)
        first = await store.commits.commit(UPLOAD, epoch)

        assert first == await store.commits.commit(UPLOAD, epoch)


async def test_a_commit_with_another_epoch_is_rejected_from_the_kept_record() -> None:
    async with fresh_store() as (store, _):
        epoch = await finished(store)

        with pytest.raises(UploadSupersededError, match=f"expected epoch {epoch}"):
            await store.commits.commit(UPLOAD, epoch + 1)


async def test_a_call_beside_another_ends_with_the_context_without_a_warning() -> None:
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def fails() -> None:
        raise StorageUnavailableError("no answer")

    async with background_task(waits()), background_task(fails()):
        await asyncio.sleep(0)

    assert ["cancelled"] == ended
