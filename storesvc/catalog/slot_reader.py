"""Reading the slots of a run: one, or the newest.

A list names the slots, and reads then tell their states, one after the other. What
was passed over may be committed meanwhile and what comes below it deleted, so that
what is found was the newest at no time. So the slots that were passed over are looked
at again, until they are seen to have not changed.
"""

import asyncio
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from storesvc.catalog.records import damaged, or_damage, read_record
from storesvc.catalog.rollbacks import Rollbacks
from storesvc.catalog.slots import state_of
from storesvc.errors import ConflictError, CorruptDataError
from storesvc.format.layout import RunPlaces
from storesvc.format.names import RunName
from storesvc.storage.bounded_gather import AT_ONCE, each
from storesvc.storage.bucket import Bucket, Generation
from storesvc_proto.v1 import bucket_pb2 as pb

_LOOKS: Final = 10
_MAX_LOOKS: Final = 50
_PAUSE_SECONDS: Final = 0.01
"""After the first look that found nothing; longer each time."""


@dataclass(frozen=True, slots=True)
class _Look:
    """Slots of a run, read from the newest down."""

    found: Sequence[tuple[int, pb.CheckpointRecord | CorruptDataError]]
    """Those that were looked for, by step; a damaged one may be of any state."""
    passed: Mapping[int, Generation | None]
    """What other steps held above the last one of them."""


class SlotReads:
    """Those of a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._rollbacks = Rollbacks(bucket)

    async def slot(
        self, run: RunName, step: int
    ) -> tuple[pb.CheckpointRecord, Generation] | None:
        """Returns what a step's slot holds, committed or not.

        Raises:
            CorruptDataError: It holds the slot of another step, or is damaged.
            FormatUnsupportedError: It is in a state that this code does not know.
        """
        place, of = RunPlaces(run).checkpoint(step), f"{run}@{step}"
        try:
            found = await read_record(self._bucket, place, pb.CheckpointRecord, of=of)
            if found is not None and found[0].step != step:
                how = f"expected step {step}, got {found[0].step}"
                raise damaged(place, how, of=of)
        except CorruptDataError as e:
            raise _costs_no_other(e, run, step) from e
        if found is not None:
            state_of(found[0])
        return found

    async def checked(
        self, run: RunName, step: int
    ) -> tuple[pb.CheckpointRecord, Generation] | None:
        """Returns what a step's slot holds, for readers of checkpoints.

        Raises:
            CorruptDataError: It holds the slot of another step, is damaged, or was put
                back to what it was before its commit.
        """
        found = await self.slot(run, step)
        damage = await self._rollbacks.damage(run, found)
        if damage is not None:
            raise _costs_no_other(damage, run, step)
        return found

    async def steps(
        self, run: RunName, *, after: int | None = None, before: int | None = None
    ) -> list[int]:
        """Returns the steps that have a slot, newest first.

        Args:
            run: The run.
            after: Only higher ones.
            before: Only lower ones.
        """
        places = RunPlaces(run)
        found = await self._bucket.list(
            places.checkpoints,
            after="" if after is None else places.checkpoint(after),
        )
        steps = map(places.step_of, reversed(found))
        return [s for s in steps if s is not None and (before is None or s < before)]

    async def newest(
        self, run: RunName, states: Container[int], *, before: int | None, limit: int
    ) -> Sequence[tuple[int, pb.CheckpointRecord | CorruptDataError]]:
        """Returns the newest slots of some states by step, none missing that was there
        throughout; of a damaged one, that.

        Args:
            run: The run.
            states: Which slots.
            before: Only those of lower steps.
            limit: At most so many.
        """
        for looks in count(1):
            steps = await self.steps(run, before=before)
            look = await self._look(run, steps, states, limit)
            if not look.passed:
                break
            above = look.found[-1][0] if len(look.found) == limit else None
            later = await self.steps(run, after=above, before=before)
            if set(later) <= set(steps) and await self._is_still(run, look.passed):
                break
            # In a run that never stands still, something is better than nothing. But
            # nothing is not to be told before it is known.
            if look.found and looks >= _LOOKS:
                break
            if looks >= _MAX_LOOKS:
                raise ConflictError(
                    f"{run}: its checkpoints changed during each of {looks} looks; try "
                    "again",
                    run=str(run),
                )
            if not look.found:
                await asyncio.sleep(looks * _PAUSE_SECONDS)
        return look.found

    async def _look(
        self, run: RunName, steps: Sequence[int], states: Container[int], limit: int
    ) -> _Look:
        found: list[tuple[int, pb.CheckpointRecord | CorruptDataError]] = []
        passed: dict[int, Generation | None] = {}
        # The newest slots may be reservations of saves that are under way, or freed:
        # mostly the first ones are it, and the others are looked at many at once.
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
                    passed[step] = slot and slot[1]
            count = max(limit - len(found), AT_ONCE)
        return _Look(found, passed)

    async def _is_still(
        self, run: RunName, passed: Mapping[int, Generation | None]
    ) -> bool:
        """Whether steps hold what they held."""
        slots = await each(lambda step: or_damage(self.slot(run, step)), passed)
        for before, slot in zip(passed.values(), slots, strict=True):
            if isinstance(slot, CorruptDataError) or (slot and slot[1]) != before:
                return False
        return True


def _costs_no_other(
    damage: CorruptDataError, run: RunName, step: int
) -> CorruptDataError:
    text = f"{damage}; other steps can be used as before"
    return CorruptDataError(text, run=str(run), step=str(step))
