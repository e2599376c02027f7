"""Commits: turns an upload into a checkpoint.

The commit is one conditional write of the slot. Everything before it only prepares the
objects that the record will name, and may be repeated. So a crash at any point leaves
either no checkpoint or a whole one, and a repeated call completes the work. In order:

1. Check that the upload owns its slot; if it is committed already, return the record.
2. Write the objects that the record will name.
3. Append the commit to the journal, so that a watch cannot miss it.
4. Write the slot, on the condition that the upload owns it. The checkpoint exists.
5. Delete the staging tables and the parts of the upload; a server over a bucket answers
   first.

A checkpoint needs nothing of step 5, and garbage collection deletes what a crash
leaves. So ``storectl serve`` over a bucket, where deletions take several requests,
answers a commit first and deletes in the background: between ``defer`` and ``drain``.
Elsewhere, as in an embedded store, ``delete`` waits.

The only writer of an upload may finish in the same call: then the commit is decided
from what it sends (`WriterEnd`), without a receipt or a staging table of its last
chunks: if the call fails, it is repeated with all of it.

``create`` begins, stores and commits a small upload in one call: it writes the record
of the upload, from where on no collection takes its objects for garbage, then what is
in steps 2 to 4, with the chunks in the file of the nodes. A leaf table, a lease, a
staging table and a receipt are for calls that another process continues.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from storesvc.catalog import slots
from storesvc.catalog.catalog import Catalog
from storesvc.catalog.journal import Journal
from storesvc.catalog.records import timestamp, write_record
from storesvc.clock import Clock
from storesvc.concurrency import offload
from storesvc.errors import (
    ChunksIncompleteError,
    ConflictError,
    InvalidFieldError,
    StoreError,
)
from storesvc.failpoints import Failpoint, reach
from storesvc.format.checksums import digest
from storesvc.format.chunks import ChunkLocations, Sums, merge
from storesvc.format.layout import ROOT, RunPaths
from storesvc.format.manifests import Manifest, pack_manifest
from storesvc.format.names import RunName, UploadName
from storesvc.format.ocdbt import ZarrArray, view_arrays
from storesvc.format.trees import Tree
from storesvc.save.batches import check_small_chunks
from storesvc.save.receipts import FEW_WRITERS, Receipts, longest
from storesvc.save.receiver import Receiver, check_direct_chunks
from storesvc.save.reuse import Claims, Reuse, claimed_places, find_claims
from storesvc.save.uploads import NewUpload, OpenUpload, Uploads, Version
from storesvc.storage.bucket import (
    IF_ABSENT,
    Generation,
    PreconditionError,
    WriteCondition,
)
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.storage.requests import background_task, retrieve_error, run_all
from storesvc.telemetry.events import ChunksMoved, Committed, Span, publish
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import report_pb2, tree_pb2

MAX_DEFERRED: Final = 64
"""Uploads whose deletion may be in the background at a time; commits beyond it wait for
their own, so that a storage that deletes slowly slows commits down."""

_log = logging.getLogger(__name__)


class Discards:
    """Deletes the staging of committed uploads."""

    def __init__(self, bucket: TensorStoreBucket) -> None:
        self._bucket = bucket
        self._is_deferred = False
        self._tasks: set[asyncio.Task[None]] = set()

    def defer(self) -> None:
        """Deletes in the background from now on."""
        self._is_deferred = True

    async def drain(self, seconds: float) -> None:
        """Waits for the deletions in the background; the next ones are waited for.

        Args:
            seconds: Maximum time; garbage collection deletes what is left.
        """
        self._is_deferred = False
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)

    async def delete(self, name: UploadName) -> None:
        """Deletes the staging of an upload, or begins to; a failure is logged."""
        if not self._is_deferred or len(self._tasks) >= MAX_DEFERRED:
            await self._delete(name)
            return
        task = asyncio.create_task(self._delete(name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _delete(self, name: UploadName) -> None:
        places = RunPaths(name.run)
        try:
            await reach(Failpoint.COMMIT_BEFORE_DISCARD)
            await run_all(
                self._bucket.delete_below(places.staging_prefix(name.upload)),
                self._bucket.delete_below(places.upload_parts(name.upload)),
            )
        except StoreError:
            # The commit stands; garbage collection deletes the rest.
            _log.warning("%s: its staging was not deleted", name, exc_info=True)


_WRITES: Final = 4
"""Attempts to write a slot that the upload owns."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The fields of a record that describe the objects it names."""

    tree: Tree
    _: KW_ONLY
    attempt: str
    manifest_bytes: int
    manifest_digest: bytes
    files_digest: bytes
    own_bytes: int
    writers: Sequence[report_pb2.WriterReport] = ()


@dataclass(slots=True, eq=False)
class _Running:
    """A commit that is being made."""

    task: asyncio.Task[pb.CheckpointRecord]
    calls: int = 0
    """Calls that wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterEnd:
    """The end of the only writer of an upload."""

    sums: Sums
    """Checksums of all its chunks, ascending by ordinal."""
    placed: tree_pb2.ChunkTable
    """Chunks that it put into the pool itself, and has not reported yet."""
    report: report_pb2.WriterReport | None
    """Its measurements; None: it sent none."""
    reserve: Callable[[int, int], Awaitable[None]]
    """Rejects the bytes of some chunks of an upload with so many bytes in all."""


class Commits:
    """Commits uploads as checkpoints."""

    def __init__(
        self,
        bucket: TensorStoreBucket,
        catalog: Catalog,
        uploads: Uploads,
        receipts: Receipts,
        receiver: Receiver,
        reuse: Reuse,
        journal: Journal,
        *,
        on_commit: Callable[[RunName], None],
        clock: Clock,
    ) -> None:
        self.discards = Discards(bucket)
        """Deletes what committed uploads leave."""
        self._bucket = bucket
        self._catalog = catalog
        self._uploads = uploads
        self._receipts = receipts
        self._receiver = receiver
        self._reuse = reuse
        self._journal = journal
        self._on_commit = on_commit
        self._clock = clock
        self._running: dict[UploadName, _Running] = {}

    async def commit(
        self, name: UploadName, epoch: int, end: WriterEnd | None = None
    ) -> pb.CheckpointRecord:
        """Commits an upload, and returns the record of the checkpoint. Calls for one
        upload at the same time share one commit.

        Args:
            end: What its only writer declares; None: its writers have finished.

        Raises:
            InvalidChunkError: ``end`` does not fit what is stored.
            UploadNotFoundError: The upload does not exist.
            UploadSupersededError: The upload has another epoch, or lost its slot.
            CheckpointExistsError: Another upload committed the step.
            WriterUnfinishedError: A writer has not finished.
            ChunksIncompleteError: A chunk is missing, or several writers sent it.
            ConflictError: The slot changed at the same time.
        """
        record = await self._uploads.known_record(name)
        slots.check_epoch(name, record, epoch)
        if end is not None and record.writer_count != 1:
            raise InvalidFieldError(
                f"end: expected an upload of one writer, got {record.writer_count}; "
                "finish each of them"
            )
        if (running := self._running.get(name)) is not None:
            # It may have read the receipts before this call: only its success counts.
            with suppress(StoreError):
                return await self._share(name, running)
        running = self._running.get(name)
        if running is None:
            once = self._commit_once(name, record, end)
            running = _Running(asyncio.create_task(once))
            running.task.add_done_callback(lambda _: self._forget(name, running))
            self._running[name] = running
        return await self._share(name, running)

    async def _share(self, name: UploadName, running: _Running) -> pb.CheckpointRecord:
        """Awaits a commit, and cancels it if all its calls are cancelled."""
        running.calls += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.calls -= 1
            if not running.calls and not running.task.done():
                self._forget(name, running)
                running.task.cancel()
                await asyncio.wait({running.task})

    def _forget(self, name: UploadName, running: _Running) -> None:
        """Lets no later call share a commit."""
        if self._running.get(name) is running:
            del self._running[name]
        if running.task.done():
            retrieve_error(running.task)

    async def _commit_once(
        self, name: UploadName, record: pb.UploadRecord, end: WriterEnd | None
    ) -> pb.CheckpointRecord:
        span = Span()
        # 1. If an earlier try of this call has committed, and only its reply was lost,
        #    return its record. So may the process of another writer have: the receipts
        #    of many are read only if none has.
        looked = None
        if record.writer_count > FEW_WRITERS:
            looked = await self._uploads.slot(name, record)
            if looked[0].state != slots.UPLOADING:
                return await self._settle_record(name, looked[0])
        #    Else the objects are prepared at the same time, and used only if the upload
        #    owns its slot: then it has owned it since it began, because a slot that was
        #    lost never comes back, so they are of a live upload. Others are named by no
        #    record, and are collected.
        preparing = (
            self._prepare_end(name, record, end)
            if end is not None
            else self._prepare(name, record)
        )
        async with background_task(preparing) as made:
            slot, seen = looked or await self._uploads.slot(name, record)
            if slot.state != slots.UPLOADING:
                return await self._settle_record(name, slot)
            return await self._commit(name, record, slot, seen, made, span)

    async def _commit(
        self,
        name: UploadName,
        record: pb.UploadRecord,
        slot: pb.CheckpointRecord,
        seen: Generation,
        making: Awaitable[_Prepared],
        span: Span,
    ) -> pb.CheckpointRecord:
        # 2. Objects before the slot: after a crash in the other order, a committed slot
        #    would name a manifest that is missing. Another call may commit in the
        #    meantime and delete the parts of the upload: then an object is missing
        #    here, and the slot says so.
        try:
            made = await making
        except StoreError as e:
            return await self._after_conflict(name, record, e)
        committed = await self._land(name, record, Version(slot, seen), made, span)
        # 5. Receipts and staging last: without them the upload could not be committed
        #    again. The record names none of them; after a crash here, garbage
        #    collection deletes them.
        await self.discards.delete(name)
        await reach(Failpoint.COMMIT_BEFORE_REPLY)
        return committed

    async def create(
        self,
        name: UploadName,
        new: NewUpload,
        table: bytes,
        data: bytes,
        *,
        reserve: Callable[[int], Awaitable[None]],
        report: report_pb2.WriterReport | None,
    ) -> pb.CheckpointRecord:
        """Begins a small upload, stores its chunks, which are `data` back to back, and
        commits it; returns the record of the checkpoint.

        Raises:
            InvalidChunkError: The data do not fit the leaf table, or are damaged.
            StoreError: As ``Uploads.begin`` and ``commit``.
        """
        span, unique = Span(), uuid.uuid4()
        tree = await self._uploads.parse(name, table)
        chunks = check_small_chunks(tree, data)
        async with background_task(self._journal.look_up(name.run.namespace)) as look:
            record, version = await self._uploads.begin(
                name, new, table, reserve=reserve, commits_now=True
            )
            await look
        if version.slot.state != slots.UPLOADING:  # only the reply was lost
            return await self._settle_record(name, version.slot)
        upload = OpenUpload(name, record, tree)
        manifest = Manifest(tree, *chunks.table(_name_file(upload, unique)))
        made = await self._write_objects(upload, manifest, unique, data)
        publish(ChunksMoved(direction="in", path="stream", size_bytes=len(data)))
        made = replace(made, writers=[report] if report else [])
        committed = await self._land(name, record, version, made, span)
        if version.generation is not IF_ABSENT:
            await self.discards.delete(name)  # the leaf table of the reservation
        await reach(Failpoint.COMMIT_BEFORE_REPLY)
        return committed

    async def _land(
        self,
        name: UploadName,
        record: pb.UploadRecord,
        seen: Version,
        made: _Prepared,
        span: Span,
    ) -> pb.CheckpointRecord:
        """Announces a commit whose objects are durable, and makes it."""
        # 3. Journal before slot: after a crash here, a watch reads the slot and finds
        #    that the change never landed. The other order would lose the event. Not
        #    while the objects are written, which would save a bucket's round trip: the
        #    announcements of commits that fail there would hold watches up.
        await reach(Failpoint.COMMIT_BEFORE_ANNOUNCEMENT)
        announcement = pb.Announcement(
            kind=pb.Announcement.KIND_COMMIT,
            run=name.run.run,
            step=record.step,
            upload=name.upload,
        )
        number = await self._journal.announce(name.run.namespace, announcement)
        # 4. From this write on the checkpoint exists. The condition fails if the slot
        #    was taken over, or if another call of this commit was faster.
        committed = self._committed_record(seen.slot, record, made, number)
        await reach(Failpoint.COMMIT_BEFORE_RECORD)
        try:
            written = await self._write_slot(name, record, committed, seen.generation)
        except PreconditionError as e:
            return await self._after_conflict(name, record, e)
        self._uploads.forget_open(name)
        self._catalog.note_commit(name.run, committed, written)
        # A watcher reads the slot when it is notified, so never before this write.
        self._journal.notify_landed(name.run.namespace)
        publish(_event(name, committed, span))
        self._on_commit(name.run)  # in no process that finds it committed
        return committed

    async def _prepare_end(
        self, name: UploadName, record: pb.UploadRecord, end: WriterEnd
    ) -> _Prepared:
        """Checks what the only writer declares, and writes the objects that the record
        will name."""
        upload = await self._uploads.presume_open(name, record.epoch)
        await self._uploads.renew(upload)
        rows = len(end.placed.crc32c)
        placed = await offload(rows, check_direct_chunks, upload, end.placed)
        new_bytes = int(placed[1].length.sum())
        await end.reserve(new_bytes, int(upload.tree.lengths.sum()))
        staged = await self._receipts.staged(
            name, 0, chunk_count=0 if new_bytes else len(end.sums)
        )
        places = await self._receipts.locate(upload, 0, end.sums, staged, placed)
        stored = {0: (end.sums, places)}
        await offload(
            len(end.sums),
            slots.check_complete,
            name,
            upload.tree,
            stored,
            writer_count=1,
        )
        manifest = Manifest(upload.tree, end.sums, places)
        # The files of the writer at the same time, because both only prepare.
        async with background_task(
            self._receiver.adopt_files(upload, placed[1])
        ) as adopting:
            made = await self._write_objects(upload, manifest, uuid.uuid4())
            await adopting
        if new_bytes:
            publish(ChunksMoved(direction="in", path="direct", size_bytes=new_bytes))
        return replace(made, writers=[end.report] if end.report else [])

    async def _prepare(self, name: UploadName, record: pb.UploadRecord) -> _Prepared:
        """Reads the receipts, and writes the objects that the record will name.

        A repeated call writes new objects. It never overwrites objects of an earlier
        call, because a record may name them.
        """
        tree = await self._uploads.tree(name, record)
        upload = OpenUpload(name, record, tree)
        receipts = await self._receipts.read(upload)
        # 1. Decide, from the receipts alone, whether the upload is complete. In threads
        #    (as below), so that health checks are answered in the meantime. The commit
        #    renews the lease itself, because the client only waits.
        await self._uploads.renew(upload)
        rows = tree.chunk_count + len(tree.leaves)  # a leaf may have no chunk
        stored = await offload(
            rows,
            slots.check_complete,
            name,
            tree,
            {writer: one.table for writer, one in receipts.items()},
            writer_count=upload.record.writer_count,
        )
        sums, places = await offload(rows, merge, stored)
        # 2. Check claimed chunks again: the base may have been purged since the writer
        #    finished.
        await self._check_claims(upload, sums, places)
        await self._uploads.renew(upload)
        made = await self._write_objects(
            upload, Manifest(tree, sums, places), uuid.uuid4()
        )
        reports = (each for one in receipts.values() for each in one.report)
        return replace(made, writers=longest(reports))

    async def _write_objects(
        self,
        upload: OpenUpload,
        manifest: Manifest,
        unique: uuid.UUID,
        data: bytes = b"",
    ) -> _Prepared:
        """Encodes and writes the objects that the record will name."""
        tree = manifest.tree
        made, objects = await offload(
            tree.chunk_count + len(tree.leaves),
            _encode_objects,
            upload,
            manifest,
            unique,
            data,
            commit_time_ns=timestamp(self._clock.now()).ToNanoseconds(),
        )
        # At the same time, because nothing refers to them before the record does, and a
        # bucket takes long for each.
        await reach(Failpoint.COMMIT_BEFORE_OBJECTS)
        await self._bucket.write_all(objects)
        return made

    async def _check_claims(
        self, upload: OpenUpload, sums: Sums, places: ChunkLocations
    ) -> None:
        """Checks that the chunks of other uploads are still stored where the receipts
        claim them."""
        claimed = np.flatnonzero(~_is_own(upload, places))
        if not claimed.size:
            return
        sources = await self._reuse.sources(upload)
        found = await offload(
            len(sums), find_claims, upload.tree, sums.take(claimed), sources
        )
        lost = await offload(len(sums), _find_moved, places.take(claimed), found)
        if lost:
            first = upload.tree.describe_chunk(int(sums.ordinal[claimed[lost[0]]]))
            raise ChunksIncompleteError(
                f"{upload.name}: {len(lost)} claimed chunks are no longer available "
                f"({first}); send them, finish, then commit again",
                missing=str(len(lost)),
            )

    def _committed_record(
        self,
        slot: pb.CheckpointRecord,
        record: pb.UploadRecord,
        made: _Prepared,
        number: int,
    ) -> pb.CheckpointRecord:
        return pb.CheckpointRecord(
            state=slots.COMMITTED,
            step=slot.step,
            upload=slot.upload,
            epoch=slot.epoch,
            create_time=slot.create_time,
            commit_time=timestamp(self._clock.now()),
            labels=record.labels,
            metrics=record.metrics,
            size_bytes=made.tree.size_bytes,
            stored_bytes=made.tree.lengths.sum(),
            leaf_count=made.tree.tree_count,
            item_count=made.tree.item_count,
            chunk_count=made.tree.chunk_count,
            manifest_bytes=made.manifest_bytes,
            manifest_digest=made.manifest_digest,
            attempt=made.attempt,
            files_digest=made.files_digest,
            own_bytes=made.own_bytes,
            owner=slot.owner,
            principal=record.principal,
            commit_sequence=number,
            sequence=number,
            writers=made.writers,
        )

    async def _write_slot(
        self,
        name: UploadName,
        record: pb.UploadRecord,
        committed: pb.CheckpointRecord,
        generation: WriteCondition,
    ) -> Generation:
        """Writes the slot, on the condition that the upload still owns it; returns its
        generation."""
        place = RunPaths(name.run).checkpoint(record.step)
        for _ in range(_WRITES):
            with suppress(PreconditionError):
                return await write_record(
                    self._bucket, place, committed, condition=generation
                )
            # The same reservation may have been written again, by whatever copies
            # files: only its owner and its state count.
            found = await self._catalog.slot(name.run, record.step)
            if found is None or found[0].state != slots.UPLOADING:
                break
            if not slots.owns(name, record, found[0]):
                break
            generation = found[1]
        raise PreconditionError(place)

    async def _after_conflict(
        self, name: UploadName, record: pb.UploadRecord, error: Exception
    ) -> pb.CheckpointRecord:
        """Returns the record if another call of this commit has written it.

        Raises:
            ConflictError: The slot changed otherwise, and ``error`` is a failed
                condition.
            StoreError: ``error`` itself, if it is of this type.
        """
        found = await self._catalog.slot(name.run, record.step)
        slot = slots.check_owner(name, record, found and found[0])
        if slot.state != slots.UPLOADING:
            return await self._settle_record(name, slot)
        if isinstance(error, StoreError):
            raise error
        raise ConflictError(
            f"{name}: its slot changed while it was committed; commit it again",
            upload=name.upload,
        ) from error

    async def _settle_record(
        self, name: UploadName, slot: pb.CheckpointRecord
    ) -> pb.CheckpointRecord:
        """Returns a record that another call wrote, once it is durable."""
        await self._bucket.settle(RunPaths(name.run).checkpoint(slot.step))
        return slot


def _event(name: UploadName, record: pb.CheckpointRecord, span: Span) -> Committed:
    return Committed(
        run=str(name.run),
        step=record.step,
        upload=name.upload,
        start=span.start,
        seconds=span.seconds,
        upload_start=record.create_time.ToNanoseconds() / 1e9,
        stored_bytes=record.stored_bytes,
        own_bytes=record.own_bytes,
        chunk_count=record.chunk_count,
    )


def _find_moved(wanted: ChunkLocations, found: Sequence[Claims]) -> list[int]:
    """Returns the rows of locations that no claim confirms."""
    there: dict[int, tuple[str, int, int]] = {}
    for claims in found:
        rows = claims.rows.tolist()
        there.update(zip(rows, claimed_places(claims).rows(), strict=True))
    return [row for row, place in enumerate(wanted.rows()) if there.get(row) != place]


def _name_file(upload: OpenUpload, unique: uuid.UUID) -> str:
    """Returns the data file with the nodes of a key space."""
    return upload.places.data_prefix(upload.name.upload) + unique.hex


def _encode_objects(
    upload: OpenUpload,
    manifest: Manifest,
    unique: uuid.UUID,
    data: bytes,
    *,
    commit_time_ns: int,
) -> tuple[_Prepared, dict[str, list[bytes]]]:
    """Returns the fields that a record will have, and the objects that it names.

    The key space gets names unique to this call, so that a late commit of the same
    upload by another server changes no object that a record names; manifest and file
    table are named by their own digests.
    """
    run, name, node_file = upload.places, upload.name.upload, _name_file(upload, unique)
    tree = manifest.tree
    packed = b"".join(pack_manifest(manifest))
    table = _file_table(manifest, node_file).SerializeToString(deterministic=True)
    made = _Prepared(
        tree,
        attempt=unique.hex[:8],
        manifest_bytes=len(packed),
        manifest_digest=digest(packed),
        files_digest=digest(table),
        own_bytes=int(manifest.places.length[_is_own(upload, manifest.places)].sum()),
    )
    arrays = [
        ZarrArray(
            name=leaf.key,
            shape=leaf.shape,
            chunk_shape=leaf.chunk_shape,
            dtype=leaf.dtype,
        )
        for leaf in tree.leaves
    ]
    view = view_arrays(
        arrays,
        tree.chunk_keys(np.arange(tree.chunk_count)),
        manifest.places,
        node_file=node_file,
        node_offset=len(data),
        uuid=unique.bytes,
        commit_time_ns=commit_time_ns,
    )
    return made, {
        run.data_file(node_file): [data, *view.nodes],
        run.key_space(name, made.attempt) + ROOT: [view.root],
        run.manifest(name, made.manifest_digest): [packed],
        run.file_table(name, made.files_digest): [table],
    }


def _file_table(manifest: Manifest, node_file: str) -> pb.FileTable:
    """Returns all data files that a checkpoint needs, with their bytes of chunks."""
    places = manifest.places
    bytes_in = np.bincount(places.file, places.length, len(places.files))
    held = {file: int(n) for file, n in zip(places.files, bytes_in, strict=True) if n}
    held.setdefault(node_file, 0)  # of a small checkpoint it has the chunks, too
    files = sorted(held)
    return pb.FileTable(file=files, chunk_bytes=[held[file] for file in files])


def _is_own(upload: OpenUpload, places: ChunkLocations) -> NDArray[np.bool_]:
    """Returns for each chunk whether this upload stored it."""
    prefix = upload.places.data_prefix(upload.name.upload)
    own = np.array([file.startswith(prefix) for file in places.files], np.bool_)
    return own[places.file] if places.file.size else np.zeros(0, np.bool_)
