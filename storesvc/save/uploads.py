"""Uploads: begin, open, keep alive, abort.

Keeps no state: whatever a call needs it reads from the bucket, so any process
can serve any call of any upload. ``slots`` decides; this module reads, asks it,
and writes on the condition that nothing changed meanwhile. What an upload stores
is in ``receiver``, how it becomes a checkpoint in ``commit``.
"""

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain
from typing import Final

from cachetools import LRUCache
from google.protobuf.timestamp_pb2 import Timestamp

from storesvc.catalog import slots
from storesvc.catalog.catalog import Catalogue
from storesvc.catalog.records import duration, read_record, timestamp, write_record
from storesvc.catalog.rollbacks import Rollbacks
from storesvc.catalog.row_lookup import rows
from storesvc.catalog.runs import Runs
from storesvc.clock import Clock
from storesvc.errors import (
    CheckpointNotFoundError,
    ConflictError,
    CorruptDataError,
    PlanMismatchError,
    ProcessesDifferError,
    RequestIdReusedError,
    RunNotFoundError,
    UploadNotFoundError,
)
from storesvc.failpoints import Failpoint, reach
from storesvc.format.checksums import digest
from storesvc.format.layout import RunPlaces
from storesvc.format.manifests import Manifest
from storesvc.format.names import LATEST, CheckpointName, RunName, UploadName
from storesvc.format.seal import seal
from storesvc.format.trees import Tree
from storesvc.save.leaf_tables import LeafTables
from storesvc.save.plan_mismatch import difference, differing_rows
from storesvc.storage.bounded_gather import AT_ONCE, each
from storesvc.storage.bucket import IF_ABSENT, Generation, PreconditionError
from storesvc.storage.tensorstore_bucket import KvBucket
from storesvc_proto.v1 import bucket_pb2 as pb

DEFAULT_LEASE: Final = timedelta(minutes=10)
"""How long an upload is safe after its last sign of life."""

_KEPT_SIGNS: Final = 10_000
_SIGNS_A_LEASE: Final = 6
"""How often progress renews a lease, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewUpload:
    """What BeginUpload is asked for, its fields checked."""

    step: int
    writer_count: int
    labels: dict[str, str]
    metrics: dict[str, float]
    lease: timedelta
    base: CheckpointName | None
    """Whose chunks may be claimed."""
    body: bytes
    """What the request said, to tell it from another with the same id."""
    owner: str = ""
    """Who writes it, for people; "": an earlier client."""


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


@dataclass(frozen=True, slots=True)
class Fate:
    """An upload, and what became of it."""

    name: UploadName
    record: pb.UploadRecord
    slot: pb.CheckpointRecord | None
    """The slot, while it is of this upload."""
    renew_time: Timestamp
    finished_writers: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Sign:
    """A sign of life that this process wrote."""

    when: datetime
    at: float
    """``Clock.elapsed`` then."""


class Uploads:
    """The uploads of a bucket."""

    def __init__(
        self, bucket: KvBucket, catalogue: Catalogue, runs: Runs, *, clock: Clock
    ) -> None:
        self._bucket = bucket
        self._catalogue = catalogue
        self._runs = runs
        self._clock = clock
        self._leaf_tables = LeafTables(bucket)
        self._rollbacks = Rollbacks(bucket)
        self._signs: LRUCache[UploadName, _Sign] = LRUCache(_KEPT_SIGNS)

    async def begin(
        self, name: UploadName, new: NewUpload, table: bytes, digests: bytes = b""
    ) -> pb.UploadRecord:
        """Reserves a step for an upload of the tree that a leaf table describes.

        Args:
            name: The upload.
            new: What it is.
            table: The leaf table, serialised.
            digests: Of the leaves that other writers hold, too; b"": of none.

        Raises:
            InvalidTreeError: The table contradicts itself.
            LimitExceededError: It has too many leaves or chunks.
            RequestIdReusedError: The upload exists with another body.
            CheckpointExistsError: The step is committed.
            CorruptDataError: It was, and its slot was put back to before its commit.
            UploadSupersededError: The upload exists, and lost its slot.
            UploadNotFoundError: It was aborted; or the step was freed while it began,
                and another id must begin.
            ConflictError: Another upload of the step began at the same moment.
        """
        tree_digest = await self._leaf_tables.check(name, table)
        values_digest = digest(digests) if digests else b""
        # 1. The slot says which epoch is next, or that a retry is done already.
        slot = await self._catalogue.slot(name.run, new.step)
        record = await self._own_record(name, new.body + tree_digest + values_digest)
        if record and slot and slots.holds(name, record, slot[0]):
            await self._bucket.settle(RunPlaces(name.run).checkpoint(new.step))
            return record
        run = await self._runs.create(name.run)
        epoch = slots.next_epoch(name.run, slot and slot[0], floor=run.epoch_floor)
        predecessor = slots.predecessor(slot and slot[0])
        if predecessor and (damage := await self._rollbacks.damage(name.run, slot)):
            raise damage
        # 2. Record before tree before slot: whoever sees the slot finds the others.
        if record is None:
            described = await self._described(new, tree_digest, values_digest)
            described.epoch, described.predecessor = epoch, predecessor
            await reach(Failpoint.BEGIN_BEFORE_RECORD)
            record = await self._create_record(name, new, described)
        # A record is never changed: by what it says, the collector tells what may still
        # reserve the slot. Where the slot is not what it says, another id must begin.
        if (record.epoch, record.predecessor) != (epoch, predecessor):
            raise slots.lost(name, record, slot and slot[0])
        await reach(Failpoint.BEGIN_BEFORE_TREE)
        await self._leaf_tables.write(name, tree_digest, table)
        if digests:
            await self._leaf_tables.write_values(name, digests)
        # 3. The slot, while it still holds what was read.
        await reach(Failpoint.BEGIN_BEFORE_SLOT)
        if not await self._reserve(name, record, slot and slot[1]):
            slot = await self._catalogue.slot(name.run, new.step)
            raise slots.not_begun(name, record, slot and slot[0])
        await reach(Failpoint.BEGIN_BEFORE_REPLY)
        return record

    async def _reserve(
        self, name: UploadName, record: pb.UploadRecord, seen: Generation | None
    ) -> bool:
        """Takes the slot; False: it is not any more what was seen."""
        try:
            await write_record(
                self._bucket,
                RunPlaces(name.run).checkpoint(record.step),
                slots.reservation(name.upload, record),
                condition=seen or IF_ABSENT,
            )
        except PreconditionError:
            return False
        return True

    async def join(
        self,
        name: UploadName,
        *,
        writer: int,
        writer_count: int,
        table: bytes,
        digests: bytes = b"",
    ) -> pb.UploadRecord:
        """Returns the record of an upload that another writer began, for one that has
        planned the same.

        Args:
            name: The upload.
            writer: The writer that joins.
            writer_count: How many writers it expects.
            table: Its leaf table, serialised.
            digests: Of the leaves that other writers hold, too; b"": of none.

        Raises:
            InvalidTreeError: The leaf table contradicts itself.
            LimitExceededError: It has too many leaves or chunks.
            UploadNotFoundError: There is none, or it was aborted.
            UploadSupersededError: It lost its slot.
            CheckpointExistsError: Another upload committed the step.
            PlanMismatchError: The writer planned another tree, or number of writers.
            ProcessesDifferError: It and writer 0 hold different values of a leaf.
        """
        record = await self.record(name)
        slots.check_owner(name, record, await self.slot(name.run, record.step))
        if writer_count != record.writer_count:
            raise PlanMismatchError(
                f"{name}, writer {writer}: expected {record.writer_count} writers as "
                f"writer 0 has it, got {writer_count}; start all processes of the job "
                "alike"
            )
        tree_digest = digest(table)
        if tree_digest != record.tree_digest:
            expected = await self.tree(name, record)
            got = await self._leaf_tables.parsed(name, tree_digest, table)
            leaf, told = await asyncio.to_thread(difference, expected, got)
            raise PlanMismatchError(
                f"{name}, writer {writer}: {told}; writer 0 plans otherwise: run the "
                "same program on every process",
                leaf=leaf,
            )
        # A client of an earlier release sends no digests.
        if digests and record.values_digest not in (b"", digest(digests)):
            await self._compare(name, record, writer, digests)
        return record

    async def _compare(
        self, name: UploadName, record: pb.UploadRecord, writer: int, digests: bytes
    ) -> None:
        """Refuses a writer whose values differ from those of writer 0."""
        expected = await self._leaf_tables.values(name, record.values_digest)
        rows = differing_rows(expected, digests)
        if not rows:
            return
        leaf = (await self.tree(name, record)).leaves[rows[0]].key
        more = f", as {len(rows) - 1} more leaves do" if len(rows) > 1 else ""
        raise ProcessesDifferError(
            f"{name}: leaf {leaf!r}: processes 0 and {writer} hold different values of "
            f"it{more}, and only one of them would be saved; give it the same value on "
            "every process, or save it as an array that is sharded over the processes",
            leaf=leaf,
        )

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
        if slot.state != slots.UPLOADING:
            raise slots.exists(name.run, slot)
        return OpenUpload(name, record, await self.tree(name, record))

    async def renew(self, upload: OpenUpload) -> datetime:
        """Tells that an upload lives; returns when its lease is over.

        Where progress renews it chunk by chunk, only one sign in a while is written.
        """
        length = upload.record.lease_duration.ToTimedelta()
        elapsed = self._clock.elapsed()
        last = self._signs.get(upload.name)
        if last is None or elapsed - last.at >= length.total_seconds() / _SIGNS_A_LEASE:
            last = _Sign(self._clock.now(), elapsed)
            lease = pb.LeaseRecord(
                renew_time=timestamp(last.when), nonce=uuid.uuid4().hex
            )
            place = upload.places.lease(upload.name.upload)
            await self._bucket.write(place, seal(lease, place=place))
            self._signs[upload.name] = last
        return last.when + length

    async def fate(self, name: UploadName) -> Fate:
        """Returns an upload, live or not, and what became of it.

        Raises:
            UploadNotFoundError: There is none.
        """
        record = await self.record(name)
        slot = await self.slot(name.run, record.step)
        lease = await read_record(
            self._bucket, RunPlaces(name.run).lease(name.upload), pb.LeaseRecord
        )
        return Fate(
            name,
            record,
            slot if slot and slots.owns(name, record, slot) else None,
            renew_time=lease[0].renew_time if lease else record.create_time,
            finished_writers=await self.finished_writers(name),
        )

    async def finished_writers(self, name: UploadName) -> frozenset[int]:
        """Returns which writers of an upload have finished."""
        places = RunPlaces(name.run)
        receipts = await self._bucket.list(places.receipts(name.upload))
        return frozenset(map(places.writer_of, receipts))

    async def live(
        self, runs: Sequence[RunName], *, after: UploadName | None, limit: int
    ) -> list[tuple[UploadName, Fate | CorruptDataError]]:
        """Returns live uploads of runs, by run and id; of one whose records are
        damaged, that.

        Args:
            runs: The runs, ascending.
            after: Only those after this one.
            limit: At most so many.
        """
        found: list[tuple[UploadName, Fate | CorruptDataError]] = []
        left = [run for run in runs if after is None or run >= after.run]
        while left and len(found) < limit:
            batch, left = left[:AT_ONCE], left[AT_ONCE:]
            begun = chain.from_iterable(await each(self._begun, batch))
            names = [name for name in begun if after is None or name > after]
            found += await rows(self._live, names, limit=limit - len(found))
        return found

    async def _begun(self, run: RunName) -> list[UploadName]:
        """The uploads of a run that live, or have left something."""
        places = RunPlaces(run)
        # A record stays for long after its upload has ended. A live upload has a leaf
        # table too, below its name, which it wrote before its slot.
        ids = sorted(
            {
                id_
                for place in await self._bucket.list(places.uploads)
                if (id_ := places.upload_of(place)) and place != places.upload(id_)
            }
        )
        return [UploadName(run, id_) for id_ in ids]

    async def _live(self, name: UploadName) -> Fate | None:
        try:
            fate = await self.fate(name)
        except UploadNotFoundError:  # collected meanwhile
            return None
        return fate if fate.slot and fate.slot.state == slots.UPLOADING else None

    async def abort(self, name: UploadName) -> None:
        """Gives an upload up and frees its step.

        Raises:
            CheckpointExistsError: It is committed.
            CorruptDataError: It was, and its slot was put back to before its commit.
            ConflictError: It changed at the same moment.
        """
        places = RunPlaces(name.run)
        record = await self._found(name)
        if record is None:
            return
        step = record.step
        slot = await self._catalogue.slot(name.run, step)
        if slot is None or not slots.owns(name, record, slot[0]):
            return  # another took the step over, and may claim what is stored
        if slot[0].state in slots.CHECKPOINTS:
            raise slots.exists(name.run, slot[0])
        if damage := await self._rollbacks.damage(name.run, slot):
            raise damage
        await reach(Failpoint.ABORT_BEFORE_SLOT)
        try:
            await write_record(
                self._bucket,
                places.checkpoint(step),
                slots.released(slot[0], timestamp(self._clock.now())),
                condition=slot[1],
            )
        except PreconditionError as e:
            raise ConflictError(
                f"{name}: it changed while it was aborted; abort it again",
                upload=name.upload,
            ) from e
        # The record stays, and with it the answer to who asks for it again.
        await reach(Failpoint.ABORT_BEFORE_DISCARD)
        await self._bucket.delete_below(places.staging_of(name.upload))
        await self._bucket.delete_below(places.upload_parts(name.upload))
        await reach(Failpoint.ABORT_BEFORE_REPLY)

    async def slot(self, run: RunName, step: int) -> pb.CheckpointRecord | None:
        """Returns what the slot of a step holds."""
        found = await self._catalogue.slot(run, step)
        return found and found[0]

    async def manifest(self, run: RunName, slot: pb.CheckpointRecord) -> Manifest:
        """Returns the manifest of a checkpoint, deleted or not."""
        return await self._catalogue.manifest(run, slot)

    async def record(self, name: UploadName) -> pb.UploadRecord:
        """Returns the record of an upload, whether or not it owns its slot.

        Raises:
            UploadNotFoundError: There is none.
        """
        found = await self._found(name)
        if found is None:
            raise slots.absent(name)
        return found

    async def _found(self, name: UploadName) -> pb.UploadRecord | None:
        place = RunPlaces(name.run).upload(name.upload)
        found = await read_record(self._bucket, place, pb.UploadRecord)
        return found and found[0]

    async def tree(self, name: UploadName, record: pb.UploadRecord) -> Tree:
        """Returns the tree of an upload.

        Raises:
            UploadNotFoundError: It was aborted.
            CorruptDataError: Its leaf table is damaged.
        """
        return await self._leaf_tables.tree(name, record.tree_digest)

    async def _own_record(
        self, name: UploadName, body: bytes
    ) -> pb.UploadRecord | None:
        """The record that an earlier try of the same request wrote."""
        found = await self._found(name)
        if found is not None and found.request_digest != digest(body):
            raise RequestIdReusedError(
                f"{name}: its request id was used with another body; take a new one",
                upload=name.upload,
            )
        return found

    async def _described(
        self, new: NewUpload, tree_digest: bytes, values_digest: bytes
    ) -> pb.UploadRecord:
        """The record, but for what the slot says."""
        record = pb.UploadRecord(
            step=new.step,
            writer_count=new.writer_count,
            tree_digest=tree_digest,
            labels=new.labels,
            metrics=new.metrics,
            create_time=timestamp(self._clock.now()),
            lease_duration=duration(new.lease),
            owner=new.owner,
            request_digest=digest(new.body + tree_digest + values_digest),
            values_digest=values_digest,
        )
        base = await self._base(new)
        if base is not None:
            record.base_step, record.base = base.step, base.upload
        return record

    async def _base(self, new: NewUpload) -> pb.CheckpointRecord | None:
        if new.base is None:
            return None
        try:
            return await self._catalogue.checkpoint(new.base)
        except (RunNotFoundError, CheckpointNotFoundError, CorruptDataError):
            # the first save of a run, or one whose newest record is damaged
            if new.base.which == LATEST:
                return None
            raise

    async def _create_record(
        self, name: UploadName, new: NewUpload, record: pb.UploadRecord
    ) -> pb.UploadRecord:
        """The record, ours or that of a try of the same request beside us."""
        try:
            await write_record(
                self._bucket,
                RunPlaces(name.run).upload(name.upload),
                record,
                condition=IF_ABSENT,
            )
        except PreconditionError:
            identity = new.body + record.tree_digest + record.values_digest
            found = await self._own_record(name, identity)
            if found is None:
                raise slots.absent(name) from None
            return found
        return record
