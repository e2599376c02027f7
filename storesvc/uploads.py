"""Uploads: begin, open, abort.

Keeps no state: whatever a call needs it reads from the bucket, so any process
can serve any call of any upload. ``slots`` decides; this module reads, asks it,
and writes on the condition that nothing changed meanwhile. What an upload stores
is in ``receiving``, how it becomes a checkpoint in ``commits``.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp

from storesvc import slots
from storesvc.bucket import IF_ABSENT, PreconditionError
from storesvc.catalogue import Catalogue, read_record
from storesvc.errors import (
    ConflictError,
    CorruptDataError,
    InvalidTreeError,
    LimitExceededError,
    RequestIdReusedError,
    UploadSupersededError,
)
from storesvc.format.checksums import digest
from storesvc.format.layout import RunPlaces
from storesvc.format.names import UploadName
from storesvc.format.seal import seal
from storesvc.format.trees import InvalidTreeError as InvalidTableError
from storesvc.format.trees import Tree, unpack_leaves
from storesvc.kvbucket import KeySpace, KvBucket
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import tree_pb2

MAX_LEAVES: Final = 1_000_000
"""Leaves of a tree."""

MAX_VALUES: Final = 4096
"""Distinct dtypes, shardings or PRNG implementations of a tree."""

MAX_CHUNKS: Final = 4_000_000
"""Chunks of a tree."""

DEFAULT_LEASE: Final = timedelta(minutes=10)
"""How long an upload is safe after its last sign of life."""

_KEPT_TREES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class NewUpload:
    """What BeginUpload is asked for, its fields checked."""

    step: int
    writer_count: int
    labels: dict[str, str]
    metrics: dict[str, float]
    lease: timedelta
    body: bytes
    """What the request said, to tell it from another with the same id."""


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """An upload that owns its slot."""

    name: UploadName
    record: pb.UploadRecord
    tree: Tree

    @property
    def places(self) -> RunPlaces:
        """Where its run lies."""
        return RunPlaces(self.name.run)


class Uploads:
    """The uploads of a bucket."""

    def __init__(
        self, bucket: KvBucket, catalogue: Catalogue, *, now: Callable[[], datetime]
    ) -> None:
        self._bucket = bucket
        self._catalogue = catalogue
        self._now = now
        # A cache of pure values by digest: any process fills it for itself.
        self._trees: dict[bytes, Tree] = {}

    async def begin(
        self, name: UploadName, new: NewUpload, table: bytes
    ) -> pb.UploadRecord:
        """Reserves a step for an upload of the tree that a leaf table describes.

        Raises:
            InvalidTreeError: The table contradicts itself.
            LimitExceededError: It has too many leaves or chunks.
            RequestIdReusedError: The upload exists with another body.
            CheckpointExistsError: The step is committed.
            UploadSupersededError: The upload exists, and lost its slot.
            ConflictError: Another upload of the step began at the same moment.
        """
        tree_digest = digest(table)
        await self._keep(name, table, tree_digest)
        # 1. The slot says which epoch is next, or that a retry is done already.
        slot = await self._catalogue.slot(name.run, new.step)
        record = await self._own_record(name, new.body + tree_digest)
        if record and slot and slots.holds(name, record, slot[0]):
            return record
        epoch = slots.next_epoch(name.run, new.step, slot and slot[0])
        # 2. Tree before record before slot: whoever sees one finds the others.
        if record is None:
            places = RunPlaces(name.run)
            await self._bucket.write(places.tree(name.upload, tree_digest), table)
            record = await self._create_record(name, new, epoch, tree_digest)
        if record.epoch != epoch:
            raise UploadSupersededError(
                f"{name}: step {new.step} was taken from it; begin a new upload",
                upload=name.upload,
            )
        # 3. The slot, while it still holds what was read.
        try:
            await self._bucket.write(
                RunPlaces(name.run).checkpoint(new.step),
                seal(slots.reservation(name.upload, record)),
                condition=slot[1] if slot else IF_ABSENT,
            )
        except PreconditionError as e:
            found = await self._catalogue.slot(name.run, new.step)
            if found is None or not slots.holds(name, record, found[0]):
                raise ConflictError(
                    f"{name}: another upload of step {new.step} began at the same "
                    "moment; begin a new one",
                    upload=name.upload,
                ) from e
        return record

    async def open(self, name: UploadName, epoch: int) -> OpenUpload:
        """Returns an upload that owns its slot and may still be written.

        Raises:
            UploadNotFoundError: There is none.
            UploadSupersededError: Its epoch is another, or it lost its slot.
            CheckpointExistsError: The step is committed.
        """
        record = await self.record(name)
        slots.check_epoch(name, record, epoch)
        found = await self._catalogue.slot(name.run, record.step)
        slot = slots.check_owner(name, record, found and found[0])
        if slot.state == slots.COMMITTED:
            raise slots.exists(name.run, record.step)
        return OpenUpload(name, record, await self.tree(name, record))

    def key_space(self, upload: OpenUpload, writer: int) -> KeySpace:
        """Returns where a writer's chunks go."""
        return self._bucket.key_space(
            place=upload.places.staging(upload.name.upload, writer),
            pool=upload.places.pool,
        )

    async def abort(self, name: UploadName) -> None:
        """Gives an upload up and frees its step.

        Raises:
            CheckpointExistsError: It is committed.
            ConflictError: It changed at the same moment.
        """
        places = RunPlaces(name.run)
        found = await read_record(
            self._bucket, places.upload(name.upload), pb.UploadRecord
        )
        if found is None:
            return
        step = found[0].step
        slot = await self._catalogue.slot(name.run, step)
        if slot and slots.owns(name, found[0], slot[0]):
            if slot[0].state == slots.COMMITTED:
                raise slots.exists(name.run, step)
            try:
                await self._bucket.write(
                    places.checkpoint(step),
                    seal(slots.released(slot[0])),
                    condition=slot[1],
                )
            except PreconditionError as e:
                raise ConflictError(
                    f"{name}: it changed while it was aborted; abort it again",
                    upload=name.upload,
                ) from e
        # The record stays, and with it the answer to who asks for it again.
        await self._bucket.delete_below(places.staging_of(name.upload))
        await self._bucket.delete_below(places.upload_parts(name.upload))

    async def record(self, name: UploadName) -> pb.UploadRecord:
        """Returns the record of an upload, whether or not it owns its slot.

        Raises:
            UploadNotFoundError: There is none.
        """
        place = RunPlaces(name.run).upload(name.upload)
        found = await read_record(self._bucket, place, pb.UploadRecord)
        if found is None:
            raise slots.absent(name)
        return found[0]

    async def tree(self, name: UploadName, record: pb.UploadRecord) -> Tree:
        """Returns the tree of an upload.

        Raises:
            UploadNotFoundError: It was aborted.
            CorruptDataError: Its leaf table is damaged.
        """
        kept = self._trees.get(record.tree_digest)
        if kept is not None:
            return kept
        place = RunPlaces(name.run).tree(name.upload, record.tree_digest)
        stored = await self._bucket.read(place)
        if stored is None:
            raise slots.absent(name)
        if digest(stored.data) != record.tree_digest:
            raise CorruptDataError(f"{name}: its leaf table is damaged")
        return await self._keep(name, stored.data, record.tree_digest)

    async def _keep(self, name: UploadName, table: bytes, key: bytes) -> Tree:
        """The tree of a leaf table, which is kept for the calls that follow."""
        if key not in self._trees:
            tree = await asyncio.to_thread(parse_tree, name, table)
            while len(self._trees) >= _KEPT_TREES:
                del self._trees[next(iter(self._trees))]
            self._trees[key] = tree
        return self._trees[key]

    async def _own_record(
        self, name: UploadName, body: bytes
    ) -> pb.UploadRecord | None:
        """The record that an earlier try of the same request wrote."""
        place = RunPlaces(name.run).upload(name.upload)
        found = await read_record(self._bucket, place, pb.UploadRecord)
        if found is None:
            return None
        if found[0].request_digest != digest(body):
            raise RequestIdReusedError(
                f"{name}: its request id was used with another body; take a new one",
                upload=name.upload,
            )
        return found[0]

    async def _create_record(
        self, name: UploadName, new: NewUpload, epoch: int, tree_digest: bytes
    ) -> pb.UploadRecord:
        """The record, ours or that of a try of the same request beside us."""
        body = new.body + tree_digest
        record = pb.UploadRecord(
            step=new.step,
            epoch=epoch,
            writer_count=new.writer_count,
            tree_digest=tree_digest,
            labels=new.labels,
            metrics=new.metrics,
            create_time=timestamp(self._now()),
            lease_duration=_duration(new.lease),
            request_digest=digest(body),
        )
        try:
            await self._bucket.write(
                RunPlaces(name.run).upload(name.upload),
                seal(record),
                condition=IF_ABSENT,
            )
        except PreconditionError:
            return await self._own_record(name, body) or record
        return record


def parse_tree(name: UploadName, table: bytes) -> Tree:
    """Returns the tree of a serialised leaf table.

    Raises:
        InvalidTreeError: The table contradicts itself.
        LimitExceededError: It has too many leaves or chunks.
    """
    try:
        columns = tree_pb2.LeafTable.FromString(table)
        check_limits(name, columns)
        tree = unpack_leaves(columns)
    except (InvalidTableError, DecodeError) as e:
        raise InvalidTreeError(f"{name}: {e}") from e
    if tree.chunk_count > MAX_CHUNKS:
        raise LimitExceededError(
            f"{name}: expected at most {MAX_CHUNKS} chunks, got {tree.chunk_count}"
        )
    return tree


def check_limits(name: UploadName, table: tree_pb2.LeafTable) -> None:
    """Refuses a table of more rows or values than a server takes.

    Raises:
        LimitExceededError: Naming the column.
    """
    for column, limit in (
        ("key", MAX_LEAVES),
        ("dtypes", MAX_VALUES),
        ("shardings", MAX_VALUES),
        ("prng_impls", MAX_VALUES),
    ):
        rows = len(getattr(table, column))
        if rows > limit:
            raise LimitExceededError(
                f"{name}: column {column}: expected at most {limit} rows, got {rows}"
            )


def timestamp(moment: datetime) -> Timestamp:
    """Returns a moment as records hold it."""
    stamp = Timestamp()
    stamp.FromDatetime(moment)
    return stamp


def _duration(length: timedelta) -> Duration:
    duration = Duration()
    duration.FromTimedelta(length)
    return duration
