"""Calls that overlap, are cancelled, or idle: no leak and no wrong result."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storesvc_client as store_client
from storesvc.catalog import slots
from storesvc.errors import (
    ConflictError,
    RunNotFoundError,
    StalledError,
    StorageUnavailableError,
    UploadNotFoundError,
    UploadSupersededError,
)
from storesvc.format.chunks import ChunkLocations, pack_placed
from storesvc.format.layout import RunPaths
from storesvc.format.names import CheckpointName, RunName, UploadName
from storesvc.format.trees import pack_leaves
from storesvc.format.wire import Frame
from storesvc.save import batches, receiver
from storesvc.save.uploads import NewUpload, OpenUpload
from storesvc.storage.bucket import ALWAYS, Generation, WriteCondition
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.store import Store
from storesvc_proto.v1 import tree_pb2
from storesvc_proto.v1 import upload_service_pb2 as api
from tests.support.contract import Writer, frame, received, stored, sums, tree_of
from tests.support.faulty_bucket import Call, Fault, FaultyBucket
from tests.support.faulty_server import serving

RUN = RunName("tests", "overlap")
IDS = ["a" * 32, "b" * 32]


@dataclass
class Caller:
    """An upload of step 1, driven without a wire."""

    store: Store
    name: UploadName
    epoch: int = 0

    async def begin(self) -> None:
        new = NewUpload(
            step=1,
            writer_count=1,
            labels={},
            metrics={},
            lease=timedelta(minutes=1),
            base=None,
            body=b"",
        )
        table = b"".join(pack_leaves(tree_of()))
        record, _ = await self.store.uploads.begin(self.name, new, table)
        self.epoch = record.epoch

    async def open(self) -> OpenUpload:
        return await self.store.uploads.open(self.name, self.epoch)

    async def write(self, frames: AsyncIterator[Frame]) -> list[int]:
        upload = await self.open()
        return [n async for n in self.store.receiver.write(upload, 0, frames)]

    async def finish(self) -> None:
        upload, receipts = await self.open(), self.store.receipts
        staged = receipts.staged(self.name, 0, chunk_count=3)
        await receipts.finish(upload, 0, sums(0, 1, 2), staged)

    async def commit(self) -> Any:
        return await self.store.commits.commit(self.name, self.epoch)

    async def ready(self) -> None:
        """Does all but the commit."""
        await self.begin()
        await self.write(frames_of(frame(0, 1, 2)))
        await self.finish()


async def frames_of(*frames: api.ChunkFrame) -> AsyncIterator[Frame]:
    for one in frames:
        yield received(one)


async def open_callers(tmp_path: Path) -> tuple[Store, list[Caller]]:
    """Returns a fresh store, with two callers."""
    store = await Store.open(await TensorStoreBucket.open(tmp_path.as_uri()))
    return store, [Caller(store, UploadName(RUN, i)) for i in IDS]


async def test_an_upload_that_was_superseded_stays_so_when_the_later_one_aborts(
    tmp_path: Path,
) -> None:
    store, (first, second) = await open_callers(tmp_path)
    await first.ready()
    await second.begin()
    await store.uploads.abort(second.name)

    for call in (first.begin, first.commit):
        with pytest.raises(UploadSupersededError):
            await call()


async def test_an_aborted_upload_has_no_second_life(tmp_path: Path) -> None:
    store, (first, second) = await open_callers(tmp_path)
    await first.ready()
    await store.uploads.abort(first.name)

    for call in (first.begin, first.commit):
        with pytest.raises(UploadNotFoundError):
            await call()
    await second.begin()
    assert first.epoch + 1 == second.epoch


async def test_overlapping_commits_of_one_upload_give_one_answer(
    tmp_path: Path,
) -> None:
    store, (caller, _) = await open_callers(tmp_path)
    await caller.ready()

    records = await asyncio.gather(*(caller.commit() for _ in range(6)))

    assert all(record == records[0] for record in records)
    record = await store.catalog.checkpoint(CheckpointName(RUN, 1))
    assert record == records[0]
    await store.catalog.manifest(RUN, record)


async def test_a_commit_that_another_overtook_gives_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, (caller, _) = await open_callers(tmp_path)
    await caller.ready()
    # at another server: calls to one share a commit
    other = Caller(await Store.open(store.bucket), caller.name, caller.epoch)
    commits = store.commits
    prepare = commits._prepare
    first = True

    async def overtaken(*arguments: Any) -> Any:
        nonlocal first
        if first:
            first = False
            await other.commit()  # and with it the receipts are gone
        return await prepare(*arguments)

    monkeypatch.setattr(commits, "_prepare", overtaken)
    record = await caller.commit()

    assert slots.COMMITTED == record.state
    # and leaves what the other has committed, for plain TensorStore too
    places = RunPaths(RUN)
    space = commits._bucket.key_space(
        path=places.key_space(record.upload, record.attempt), pool=places.pool
    )
    found = await space.places()
    assert found is not None
    assert {"x/zarr.json", "x/c/0", "x/c/1", "x/c/2"} == found.keys()


async def test_chunks_that_come_after_their_receipt_change_nothing(
    tmp_path: Path,
) -> None:
    store, (caller, _) = await open_callers(tmp_path)
    await caller.ready()
    await caller.write(frames_of(frame(1, version=1)))

    record = await caller.commit()
    manifest = await store.catalog.manifest(RUN, record)
    assert (sums(0, 1, 2).digests == manifest.sums.digests).all()


async def test_a_commit_that_dies_before_its_record_leaves_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, (caller, _) = await open_callers(tmp_path)
    await caller.ready()

    def dies(*_: Any) -> Any:
        raise RuntimeError

    monkeypatch.setattr(store.commits, "_committed_record", dies)
    with pytest.raises(RuntimeError):
        await caller.commit()

    assert [] == await store.catalog.runs(None, after=None, limit=9)
    with pytest.raises(RunNotFoundError):
        await store.catalog.run(RUN)


async def all_permits_free(store: Store) -> None:
    """Returns once no batch holds a place; a thread deletes its file before."""
    admission = store.receiver.admission
    async with asyncio.timeout(20):
        while admission.free < receiver.MAX_FILES:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("pause", [0, 0.001, 0.003, 0.01])
async def test_cancelled_streams_release_their_permits(
    tmp_path: Path, pause: float
) -> None:
    store, (caller, _) = await open_callers(tmp_path)
    await caller.begin()
    for _ in range(3 * receiver.MAX_BATCHES):
        many = frames_of(*(frame(0, 1, 2) for _ in range(20)))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(caller.write(many), pause)

    await asyncio.wait_for(caller.write(frames_of(frame(0))), 20)
    await all_permits_free(store)


async def test_a_client_that_pauses_is_acknowledged_and_holds_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "BATCH_SECONDS", 0.2)
    monkeypatch.setattr(receiver, "TICK_SECONDS", 0.1)

    store, (caller, _) = await open_callers(tmp_path)
    await caller.begin()
    upload = await caller.open()
    going_on = asyncio.Event()

    async def frames() -> AsyncIterator[Frame]:
        yield received(frame(0))
        await going_on.wait()
        yield received(frame(1))

    acknowledged = store.receiver.write(upload, 0, frames())
    assert 1 == await asyncio.wait_for(anext(acknowledged), 20)
    await all_permits_free(store)
    going_on.set()
    assert [2] == [n async for n in acknowledged]


async def test_a_chunk_that_never_ends_is_stalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "CHUNK_SECONDS", 0.3)
    monkeypatch.setattr(receiver, "TICK_SECONDS", 0.1)

    store, (caller, _) = await open_callers(tmp_path)
    await caller.begin()

    async def frames() -> AsyncIterator[Frame]:
        yield received(api.ChunkFrame(chunk=[0], offset=[0], length=[1], data=b"x"))
        await asyncio.Event().wait()

    with pytest.raises(StalledError, match="leaf 'x' chunk 0 was not complete"):
        await asyncio.wait_for(caller.write(frames()), 20)
    await all_permits_free(store)


class WaitingBucket(TensorStoreBucket):
    """A bucket in which the writes of others become durable only on request."""

    may_go_on: asyncio.Event

    async def adopt(self, place: str) -> None:
        await self.may_go_on.wait()
        await super().adopt(place)


@pytest.mark.parametrize(
    ("storage", "most"),
    [("files", receiver.MAX_BATCHES), ("memory", receiver.MAX_TABLES)],
)
async def test_no_more_tables_are_taken_than_can_be_stored(
    tmp_path: Path, storage: str, most: int
) -> None:
    root = tmp_path.as_uri() if storage == "files" else "memory://"
    count = 3 * most
    taken = 0

    bucket = await WaitingBucket.open(root)
    assert isinstance(bucket, WaitingBucket)
    bucket.may_go_on = asyncio.Event()
    store = await Store.open(bucket)
    caller = Caller(store, UploadName(RUN, IDS[0]))
    await caller.begin()
    upload = await caller.open()
    file = upload.places.data_prefix(IDS[0]) + "f" * 32
    await bucket.write(upload.places.data_file(file), stored(0))
    places = ChunkLocations.of_rows([(file, 0, len(stored(0)))])
    (table,) = pack_placed(sums(0), places, with_ordinals=True)

    async def tables() -> AsyncIterator[tree_pb2.ChunkTable]:
        nonlocal taken
        for _ in range(count):
            taken += 1
            yield table

    async def all_of_it() -> list[int]:
        return [n async for n in store.receiver.write(upload, 0, tables())]

    writing = asyncio.ensure_future(all_of_it())
    before = -1
    while before < taken or not taken:  # until it takes no more
        before = taken
        await asyncio.sleep(0.2)
    assert most <= taken <= most + 2  # one that waits, and the next
    bucket.may_go_on.set()
    assert count == (await writing)[-1]


async def test_a_chunk_sent_twice_counts_twice(tmp_path: Path) -> None:
    _, (caller, _) = await open_callers(tmp_path)
    await caller.begin()

    assert 3 == (await caller.write(frames_of(frame(0), frame(0), frame(1))))[-1]


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.RETRIED])
async def test_a_commit_that_answers_for_another_write_makes_it_durable_first(
    tmp_path: Path, fault: Fault
) -> None:
    """The record may be seen before it would survive a power cut."""
    settled: list[str] = []

    def plan(call: Call) -> Fault:
        if call.operation == "settle":
            settled.append(call.path)
        is_record = call.operation == "write" and "/checkpoints/" in call.path
        return fault if is_record and not settled else Fault.NONE

    bucket = await FaultyBucket.faulty(tmp_path.as_uri())
    caller = Caller(await Store.open(bucket), UploadName(RUN, IDS[0]))
    await caller.ready()
    bucket.calls.follow(plan)
    with contextlib.suppress(StorageUnavailableError):
        await caller.commit()
    await caller.commit()

    assert {RunPaths(RUN).checkpoint(1)} == set(settled)


class BusyBucket(TensorStoreBucket):
    """A bucket where something happens right before a slot is written."""

    during_read: Callable[[], Coroutine[Any, Any, None]] | None = None

    async def write(
        self, place: str, data: bytes, *, condition: WriteCondition = ALWAYS
    ) -> Generation:
        if place == RunPaths(RUN).checkpoint(1) and self.during_read is not None:
            happens, self.during_read = self.during_read, None
            await happens()
        return await super().write(place, data, condition=condition)


async def open_busy(tmp_path: Path) -> tuple[BusyBucket, Store, list[Caller]]:
    """Returns a busy bucket and its store, with two callers."""
    bucket = await BusyBucket.open(tmp_path.as_uri())
    assert isinstance(bucket, BusyBucket)
    store = await Store.open(bucket)
    return bucket, store, [Caller(store, UploadName(RUN, i)) for i in IDS]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("freed", ["live", "emptied", "emptied far above"])
async def test_an_upload_whose_slot_is_freed_while_it_begins_gives_way_to_another(
    tmp_path: Path, freed: str, *, fails: bool
) -> None:
    """The collector ends dead uploads, and empties slots. None of that is a rival, but
    what it has read of the upload must stay true: its record is written once."""

    bucket = await BusyBucket.open(tmp_path.as_uri())
    assert isinstance(bucket, BusyBucket)
    store = await Store.open(bucket)
    first, second, third = (Caller(store, UploadName(RUN, i)) for i in (*IDS, "c" * 32))
    place = RunPaths(RUN).upload(second.name.upload)
    await first.begin()
    if freed != "live":
        await store.uploads.abort(first.name)

    async def collect() -> None:
        if freed == "live":
            await store.uploads.abort(first.name)
        else:
            floor = 1 if freed == "emptied" else 7
            await store.runs.raise_epoch_floor(RUN, floor)
            await bucket.delete(RunPaths(RUN).checkpoint(1))
        if fails:
            raise StorageUnavailableError("as if")

    bucket.during_read = collect
    with pytest.raises(StorageUnavailableError if fails else UploadNotFoundError):
        await second.begin()
    record = await bucket.read(place)
    if freed != "emptied":  # else it finds what it found before
        with pytest.raises(UploadNotFoundError):
            await second.begin()
    assert record == await bucket.read(place)
    await third.ready()
    await third.finish()
    await third.commit()
    expected = 8 if freed == "emptied far above" else 2
    assert expected == third.epoch


def test_a_save_whose_step_is_freed_while_it_begins_begins_again(
    tmp_path: Path,
) -> None:
    slot = tmp_path / RunPaths(RUN).checkpoint(1)
    emptied: list[Call] = []

    def plan(call: Call) -> Fault:
        if call.operation == "write" and str(slot).endswith(call.path) and not emptied:
            emptied.append(call)
            slot.unlink()
        return Fault.NONE

    tree = {"x": np.arange(9)}
    with serving(tmp_path) as address:
        aborted = Writer(address, str(RUN), 1)
        aborted.begin()
        with store_client.connect(address) as client:
            client.run(str(RUN)).uploads.abort(aborted.name.rpartition("/")[2])
    with serving(tmp_path, plan) as address, store_client.connect(address) as client:
        client.run(str(RUN)).save(1, tree).result()
        assert np.array_equal(tree["x"], client.run(str(RUN)).restore(1)["x"])
    assert emptied


async def test_an_upload_whose_slot_a_rival_has_is_superseded_whatever_its_epoch(
    tmp_path: Path,
) -> None:
    """The floor of epochs was raised in between, so that the rival's is lower."""

    bucket, store, (rival, late) = await open_busy(tmp_path)

    async def begin_late() -> None:  # before the rival's slot is written
        await store.runs.raise_epoch_floor(RUN, 100)
        bucket.during_read = fail
        with pytest.raises(StorageUnavailableError):
            await late.begin()

    async def fail() -> None:
        raise StorageUnavailableError("as if")

    bucket.during_read = begin_late
    await rival.begin()
    with pytest.raises(UploadSupersededError):
        await late.begin()
    await rival.open()


async def test_a_rival_at_the_same_moment_is_a_conflict(tmp_path: Path) -> None:
    bucket, _, (first, second) = await open_busy(tmp_path)
    bucket.during_read = first.begin
    with pytest.raises(ConflictError, match="at the same moment"):
        await second.begin()
    await first.open()


async def test_an_upload_that_an_earlier_try_of_its_request_reserved_has_begun(
    tmp_path: Path,
) -> None:
    """The server of that try was killed while its write was on its way."""

    bucket, store, _ = await open_busy(tmp_path)
    for upload in IDS:  # onto an absent slot, and onto that of another upload
        caller = Caller(store, UploadName(RUN, upload))
        bucket.during_read = Caller(store, caller.name).begin
        await caller.begin()
        await caller.open()

    await caller.ready()
    assert slots.COMMITTED == (await caller.commit()).state


@pytest.mark.parametrize("times", [1, 3, 9])
async def test_a_commit_stands_although_its_reservation_was_written_again(
    tmp_path: Path, times: int
) -> None:
    bucket, _, (caller, _) = await open_busy(tmp_path)
    await caller.ready()
    place, left = RunPaths(RUN).checkpoint(1), times

    async def write_again() -> None:
        nonlocal left
        found, left = await bucket.read(place), left - 1
        assert found is not None
        await bucket.write(place, found.data, condition=found.generation)
        bucket.during_read = write_again if left else None

    bucket.during_read = write_again
    if times < 4:
        assert slots.COMMITTED == (await caller.commit()).state
    else:
        with pytest.raises(ConflictError, match="commit it again"):
            await caller.commit()
        bucket.during_read = None
        assert slots.COMMITTED == (await caller.commit()).state


async def test_a_commit_does_not_take_the_step_back(tmp_path: Path) -> None:
    bucket, _, (first, second) = await open_busy(tmp_path)
    await first.ready()
    bucket.during_read = second.begin
    with pytest.raises(UploadSupersededError):
        await first.commit()
    await second.open()
