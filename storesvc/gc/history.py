"""Compares a run with its history before a pass of the collector changes anything.

The collector aborts an unfinished upload once its lease is over, and then deletes its
objects. So a committed upload must not look unfinished because an earlier version of
its slot was restored, for example from a backup. ``rollbacks`` defines the evidence; if
there is any, the pass over the run is postponed and changes nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Final

from storesvc.catalog.catalog import Catalog
from storesvc.catalog.journal import Journal
from storesvc.catalog.rollbacks import (
    contradiction,
    has_manifest,
    rolled_back,
    slot_missing,
)
from storesvc.catalog.slots import FREE
from storesvc.format.names import RunName
from storesvc.gc import mark
from storesvc.gc.lease_expiry import ExpiredUpload
from storesvc.gc.mark import Fate, RunState
from storesvc.lifecycle.references import References
from storesvc_proto.v1 import bucket_pb2 as pb

_ONLY_COMMITTED: Final = {
    pb.Announcement.KIND_DELETE: "deletion",
    pb.Announcement.KIND_UNDELETE: "undeletion",
    pb.Announcement.KIND_TAG: "tag",
    pb.Announcement.KIND_UNTAG: "removed tag",
    pb.Announcement.KIND_UPDATE: "update",
}
"""Changes that are announced only for committed checkpoints. A commit is announced
before it is made, so its announcement alone does not prove it."""


class History:
    """Checks the slots of the runs of a bucket against their histories."""

    def __init__(
        self, catalog: Catalog, journal: Journal, references: References
    ) -> None:
        self._catalog = catalog
        self._journal = journal
        self._references = references

    async def check(
        self, run: RunName, state: RunState, expired: Sequence[ExpiredUpload]
    ) -> None:
        """Rejects a run with a slot that was rolled back.

        Args:
            run: The run.
            state: The state read of it.
            expired: Its uploads whose lease is over.

        Raises:
            CorruptDataError: Names the slot and the evidence of the rollback.
        """
        known = mark.fates(state)
        await self._check_orphans(run, state, known)
        unfinished = mark.unfinished(known)
        if not unfinished:
            return
        named = await self._references.named(run)
        announced = await self._announced(run, expired)
        for upload in unfinished:
            step = mark.step_of(state, upload, known[upload])
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
        """Rejects a slot older than the commit of an upload that it does not name.

        The upload was not deleted since, and has no record: only the journal shows its
        commit.
        """
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

    async def _announced(
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
