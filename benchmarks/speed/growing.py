"""``growth``: memory over many saves and restores in one process."""

import gc
import os
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.speed.meters import family, memory_mib
from benchmarks.speed.ours import Ours
from benchmarks.speed.side_by_side import bytes_of, check, target_of
from benchmarks.speed.states import States

WARM: Final = 10
CYCLES: Final = 50

AROUND: Final = 5
"""Cycles per median, as the memory that the allocator keeps varies."""


def growth(contender: Ours, states: States, directory: Path) -> dict[str, Any]:
    """Returns the memory of client and server around the 10th and the 50th cycle of a
    save, a restore, and the removal of the step before."""
    del directory
    changing = states.whole()
    target = target_of(changing.state)
    resident: dict[str, list[float]] = {"client": [], "server": []}
    for step in range(1, CYCLES + 1):
        state = changing.change()
        contender.save(step, state)
        check(state, contender.restore(step, target), target)
        if step > 1:
            contender.remove(step - 1)
        gc.collect()
        resident["client"].append(memory_mib([os.getpid()]))
        resident["server"].append(memory_mib(family(contender.pids)))
    found: dict[str, Any] = {"bytes": bytes_of(changing.state)}
    for side, mib in resident.items():
        before, after = (median(mib[at - AROUND : at]) for at in (WARM, CYCLES))
        found |= {f"{side}_mib_10": before, f"{side}_mib_50": after}
        found[f"{side}_growth_mib"] = after - before
    return found
