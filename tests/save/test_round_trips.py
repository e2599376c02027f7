"""A call waits for several requests of a storage at the same time, where none needs the
response to another.

The storage here answers two of them only once both are sent: a call that sends them one
after another never ends.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import timedelta
from typing import Any

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
from storesvc.format.layout import RunPaths
from storesvc.format.names import LATEST, CheckpointName, RunName, UploadName
from storesvc.format.trees import pack_leaves
from storesvc.format.wire import Frame
from storesvc.save.uploads import NewUpload
from storesvc.storage.bucket import ALWAYS, Generation, Stored, WriteCondition
from storesvc.storage.kvstore import OpenedStorage
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.storage.requests import beside
from storesvc.store import Store
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.support.contract import frame, received, sums, tree_of

RUN = RunName("tests", "trips")
PLACES = RunPaths(RUN)
TABLE = b"".join(pack_leaves(tree_of()))
SECONDS = 20.0


class MeetingBucket(TensorStoreBucket):
    """A bucket in which the first requests of some places wait for each other."""

    places: frozenset[str] = frozenset()

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
        await self._meeting(path)
        self.reads.append(path)
        return await super().read(path)

    async def write(
        self, path: str, data: bytes, *, condition: WriteCondition = ALWAYS
    ) -> Generation:
        await self._meeting(path)
        return await super().write(path, data, condition=condition)

    async def list(self, prefix: str, *, after: str = "") -> list[str]:
        await self._meeting(prefix)
        self.reads.append(prefix)
        return await super().list(prefix, after=after)


def name_of(step: int) -> UploadName:
    """Returns the name of the upload of a step."""
    return UploadName(RUN, f"{step:032x}")


async def begin(
    store: Store,
    step: int,
    base: CheckpointName | None = None,
    writer_count: int = 1,
    request: int | None = None,
) -> pb.UploadRecord:
    """Begins an upload of a step; `request` is the number in its request id."""
    new = NewUpload(
        step=step,
        writer_count=writer_count,
        labels={},
        metrics={},
        lease=timedelta(minutes=1),
        base=base,
        body=str(step).encode(),
    )
    return await store.uploads.begin(name_of(request or step), new, TABLE)


async def finished(store: Store, step: int) -> int:
    """Does all but the commit of an upload of a step; returns its epoch."""
    record = await begin(store, step)
    upload = await store.uploads.open(name_of(step), record.epoch)

    async def frames() -> AsyncIterator[Frame]:
        yield received(frame(0, 1, 2))

    async for _ in store.receiver.write(upload, 0, frames()):
        pass
    staged = store.receipts.staged(upload.name, 0)
    await store.receipts.finish(upload, 0, sums(0, 1, 2), staged)
    return record.epoch


Test = Callable[[Store, MeetingBucket], Coroutine[Any, Any, None]]


def within(test: Test) -> None:
    """Runs a test on a fresh store in memory."""

    async def main() -> None:
        bucket = await MeetingBucket.open("memory://")
        assert isinstance(bucket, MeetingBucket)
        async with asyncio.timeout(SECONDS):
            await test(await Store.open(bucket), bucket)

    asyncio.run(main())


def test_a_commit_reads_its_receipt_beside_the_slot() -> None:
    async def test(store: Store, bucket: MeetingBucket) -> None:
        epoch = await finished(store, 1)
        bucket.meet(PLACES.checkpoint(1), PLACES.receipt(name_of(1).upload, 0))

        committed = await store.commits.commit(name_of(1), epoch)

        assert slots.COMMITTED == committed.state

    within(test)


def test_a_commit_reads_its_slot_beside_the_writes_of_its_objects() -> None:
    async def test(store: Store, bucket: MeetingBucket) -> None:
        epoch = await finished(store, 1)
        # the receipt is read, too, and compared with the one that is assumed
        root = PLACES.key_space(name_of(1).upload, "").rstrip("/")
        bucket.meet_below(root, PLACES.checkpoint(1))

        committed = await store.commits.commit(name_of(1), epoch)

        assert slots.COMMITTED == committed.state
        assert PLACES.receipt(name_of(1).upload, 0) in bucket.reads

    within(test)


def test_a_receipt_needs_no_read_of_what_this_process_has_just_stored() -> None:
    async def test(store: Store, bucket: MeetingBucket) -> None:
        await finished(store, 1)

        staging = PLACES.staging_prefix(name_of(1).upload)
        assert [] == [place for place in bucket.reads if place.startswith(staging)]

    within(test)


def test_an_upload_reads_its_run_beside_the_slot() -> None:
    async def test(store: Store, bucket: MeetingBucket) -> None:
        await begin(store, 1)
        bucket.meet(PLACES.checkpoint(2), layout.run_record(RUN))

        assert 1 == (await begin(store, 2)).epoch

    within(test)


def test_a_begin_that_is_rejected_leaves_no_request_under_way() -> None:
    async def test(store: Store, bucket: MeetingBucket) -> None:
        await begin(store, 1)
        # The read of the run waits for a second request, which never comes.
        bucket.meet(layout.run_record(RUN), "none")

        with pytest.raises(RequestIdReusedError):
            await begin(store, 2, request=1)

        assert {asyncio.current_task()} == asyncio.all_tasks()

    within(test)


def test_an_upload_of_a_step_with_a_slot_reads_its_run_once() -> None:
    async def test(store: Store, bucket: MeetingBucket) -> None:
        await begin(store, 1)
        await store.uploads.abort(name_of(1))
        bucket.reads.clear()

        again = await begin(store, 1, request=2)

        assert 2 == again.epoch
        assert 1 == bucket.reads.count(layout.run_record(RUN))

    within(test)


def test_an_epoch_floor_that_rises_while_an_upload_begins_is_not_missed() -> None:
    class Collected(MeetingBucket):
        """A collection raises the floor when the first slot has been read."""

        store: Store

        async def read(self, path: str) -> Stored | None:
            found = await super().read(path)
            if path == PLACES.checkpoint(1) and layout.run_record(RUN) in self.reads:
                await self.store.runs.raise_epoch_floor(RUN, 7)
            return found

    async def main() -> None:
        bucket = await Collected.open("memory://")
        bucket.store = store = await Store.open(bucket)
        await store.runs.create(RUN)
        bucket.meet(PLACES.checkpoint(1), layout.run_record(RUN))

        with pytest.raises(UploadNotFoundError, match="begin a new one"):
            await begin(store, 1)
        assert await store.catalog.slot(RUN, 1) is None

        # A client begins again with another request id; the first one stays rejected.
        assert 8 == (await begin(store, 1, request=2)).epoch
        with pytest.raises(UploadSupersededError):
            await begin(store, 1)

    asyncio.run(main())


def test_a_commit_of_many_writers_lists_their_receipts_beside_the_slot() -> None:
    async def test(store: Store, bucket: MeetingBucket) -> None:
        record = await begin(store, 1, writer_count=9)
        bucket.meet(PLACES.checkpoint(1), PLACES.receipts(name_of(1).upload))

        with pytest.raises(WriterUnfinishedError, match="9 have not finished"):
            await store.commits.commit(name_of(1), record.epoch)

    within(test)


def test_an_upload_finds_its_base_beside_the_slot() -> None:
    async def test(store: Store, bucket: MeetingBucket) -> None:
        await store.commits.commit(name_of(1), await finished(store, 1))
        bucket.meet(PLACES.checkpoint(2), PLACES.checkpoints)

        record = await begin(store, 2, base=CheckpointName(RUN, LATEST))

        assert (1, name_of(1).upload) == (record.base_step, record.base)

    within(test)


def test_a_repeated_commit_returns_the_record_though_the_receipts_are_gone() -> None:
    async def test(store: Store, bucket: MeetingBucket) -> None:
        del bucket
        epoch = await finished(store, 1)
        first = await store.commits.commit(name_of(1), epoch)

        assert first == await store.commits.commit(name_of(1), epoch)

    within(test)


def test_a_commit_with_another_epoch_is_rejected_from_the_kept_record() -> None:
    async def test(store: Store, bucket: MeetingBucket) -> None:
        del bucket
        epoch = await finished(store, 1)

        with pytest.raises(UploadSupersededError, match=f"expected epoch {epoch}"):
            await store.commits.commit(name_of(1), epoch + 1)

    within(test)


def test_a_call_beside_another_ends_with_the_context_and_its_error_is_no_warning() -> (
    None
):
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def fails() -> None:
        raise StorageUnavailableError("no answer")

    async def main() -> None:
        async with beside(waits()), beside(fails()):
            await asyncio.sleep(0)

    asyncio.run(main())

    assert ["cancelled"] == ended
