"""Measures the search for equal chunks in a save whose leaves have all changed.

    python -m benchmarks reuse [--rounds 40] [--only mesh inner ...]

Saves a state in turns into two runs of one embedded store, with ``snapshot="none"``:
on the save before, as a job does that calls ``save`` without ``base=``, and with
``base=None``. A ratio is that of two neighbouring saves, so that it holds on a machine
that other programs use, too; prints the median over the rounds.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.speed.rounds import PLACES, SETTINGS

BAR: Final = 0.97
"""Least speed on a base, of that without one."""

_SHAPES: Final = ("rows", "mesh", "inner", "replicated", "scan", "mixed", "odd")


def main() -> None:
    """Prints a line for each shape, and the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", nargs="+", choices=_SHAPES, default=_SHAPES)
    parser.add_argument("--seed", type=int, default=9)
    arguments = parser.parse_args()
    os.environ |= SETTINGS  # before jax starts
    print(f"{'a save on a base / without one':32}{'speed':>8}{'CPU':>8}{'ms':>8}")
    worst = 10.0
    for shape in arguments.only:
        found = _measure(shape, arguments.seed, arguments.rounds)
        speed = median(b / a for a, b in zip(*found["seconds"], strict=True))
        cpu = median(a / b for a, b in zip(*found["cpu"], strict=True))
        milliseconds = 1e3 * median(found["seconds"][0])
        print(f"{shape:32}{speed:8.3f}{cpu:8.3f}{milliseconds:8.1f}", flush=True)
        worst = min(worst, speed)
    says = "met" if worst >= BAR else f"missed by {1 - worst / BAR:.1%}"
    print(f"\nworst shape: {worst:.3f}, bar >= {BAR}: {says}")


def _measure(shape: str, seed: int, rounds: int) -> Mapping[str, Any]:
    """Returns seconds and CPU seconds of the saves on a base, and of those without."""
    from benchmarks.shapes.drawing import draw
    from benchmarks.shapes.making import VALUES, state_of
    from benchmarks.speed.ours import Embedded

    changing = state_of(draw(shape, seed, is_quick=False), seed, VALUES["weights"])
    found: Mapping[str, Any] = {"seconds": ([], []), "cpu": ([], [])}
    with tempfile.TemporaryDirectory(
        prefix="storesvc-bench-", dir=PLACES["tmpfs"]
    ) as directory:
        contenders = [
            Embedded(Path(directory) / "base", snapshot="none"),
            Embedded(Path(directory) / "none", snapshot="none", base=None),
        ]
        for step in range(rounds + 2):
            for which in (0, 1) if step % 2 else (1, 0):
                contender, state = contenders[which], changing.change()
                began, cpu = time.perf_counter(), time.process_time()
                contender.save(step, state)
                seconds, used = time.perf_counter() - began, time.process_time() - cpu
                if step:
                    contender.remove(step - 1)
                if step > 1:  # the first have memory to touch, and modules to import
                    found["seconds"][which].append(seconds)
                    found["cpu"][which].append(used)
        for contender in contenders:
            contender.close()
    return found


if __name__ == "__main__":
    main()
