"""Commits: how an upload becomes a checkpoint.

The one conditional write of the slot is the commit; all before it only prepares
what the record will name, and may be repeated. So a crash at any point leaves
either no checkpoint or a whole one, and a repeated call finishes the work.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from storesvc import slots
from storesvc.bucket import IF_ABSENT, PreconditionError
from storesvc.catalogue import Catalogue, read_record
from storesvc.errors import (
    ConflictError,
    CorruptDataError,
    StoreError,
    WriterUnfinishedError,
)
from storesvc.format import layout, zarr
from storesvc.format.checksums import digest
from storesvc.format.chunks import (
    InvalidChunksError,
    Places,
    Sums,
    merge,
    unpack_places,
    unpack_sums,
)
from storesvc.format.layout import RunPlaces
from storesvc.format.manifests import Manifest, pack_manifest
from storesvc.format.names import RunName, UploadName
from storesvc.format.seal import seal
from storesvc.format.trees import Tree
from storesvc.kvbucket import KeySpace, KvBucket, Place
from storesvc.uploads import OpenUpload, Uploads, timestamp
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import tree_pb2

_READS_AT_ONCE: Final = 32

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What a record will name."""

    tree: Tree
    manifest_bytes: int
    manifest_digest: bytes


class Commits:
    """Makes checkpoints of the uploads of a bucket."""

    def __init__(
        self,
        bucket: KvBucket,
        catalogue: Catalogue,
        uploads: Uploads,
        *,
        now: Callable[[], datetime],
    ) -> None:
        self._bucket = bucket
        self._catalogue = catalogue
        self._uploads = uploads
        self._now = now

    async def commit(self, name: UploadName, epoch: int) -> pb.CheckpointRecord:
        """Makes the checkpoint exist, and returns its record.

        Raises:
            UploadNotFoundError: There is no such upload.
            UploadSupersededError: Its epoch is another, or it lost its slot.
            CheckpointExistsError: Another upload committed the step.
            WriterUnfinishedError: A writer has not finished.
            ChunksIncompleteError: A chunk is missing, or came twice.
            ConflictError: The slot changed at the same moment.
        """
        record = await self._uploads.record(name)
        slots.check_epoch(name, record, epoch)
        found = await self._catalogue.slot(name.run, record.step)
        slot = slots.check_owner(name, record, found and found[0])
        if found is None or slot.state == slots.COMMITTED:  # after a lost reply
            return slot
        try:
            manifest = await self._prepare(name, record)
        except StoreError as e:
            # What is missing may be gone because another call has committed.
            return await self._after_conflict(name, record, e)
        await self._create_run(name.run)
        # From this write on the checkpoint exists.
        committed = self._committed(slot, record, manifest)
        try:
            await self._bucket.write(
                RunPlaces(name.run).checkpoint(record.step),
                seal(committed),
                condition=found[1],
            )
        except PreconditionError as e:
            return await self._after_conflict(name, record, e)
        # Nothing needs the staging any more; a crash leaves it to be collected.
        await self._discard(name)
        return committed

    async def _prepare(self, name: UploadName, record: pb.UploadRecord) -> _Prepared:
        """Writes what the record will name; a repetition writes it beside."""
        tree = await self._uploads.tree(name, record)
        upload = OpenUpload(name, record, tree)
        # 1. Decide, from the receipts alone. Threads, here and below: a ping must
        #    not wait for a million chunks.
        receipts = await self._receipts(upload)
        stored = await asyncio.to_thread(slots.check_complete, name, tree, receipts)
        # 2. Merge the key spaces, and believe only what the merged one holds.
        target = await self._merge_key_spaces(upload)
        found = await target.places()
        manifest = await asyncio.to_thread(_manifest_of, name, tree, stored, found)
        # 3. The manifest, under a name of its own content.
        data = await asyncio.to_thread(lambda: b"".join(pack_manifest(manifest)))
        made = _Prepared(tree, len(data), digest(data))
        await self._bucket.write(
            upload.places.manifest(name.upload, made.manifest_digest), data
        )
        return made

    async def _receipts(
        self, upload: OpenUpload
    ) -> dict[int, tuple[Sums, Places] | None]:
        """What each writer stored; None: it has not finished."""
        name = upload.name.upload
        # One list first: a tree may have been promised by very many writers.
        written = set(await self._bucket.list(upload.places.receipts(name)))
        places = [
            upload.places.receipt(name, writer)
            for writer in range(upload.record.writer_count)
        ]
        at_once = asyncio.Semaphore(_READS_AT_ONCE)

        async def receipt(place: str) -> tuple[Sums, Places] | None:
            async with at_once:
                found = await read_record(self._bucket, place, pb.Receipt)
            return None if found is None else _unpack_receipt(place, found[0])

        finished = [place for place in places if place in written]
        read = dict(
            zip(finished, await asyncio.gather(*map(receipt, finished)), strict=True)
        )
        return {writer: read.get(place) for writer, place in enumerate(places)}

    async def _merge_key_spaces(self, upload: OpenUpload) -> KeySpace:
        staged = [
            self._uploads.key_space(upload, writer)
            for writer in range(upload.record.writer_count)
        ]
        target = self._bucket.key_space(
            place=upload.places.key_space(upload.name.upload), pool=upload.places.pool
        )
        metadata = await asyncio.to_thread(_metadata_of, upload.tree)
        await target.take_over([s for s in staged if await s.exists()], metadata)
        return target

    async def _create_run(self, name: RunName) -> None:
        place = layout.run_record(name)
        if await self._bucket.read(place) is not None:
            return
        record = pb.RunRecord(uid=str(uuid.uuid4()), create_time=timestamp(self._now()))
        with suppress(PreconditionError):  # it exists, whoever made it
            await self._bucket.write(place, seal(record), condition=IF_ABSENT)

    def _committed(
        self, slot: pb.CheckpointRecord, record: pb.UploadRecord, made: _Prepared
    ) -> pb.CheckpointRecord:
        return pb.CheckpointRecord(
            state=slots.COMMITTED,
            step=slot.step,
            upload=slot.upload,
            epoch=slot.epoch,
            create_time=slot.create_time,
            commit_time=timestamp(self._now()),
            labels=record.labels,
            metrics=record.metrics,
            size_bytes=made.tree.size_bytes,
            stored_bytes=int(made.tree.stored_lengths.sum()),
            leaf_count=len(made.tree.leaves),
            chunk_count=made.tree.chunk_count,
            manifest_bytes=made.manifest_bytes,
            manifest_digest=made.manifest_digest,
        )

    async def _after_conflict(
        self, name: UploadName, record: pb.UploadRecord, error: Exception
    ) -> pb.CheckpointRecord:
        """The record, if another call of this very commit has written it.

        Raises:
            ConflictError: It has not, and the slot changed.
            StoreError: The error, where that was one.
        """
        found = await self._catalogue.slot(name.run, record.step)
        slot = slots.check_owner(name, record, found and found[0])
        if slot.state == slots.COMMITTED:
            return slot
        if isinstance(error, StoreError):
            raise error
        raise ConflictError(
            f"{name}: its slot changed while it was committed; commit it again",
            upload=name.upload,
        ) from error

    async def _discard(self, name: UploadName) -> None:
        places = RunPlaces(name.run)
        try:
            await self._bucket.delete_below(places.staging_of(name.upload))
            await self._bucket.delete_below(places.upload_parts(name.upload))
        except StoreError:
            # The commit stands; what is left is the collector's.
            _log.warning("%s: its staging was not deleted", name, exc_info=True)


def _metadata_of(tree: Tree) -> dict[str, bytes]:
    return {
        zarr.metadata_key(x.key): zarr.metadata_bytes(x.shape, x.chunk_shape, x.dtype)
        for x in tree.leaves
    }


def _unpack_receipt(place: str, receipt: pb.Receipt) -> tuple[Sums, Places]:
    try:
        table = tree_pb2.ChunkTable.FromString(receipt.chunks)
        return unpack_sums(table), unpack_places(table)
    except InvalidChunksError as e:
        raise CorruptDataError(f"{place} is damaged: {e}") from e


def _manifest_of(
    name: UploadName,
    tree: Tree,
    stored: Sequence[tuple[Sums, Places]],
    found: Mapping[str, Place],
) -> Manifest:
    """The manifest of what the writers finished, if the merged key space holds
    that and nothing else: both views of a checkpoint show the same bytes."""
    sums, places = merge(stored)
    metadata = {zarr.metadata_key(leaf.key) for leaf in tree.leaves}
    rows = zip(
        map(tree.chunk_key, range(tree.chunk_count)),
        (places.files[file] for file in places.file),
        places.offset.tolist(),
        places.length.tolist(),
        strict=True,
    )
    finished = {key: Place(*place) for key, *place in rows}
    if finished != {k: v for k, v in found.items() if k not in metadata}:
        raise WriterUnfinishedError(
            f"{name}: a writer stored chunks after it had finished, or left some out; "
            "finish it again, then commit again"
        )
    return Manifest(tree, sums, places)
