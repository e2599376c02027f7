"""Compares a run with its history, before a pass of the collector changes anything.

What the collector calls unfinished is ended once its lease is over, and then deleted.
So an upload that was committed must not look unfinished because an earlier version of
its slot was put back. ``rollbacks`` says what shows that; where anything does, the pass
over the run is postponed, and nothing of it ends or is deleted.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Final

from storesvc.catalog.catalog import Catalogue
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
from storesvc.gc.lease_expiry import Expired
from storesvc.gc.mark import Fate, Snapshot
from storesvc.lifecycle.references import References
from storesvc_proto.v1 import bucket_pb2 as pb

_ONLY_COMMITTED: Final = {
    pb.Announcement.KIND_DELETE: "deletion",
    pb.Announcement.KIND_UNDELETE: "undeletion",
    pb.Announcement.KIND_TAG: "tag",
    pb.Announcement.KIND_UNTAG: "removed tag",
}
"""Changes that are announced only of checkpoints. A commit is announced before it is
made, so that its announcement alone does not show that it was."""


class History:
    """Compares the runs of a bucket with their histories."""

    def __init__(
        self, catalogue: Catalogue, journal: Journal, references: References
    ) -> None:
        self._catalogue = catalogue
        self._journal = journal
        self._references = references

    async def check(
        self, run: RunName, snapshot: Snapshot, expired: Sequence[Expired]
    ) -> None:
        """Refuses a run one of whose slots was put back.

        Args:
            run: The run.
            snapshot: What was read of it.
            expired: Its uploads whose lease is over.

        Raises:
            CorruptDataError: Naming the slot, and what shows that it was put back.
        """
        known = mark.fates(snapshot)
        await self._check_orphans(run, snapshot, known)
        unfinished = mark.unfinished(known)
        if not unfinished:
            return
        named = await self._references.named(run)
        announced = await self._announced(run, expired)
        for upload in unfinished:
            step = mark.step_of(snapshot, upload, known[upload])
            slot, why = snapshot.slots.get(step), ""
            objects = snapshot.objects.get(upload, ())
            if upload in named:
                why = f"{named[upload]} names it"
            elif slot is not None:  # else somebody may have given the step up
                why = contradiction(
                    snapshot.places, upload, objects, owns_slot=slot.upload == upload
                ) or announced.get(upload, "")
            # What was read after the slot may be of a commit that came after it.
            if not why or not await self._is_still(run, step, slot):
                continue
            if slot is None:
                raise slot_missing(run, step, str(named[upload]))
            raise rolled_back(run, step, upload, why)

    async def _check_orphans(
        self, run: RunName, snapshot: Snapshot, known: Mapping[str, Fate]
    ) -> None:
        """Refuses a slot that is older than the commit of an upload that it does not
        name, which was not deleted since. Of the upload no record is left that says so:
        the journal does."""
        orphans = {
            upload
            for upload in mark.orphans(snapshot, known)
            if has_manifest(snapshot.places, upload, snapshot.objects.get(upload, ()))
        }
        if not orphans:
            return
        for upload, (number, one) in (await self._last(run, orphans)).items():
            slot = snapshot.slots.get(one.step)
            if slot is None or one.kind == pb.Announcement.KIND_DELETE:
                continue  # given up, or purged
            stamp = slot.delete_time if slot.state == FREE else slot.create_time
            is_older = stamp.ToDatetime(UTC) <= one.create_time.ToDatetime(UTC)
            if is_older and await self._is_still(run, one.step, slot):
                why = f"announcement {number} of the journal is of it, and later"
                raise rolled_back(run, one.step, upload, why)

    async def _last(
        self, run: RunName, uploads: Collection[str]
    ) -> dict[str, tuple[int, pb.Announcement]]:
        """The last announced change of each of some uploads, as far as the journal goes
        back."""
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
        self, run: RunName, expired: Sequence[Expired]
    ) -> dict[str, str]:
        """Returns how the journal shows that expired uploads were committed."""
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
        found = await self._catalogue.slot(run, step)
        return (found and found[0]) == seen
