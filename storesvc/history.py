"""Compares a run with its history, before a pass of the collector changes anything.

What the collector calls unfinished is ended once its lease is over, and then deleted.
So an upload that was committed must not look unfinished because an earlier version of
its slot was put back. ``rollbacks`` says what shows that; where anything does, the pass
over the run is postponed, and nothing of it ends or is deleted.
"""

from collections.abc import Sequence
from contextlib import aclosing
from typing import Final

from storesvc import marking
from storesvc.catalogue import Catalogue
from storesvc.expiry import Expired
from storesvc.format.names import RunName
from storesvc.journal import Journal
from storesvc.marking import Snapshot
from storesvc.rollbacks import contradiction, put_back, removed
from storesvc.uses import Uses
from storesvc_proto.v1 import bucket_pb2 as pb

_ONLY_COMMITTED: Final = {
    pb.Announcement.KIND_DELETE: "deletion",
    pb.Announcement.KIND_UNDELETE: "undeletion",
    pb.Announcement.KIND_TAG: "tag",
    pb.Announcement.KIND_UNTAG: "removed tag",
}
"""What is announced only of what was committed. A commit is announced before it is
made, so that its announcement alone does not show that it was."""


class History:
    """Compares the runs of a bucket with their histories."""

    def __init__(self, catalogue: Catalogue, journal: Journal, uses: Uses) -> None:
        self._catalogue = catalogue
        self._journal = journal
        self._uses = uses

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
        known = marking.fates(snapshot)
        unfinished = marking.unfinished(known)
        if not unfinished:
            return
        named = await self._uses.named(run)
        announced = await self._announced(run, expired)
        for upload in unfinished:
            step = marking.step_of(snapshot, upload, known[upload])
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
                raise removed(run, step, str(named[upload]))
            raise put_back(run, step, upload, why)

    async def _announced(
        self, run: RunName, expired: Sequence[Expired]
    ) -> dict[str, str]:
        """What the journal says of uploads that only a checkpoint can have."""
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
