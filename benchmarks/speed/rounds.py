"""Rounds: every contender once, each in a new process, in a random order."""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.speed.bars import Found
from benchmarks.speed.works import WORKS

OUTPUT: Final = Path("build/bench")
PLACES: Final = {"tmpfs": Path("/dev/shm"), "disk": OUTPUT}

EASYDEL: Final = Path("build/easydel/venv/bin/python")
"""Python of EasyDeL's environment; ``make test-easydel`` creates it."""

SETTINGS: Final = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
}


def rounds(
    work: str, place: str, state: str, names: Sequence[str], count: int
) -> Found:
    """Returns the measurements of each contender in each round.

    Raises:
        SystemExit: A contender failed; its error is printed.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(1, min(count, WORKS[work].rounds or count) + 1):
        for name in random.sample(names, len(names)):
            if found[name] and "absent" in found[name][0]:
                continue
            at = f"{work} on {place}: round {number} of {count}, {name}"
            print(f"{at:60}", end="\r", file=sys.stderr)
            found[name].append(_measured(name, work, place, state))
    print(f"{'':60}", end="\r", file=sys.stderr)
    return found


def _measured(name: str, work: str, place: str, state: str) -> dict[str, Any]:
    """Returns the measurements of one contender in one round."""
    python = sys.executable
    if name == "easydel":
        if not EASYDEL.exists():
            return {"absent": "easydel is not installed"}
        python = str(EASYDEL.absolute())
    with tempfile.TemporaryDirectory(
        prefix="storesvc-bench-", dir=PLACES[place].absolute()
    ) as directory:
        worker = ["-m", "benchmarks.speed.worker", name, work, state, directory]
        done = subprocess.run(
            [python, *worker],
            env=os.environ | SETTINGS,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    if done.returncode:
        sys.exit(f"{work} on {place}: {name} failed; its own words stand above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
