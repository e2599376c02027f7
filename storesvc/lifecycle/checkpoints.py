"""What happens to checkpoints after their commit: updates, deletion, purge.

``transitions`` decides what a slot becomes; this module reads, asks it, and writes on
the condition that the slot has not changed since, a few times where it has. A purge
takes two writes, with a look at all uses in between; whoever finds one that was cut
off finishes it.
"""

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Final, TypeAlias

from storesvc.catalog import transitions
from storesvc.catalog.catalog import Catalogue
from storesvc.catalog.journal import Journal
from storesvc.catalog.records import etag_of, read_record, write_record
from storesvc.catalog.slots import CHECKPOINTS, PURGING
from storesvc.catalog.transitions import Change
from storesvc.clock import Clock
from storesvc.errors import ConflictError
from storesvc.failpoints import Failpoint, reach
from storesvc.format import layout
from storesvc.format.layout import RunPlaces
from storesvc.format.names import CheckpointName, RunName
from storesvc.lifecycle.references import Uses
from storesvc.storage.bounded_gather import each
from storesvc.storage.bucket import Bucket, Generation, PreconditionError
from storesvc_proto.v1 import bucket_pb2 as pb

DEFAULT_PURGE_DELAY: Final = timedelta(days=3)
"""How long a deleted checkpoint can be undeleted, where nobody says otherwise."""

MAX_PURGE_DELAY: Final = timedelta(days=365)
"""How long at most."""

_TRIES: Final = 8
"""Of a change, while others change the same slot."""

_Decide: TypeAlias = Callable[[pb.CheckpointRecord], pb.CheckpointRecord]


class Lives:
    """Those of the checkpoints of a bucket."""

    def __init__(
        self,
        bucket: Bucket,
        catalogue: Catalogue,
        journal: Journal,
        uses: Uses,
        *,
        clock: Clock,
    ) -> None:
        self._bucket = bucket
        self._catalogue = catalogue
        self._journal = journal
        self._uses = uses
        self._clock = clock

    async def update(
        self, run: RunName, step: int, change: Change, *, etag: str, write_id: str
    ) -> pb.CheckpointRecord:
        """Sets labels, metrics or the pin of a checkpoint, and returns its record.

        Raises:
            RunNotFoundError: With the most similar names.
            CheckpointNotFoundError: With the nearest steps.
            CheckpointDeletedError: It was deleted.
            EtagMismatchError: It changed since the etag was read.
            RequestIdReusedError: The request id made another change of it.
            ConflictError: Others change it all the time.
        """

        def decide(slot: pb.CheckpointRecord) -> pb.CheckpointRecord:
            return transitions.updated(run, slot, change, etag=etag, write_id=write_id)

        return await self._change(run, step, decide)

    async def delete(
        self,
        run: RunName,
        step: int,
        *,
        purge_delay: timedelta | None,
        etag: str,
        write_id: str,
        uid: str = "",
    ) -> pb.CheckpointRecord:
        """Deletes a checkpoint softly, and returns its record.

        Args:
            run: The run.
            step: Of the checkpoint.
            purge_delay: How long it can be undeleted; None: as the run says.
            etag: What the caller read, or "".
            write_id: Of the request.
            uid: Of the checkpoint; "": of whichever is there.

        Raises:
            RunNotFoundError: With the most similar names.
            CheckpointNotFoundError: With the nearest steps, or it was replaced.
            CheckpointInUseError: It is pinned or tagged.
            EtagMismatchError: It changed since the etag was read.
            RequestIdReusedError: The request id made another change of it.
            ConflictError: Others change it all the time.
        """
        # A tag that is set at this moment is not seen: it keeps the checkpoint from
        # being purged all the same.
        tagged = await self._uses.tagged(run)
        if purge_delay is None:
            purge_delay = await self._purge_delay(run)
        now = self._clock.now()

        def decide(slot: pb.CheckpointRecord) -> pb.CheckpointRecord:
            return transitions.deleted(
                run,
                slot,
                tagged=tagged,
                when=now,
                purge_time=now + purge_delay,
                etag=etag,
                write_id=write_id,
            )

        kind = pb.Announcement.KIND_DELETE
        return await self._change(run, step, decide, kind, uid=uid)

    async def undelete(
        self, run: RunName, step: int, *, write_id: str, uid: str = ""
    ) -> pb.CheckpointRecord:
        """Takes the deletion of a checkpoint back, and returns its record.

        Raises:
            RunNotFoundError: With the most similar names.
            CheckpointNotFoundError: With the nearest steps, or the one of the uid was
                replaced.
            RequestIdReusedError: The request id made another change of it.
            ConflictError: It is being purged, or others change it all the time.
        """

        def decide(slot: pb.CheckpointRecord) -> pb.CheckpointRecord:
            return transitions.undeleted(run, slot, write_id=write_id)

        kind = pb.Announcement.KIND_UNDELETE
        return await self._change(run, step, decide, kind, uid=uid)

    async def purge(self, run: RunName, step: int, *, etag: str, uid: str = "") -> None:
        """Ends a deleted checkpoint for good, and frees its step.

        Raises:
            RunNotFoundError: With the most similar names.
            CheckpointNotFoundError: With the nearest steps, or the one of the uid was
                replaced.
            CheckpointNotDeletedError: It is not deleted.
            CheckpointInUseError: Something needs it.
            EtagMismatchError: It changed since the etag was read.
            ConflictError: Others change it all the time.
        """
        uid = (await self._slot(run, step, uid))[0].upload
        for _ in range(_TRIES):
            found = await self._catalogue.slot(run, step)
            if found is None or not _is_checkpoint(found[0], uid):
                return  # purged meanwhile, by whomever
            marked = await self._mark(run, *found, etag=etag)
            if marked is None:
                continue
            uses = await self._uses.of(run)
            if not await self._settle(run, *marked, uses):
                continue
            if uid in uses:
                raise transitions.in_use(run, found[0], str(uses[uid]), "end that")
            return
        raise _contended(run, step)

    async def purge_due(
        self, run: RunName, slots: Iterable[pb.CheckpointRecord]
    ) -> list[pb.CheckpointRecord]:
        """Purges those of a run's checkpoints whose time has come and that nothing
        uses, and returns what they were; finishes purges that were cut off.

        One that changes meanwhile is left for the next time.

        Args:
            run: The run.
            slots: What was read, of any state.
        """
        now = self._clock.now()
        due = [slot for slot in slots if transitions.is_due(slot, now)]
        if not due:
            return []
        # 1. What is used stays as it is: marking it would only refuse, for a moment,
        #    to undelete it or to renew its hold.
        uses = await self._uses.of(run)
        due = [s for s in due if s.state == PURGING or s.upload not in uses]
        # 2. PURGING, before the look at the uses that counts.
        marked = await self._mark_due(run, due, now)
        if not marked:
            return []
        # 3. All uses, once more.
        uses = await self._uses.of(run)

        # 4. Free what has none.
        async def settle(
            marked: tuple[pb.CheckpointRecord, Generation],
        ) -> pb.CheckpointRecord | None:
            settled = await self._settle(run, *marked, uses)
            slot, _ = marked
            return slot if settled and slot.upload not in uses else None

        purged = await each(settle, marked)
        return [slot for slot in purged if slot is not None]

    async def _mark_due(
        self, run: RunName, due: Iterable[pb.CheckpointRecord], now: datetime
    ) -> list[tuple[pb.CheckpointRecord, Generation]]:
        """Those that are still due, PURGING."""

        async def mark(
            slot: pb.CheckpointRecord,
        ) -> tuple[pb.CheckpointRecord, Generation] | None:
            found = await self._catalogue.slot(run, slot.step)
            if found is None or not _is_checkpoint(found[0], slot.upload):
                return None
            if not transitions.is_due(found[0], now):
                return None
            return await self._mark(run, *found, etag="")

        return [m for m in await each(mark, due) if m is not None]

    async def _slot(
        self, run: RunName, step: int, uid: str = ""
    ) -> tuple[pb.CheckpointRecord, Generation]:
        """The slot of a checkpoint, deleted or not; with a uid, of that very one."""
        found = await self._catalogue.slot(run, step)
        if found is None or found[0].state not in CHECKPOINTS:
            raise await self._catalogue.missing(CheckpointName(run, step))
        if uid not in ("", found[0].upload):
            raise transitions.replaced(run, found[0], uid)
        return found

    async def _change(
        self,
        run: RunName,
        step: int,
        decide: _Decide,
        kind: "pb.Announcement.Kind.ValueType" = pb.Announcement.KIND_UNSPECIFIED,
        *,
        uid: str = "",
    ) -> pb.CheckpointRecord:
        """Makes one change of a slot, and tells of it where it is of a kind."""
        for _ in range(_TRIES):
            slot, generation = await self._slot(run, step, uid)
            changed = decide(slot)
            if changed is slot:  # as another call may have left it
                await self._bucket.settle(RunPlaces(run).checkpoint(step))
                return slot
            await reach(Failpoint.DELETE_BEFORE_ANNOUNCEMENT)
            if kind:
                changed.sequence = await self._journal.announce(
                    run.namespace,
                    pb.Announcement(
                        kind=kind,
                        run=run.run,
                        step=step,
                        upload=slot.upload,
                        replaces=etag_of(slot),
                    ),
                )
            await reach(Failpoint.DELETE_BEFORE_RECORD)
            if await self._write(run, changed, generation) is None:
                continue
            if kind:
                self._journal.landed(run.namespace)
            await reach(Failpoint.DELETE_BEFORE_REPLY)
            return changed
        raise _contended(run, step)

    async def _mark(
        self,
        run: RunName,
        slot: pb.CheckpointRecord,
        generation: Generation,
        *,
        etag: str,
    ) -> tuple[pb.CheckpointRecord, Generation] | None:
        """The slot, PURGING; None: it changed meanwhile."""
        marked = transitions.purging(run, slot, etag=etag)
        if marked is slot:
            return slot, generation
        await reach(Failpoint.PURGE_BEFORE_MARK)
        written = await self._write(run, marked, generation)
        await reach(Failpoint.PURGE_AFTER_MARK)
        return None if written is None else (marked, written)

    async def _settle(
        self,
        run: RunName,
        slot: pb.CheckpointRecord,
        generation: Generation,
        uses: Iterable[str],
    ) -> bool:
        """Ends PURGING, this way or that; False: the slot changed meanwhile."""
        assert slot.state == PURGING
        if slot.upload in uses:
            settled = transitions.spared(slot)
        else:
            settled = transitions.freed(slot, when=self._clock.now())
        await reach(Failpoint.PURGE_BEFORE_FREE)
        written = await self._write(run, settled, generation)
        await reach(Failpoint.PURGE_BEFORE_REPLY)
        return written is not None

    async def _write(
        self, run: RunName, slot: pb.CheckpointRecord, generation: Generation
    ) -> Generation | None:
        """Writes a slot; None: it changed since it was read."""
        place = RunPlaces(run).checkpoint(slot.step)
        try:
            return await write_record(self._bucket, place, slot, condition=generation)
        except PreconditionError:
            return None

    async def _purge_delay(self, run: RunName) -> timedelta:
        place = layout.run_record(run)
        found = await read_record(self._bucket, place, pb.RunRecord)
        if found is None or not found[0].HasField("purge_delay"):
            return DEFAULT_PURGE_DELAY
        return found[0].purge_delay.ToTimedelta()


def _is_checkpoint(slot: pb.CheckpointRecord, uid: str) -> bool:
    return slot.state in CHECKPOINTS and slot.upload == uid


def _contended(run: RunName, step: int) -> ConflictError:
    return ConflictError(
        f"{run}@{step}: others changed it {_TRIES} times meanwhile; try again",
        run=str(run),
        step=str(step),
    )
