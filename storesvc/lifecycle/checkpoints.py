"""Lifecycle of committed checkpoints: update, delete, undelete, purge.

``catalog.slots`` decides the next record of a slot; this module reads the slot, asks
for it, and writes the record on the condition that the slot is unchanged. If it
changed, the update is repeated a few times.

A purge has three steps, so that a tag, a hold or an upload that begins to use the
checkpoint at the same time is never left without it:

1. Set the slot to PURGING.
2. Look for references (``holds.References``).
3. Free the slot, or set it back to DELETED if there is a reference.

A purge that was interrupted is completed by the next purge of the checkpoint or the
next garbage collection.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeAlias, TypeVar

from storesvc.auth.call import principal_name
from storesvc.catalog import slots
from storesvc.catalog.catalog import Catalog
from storesvc.catalog.journal import Journal
from storesvc.catalog.records import (
    read_record,
    record_etag,
    update_record,
    write_record,
)
from storesvc.catalog.slots import CHECKPOINTS, PURGING, Change
from storesvc.clock import Clock
from storesvc.failpoints import Failpoint, reach
from storesvc.format import layout
from storesvc.format.layout import RunPaths
from storesvc.format.names import CheckpointName, RunName
from storesvc.lifecycle.holds import References
from storesvc.storage.bucket import Bucket, Generation, PreconditionError
from storesvc.storage.requests import gather_each
from storesvc_proto.v1 import bucket_pb2 as pb

DEFAULT_PURGE_DELAY: Final = timedelta(days=3)
"""Time for which a deleted checkpoint can be undeleted, unless the run or the request
sets another."""

MAX_PURGE_DELAY: Final = timedelta(days=365)
"""Maximum purge delay."""

_Slot: TypeAlias = tuple[pb.CheckpointRecord, Generation]
T = TypeVar("T")


@dataclass(eq=False, repr=False)
class CheckpointLifecycle:
    """Updates, deletes, undeletes, purges checkpoints, with the contract's errors."""

    _bucket: Bucket
    _catalog: Catalog
    _journal: Journal
    _references: References
    _clock: Clock

    async def update(
        self, run: RunName, step: int, change: Change, *, etag: str, write_id: str
    ) -> pb.CheckpointRecord:
        """Sets labels, metrics or the pin of a checkpoint, and returns its record."""

        def decide(slot: pb.CheckpointRecord) -> pb.CheckpointRecord:
            return slots.update_slot(run, slot, change, etag=etag, write_id=write_id)

        return await self._change(run, step, decide, pb.Announcement.KIND_UPDATE)

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
        """Deletes a checkpoint so that it can be undeleted, and returns its record.

        Args:
            purge_delay: Time for which it can be undeleted; None: the setting of the
                run.
            etag: Etag that the caller read; "": none.
            uid: Uid of the checkpoint; "": any.
        """
        # A tag that is set at the same time may be missed here: it still keeps the
        # checkpoint from being purged.
        tagged = await self._references.find_tags(run)
        if purge_delay is None:
            place = layout.run_record(run)
            found = await read_record(self._bucket, place, pb.RunRecord)
            purge_delay = find_purge_delay(found[0] if found else pb.RunRecord())
        now = self._clock.now()

        def decide(slot: pb.CheckpointRecord) -> pb.CheckpointRecord:
            return slots.delete_slot(
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
        def decide(slot: pb.CheckpointRecord) -> pb.CheckpointRecord:
            return slots.undelete_slot(run, slot, write_id=write_id)

        kind = pb.Announcement.KIND_UNDELETE
        return await self._change(run, step, decide, kind, uid=uid)

    async def purge(self, run: RunName, step: int, *, etag: str, uid: str = "") -> None:
        """Removes a deleted checkpoint permanently, and frees its step.

        Its chunks remain until garbage collection deletes them.
        """
        # The uid before the attempts: a later one must not purge a checkpoint that was
        # committed after an earlier one had freed the step.
        uid = (await self._slot(run, step, uid))[0].upload

        async def attempt() -> None:
            found = await self._catalog.slot(run, step)
            if found is None or not _is_checkpoint(found[0], uid):
                return  # another call has purged it
            # 1. Set PURGING: a reference that is added from now on will see it.
            marked = await self._mark(run, *found, etag=etag)
            # 2. Look for references, which were added before. In the other order a tag
            #    that is set between the two would name a freed checkpoint, and neither
            #    side would notice.
            references = await self._references.find_references(run)
            # 3. Free the slot, or set it back, before any error: a slot that stays
            #    PURGING cannot be undeleted until another purge ends it.
            await self._end_purge(run, *marked, references)
            if uid in references:
                raise slots.in_use(run, found[0], str(references[uid]), "end that")

        await self._update(run, step, attempt)

    async def purge_due(
        self, run: RunName, given: Iterable[pb.CheckpointRecord]
    ) -> list[pb.CheckpointRecord]:
        """Purges the checkpoints of a run whose purge time has passed and that have no
        reference, and returns their records; completes interrupted purges.

        A checkpoint that changes in the meantime is left for the next call.
        """
        now = self._clock.now()
        due = [slot for slot in given if slots.is_due(slot, now)]
        if not due:
            return []
        # 1. Leave referenced checkpoints alone: while marked, they could not be
        #    undeleted, nor their holds renewed.
        references = await self._references.find_references(run)
        due = [s for s in due if s.state == PURGING or s.upload not in references]

        async def mark(slot: pb.CheckpointRecord) -> _Slot | None:
            found = await self._catalog.slot(run, slot.step)
            if found is None or not _is_checkpoint(found[0], slot.upload):
                return None
            if not slots.is_due(found[0], now):
                return None
            try:
                return await self._mark(run, *found, etag="")
            except PreconditionError:
                return None

        # 2. Set PURGING: a reference that is added from now on will see it.
        marked = [m for m in await gather_each(mark, due) if m is not None]
        if not marked:
            return []
        # 3. Look for references again: only what is seen after step 2 counts.
        references = await self._references.find_references(run)

        async def end_purge(marked: _Slot) -> pb.CheckpointRecord | None:
            slot, generation = marked
            try:
                await self._end_purge(run, slot, generation, references)
            except PreconditionError:
                return None
            return slot if slot.upload not in references else None

        # 4. Free the slots without a reference, and set the others back.
        purged = await gather_each(end_purge, marked)
        return [slot for slot in purged if slot is not None]

    async def _slot(self, run: RunName, step: int, uid: str = "") -> _Slot:
        """Returns the slot of a checkpoint, deleted or not, that has the given uid."""
        found = await self._catalog.slot(run, step)
        if found is None or found[0].state not in CHECKPOINTS:
            raise await self._catalog.missing(CheckpointName(run, step))
        if uid not in ("", found[0].upload):
            raise slots.replaced_error(run, found[0], uid)
        return found

    async def _change(
        self,
        run: RunName,
        step: int,
        decide: Callable[[pb.CheckpointRecord], pb.CheckpointRecord],
        kind: "pb.Announcement.Kind.ValueType",
        *,
        uid: str = "",
    ) -> pb.CheckpointRecord:
        """Announces a change of a slot, makes it, and returns the record."""

        async def attempt() -> pb.CheckpointRecord:
            slot, generation = await self._slot(run, step, uid)
            changed = decide(slot)
            if changed is slot:  # an earlier try wrote it, perhaps not yet durable
                await self._bucket.settle(RunPaths(run).checkpoint(step))
                return slot
            changed.change_principal = principal_name()
            # 1. Journal before slot: after a crash in between, a watch finds that the
            #    change was not made. In the other order it would never see a change
            #    that was. The slot was read before: by ``replaces`` a watch finds out
            #    when the change can no longer be made.
            await reach(Failpoint.DELETE_BEFORE_ANNOUNCEMENT)
            number = await self._journal.announce(
                run.namespace,
                pb.Announcement(
                    kind=kind,
                    run=run.run,
                    step=step,
                    upload=slot.upload,
                    replaces=record_etag(slot),
                ),
            )
            if kind == pb.Announcement.KIND_UPDATE:
                changed.update_sequence = number
            else:
                changed.sequence = number
            # 2. The slot, on the condition that it is unchanged since it was read:
            #    otherwise a decision on an old state could undo another call's.
            await reach(Failpoint.DELETE_BEFORE_RECORD)
            await self._write(run, changed, generation)
            # 3. Only now: a watcher reads the slot when it is notified.
            self._journal.notify_landed(run.namespace)
            await reach(Failpoint.DELETE_BEFORE_REPLY)
            return changed

        return await self._update(run, step, attempt)

    async def _update(
        self, run: RunName, step: int, attempt: Callable[[], Awaitable[T]]
    ) -> T:
        return await update_record(
            attempt, record=f"{run}@{step}", run=str(run), step=str(step)
        )

    async def _mark(
        self,
        run: RunName,
        slot: pb.CheckpointRecord,
        generation: Generation,
        *,
        etag: str,
    ) -> _Slot:
        """Sets a slot to PURGING, unless it is, and returns it."""
        marked = slots.purging(run, slot, etag=etag)
        if marked is slot:
            return slot, generation
        await reach(Failpoint.PURGE_BEFORE_MARK)
        written = await self._write(run, marked, generation)
        await reach(Failpoint.PURGE_AFTER_MARK)
        return marked, written

    async def _end_purge(
        self,
        run: RunName,
        slot: pb.CheckpointRecord,
        generation: Generation,
        references: Iterable[str],
    ) -> None:
        """Frees a PURGING slot, or sets it back to DELETED if it has a reference."""
        assert slot.state == PURGING
        if slot.upload in references:
            ended = slots.spare_slot(slot)
        else:
            ended = slots.free_slot(slot, when=self._clock.now())
        await reach(Failpoint.PURGE_BEFORE_FREE)
        await self._write(run, ended, generation)
        await reach(Failpoint.PURGE_BEFORE_REPLY)

    async def _write(
        self, run: RunName, slot: pb.CheckpointRecord, generation: Generation
    ) -> Generation:
        place = RunPaths(run).checkpoint(slot.step)
        return await write_record(self._bucket, place, slot, condition=generation)


def find_purge_delay(run: pb.RunRecord) -> timedelta:
    """Returns the time for which deleted checkpoints of a run can be undeleted."""
    if run.HasField("purge_delay"):
        return run.purge_delay.ToTimedelta()
    return DEFAULT_PURGE_DELAY


def _is_checkpoint(slot: pb.CheckpointRecord, uid: str) -> bool:
    return slot.state in CHECKPOINTS and slot.upload == uid
