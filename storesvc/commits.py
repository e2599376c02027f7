"""Commits: how an upload becomes a checkpoint.

The one conditional write of the slot is the commit; all before it only prepares
what the record will name, and may be repeated. So a crash at any point leaves
either no checkpoint or a whole one, and a repeated call finishes the work.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime

from storesvc import slots
from storesvc.bucket import IF_ABSENT, PreconditionError
from storesvc.catalogue import Catalogue, read_record
from storesvc.errors import ConflictError, CorruptDataError, StoreError
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
from storesvc.format.manifests import Manifest, pack_manifest
from storesvc.format.names import RunName, UploadName
from storesvc.format.seal import seal
from storesvc.kvbucket import KvBucket
from storesvc.uploads import OpenUpload, Uploads, timestamp
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import tree_pb2

_log = logging.getLogger(__name__)


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
        tree = await self._uploads.tree(name, record)
        upload = OpenUpload(name, record, tree)
        # 1. Decide, from the receipts alone.
        receipts = await self._receipts(upload)
        stored = slots.check_complete(name, tree, receipts)
        # 2. Write what the record will name; a repetition writes the same again.
        await self._merge_key_spaces(upload)
        sums, places = merge(stored)
        manifest = await self._write_manifest(upload, sums, places)
        await self._create_run(name.run)
        # 3. Write the record: from here on the checkpoint exists.
        committed = self._committed(slot, upload, manifest, int(places.length.sum()))
        try:
            await self._bucket.write(
                upload.places.checkpoint(record.step),
                seal(committed),
                condition=found[1],
            )
        except PreconditionError:
            return await self._read_back(name, record)
        # 4. Nothing needs the staging any more; a crash leaves it to be collected.
        await self._discard(upload)
        return committed

    async def _receipts(
        self, upload: OpenUpload
    ) -> dict[int, tuple[Sums, Places] | None]:
        """What each writer stored; None: it has not finished."""

        async def receipt(writer: int) -> tuple[Sums, Places] | None:
            place = upload.places.receipt(upload.name.upload, writer)
            found = await read_record(self._bucket, place, pb.Receipt)
            if found is None:
                return None
            try:
                table = tree_pb2.ChunkTable.FromString(found[0].chunks)
                return unpack_sums(table), unpack_places(table)
            except InvalidChunksError as e:
                raise CorruptDataError(f"{place} is damaged: {e}") from e

        writers = range(upload.record.writer_count)
        return dict(
            zip(writers, await asyncio.gather(*map(receipt, writers)), strict=True)
        )

    async def _merge_key_spaces(self, upload: OpenUpload) -> None:
        staged = [
            self._uploads.key_space(upload, writer)
            for writer in range(upload.record.writer_count)
        ]
        target = self._bucket.key_space(
            place=upload.places.key_space(upload.name.upload), pool=upload.places.pool
        )
        metadata = {
            zarr.metadata_key(x.key): zarr.metadata_bytes(
                x.shape, x.chunk_shape, x.dtype
            )
            for x in upload.tree.leaves
        }
        await target.take_over([s for s in staged if await s.exists()], metadata)

    async def _write_manifest(
        self, upload: OpenUpload, sums: Sums, places: Places
    ) -> bytes:
        manifest = Manifest(upload.tree, sums, places)
        data = await asyncio.to_thread(lambda: b"".join(pack_manifest(manifest)))
        await self._bucket.write(upload.places.manifest(upload.name.upload), data)
        return data

    async def _create_run(self, name: RunName) -> None:
        place = layout.run_record(name)
        if await self._bucket.read(place) is not None:
            return
        record = pb.RunRecord(uid=str(uuid.uuid4()), create_time=timestamp(self._now()))
        with suppress(PreconditionError):  # it exists, whoever made it
            await self._bucket.write(place, seal(record), condition=IF_ABSENT)

    def _committed(
        self,
        slot: pb.CheckpointRecord,
        upload: OpenUpload,
        manifest: bytes,
        stored_bytes: int,
    ) -> pb.CheckpointRecord:
        return pb.CheckpointRecord(
            state=slots.COMMITTED,
            step=slot.step,
            upload=slot.upload,
            epoch=slot.epoch,
            create_time=slot.create_time,
            commit_time=timestamp(self._now()),
            labels=upload.record.labels,
            metrics=upload.record.metrics,
            size_bytes=upload.tree.size_bytes,
            stored_bytes=stored_bytes,
            leaf_count=len(upload.tree.leaves),
            chunk_count=upload.tree.chunk_count,
            manifest_bytes=len(manifest),
            manifest_digest=digest(manifest),
        )

    async def _read_back(
        self, name: UploadName, record: pb.UploadRecord
    ) -> pb.CheckpointRecord:
        """The record, if an earlier attempt of this very commit wrote it."""
        found = await self._catalogue.slot(name.run, record.step)
        slot = slots.check_owner(name, record, found and found[0])
        if slot.state != slots.COMMITTED:
            raise ConflictError(
                f"{name}: its slot changed while it was committed; commit it again",
                upload=name.upload,
            )
        return slot

    async def _discard(self, upload: OpenUpload) -> None:
        places, upload_id = upload.places, upload.name.upload
        try:
            await self._bucket.delete_below(places.staging_of(upload_id))
            await self._bucket.delete_below(places.upload_parts(upload_id))
        except StoreError:
            # The commit stands; what is left is the collector's.
            _log.warning("%s: its staging was not deleted", upload.name, exc_info=True)
