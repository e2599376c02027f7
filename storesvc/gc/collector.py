"""Collection: one pass over a run, which ends what has no more use.

In this order, so that a pass that is cut off anywhere leaves nothing that a later
one cannot go on with:

1. Uploads whose lease is over are aborted; but where a slot was put back to before
   its commit (``history``), the pass ends here.
2. The retention policy is applied.
3. Deleted checkpoints whose time has come are purged.
4. The run is read as it is then, and ``mark`` says what is garbage. The steps
   before need no such read, so that they go on in a run that never holds still.
5. Garbage is deleted: what points to data files, data files, what no list shows of
   uploads that are gone, records of uploads.
6. FREE slots are emptied, once no new epoch can be one of theirs.
7. Holds that are over, and tags that were deleted, go.

Passes of several processes beside each other do no harm: what is garbage stays so, and
each record is deleted on the condition that it is still what was judged.
"""

import logging
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

from storesvc.catalog.catalog import Catalogue
from storesvc.catalog.disk_reserve import Reserve
from storesvc.catalog.journal import Journal
from storesvc.catalog.lease_clock import Observations
from storesvc.catalog.runs import Runs
from storesvc.catalog.slots import FREE
from storesvc.clock import Clock
from storesvc.errors import StorageDeniedError, StorageUnavailableError, StoreError
from storesvc.failpoints import Failpoint, reach
from storesvc.format.names import RunName
from storesvc.gc import mark
from storesvc.gc.expiry import Ending, Endings
from storesvc.gc.history import History
from storesvc.gc.lease_expiry import Expiry
from storesvc.gc.mark import Snapshot
from storesvc.gc.run_state import Snapshots
from storesvc.gc.sweep import Garbage, Search
from storesvc.lifecycle.checkpoints import CheckpointLifecycle
from storesvc.lifecycle.references import Reference, References
from storesvc.retention.enforcement import Retaining
from storesvc.storage.bounded_gather import each
from storesvc.storage.bucket import Bucket, Generation, PreconditionError

DEFAULT_GRACE: Final = timedelta(hours=1)
"""How long ago something must have lost its use: readers without a hold go on."""

_RUNS_UNANSWERED: Final = 3
"""Runs in a row whose storage did not answer, after which the others are left."""

_DELETES_TOLD: Final = 256
"""Deletions after which progress is told."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a pass over a run has done so far, or would do."""

    run: RunName
    is_done: bool = False
    """Whether nothing more comes."""
    aborted_uploads: int = 0
    deleted_checkpoints: int = 0
    purged_checkpoints: int = 0
    garbage_objects: int = 0
    deleted_objects: int = 0
    postponed: str = ""
    """Why something was left for the next time."""
    is_unavailable: bool = False
    """Whether that is because the storage did not answer, or denied it."""

    def after(self, endings: Endings) -> "Progress":
        """Returns the progress once something ended."""
        return replace(
            self,
            aborted_uploads=len(endings.aborted),
            deleted_checkpoints=len(endings.deleted),
            purged_checkpoints=len(endings.purged),
        )

    def failed(self, error: StoreError) -> "Progress":
        """Returns the progress where the rest is left for the next time; other runs
        go on."""
        _log.warning("%s: its collection is postponed: %s", self.run, error)
        return replace(
            self,
            postponed=str(error),
            is_unavailable=isinstance(
                error, StorageDeniedError | StorageUnavailableError
            ),
        )

    def knowing(
        self, garbage: Garbage, grace: timedelta, lost: Mapping[str, Reference]
    ) -> "Progress":
        """Returns the progress once the garbage was found."""
        kept = [upload for upload in garbage.marks.waiting if upload in lost]
        count = len(garbage.marks.waiting) - len(kept)
        uploads = "1 upload" if count == 1 else f"{count} uploads"
        reasons = [f"{uploads} ended less than {grace} ago"] if count else []
        reasons += [
            f"upload {upload} lost its step to another one, and {lost[upload]} names "
            "it; put the record of its step back, or delete that"
            for upload in kept
        ]
        return replace(self, garbage_objects=len(garbage), postponed="; ".join(reasons))


class Patience:
    """With a storage that does not answer, or denies us, over the runs of a pass: it
    ends after a few in a row, because the others would meet the same, each for as long
    as a storage is waited for."""

    def __init__(self) -> None:
        self._unanswered = 0

    @property
    def is_over(self) -> bool:
        """Whether the other runs are left for the next time."""
        return self._unanswered >= _RUNS_UNANSWERED

    def note(self, progress: Progress) -> None:
        """Takes note of how the pass over a run ended."""
        if progress.is_done:
            self._unanswered = self._unanswered + 1 if progress.is_unavailable else 0

    def left(self, run: RunName) -> Progress:
        """Returns the progress in a run that is left."""
        return Progress(
            run=run,
            is_done=True,
            postponed=f"the storage did nothing for {_RUNS_UNANSWERED} runs in a "
            "row before this one; collect again later",
            is_unavailable=True,
        )


class Collector:
    """Collects the garbage of the runs of a bucket."""

    def __init__(
        self,
        bucket: Bucket,
        catalogue: Catalogue,
        runs: Runs,
        retaining: Retaining,
        lifecycle: CheckpointLifecycle,
        references: References,
        journal: Journal,
        reserve: Reserve,
        *,
        clock: Clock,
    ) -> None:
        self._bucket = bucket
        self._catalogue = catalogue
        self._runs = runs
        self._journal = journal
        self._reserve = reserve
        seen = Observations()
        self._snapshots = Snapshots(bucket, catalogue)
        expiry = Expiry(bucket, catalogue, seen, clock=clock)
        self._ending = Ending(
            bucket,
            expiry,
            retaining,
            lifecycle,
            references,
            History(catalogue, journal, references),
            reserve,
            clock=clock,
        )
        self._search = Search(
            bucket, catalogue, self._snapshots, expiry, references, seen, clock=clock
        )

    async def collect(
        self, run: RunName, *, grace: timedelta
    ) -> AsyncGenerator[Progress, None]:
        """Makes a pass over a run, and yields how far it is."""
        progress = Progress(run=run)
        try:
            await reach(Failpoint.COLLECT_BEFORE_LIST)
            seen = await self._snapshots.look(run)
            await reach(Failpoint.COLLECT_BEFORE_ENDINGS)
            endings = await self._ending.apply(run, seen)
            progress = progress.after(endings)
            yield progress
            if endings.slots:
                # What came since may use what has lost its use: look again.
                seen = await self._snapshots.look(run)
            snapshot = await self._snapshots.settled(seen)
            await reach(Failpoint.COLLECT_BEFORE_MARKS)
            lost = await self._search.lost(snapshot)
            over = self._search.over(snapshot, grace) - lost.keys()
            garbage = await self._search.find(snapshot, over)
            progress = progress.knowing(garbage, grace, lost)
            await reach(Failpoint.COLLECT_BEFORE_DELETES)
            yield progress
            async for count in self._delete(snapshot, garbage):
                progress = replace(progress, deleted_objects=count)
                yield progress
            await self._reserve.put_back()
        except StoreError as e:
            progress = progress.failed(e)
        await reach(Failpoint.COLLECT_BEFORE_REPLY)
        yield replace(progress, is_done=True)

    async def preview(
        self, run: RunName, *, grace: timedelta
    ) -> AsyncGenerator[Progress, None]:
        """Yields what ``collect`` would do, and changes nothing."""
        progress = Progress(run=run)
        try:
            seen = await self._snapshots.look(run)
            endings = await self._ending.preview(run, seen)
            progress = progress.after(endings)
            snapshot = await self._snapshots.settled(seen)
            lost = await self._search.lost(snapshot)
            over = self._search.over(snapshot, grace)
            after = snapshot.with_slots(endings.slots)
            if not grace:
                over |= mark.ended(mark.fates(after))
            garbage = await self._search.find(after, over - lost.keys())
            progress = progress.knowing(garbage, grace, lost)
        except StoreError as e:
            progress = progress.failed(e)
        yield replace(progress, is_done=True)

    async def retain(self, run: RunName) -> None:
        """Applies the retention policy of a run, if it has one, and nothing else."""
        await self._ending.retain(run)

    async def trim(self, namespaces: Iterable[str]) -> None:
        """Deletes the oldest announcements of namespaces."""
        for namespace in namespaces:
            await self._reserve.spent_on(self._journal.trim, namespace)

    async def _delete(
        self, snapshot: Snapshot, garbage: Garbage
    ) -> AsyncGenerator[int, None]:
        """Deletes garbage, and yields how many objects are gone."""
        count, marks = 0, garbage.marks
        # What no list shows goes before what this pass knew its uploads by: one that
        # is cut off here is repeated.
        prefixes = [p for gone in marks.gone for p in snapshot.places.all_of(gone)]
        for delete, places in (
            (self._delete_place, marks.garbage),
            (self._delete_below, prefixes),
            (self._delete_place, marks.records),
        ):
            for at in range(0, len(places), _DELETES_TOLD):
                part = places[at : at + _DELETES_TOLD]
                await each(delete, part)
                count += len(part) if places is not prefixes else 0
                yield count
        count += await self._empty(snapshot, marks.free_steps)
        count += await self._delete_unchanged({**garbage.holds, **garbage.tags})
        yield count

    async def _delete_place(self, place: str) -> None:
        await reach(Failpoint.COLLECT_BEFORE_DELETE)
        await self._reserve.spent_on(self._bucket.delete, place)

    async def _delete_below(self, prefix: str) -> None:
        await self._reserve.spent_on(self._bucket.delete_below, prefix)

    async def _empty(self, snapshot: Snapshot, steps: Iterable[int]) -> int:
        """Empties FREE slots, and returns how many."""
        run = snapshot.places.name

        async def still_free(step: int) -> tuple[str, int, Generation] | None:
            found = await self._catalogue.slot(run, step)
            if found is None or found[0].state != FREE:
                return None
            if found[0].upload != snapshot.slots[step].upload:
                return None
            return snapshot.places.checkpoint(step), found[0].epoch, found[1]

        found = [slot for slot in await each(still_free, steps) if slot is not None]
        if not found:
            return 0
        floor = max(epoch for _, epoch, _ in found)
        await reach(Failpoint.COLLECT_BEFORE_FLOOR)
        await self._reserve.spent_on(self._runs.raise_epoch_floor, run, floor)
        return await self._delete_unchanged({place: g for place, _, g in found})

    async def _delete_unchanged(self, records: Mapping[str, Generation]) -> int:
        """Deletes records that are what was read, and returns how many."""

        async def delete(record: tuple[str, Generation]) -> bool:
            place, generation = record
            await reach(Failpoint.COLLECT_BEFORE_EMPTYING)
            try:
                await self._reserve.spent_on(
                    self._bucket.delete, place, generation=generation
                )
            except PreconditionError:
                return False  # used again
            return True

        return sum(await each(delete, records.items()))
