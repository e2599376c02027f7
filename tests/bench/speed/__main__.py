"""``python -m tests.bench.speed``: runs the rounds, and prints the tables."""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.bench.speed.tables import table

WORKS: Final = ("lm", "reshard", "whole", "many")
NAMES: Final = (
    "memcpy",
    "files",
    "grpc",
    "streamed",
    "embedded",
    "orbax",
    "orbax-raw",
    "safetensors",
)
OUTPUT: Final = Path("build/bench")
PLACES: Final = {"tmpfs": Path("/dev/shm"), "disk": OUTPUT}


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.speed")
    parser.add_argument(
        "work", nargs="*", default=["lm"], metavar="WORK", help=str(WORKS)
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--on", nargs="+", choices=PLACES, default=["tmpfs"])
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    arguments = parser.parse_args()
    if unknown := set(arguments.work) - set(WORKS):
        parser.error(f"expected {', '.join(WORKS)}, got {', '.join(unknown)}")
    OUTPUT.mkdir(parents=True, exist_ok=True)
    for work in arguments.work:
        for place in arguments.on:
            found = rounds(work, place, arguments.only, arguments.rounds)
            report = OUTPUT / f"speed-{work}-{place}"
            report.with_suffix(".json").write_text(json.dumps(found, indent=1))
            report.with_suffix(".txt").write_text(table(work, place, found) + "\n")
            print(table(work, place, found), end="\n\n", flush=True)


def rounds(
    work: str, place: str, names: Sequence[str], count: int
) -> dict[str, list[dict[str, Any]]]:
    """Returns what each contender took in each round."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(1, count + 1):
        for name in random.sample(names, len(names)):
            at = f"{work} on {place}: round {number} of {count}, {name}"
            print(f"{at:60}", end="\r", file=sys.stderr)
            found[name].append(measured(name, work, place))
    print(f"{'':60}", end="\r", file=sys.stderr)
    return found


def measured(name: str, work: str, place: str) -> dict[str, Any]:
    """Returns what one contender took in one round."""
    settings = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    with tempfile.TemporaryDirectory(
        prefix="storesvc-bench-", dir=PLACES[place].absolute()
    ) as directory:
        done = subprocess.run(
            [sys.executable, "-m", "tests.bench.speed.worker", name, work, directory],
            env=os.environ | settings,
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
