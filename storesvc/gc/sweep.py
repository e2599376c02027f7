"""Deletes the garbage of a run, in an order that is safe to cut off anywhere.

1. Objects that refer to data files, then data files: no reader finds a file table whose
   files are gone.
2. Unlisted leftovers of the uploads of which nothing else remains. They go before the
   objects by which a later pass would find these uploads again.
3. Records of uploads.
4. FREE slots, each after the run's epoch floor was raised to its epoch, so that epochs
   never start again; on the condition that the slot is unchanged.
5. Expired holds and the records of deleted tags, on the same condition.
"""

from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Final

from storesvc.catalog.catalog import Catalog
from storesvc.catalog.rollbacks import Reserve
from storesvc.catalog.runs import Runs
from storesvc.catalog.slots import FREE
from storesvc.failpoints import Failpoint, reach
from storesvc.gc.garbage import Garbage
from storesvc.gc.mark import RunState
from storesvc.storage.bucket import Bucket, Generation, PreconditionError
from storesvc.storage.hedged_calls import each

_PROGRESS_DELETES: Final = 256
"""Deletions between two reports of progress."""


class Sweeper:
    """Deletes the garbage of the runs of a bucket."""

    def __init__(
        self, bucket: Bucket, catalog: Catalog, runs: Runs, reserve: Reserve
    ) -> None:
        self._bucket = bucket
        self._catalog = catalog
        self._runs = runs
        self._reserve = reserve

    async def delete(
        self, state: RunState, garbage: Garbage
    ) -> AsyncGenerator[int, None]:
        """Deletes garbage; yields the number of objects deleted so far."""
        count, marks = 0, garbage.marks
        prefixes = [p for gone in marks.gone for p in state.places.all_of(gone)]
        for delete, places in (
            # 1. Tables before data files (``mark`` sorts them): a pass that is cut off
            #    in between leaves files that the next list shows, and no table that
            #    names missing files.
            (self._delete_object, marks.garbage),
            # 2. Before the records: the next pass knows of these uploads only by them.
            (self._delete_below, prefixes),
            # 3. After all objects: without its record an upload that left objects
            #    behind would have to be observed for a grace period again.
            (self._delete_object, marks.records),
        ):
            for at in range(0, len(places), _PROGRESS_DELETES):
                part = places[at : at + _PROGRESS_DELETES]
                await each(delete, part)
                count += len(part) if places is not prefixes else 0
                yield count
        # 4. After the records: an upload with a record but no slot counts as begun, so
        #    a pass that is cut off in between would keep it again.
        count += await self._delete_free_slots(state, marks.free_steps)
        # 5. In any order: no other object is found through these.
        count += await self._delete_unchanged({**garbage.holds, **garbage.tags})
        yield count

    async def _delete_object(self, place: str) -> None:
        await reach(Failpoint.COLLECT_BEFORE_DELETE)
        await self._reserve.spent_on(self._bucket.delete, place)

    async def _delete_below(self, prefix: str) -> None:
        await self._reserve.spent_on(self._bucket.delete_below, prefix)

    async def _delete_free_slots(self, state: RunState, steps: Iterable[int]) -> int:
        """Deletes FREE slots; returns their number."""
        run = state.places.name

        async def still_free(step: int) -> tuple[str, int, Generation] | None:
            found = await self._catalog.slot(run, step)
            if found is None or found[0].state != FREE:
                return None
            if found[0].upload != state.slots[step].upload:
                return None
            return state.places.checkpoint(step), found[0].epoch, found[1]

        found = [slot for slot in await each(still_free, steps) if slot is not None]
        if not found:
            return 0
        # The floor first: after a crash in the other order the epochs of the step would
        # begin at 1 again.
        floor = max(epoch for _, epoch, _ in found)
        await reach(Failpoint.COLLECT_BEFORE_FLOOR)
        await self._reserve.spent_on(self._runs.raise_epoch_floor, run, floor)
        return await self._delete_unchanged({place: g for place, _, g in found})

    async def _delete_unchanged(self, records: Mapping[str, Generation]) -> int:
        """Deletes records with the generation read; returns their number."""

        async def delete(record: tuple[str, Generation]) -> bool:
            place, generation = record
            await reach(Failpoint.COLLECT_BEFORE_EMPTYING)
            try:
                await self._reserve.spent_on(
                    self._bucket.delete, place, generation=generation
                )
            except PreconditionError:
                return False  # changed, so in use again
            return True

        return sum(await each(delete, records.items()))
