"""What ends by itself: uploads past their lease, checkpoints that nobody keeps.

The first steps of a pass over a run. ``preview`` tells what ``apply`` would do, and
changes nothing.
"""

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from storesvc.catalog import slots, transitions
from storesvc.catalog.disk_reserve import Reserve
from storesvc.catalog.records import read_record, timestamp
from storesvc.clock import Clock
from storesvc.errors import InvalidPolicyError, RunNotFoundError
from storesvc.format import layout
from storesvc.format.names import RunName
from storesvc.gc.history import History
from storesvc.gc.lease_expiry import Expired, Expiry
from storesvc.gc.mark import Snapshot
from storesvc.lifecycle.checkpoints import DEFAULT_PURGE_DELAY, CheckpointLifecycle
from storesvc.lifecycle.references import Reference, References
from storesvc.retention.enforcement import Retaining, Verdict
from storesvc.storage.bucket import Bucket
from storesvc_proto.v1 import bucket_pb2 as pb

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endings:
    """What ended in a run, as the slots that it left."""

    aborted: list[pb.CheckpointRecord]
    """Of uploads."""
    deleted: list[pb.CheckpointRecord]
    """Of checkpoints that the retention policy does not keep."""
    purged: list[pb.CheckpointRecord]
    """Of checkpoints that were deleted before."""

    @property
    def slots(self) -> list[pb.CheckpointRecord]:
        """Returns all of them, in the order in which they changed."""
        return [*self.aborted, *self.deleted, *self.purged]


class Ending:
    """Ends what ends by itself in the runs of a bucket."""

    def __init__(
        self,
        bucket: Bucket,
        expiry: Expiry,
        retaining: Retaining,
        lifecycle: CheckpointLifecycle,
        references: References,
        history: History,
        reserve: Reserve,
        *,
        clock: Clock,
    ) -> None:
        self._bucket = bucket
        self._history = history
        self._expiry = expiry
        self._retaining = retaining
        self._lifecycle = lifecycle
        self._references = references
        self._reserve = reserve
        self._clock = clock

    async def apply(self, run: RunName, snapshot: Snapshot) -> Endings:
        """Aborts uploads past their lease, applies the retention policy, purges what is
        due; returns what ended.

        Raises:
            CorruptDataError: A slot was put back to an earlier version: nothing ended.
        """
        aborted = [
            expired.after
            for expired in await self._expired(run, snapshot)
            if await self._reserve.spent_on(self._expiry.abort, run, expired)
        ]
        deleted = await self._deleted(run, snapshot, await self.retain(run))
        held = snapshot.with_slots(deleted).slots.values()
        purged = await self._reserve.spent_on(self._lifecycle.purge_due, run, held)
        return Endings(
            aborted=aborted, deleted=deleted, purged=[self._freed(s) for s in purged]
        )

    async def preview(self, run: RunName, snapshot: Snapshot) -> Endings:
        """Returns what would end.

        Raises:
            CorruptDataError: A slot was put back to an earlier version.
        """
        expired = await self._expired(run, snapshot)
        verdicts = await self._verdicts(run, self._retaining.preview)
        deleted = await self._deleted(run, snapshot, verdicts)
        purged = await self._would_purge(run, snapshot.with_slots(deleted), expired)
        return Endings(
            aborted=[e.after for e in expired], deleted=deleted, purged=purged
        )

    async def retain(self, run: RunName) -> list[Verdict]:
        """Applies the retention policy of a run, if it has one; returns what became of
        each checkpoint."""
        return await self._reserve.spent_on(self._verdicts, run, self._retaining.apply)

    async def _expired(self, run: RunName, snapshot: Snapshot) -> list[Expired]:
        """The uploads whose lease is over, where none of the run looks unfinished that
        was committed."""
        expired = await self._expiry.uploads(run, snapshot)
        await self._history.check(run, snapshot, expired)
        return expired

    async def _verdicts(
        self, run: RunName, judge: Callable[[RunName], AsyncGenerator[list[Verdict]]]
    ) -> list[Verdict]:
        if not (await self._record(run)).HasField("retention"):
            return []
        found: list[Verdict] = []
        try:
            async with aclosing(judge(run)) as pages:
                async for page in pages:
                    found += page
        except (InvalidPolicyError, RunNotFoundError) as e:
            _log.warning("%s: its retention policy was not applied: %s", run, e)
        return found

    async def _would_purge(
        self, run: RunName, snapshot: Snapshot, expired: list[Expired]
    ) -> list[pb.CheckpointRecord]:
        now = self._clock.now()
        due = [s for s in snapshot.slots.values() if transitions.is_due(s, now)]
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
        self, run: RunName, snapshot: Snapshot, verdicts: list[Verdict]
    ) -> list[pb.CheckpointRecord]:
        """The slots that deletion leaves, near enough to tell what is due."""
        record, delay = await self._record(run), DEFAULT_PURGE_DELAY
        if record.HasField("purge_delay"):
            delay = record.purge_delay.ToTimedelta()
        found = []
        for verdict in verdicts:
            slot = snapshot.slots.get(verdict.step)
            if not verdict.kept and slot is not None and slot.upload == verdict.uid:
                deleted = pb.CheckpointRecord()
                deleted.CopyFrom(slot)
                deleted.state = slots.DELETED
                deleted.purge_time.CopyFrom(timestamp(self._clock.now() + delay))
                found.append(deleted)
        return found

    def _freed(self, slot: pb.CheckpointRecord) -> pb.CheckpointRecord:
        return transitions.freed(slot, when=self._clock.now())
