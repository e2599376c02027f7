"""Reads the slots of a run: one by its step, or the newest.

A list returns the slots, and reads then return their states, one after another. While
they run, a skipped slot may be committed and one below it deleted, so that the result
was the newest at no time. So skipped slots are read again, until none has changed.
"""

import asyncio
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from storesvc.catalog.records import damaged, read_record
from storesvc.catalog.rollbacks import Rollbacks
from storesvc.catalog.row_lookup import or_damage
from storesvc.catalog.slots import state_of
from storesvc.errors import ConflictError, CorruptDataError
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName
from storesvc.storage.bucket import Bucket, Generation
from storesvc.storage.hedged_calls import AT_ONCE, each
from storesvc_proto.v1 import bucket_pb2 as pb

_PASSES: Final = 10
"""Passes after which a result that may be stale is returned."""

_MAX_PASSES: Final = 50
_PAUSE_SECONDS: Final = 0.01
"""Pause after the first empty pass; each pause is longer than the last one."""


@dataclass(frozen=True, slots=True)
class _Pass:
    """One pass over the slots of a run, from the newest down."""

    found: Sequence[tuple[int, pb.CheckpointRecord | CorruptDataError]]
    """Matching slots by step; a damaged one may have any state."""
    skipped: Mapping[int, Generation | None]
    """Generations of the other slots above the last matching one."""


class SlotReader:
    """Reads the slots of a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._rollbacks = Rollbacks(bucket)

    async def slot(
        self, run: RunName, step: int
    ) -> tuple[pb.CheckpointRecord, Generation] | None:
        """Returns the slot of a step and its generation, committed or not.

        Raises:
            CorruptDataError: The slot is damaged, or belongs to another step.
            FormatUnsupportedError: This release does not know the slot's state.
        """
        path, of = RunPaths(run).checkpoint(step), f"{run}@{step}"
        try:
            found = await read_record(self._bucket, path, pb.CheckpointRecord, of=of)
            if found is not None and found[0].step != step:
                how = f"expected step {step}, got {found[0].step}"
                raise damaged(path, how, of=of)
        except CorruptDataError as e:
            raise _isolated(e, run, step) from e
        if found is not None:
            state_of(found[0])
        return found

    async def checked(
        self, run: RunName, step: int
    ) -> tuple[pb.CheckpointRecord, Generation] | None:
        """Returns the slot of a step and its generation, for readers of checkpoints.

        Raises:
            CorruptDataError: The slot is damaged, belongs to another step, or was
                rolled back to a version before its commit.
        """
        found = await self.slot(run, step)
        damage = await self._rollbacks.damage(run, found)
        if damage is not None:
            raise _isolated(damage, run, step)
        return found

    async def steps(
        self, run: RunName, *, after: int | None = None, before: int | None = None
    ) -> list[int]:
        """Returns the steps that have a slot, newest first.

        Args:
            run: The run.
            after: Returns only higher steps.
            before: Returns only lower steps.
        """
        places = RunPaths(run)
        found = await self._bucket.list(
            places.checkpoints,
            after="" if after is None else places.checkpoint(after),
        )
        steps = map(places.step_of, reversed(found))
        return [s for s in steps if s is not None and (before is None or s < before)]

    async def newest(
        self, run: RunName, states: Container[int], *, before: int | None, limit: int
    ) -> Sequence[tuple[int, pb.CheckpointRecord | CorruptDataError]]:
        """Returns the newest slots of some states by step, or errors of damaged slots.

        A slot that matched during the whole call is never missing.

        Args:
            run: The run.
            states: States of the slots to return.
            before: Returns only slots of lower steps.
            limit: Maximum number of slots.

        Raises:
            ConflictError: Slots changed during each pass, and none was found.
        """
        for passes in count(1):
            steps = await self.steps(run, before=before)
            one = await self._pass(run, steps, states, limit)
            if not one.skipped:
                break
            above = one.found[-1][0] if len(one.found) == limit else None
            later = await self.steps(run, after=above, before=before)
            if set(later) <= set(steps) and await self._is_unchanged(run, one.skipped):
                break
            # In a run that changes all the time, a result that may be stale is better
            # than none; "no checkpoint" must be certain.
            if one.found and passes >= _PASSES:
                break
            if passes >= _MAX_PASSES:
                raise ConflictError(
                    f"{run}: its checkpoints changed during each of {passes} reads; "
                    "try again",
                    run=str(run),
                )
            if not one.found:
                await asyncio.sleep(passes * _PAUSE_SECONDS)
        return one.found

    async def _pass(
        self, run: RunName, steps: Sequence[int], states: Container[int], limit: int
    ) -> _Pass:
        found: list[tuple[int, pb.CheckpointRecord | CorruptDataError]] = []
        skipped: dict[int, Generation | None] = {}
        # Usually the first slots match. Others are reservations of saves in progress,
        # or freed, and are read in larger batches.
        count = limit
        while steps and len(found) < limit:
            batch, steps = steps[:count], steps[count:]
            slots = await each(lambda step: or_damage(self.checked(run, step)), batch)
            for step, slot in zip(batch, slots, strict=True):
                if len(found) == limit:
                    break
                if isinstance(slot, CorruptDataError):
                    found.append((step, slot))
                elif slot is not None and slot[0].state in states:
                    found.append((step, slot[0]))
                else:
                    skipped[step] = slot and slot[1]
            count = max(limit - len(found), AT_ONCE)
        return _Pass(found, skipped)

    async def _is_unchanged(
        self, run: RunName, skipped: Mapping[int, Generation | None]
    ) -> bool:
        """Returns whether slots still have their generations."""
        slots = await each(lambda step: or_damage(self.slot(run, step)), skipped)
        for before, slot in zip(skipped.values(), slots, strict=True):
            if isinstance(slot, CorruptDataError) or (slot and slot[1]) != before:
                return False
        return True


def _isolated(damage: CorruptDataError, run: RunName, step: int) -> CorruptDataError:
    text = f"{damage}; other steps can be used as before"
    return CorruptDataError(text, run=str(run), step=str(step))
