"""Ends uploads whose lease is over, and checkpoints that retention does not keep.

These are the first steps of a pass over a run. ``preview`` returns what ``apply`` would
do, and changes nothing.
"""

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from storesvc.catalog import slots
from storesvc.catalog.records import read_record, timestamp
from storesvc.catalog.rollbacks import Reserve
from storesvc.clock import Clock
from storesvc.errors import InvalidPolicyError, RunNotFoundError
from storesvc.format import layout
from storesvc.format.names import RunName
from storesvc.gc.history import History
from storesvc.gc.lease_expiry import ExpiredUpload, LeaseExpiry
from storesvc.gc.mark import RunState
from storesvc.lifecycle.checkpoints import DEFAULT_PURGE_DELAY, CheckpointLifecycle
from storesvc.lifecycle.references import Reference, References
from storesvc.retention.enforcement import Outcome, RetentionEnforcer
from storesvc.storage.bucket import Bucket
from storesvc_proto.v1 import bucket_pb2 as pb

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


class Expiry:
    """Ends uploads and checkpoints of the runs of a bucket."""

    def __init__(
        self,
        bucket: Bucket,
        leases: LeaseExpiry,
        retention: RetentionEnforcer,
        lifecycle: CheckpointLifecycle,
        references: References,
        history: History,
        reserve: Reserve,
        *,
        clock: Clock,
    ) -> None:
        self._bucket = bucket
        self._history = history
        self._leases = leases
        self._retention = retention
        self._lifecycle = lifecycle
        self._references = references
        self._reserve = reserve
        self._clock = clock

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
            for expired in await self._expired(run, state)
            if await self._reserve.spent_on(self._leases.abort, run, expired)
        ]
        # 2. Soft-delete what the policy does not keep.
        deleted = await self._deleted(run, state, await self.retain(run))
        # 3. Purge what is due, including what step 2 deleted without a purge delay.
        held = state.with_slots(deleted).slots.values()
        purged = await self._reserve.spent_on(self._lifecycle.purge_due, run, held)
        return Expirations(
            aborted=aborted, deleted=deleted, purged=[self._freed(s) for s in purged]
        )

    async def preview(self, run: RunName, state: RunState) -> Expirations:
        """Returns the slots that `apply` would change.

        Raises:
            CorruptDataError: A slot was rolled back.
        """
        expired = await self._expired(run, state)
        outcomes = await self._outcomes(run, self._retention.preview)
        deleted = await self._deleted(run, state, outcomes)
        purged = await self._would_purge(run, state.with_slots(deleted), expired)
        return Expirations(
            aborted=[e.after for e in expired], deleted=deleted, purged=purged
        )

    async def retain(self, run: RunName) -> list[Outcome]:
        """Applies the retention policy of a run, if it has one; returns the
        outcomes."""
        return await self._reserve.spent_on(self._outcomes, run, self._retention.apply)

    async def _expired(self, run: RunName, state: RunState) -> list[ExpiredUpload]:
        """Returns the uploads whose lease is over, after a check of the history."""
        expired = await self._leases.uploads(run, state)
        await self._history.check(run, state, expired)
        return expired

    async def _outcomes(
        self, run: RunName, judge: Callable[[RunName], AsyncGenerator[list[Outcome]]]
    ) -> list[Outcome]:
        if not (await self._record(run)).HasField("retention"):
            return []
        found: list[Outcome] = []
        try:
            async with aclosing(judge(run)) as pages:
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
        references = await self._references.of(run)
        used = {uid for uid, by in references.items() if by not in ended}
        return [self._freed(slot) for slot in due if slot.upload not in used]

    async def _record(self, run: RunName) -> pb.RunRecord:
        found = await read_record(self._bucket, layout.run_record(run), pb.RunRecord)
        return found[0] if found else pb.RunRecord()

    async def _deleted(
        self, run: RunName, state: RunState, outcomes: list[Outcome]
    ) -> list[pb.CheckpointRecord]:
        """Returns the slots after the deletions, accurate enough to decide what is
        due."""
        record, delay = await self._record(run), DEFAULT_PURGE_DELAY
        if record.HasField("purge_delay"):
            delay = record.purge_delay.ToTimedelta()
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

    def _freed(self, slot: pb.CheckpointRecord) -> pb.CheckpointRecord:
        return slots.freed(slot, when=self._clock.now())
