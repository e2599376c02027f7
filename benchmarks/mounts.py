"""Compares restores from a checkpoint of Orbax where it is with Orbax's own.

    python -m benchmarks mounts [--gb 1] [--rounds 5] [--on tmpfs]
        [--only orbax orbax-raw ...]

A state that was saved over eight devices is restored onto the same devices (``fsdp``),
and in another sharding (``tp``: four parts of the last dimension, two replicas), by
``open_foreign`` and by Orbax; each in a new process, both in each round, in a random
order. A ratio is the speed of ours by that of Orbax in one round.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from os import environ
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.imports import GB, SOURCES, shapes_of
from benchmarks.speed.files import bytes_below
from benchmarks.speed.meters import back_memory, measured
from benchmarks.speed.rounds import PLACES, SETTINGS

FORMATS: Final = tuple(
    name for name, (scheme, _) in SOURCES.items() if "orbax" in scheme
)
LAYOUTS: Final = ("fsdp", "tp")
WAYS: Final = ("ours", "orbax")


def _target(gb: float, layout: str) -> dict[str, Any]:
    """Returns the shapes, dtypes and shardings of the restored state."""
    import jax
    import ml_dtypes
    import numpy as np

    from benchmarks.speed.states import fsdp, tensor_parallel

    shapes = shapes_of(gb)
    placed = {"fsdp": fsdp, "tp": tensor_parallel}[layout](shapes)
    dtypes: Mapping[str, Any] = {
        "params": np.float32,
        "mu": ml_dtypes.bfloat16,
        "nu": ml_dtypes.bfloat16,
    }
    return {
        f"{part}/{key}": jax.ShapeDtypeStruct(shape, dtype, sharding=placed[key])
        for part, dtype in dtypes.items()
        for key, shape in shapes.items()
    }


def _restore(way: str, source: Path) -> Callable[[dict[str, Any]], Any]:
    """Returns a function that restores the state into a target."""
    if way == "orbax":
        from benchmarks.speed.peers import Orbax

        reader = Orbax(source)
        return lambda target: reader.restore(0, target)
    import storesvc_client as store

    return lambda target: store.open_foreign(f"orbax:{source}").restore(like=target)


def _work(way: str, layout: str, source: Path, gb: float) -> dict[str, float]:
    """Measures one restore in this process."""
    import jax

    target = _target(gb, layout)
    restore = _restore(way, source)
    back_memory(int(2.5 * bytes_below(source)))
    with measured() as cost:
        found = jax.block_until_ready(restore(target))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(found))
    return {**asdict(cost), "bytes": size}


def _worker(*arguments: str, module: str = "mounts") -> dict[str, float]:
    """Runs one part in a new process; returns what it measured."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", "--worker", *arguments],
        env=environ | SETTINGS,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _line(name: str, found: list[dict[str, dict[str, float]]]) -> str:
    line = f"{name:22}"
    for way in WAYS:
        speed = GB * median(each[way]["seconds"] / each[way]["bytes"] for each in found)
        cpu = GB * median(
            each[way]["cpu_seconds"] / each[way]["bytes"] for each in found
        )
        line += f"{1 / speed:8.2f}{cpu:10.2f}"
    ratios = [each["orbax"]["seconds"] / each["ours"]["seconds"] for each in found]
    verdict = "met" if median(ratios) >= 1 else "missed"
    return f"{line}{median(ratios):8.2f}{min(ratios):7.2f}{max(ratios):7.2f}  {verdict}"


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--on", choices=PLACES, default="tmpfs")
    parser.add_argument("--only", nargs="+", choices=FORMATS, default=list(FORMATS))
    return parser.parse_args()


def main() -> None:
    """Prints the table; ours must not be slower."""
    if sys.argv[1:2] == ["--worker"]:
        way, layout, source, gb = sys.argv[2:]
        print(json.dumps(_work(way, layout, Path(source), float(gb))))
        return
    options = _parsed()
    print(
        f"{options.gb:g} GB on {options.on}, {options.rounds} rounds\n{'':22}"
        f"{'ours':^18}{'orbax':^18}{'ours / orbax':^22}\n{'':22}"
        + f"{'GB/s':>8}{'CPU-s/GB':>10}" * 2
        + f"{'median':>8}{'min':>7}{'max':>7}"
    )
    place = PLACES[options.on]
    place.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        with tempfile.TemporaryDirectory(prefix="storesvc-bench-", dir=place) as folder:
            source, gb = str(Path(folder).absolute()), str(options.gb)
            _worker("make", name, source, gb, module="imports")
            for layout in LAYOUTS:
                found = [
                    {
                        way: _worker(way, layout, source, gb)
                        for way in random.sample(WAYS, 2)
                    }
                    for _ in range(options.rounds)
                ]
                print(_line(f"{name} {layout}", found), flush=True)


if __name__ == "__main__":
    main()
