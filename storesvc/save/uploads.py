"""Uploads: begins, joins, opens, renews and aborts them.

This module keeps no state that matters: each call reads what it needs from the bucket,
so any process can serve any call of any upload. ``slots`` decides; this module reads
the slot, asks ``slots``, and writes on the condition that the slot is unchanged.
``receiver`` stores the chunks of an upload, ``commit`` turns it into a checkpoint.

A lease shows that an upload is still live. Progress renews it often, and usually a
process knows that it was renewed a short time ago. Calls that renew one lease at the
same time share one write, because a bucket rejects many writes of one object. The write
goes on if one of these calls is cancelled, and ends with the server.

Many processes may renew the lease of an upload of many writers. Each looks at a time of
its own, earlier than a single one would write, whether another has renewed the lease
since it looked last, and writes only if none has.
"""

import asyncio
import math
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from cachetools import LRUCache

from storesvc.auth import call as access
from storesvc.auth.policy import Permission
from storesvc.catalog import slots
from storesvc.catalog.catalog import Catalog
from storesvc.catalog.records import duration, read_record, timestamp, write_record
from storesvc.catalog.rollbacks import Rollbacks
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
    StoreError,
)
from storesvc.failpoints import Failpoint, reach
from storesvc.format.checksums import digest
from storesvc.format.layout import RunPaths
from storesvc.format.names import LATEST, CheckpointName, RunName, UploadName
from storesvc.format.seal import seal
from storesvc.format.trees import Tree
from storesvc.save.leaf_tables import LeafTables
from storesvc.save.rules import differing_rows, first_difference
from storesvc.storage.bucket import (
    ALWAYS,
    IF_ABSENT,
    Bucket,
    Generation,
    PreconditionError,
    WriteCondition,
)
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.storage.requests import background_task, retrieve_error, run_all
from storesvc_proto.v1 import bucket_pb2 as pb

_KEPT_RENEWALS: Final = 10_000

_RENEWALS_A_LEASE: Final = 6
"""Maximum lease records that progress writes within one lease."""


@dataclass(frozen=True, slots=True)
class _Renewal:
    """A renewal that this process knows: a lease record, or the record of an upload."""

    when: datetime
    at: float
    """``Clock.elapsed`` at that time, or an estimate."""
    generation: Generation | None = None
    """Generation of the lease record; None: there was none."""


class Leases:
    """Renews the leases of the uploads of a bucket."""

    def __init__(self, bucket: Bucket, *, clock: Clock) -> None:
        self._bucket = bucket
        self._clock = clock
        self._renewals: LRUCache[UploadName, _Renewal] = LRUCache(_KEPT_RENEWALS)
        self._writing: dict[UploadName, asyncio.Task[_Renewal]] = {}
        self._drawn = 1.0 - random.random()  # noqa: S311 - spreads processes only
        """In (0, 1]; see ``_turn``."""

    async def renew(self, name: UploadName, record: pb.UploadRecord) -> datetime:
        """Renews the lease of an upload, and returns when it expires.

        Progress calls this for each batch; only ``_RENEWALS_A_LEASE`` renewals per
        lease are written to the bucket, or twice as many by all processes of an upload
        of many writers, and more if their clocks are wrong.
        """
        length = record.lease_duration.ToTimedelta()
        interval = length.total_seconds() / _RENEWALS_A_LEASE
        last = self._renewals.get(name)
        is_shared = record.writer_count > 1
        if is_shared:
            interval *= self._turn(record.writer_count)
            if last is None:
                last = self._presume(name, record, interval)
        if last is None or self._clock.elapsed() - last.at >= interval:
            writing = self._writing.get(name)
            if writing is None:
                renewing = (
                    self._renew_shared(name, last, interval)
                    if is_shared
                    else self._write(name, ALWAYS)
                )
                writing = asyncio.create_task(renewing)
                self._writing[name] = writing
                writing.add_done_callback(lambda _: self._writing.pop(name))
                writing.add_done_callback(retrieve_error)  # perhaps no caller waits
            last = await asyncio.shield(writing)
        return last.when + length

    def _turn(self, writer_count: int) -> float:
        """Returns the part of the interval, at least a half, after which this process
        looks at a shared lease. It is distributed so that the second of any number of
        processes usually comes when the first has written."""
        return max(0.5, 1.0 + math.log(self._drawn) / (3 * math.log(writer_count)))

    def begin(self, name: UploadName, record: pb.UploadRecord, at: float) -> None:
        """Records that an upload was begun here, whose record is its first renewal;
        ``at`` is a ``Clock.elapsed`` before the record was made."""
        when = record.create_time.ToDatetime(UTC)
        self._renewals[name] = _Renewal(when, at)

    def _presume(
        self, name: UploadName, record: pb.UploadRecord, interval: float
    ) -> _Renewal | None:
        """Takes the record of an upload that another process began a moment ago, by the
        clocks of both, for a renewal; returns None if it is older. If the clocks are
        wrong, this process looks at the lease an interval later than it should."""
        when = record.create_time.ToDatetime(UTC)
        age = (self._clock.now() - when).total_seconds()
        if abs(age) >= interval:
            return None
        renewal = _Renewal(when, self._clock.elapsed() - max(age, 0.0))
        self._renewals[name] = renewal
        return renewal

    async def end(self) -> None:
        """Cancels the writes whose calls were cancelled, and waits until they have
        ended; for a server that has ended all calls."""
        left = list(self._writing.values())
        for writing in left:
            writing.cancel()
        if left:
            await asyncio.wait(left)

    async def _renew_shared(
        self, name: UploadName, last: _Renewal | None, interval: float
    ) -> _Renewal:
        """Renews a lease unless another process has renewed it in the meantime."""
        place = RunPaths(name.run).lease(name.upload)
        found = await read_record(self._bucket, place, pb.LeaseRecord)
        generation = found[1] if found else None
        if found and (last is None or generation != last.generation):
            # Its time is of another clock, and counts only within what was seen here:
            # it was renewed after the last look, if there was one, and before this one.
            when, now = found[0].renew_time.ToDatetime(UTC), self._clock.elapsed()
            age = max((self._clock.now() - when).total_seconds(), 0.0)
            at = now - age if last is None else max(now - age, last.at)
            if now - at < interval:
                self._renewals[name] = _Renewal(when, at, generation)
                return self._renewals[name]
        try:
            return await self._write(name, generation or IF_ABSENT)
        except PreconditionError:  # another process was faster
            self._renewals[name] = _Renewal(self._clock.now(), self._clock.elapsed())
            return self._renewals[name]

    async def _write(self, name: UploadName, condition: WriteCondition) -> _Renewal:
        when, at = self._clock.now(), self._clock.elapsed()
        lease = pb.LeaseRecord(renew_time=timestamp(when), nonce=uuid.uuid4().hex)
        place = RunPaths(name.run).lease(name.upload)
        written = await self._bucket.write(
            place, seal(lease, place=place), condition=condition
        )
        renewal = self._renewals[name] = _Renewal(when, at, written)
        return renewal


DEFAULT_LEASE: Final = timedelta(minutes=10)
"""Time after its last renewal for which an upload is not aborted."""

_KEPT_SIGHTS: Final = 10_000
_KEPT_RECORD_BYTES: Final = 4 << 20
_OPEN_SECONDS: Final = 60.0
"""Time for which an upload that owned its slot is presumed to own it."""
_JOIN_TIME: Final = timedelta(seconds=30)
"""Time since an upload began for which a writer that joins presumes that it owns its
slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewUpload:
    """A BeginUpload request, its fields validated."""

    step: int
    writer_count: int
    labels: dict[str, str]
    metrics: dict[str, float]
    lease: timedelta
    base: CheckpointName | None
    """Checkpoint whose chunks may be claimed."""
    body: bytes
    """Serialised request, to detect another request with the same id."""
    owner: str = ""
    """Name of the user or job, for people; "": from a client of an earlier release."""


class WriterPlan(NamedTuple):
    """The plan of a writer that joins an upload."""

    tree_digest: bytes
    """Digest of its serialised leaf table."""
    values_digest: bytes
    """Digest of ``digests``; empty: it has none."""
    table: bytes | None = None
    """The leaf table; None: not sent."""
    digests: bytes = b""
    """Digests of the leaves that other writers hold, too."""

    @classmethod
    def whole(cls, table: bytes, digests: bytes) -> "WriterPlan":
        """Returns the plan of a writer that sent its leaf table."""
        return cls(digest(table), digest(digests) if digests else b"", table, digests)


class Version(NamedTuple):
    """A slot of an upload."""

    slot: pb.CheckpointRecord
    generation: WriteCondition
    """Condition of the next write; ``IF_ABSENT``: the slot is not written yet."""


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """An upload that owns its slot."""

    name: UploadName
    record: pb.UploadRecord
    tree: Tree

    @property
    def places(self) -> RunPaths:
        return RunPaths(self.name.run)


class Uploads:
    """Begins, joins, opens, renews and aborts the uploads of a bucket."""

    def __init__(
        self, bucket: TensorStoreBucket, catalog: Catalog, runs: Runs, *, clock: Clock
    ) -> None:
        self.leases = Leases(bucket, clock=clock)
        """Renews the leases of uploads."""
        self._bucket = bucket
        self._catalog = catalog
        self._runs = runs
        self._clock = clock
        self._leaf_tables = LeafTables(bucket)
        self._rollbacks = Rollbacks(bucket)
        self._records: LRUCache[UploadName, pb.UploadRecord] = LRUCache(
            _KEPT_RECORD_BYTES, getsizeof=pb.UploadRecord.ByteSize
        )
        """Records of uploads that began or were opened here; a record is never
        changed."""
        self._seen: LRUCache[UploadName, float] = LRUCache(_KEPT_SIGHTS)
        """``Clock.elapsed`` at which this process last saw that an upload owns its
        slot and can be written."""

    async def begin(
        self,
        name: UploadName,
        new: NewUpload,
        table: bytes,
        digests: bytes = b"",
        *,
        reserve: Callable[[int], Awaitable[None]] | None = None,
        commits_now: bool = False,
    ) -> tuple[pb.UploadRecord, Version]:
        """Takes a step for an upload, and returns its record and its slot.

        Args:
            digests: Digests of the leaves that other writers hold too; empty: none.
            reserve: Rejects the bytes of all stored chunks, before anything is stored.
            commits_now: Whether the same call commits the upload. An absent slot is not
                reserved then: the record alone keeps its objects from being collected.
                Another slot is, because a manifest of an upload whose epoch is above
                the slot's is evidence that the slot was rolled back.

        Raises:
            InvalidTreeError: The leaf table contradicts itself.
            LimitExceededError: The leaf table has too many leaves or chunks.
            RequestIdReusedError: The upload exists with another request body.
            CheckpointExistsError: The step is committed.
            CorruptDataError: The step was committed, and its slot was restored to a
                version from before the commit.
            UploadSupersededError: The upload exists, and lost its slot.
            UploadNotFoundError: The upload was aborted; or the step was freed while it
                began, and a new request id is needed.
            ConflictError: Another upload of the step began at the same time.
        """
        tree_digest = digest(table)
        tree = await self.parse(name, table)
        if reserve is not None:
            await reserve(int(tree.lengths.sum()))
        values_digest = digest(digests) if digests else b""
        identity = digest(new.body + tree_digest + values_digest)
        described = self._describe_record(new, tree_digest, values_digest, identity)
        # Resolves the base at the same time: its chunks are claimed only after the
        # upload has reserved its slot, so any time before is early enough.
        async with background_task(described) as describing:
            found = await self._take_step(
                *(name, new.step, identity, describing),
                table=table,
                digests=digests,
                commits_now=commits_now,
            )
        if not commits_now:
            self._keep(name, found[0])
        return found

    async def parse(self, name: UploadName, table: bytes) -> Tree:
        """Returns the parsed form of a serialised leaf table; raises as ``begin``."""
        return await self._leaf_tables.parse_table(name, digest(table), table)

    async def _take_step(
        self,
        name: UploadName,
        step: int,
        identity: bytes,
        describing: "asyncio.Task[pb.UploadRecord]",
        *,
        table: bytes,
        digests: bytes,
        commits_now: bool,
    ) -> tuple[pb.UploadRecord, Version]:
        """Takes a step for an upload; see ``begin``."""
        elapsed, described = self._clock.elapsed(), None
        # 1. Read the slot, which may show that an earlier try of this request has
        #    succeeded, and the run at the same time.
        async with (
            background_task(self._own_record(name, identity)) as looking,
            background_task(self._runs.create(name.run)) as creating,
        ):
            slot = await self._catalog.slot(name.run, step)
            record, run = await looking, await creating
        if record and slot and slots.holds(name, record, slot[0]):
            await self._bucket.settle(RunPaths(name.run).checkpoint(step))
            if slot[0].state == slots.UPLOADING:  # that try may have lost its tables
                await self._write_tables(name, record, table, digests)
            return record, Version(*slot)
        if slot and slot[0].state == slots.UPLOADING:
            access.require(Permission.UPLOADS_SUPERSEDE, name.run)
        epoch = slots.next_epoch(name.run, slot and slot[0], floor=run.epoch_floor)
        predecessor = slots.predecessor(slot and slot[0])
        if predecessor and (damage := await self._rollbacks.damage(name.run, slot)):
            raise damage
        # 2. Write the record before everything else: a process that sees the upload in
        #    the slot finds it, and a collection that sees another object without it may
        #    take the upload for one that has ended. If there is no slot, read the run
        #    once more in the meantime: a collection raises the epoch floor before it
        #    deletes a FREE slot. If only an earlier read counted, an epoch could be
        #    used again.
        async with background_task(
            self._checked_epoch(name.run, slot, epoch)
        ) as checking:
            if record is None:
                described = await describing
                described.epoch, described.predecessor = epoch, predecessor
                await reach(Failpoint.BEGIN_BEFORE_RECORD)
                record = await self._create_record(name, described)
            epoch = await checking
        # A record is never changed: garbage collection derives from it which uploads
        # may still reserve the slot. If the slot has changed since, the client must
        # begin with another request id.
        if (record.epoch, record.predecessor) != (epoch, predecessor):
            raise slots.lost(name, record, slot and slot[0])
        reserved = slots.reservation(name.upload, record)
        if commits_now and slot is None:
            return record, Version(reserved, IF_ABSENT)
        # 3. Reserve the slot, on the condition that it is unchanged since step 1, and
        #    write the leaf table at the same time: no call needs it before the reply,
        #    and a repeated call writes it again.
        async with background_task(
            self._write_tables(name, record, table, digests)
        ) as writing:
            await reach(Failpoint.BEGIN_BEFORE_SLOT)
            generation = await self._reserve(name, reserved, record, slot and slot[1])
            await writing
        if predecessor:
            self.forget_open(UploadName(name.run, predecessor))
        self._seen[name] = elapsed
        if record is described:  # not that of an earlier try, which may be old
            self.leases.begin(name, record, elapsed)
        await reach(Failpoint.BEGIN_BEFORE_REPLY)
        return record, Version(reserved, generation)

    async def _write_tables(
        self, name: UploadName, record: pb.UploadRecord, table: bytes, digests: bytes
    ) -> None:
        await reach(Failpoint.BEGIN_BEFORE_TREE)
        await run_all(
            self._leaf_tables.write(name, record.tree_digest, table),
            self._leaf_tables.write_values(name, digests),
        )

    async def _checked_epoch(
        self,
        run: RunName,
        slot: tuple[pb.CheckpointRecord, Generation] | None,
        epoch: int,
    ) -> int:
        if slot is not None:
            return epoch
        # By the floor that the run has after the slot was read.
        floor = (await self._runs.create(run)).epoch_floor
        return slots.next_epoch(run, None, floor=floor)

    async def _reserve(
        self,
        name: UploadName,
        reserved: pb.CheckpointRecord,
        record: pb.UploadRecord,
        seen: Generation | None,
    ) -> Generation:
        """Reserves the slot, on the condition that it is unchanged since the read;
        returns its generation."""
        place = RunPaths(name.run).checkpoint(record.step)
        try:
            return await write_record(
                self._bucket, place, reserved, condition=seen or IF_ABSENT
            )
        except PreconditionError:
            slot = await self._catalog.slot(name.run, record.step)
            if slot is None or not slots.holds(name, record, slot[0]):
                raise slots.not_begun(name, record, slot and slot[0]) from None
            # An earlier try of this request did it after the slot was read: its server
            # may have been killed while that write was on its way.
            await self._bucket.settle(place)
            return slot[1]

    async def join(
        self,
        name: UploadName,
        *,
        writer: int,
        writer_count: int,
        plan: "WriterPlan",
    ) -> pb.UploadRecord:
        """Returns the record of an upload that writer 0 began, for another writer that
        planned the same save.

        Args:
            plan: Its plan; the digests suffice if writer 0 planned the same.

        Raises:
            InvalidTreeError: The leaf table contradicts itself.
            LimitExceededError: The leaf table has too many leaves or chunks.
            UploadNotFoundError: The upload does not exist, or was aborted.
            UploadSupersededError: The upload lost its slot.
            CheckpointExistsError: Another upload committed the step.
            PlanMismatchError: The writer planned another leaf table or number of
                writers.
            ProcessesDifferError: The writer and writer 0 hold different values of a
                leaf.
        """
        record = await self.known_record(name)
        # Usually writer 0 began it a moment ago. If it has ended, as it may have if the
        # clocks are wrong, the writer cannot finish.
        elapsed = self._clock.elapsed()
        age = self._clock.now() - record.create_time.ToDatetime(UTC)
        is_open = not self._bucket.has_files and abs(age) < _JOIN_TIME
        if not is_open:
            slot, _ = await self.slot(name, record)
            is_open = slot.state == slots.UPLOADING
        if is_open:  # the calls that follow need not look
            self._seen[name] = elapsed
        if writer_count != record.writer_count:
            raise PlanMismatchError(
                f"{name}, writer {writer}: expected {record.writer_count} writers as "
                f"writer 0 has it, got {writer_count}; start all processes of the job "
                "alike"
            )
        # Clients of earlier releases send no digests of values.
        values_differ = plan.values_digest and record.values_digest not in (
            b"",
            plan.values_digest,
        )
        if plan.table is None:
            if values_differ or plan.tree_digest != record.tree_digest:
                raise PlanMismatchError(
                    f"{name}, writer {writer}: the digests of the save plan differ "
                    "from the ones that writer 0 sent; send the leaf table, to learn "
                    "where"
                )
            return record
        if plan.tree_digest != record.tree_digest:
            expected = await self.tree(name, record)
            got = await self._leaf_tables.parse_table(
                name, plan.tree_digest, plan.table
            )
            leaf, message = await asyncio.to_thread(first_difference, expected, got)
            raise PlanMismatchError(
                f"{name}, writer {writer}: {message}; the save plan differs from that "
                "of writer 0: run the same program and jax version on every process",
                leaf=leaf,
            )
        if values_differ:
            await self._compare(name, record, writer, plan.digests)
        return record

    async def _compare(
        self, name: UploadName, record: pb.UploadRecord, writer: int, digests: bytes
    ) -> None:
        """Rejects a writer whose leaf values differ from writer 0's values."""
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
        """Returns an upload that owns its slot and can still be written.

        Raises:
            UploadNotFoundError: The upload does not exist.
            UploadSupersededError: The upload has another epoch, or lost its slot.
            CheckpointExistsError: The step is committed.
        """
        record = await self.known_record(name)
        slots.check_epoch(name, record, epoch)
        elapsed = self._clock.elapsed()
        slot, _ = await self.slot(name, record)
        if slot.state != slots.UPLOADING:
            raise slots.exists(name.run, slot)
        self._seen[name] = elapsed
        return OpenUpload(name, record, await self.tree(name, record))

    @asynccontextmanager
    async def opened(self, name: UploadName, epoch: int) -> AsyncIterator[OpenUpload]:
        """Yields an upload like ``open``, whose errors it raises at the latest at the
        end of the context: for work that is of no use to an upload that has ended.

        The slot is read in the meantime if the upload owned it a short time ago.
        """
        async with background_task(self.open(name, epoch)) as opening:
            try:
                if self.was_open(name):
                    yield await self.presume_open(name, epoch)
                else:
                    yield await opening
            except StoreError:
                await opening  # if the upload has ended, that is the error
                raise
            await opening

    async def open_recent(self, name: UploadName, epoch: int) -> OpenUpload:
        """Returns an upload like ``open``, but on a bucket without a look at its slot
        if it owned it a short time ago: for what FinishWriter checks again."""
        if self.was_open(name) and not self._bucket.has_files:
            return await self.presume_open(name, epoch)
        return await self.open(name, epoch)

    def was_open(self, name: UploadName) -> bool:
        """Returns whether an upload owned its slot a short time ago."""
        seen = self._seen.get(name)
        return seen is not None and self._clock.elapsed() - seen <= _OPEN_SECONDS

    def forget_open(self, name: UploadName) -> None:
        """Forgets that an upload owned its slot: it has ended."""
        self._seen.pop(name, None)

    async def presume_open(self, name: UploadName, epoch: int) -> OpenUpload:
        """Returns an upload without a look at its slot; see ``was_open``.

        Raises:
            UploadNotFoundError: The upload does not exist.
            UploadSupersededError: The upload has another epoch.
        """
        record = await self.known_record(name)
        slots.check_epoch(name, record, epoch)
        return OpenUpload(name, record, await self.tree(name, record))

    async def known_record(self, name: UploadName) -> pb.UploadRecord:
        """Returns the record of an upload, which is read once by each process: it is
        never changed, and a read of a bucket takes long.

        Whether the upload exists any more, only its slot says; see ``slot``.

        Raises:
            UploadNotFoundError: The upload does not exist.
            PermissionDeniedError: Another principal began it.
        """
        record = self._records.get(name)
        if record is None:
            record = await self.record(name)
            self._keep(name, record)
        await _check_principal(name, record)
        return record

    async def slot(
        self, name: UploadName, record: pb.UploadRecord
    ) -> tuple[pb.CheckpointRecord, Generation]:
        """Returns the slot of an upload that owns it, committed or not, and its
        generation.

        Raises:
            UploadNotFoundError: The upload does not exist, or was aborted.
            UploadSupersededError: The upload lost its slot.
            CheckpointExistsError: Another upload committed the step.
        """
        found = await self._catalog.slot(name.run, record.step)
        try:
            slot = slots.check_owner(name, record, found and found[0])
        except StoreError:
            await self.record(name)  # raises UploadNotFoundError if it was collected
            raise
        assert found is not None, f"{name}: it owns its slot"
        return slot, found[1]

    def _keep(self, name: UploadName, record: pb.UploadRecord) -> None:
        with suppress(ValueError):  # larger than the cache
            self._records[name] = record

    async def renew(self, upload: OpenUpload) -> datetime:
        """Renews the lease of an upload, and returns when it expires."""
        return await self.leases.renew(upload.name, upload.record)

    async def abort(self, name: UploadName) -> None:
        """Aborts an upload and frees its step; an upload that has ended is ignored.

        Raises:
            CheckpointExistsError: The upload is committed.
            CorruptDataError: The upload was committed, and its slot was restored to a
                version from before the commit.
            ConflictError: The slot changed at the same time.
        """
        # 1. Free the slot first, on the condition that it is unchanged: a commit at the
        #    same time either fails, or makes this call fail.
        self.forget_open(name)
        places = RunPaths(name.run)
        record = await self._found(name)
        if record is None:
            return
        await _check_principal(name, record)
        step = record.step
        slot = await self._catalog.slot(name.run, step)
        if slot is None or not slots.owns(name, record, slot[0]):
            return  # another upload owns the step, and may claim what this one stored
        if slot[0].state in slots.CHECKPOINTS:
            raise slots.exists(name.run, slot[0])
        if damage := await self._rollbacks.damage(name.run, slot):
            raise damage
        await reach(Failpoint.ABORT_BEFORE_SLOT)
        try:
            await write_record(
                self._bucket,
                places.checkpoint(step),
                slots.free_slot(slot[0], when=self._clock.now()),
                condition=slot[1],
            )
        except PreconditionError as e:
            raise ConflictError(
                f"{name}: it changed while it was aborted; abort it again",
                upload=name.upload,
            ) from e
        # 2. Delete the parts that the commit would need, and the data: only chunks of a
        #    live upload are claimed. Before step 1, they could be missing to an upload
        #    that is still live. The record stays, so that a repeated BeginUpload or a
        #    late writer gets the right error.
        await reach(Failpoint.ABORT_BEFORE_DISCARD)
        await self._bucket.delete_below(places.staging_prefix(name.upload))
        await self._bucket.delete_below(places.upload_parts(name.upload))
        await self._bucket.delete_below(
            places.data_file(places.data_prefix(name.upload))
        )
        await reach(Failpoint.ABORT_BEFORE_REPLY)

    async def record(self, name: UploadName) -> pb.UploadRecord:
        """Returns the record of an upload, whether or not the upload owns its slot.

        Raises:
            UploadNotFoundError: The upload does not exist.
        """
        found = await self._found(name)
        if found is None:
            raise slots.absent(name)
        return found

    async def _found(self, name: UploadName) -> pb.UploadRecord | None:
        place = RunPaths(name.run).upload(name.upload)
        found = await read_record(self._bucket, place, pb.UploadRecord)
        return found and found[0]

    async def tree(self, name: UploadName, record: pb.UploadRecord) -> Tree:
        """Returns the leaf table of an upload.

        Raises:
            UploadNotFoundError: The upload was aborted.
            CorruptDataError: The leaf table is damaged.
        """
        return await self._leaf_tables.tree(name, record.tree_digest)

    async def _own_record(
        self, name: UploadName, identity: bytes
    ) -> pb.UploadRecord | None:
        """Returns the record that an earlier try of the same request wrote."""
        found = await self._found(name)
        if found is not None and found.request_digest != identity:
            raise RequestIdReusedError(
                f"{name}: its request id was used with another body; use a new id",
                upload=name.upload,
            )
        if found is not None:
            await _check_principal(name, found)
        return found

    async def _describe_record(
        self, new: NewUpload, tree_digest: bytes, values_digest: bytes, identity: bytes
    ) -> pb.UploadRecord:
        """Returns a new record, without the fields that depend on the slot."""
        record = pb.UploadRecord(
            step=new.step,
            writer_count=new.writer_count,
            tree_digest=tree_digest,
            labels=new.labels,
            metrics=new.metrics,
            create_time=timestamp(self._clock.now()),
            lease_duration=duration(new.lease),
            owner=new.owner,
            principal=access.principal_name(),
            groups=access.group_names(),
            request_digest=identity,
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
            return await self._catalog.find_base(new.base)
        except (RunNotFoundError, CheckpointNotFoundError, CorruptDataError):
            # The first save of a run has no base; neither has a save of a run whose
            # newest record is damaged.
            if new.base.which == LATEST:
                return None
            raise

    async def _create_record(
        self, name: UploadName, record: pb.UploadRecord
    ) -> pb.UploadRecord:
        """Writes and returns a record; if another try of the same request was faster,
        returns the record of that one."""
        try:
            await write_record(
                self._bucket,
                RunPaths(name.run).upload(name.upload),
                record,
                condition=IF_ABSENT,
            )
        except PreconditionError:
            found = await self._own_record(name, record.request_digest)
            if found is None:
                raise slots.absent(name) from None
            return found
        return record


async def _check_principal(name: UploadName, record: pb.UploadRecord) -> None:
    """Rejects a caller that may not write, commit and abort an upload."""
    await access.require_own(
        record.principal,
        record.groups,
        Permission.UPLOADS_WRITE,
        name.run,
        otherwise=Permission.UPLOADS_MANAGE,
    )
