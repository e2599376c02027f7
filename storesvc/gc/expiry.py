"""Ends uploads whose lease is over, and checkpoints that retention does not keep.

These are the first steps of a pass over a run. ``preview`` returns what ``apply`` would
do, and changes nothing.

An upload is aborted through its slot, as in AbortUpload: the slot becomes FREE, on the
condition that it is unchanged since it was read. So an upload that has begun but not
yet reserved its step can no longer reserve it. `Observations` of this process decide
whether a lease is over.

Once an unfinished upload is aborted, its objects are deleted. So a committed upload
must not look unfinished because an earlier version of its slot was restored, for
example from a backup. `History` compares a run with its history before anything is
changed; ``rollbacks`` defines the evidence, and if there is any, the pass over the run
is postponed and changes nothing.
"""

import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from storesvc.catalog import slots
from storesvc.catalog.catalog import Catalog
from storesvc.catalog.journal import Journal
from storesvc.catalog.records import read_record, timestamp, write_record
from storesvc.catalog.rollbacks import (
    Reserve,
    contradiction,
    has_manifest,
    rolled_back,
    slot_missing,
)
from storesvc.catalog.slots import FREE, Observations
from storesvc.clock import Clock
from storesvc.errors import InvalidPolicyError, RunNotFoundError
from storesvc.format import layout
from storesvc.format.layout import RunPaths
from storesvc.format.names import HoldName, RunName
from storesvc.gc import mark
from storesvc.gc.mark import Fate, RunState
from storesvc.lifecycle.checkpoints import CheckpointLifecycle, find_purge_delay
from storesvc.lifecycle.holds import Reference, References
from storesvc.retention.enforcement import Outcome, RetentionEnforcer
from storesvc.save.uploads import DEFAULT_LEASE
from storesvc.storage.bucket import IF_ABSENT, Bucket, Generation, PreconditionError
from storesvc.storage.requests import gather_each
from storesvc_proto.v1 import bucket_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpiredUpload:
    """An upload whose lease is over."""

    upload: str
    create_time: datetime
    """Time at which it began, by the clock of a server."""
    sign: bytes
    """The last lease record, serialised; b"": none."""
    before: pb.CheckpointRecord | None
    """The slot as it was read."""
    after: pb.CheckpointRecord
    """The FREE slot to write."""


@dataclass(eq=False, repr=False)
class LeaseExpiry:
    """Finds expired leases in the runs of a bucket."""

    _bucket: Bucket
    _catalog: Catalog
    _observations: Observations
    _clock: Clock

    async def uploads(self, run: RunName, state: RunState) -> list[ExpiredUpload]:
        async def look(upload: str) -> ExpiredUpload | None:
            return await self._find_expired(run, state, upload)

        known = mark.fates(state)
        found = await gather_each(look, mark.leases(state, known))
        return [expired for expired in found if expired is not None]

    async def abort(self, run: RunName, expired: ExpiredUpload) -> bool:
        """Aborts an expired upload; returns False if it was renewed or lost its
        slot."""
        # 1. The slot must be unchanged since the lease was judged.
        step = expired.after.step
        found = await self._catalog.slot(run, step)
        if (found and found[0]) != expired.before:
            return False
        # 2. So must the lease: it may have been renewed since.
        sign = await self._sign(run, expired.upload)
        if _serialize_record(sign) != expired.sign:
            return False
        # 3. Free the slot on the condition that it is still the one of step 1. A
        #    renewal after step 2 finds the slot FREE, and its upload ended.
        try:
            await write_record(
                self._bucket,
                RunPaths(run).checkpoint(step),
                expired.after,
                condition=found[1] if found else IF_ABSENT,
            )
        except PreconditionError:
            return False
        return True

    async def holds(self, run: RunName, state: RunState) -> dict[str, Generation]:
        """Returns the paths of expired holds, with the generations read."""
        places = RunPaths(run)

        async def look(place: str) -> tuple[str, Generation] | None:
            of = str(HoldName(run, holds[place]))
            found = await read_record(self._bucket, place, pb.HoldRecord, of=of)
            if found is None:
                return None
            hold, seen = found[0], _serialize_record(found[0])
            if not self._is_over(place, seen, hold.ttl.ToTimedelta(), hold.renew_time):
                return None
            return place, found[1]

        listed = [p for p in state.listed if p.startswith(places.holds)]
        holds = {place: id_ for place in listed if (id_ := places.parse_hold(place))}
        found = await gather_each(look, holds)
        return dict(one for one in found if one is not None)

    async def _find_expired(
        self, run: RunName, state: RunState, upload: str
    ) -> ExpiredUpload | None:
        record, owned = state.records.get(upload), state.owners.get(upload)
        begun = record or owned
        assert begun is not None
        sign = await self._sign(run, upload)
        length = record.lease_duration.ToTimedelta() if record else DEFAULT_LEASE
        renewed = sign.renew_time if sign else begun.create_time
        # Becoming the owner of a slot renews the lease too.
        seen = _serialize_record(owned) + _serialize_record(sign)
        if not self._is_over(RunPaths(run).lease(upload), seen, length, renewed):
            return None
        reserved = pb.CheckpointRecord(
            upload=upload, step=begun.step, epoch=begun.epoch
        )
        return ExpiredUpload(
            upload=upload,
            create_time=begun.create_time.ToDatetime(UTC),
            sign=_serialize_record(sign),
            before=state.slots.get(begun.step),
            after=slots.free_slot(reserved, when=self._clock.now()),
        )

    async def _sign(self, run: RunName, upload: str) -> pb.LeaseRecord | None:
        """Returns the lease record of an upload; None: it has none."""
        place = RunPaths(run).lease(upload)
        found = await read_record(self._bucket, place, pb.LeaseRecord)
        return found and found[0]

    def _is_over(
        self, key: str, seen: bytes, length: timedelta, renewed: Timestamp
    ) -> bool:
        return self._observations.is_over(
            key,
            seen,
            length=length,
            renew_time=renewed.ToDatetime(UTC),
            clock_now=self._clock.now(),
            elapsed=self._clock.elapsed(),
        )


def _serialize_record(record: Message | None) -> bytes:
    return record.SerializeToString(deterministic=True) if record else b""


_ONLY_COMMITTED: Final = {
    pb.Announcement.KIND_DELETE: "deletion",
    pb.Announcement.KIND_UNDELETE: "undeletion",
    pb.Announcement.KIND_TAG: "tag",
    pb.Announcement.KIND_UNTAG: "removed tag",
    pb.Announcement.KIND_UPDATE: "update",
}
"""Changes that are announced only for committed checkpoints. A commit is announced
before it is made, so its announcement alone does not prove it."""


@dataclass(eq=False, repr=False)
class History:
    """Checks the slots of the runs of a bucket against their histories."""

    _catalog: Catalog
    _journal: Journal
    _references: References

    async def check(
        self, run: RunName, state: RunState, expired: Sequence[ExpiredUpload]
    ) -> None:
        """Rejects a run with a slot that was rolled back.

        Raises:
            CorruptDataError: Names the slot and the evidence of the rollback.
        """
        known = mark.fates(state)
        await self._check_orphans(run, state, known)
        unfinished = mark.list_unfinished(known)
        if not unfinished:
            return
        named = await self._references.named(run)
        announced = await self._find_announced(run, expired)
        for upload in unfinished:
            step = mark.upload_step(state, upload, known[upload])
            slot, why = state.slots.get(step), ""
            objects = state.objects.get(upload, ())
            if upload in named:
                why = f"{named[upload]} names it"
            elif slot is not None:  # an absent slot may have been removed on purpose
                why = contradiction(
                    state.places, upload, objects, owns_slot=slot.upload == upload
                ) or announced.get(upload, "")
            # The evidence was read after the slot, and may be of a commit in between.
            if not why or not await self._is_still(run, step, slot):
                continue
            if slot is None:
                raise slot_missing(run, step, str(named[upload]))
            raise rolled_back(run, step, upload, why)

    async def _check_orphans(
        self, run: RunName, state: RunState, known: Mapping[str, Fate]
    ) -> None:
        """Rejects a slot older than the commit of an upload that it does not name."""
        # Not deleted since, and without a record: only the journal shows its commit.
        orphans = {
            upload
            for upload in mark.orphans(state, known)
            if has_manifest(state.places, upload, state.objects.get(upload, ()))
        }
        if not orphans:
            return
        for upload, (number, one) in (await self._last(run, orphans)).items():
            slot = state.slots.get(one.step)
            if slot is None or one.kind == pb.Announcement.KIND_DELETE:
                continue  # the slot was removed on purpose, or the checkpoint purged
            stamp = slot.delete_time if slot.state == FREE else slot.create_time
            is_older = stamp.ToDatetime(UTC) <= one.create_time.ToDatetime(UTC)
            if is_older and await self._is_still(run, one.step, slot):
                why = f"announcement {number} of the journal is of it, and later"
                raise rolled_back(run, one.step, upload, why)

    async def _last(
        self, run: RunName, uploads: Collection[str]
    ) -> dict[str, tuple[int, pb.Announcement]]:
        """Returns the last announced change of each upload that the journal has."""
        found: dict[str, tuple[int, pb.Announcement]] = {}
        began = datetime.fromtimestamp(0, UTC)
        changes = self._journal.changes(run, uploads, since=began)
        async with aclosing(changes):
            async for number, one in changes:
                found.setdefault(one.upload, (number, one))
                if len(found) == len(uploads):
                    break
        return found

    async def _find_announced(
        self, run: RunName, expired: Sequence[ExpiredUpload]
    ) -> dict[str, str]:
        """Returns the evidence in the journal that expired uploads were committed."""
        begun = {one.upload: one.create_time for one in expired}
        if not begun:
            return {}
        since, found = min(begun.values()), {}
        async with aclosing(self._journal.changes(run, begun, since=since)) as changes:
            async for number, one in changes:
                if change := _ONLY_COMMITTED.get(one.kind):
                    why = f"announcement {number} of the journal is of its {change}"
                    found[one.upload] = why
        return found

    async def _is_still(
        self, run: RunName, step: int, seen: pb.CheckpointRecord | None
    ) -> bool:
        found = await self._catalog.slot(run, step)
        return (found and found[0]) == seen


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expirations:
    """The slots that a pass changed, as they are after it."""

    aborted: list[pb.CheckpointRecord]
    """Slots of aborted uploads."""
    deleted: list[pb.CheckpointRecord]
    """Slots of checkpoints that the retention policy does not keep."""
    purged: list[pb.CheckpointRecord]
    """Slots of checkpoints that were deleted before."""

    @property
    def slots(self) -> list[pb.CheckpointRecord]:
        """All of them, in the order in which they changed."""
        return [*self.aborted, *self.deleted, *self.purged]


@dataclass(eq=False, repr=False)
class Expiry:
    """Ends uploads and checkpoints of the runs of a bucket."""

    _bucket: Bucket
    _leases: LeaseExpiry
    _retention: RetentionEnforcer
    _lifecycle: CheckpointLifecycle
    _references: References
    _history: History
    _reserve: Reserve
    _clock: Clock

    async def apply(self, run: RunName, state: RunState) -> Expirations:
        """Aborts expired uploads, applies the retention policy, purges what is due.

        Returns:
            The slots that changed.

        Raises:
            CorruptDataError: A slot was rolled back; nothing was changed.
        """
        # 1. Abort expired uploads. The history of the run is checked before the first.
        aborted = [
            expired.after
            for expired in await self._find_expired(run, state)
            if await self._reserve.spent_on(self._leases.abort, run, expired)
        ]
        # 2. Soft-delete what the policy does not keep.
        deleted = await self._apply_deletions(run, state, await self.retain(run))
        # 3. Purge what is due, including what step 2 deleted without a purge delay.
        held = state.with_slots(deleted).slots.values()
        purged = await self._reserve.spent_on(self._lifecycle.purge_due, run, held)
        return Expirations(
            aborted=aborted,
            deleted=deleted,
            purged=[self._free_slot(s) for s in purged],
        )

    async def preview(self, run: RunName, state: RunState) -> Expirations:
        """Returns the slots that `apply` would change.

        Raises:
            CorruptDataError: A slot was rolled back.
        """
        expired = await self._find_expired(run, state)
        outcomes = await self._outcomes(run, self._preview)
        deleted = await self._apply_deletions(run, state, outcomes)
        purged = await self._would_purge(run, state.with_slots(deleted), expired)
        return Expirations(
            aborted=[e.after for e in expired], deleted=deleted, purged=purged
        )

    async def retain(self, run: RunName) -> list[Outcome]:
        """Applies the retention policy of a run, if it has one; returns the
        outcomes."""
        return await self._reserve.spent_on(self._outcomes, run, self._retention.apply)

    def _preview(
        self, run: RunName, record: pb.RunRecord
    ) -> AsyncGenerator[list[Outcome]]:
        return self._retention.preview(run, record.retention)

    async def _find_expired(self, run: RunName, state: RunState) -> list[ExpiredUpload]:
        """Returns the uploads whose lease is over, after a check of the history."""
        expired = await self._leases.uploads(run, state)
        await self._history.check(run, state, expired)
        return expired

    async def _outcomes(
        self,
        run: RunName,
        judge: Callable[[RunName, pb.RunRecord], AsyncGenerator[list[Outcome]]],
    ) -> list[Outcome]:
        record = await self._record(run)
        if not record.HasField("retention"):
            return []
        found: list[Outcome] = []
        try:
            async with aclosing(judge(run, record)) as pages:
                async for page in pages:
                    found += page
        except (InvalidPolicyError, RunNotFoundError) as e:
            _log.warning("%s: its retention policy was not applied: %s", run, e)
        return found

    async def _would_purge(
        self, run: RunName, state: RunState, expired: list[ExpiredUpload]
    ) -> list[pb.CheckpointRecord]:
        now = self._clock.now()
        due = [s for s in state.slots.values() if slots.is_due(s, now)]
        if not due:
            return []
        ended = {Reference(kind="upload", name=upload.upload) for upload in expired}
        references = await self._references.find_references(run)
        used = {uid for uid, by in references.items() if by not in ended}
        return [self._free_slot(slot) for slot in due if slot.upload not in used]

    async def _record(self, run: RunName) -> pb.RunRecord:
        found = await read_record(self._bucket, layout.run_record(run), pb.RunRecord)
        return found[0] if found else pb.RunRecord()

    async def _apply_deletions(
        self, run: RunName, state: RunState, outcomes: list[Outcome]
    ) -> list[pb.CheckpointRecord]:
        """Returns the slots after deletions, accurate enough to decide what is due."""
        delay = find_purge_delay(await self._record(run))
        found = []
        for outcome in outcomes:
            slot = state.slots.get(outcome.step)
            if not outcome.kept and slot is not None and slot.upload == outcome.uid:
                deleted = pb.CheckpointRecord()
                deleted.CopyFrom(slot)
                deleted.state = slots.DELETED
                deleted.purge_time.CopyFrom(timestamp(self._clock.now() + delay))
                found.append(deleted)
        return found

    def _free_slot(self, slot: pb.CheckpointRecord) -> pb.CheckpointRecord:
        return slots.free_slot(slot, when=self._clock.now())
