"""Compares restores from a checkpoint of Orbax where it is with Orbax's own.

    python -m benchmarks mounts [--gb 1] [--rounds 5] [--on tmpfs]
        [--only orbax orbax-raw orbax-leaves ...] [--leaves 20000]

A state that was saved over eight devices is restored onto the same devices (``fsdp``),
and in another sharding (``tp``: four parts of the last dimension, two replicas), by
``open_foreign`` and by Orbax; each in a new process, both in each round, in a random
order; what both import, they import before. A ratio is the speed of ours by that of
Orbax in one round. ``orbax-leaves`` has many leaves of 64 numbers, and is measured if
it is asked for: Orbax takes minutes.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import import_module
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
LEAVES: Final = "orbax-leaves"
LAYOUTS: Final = ("fsdp", "tp")
WAYS: Final = ("ours", "orbax")


def _make_leaves(source: Path, leaves: int) -> dict[str, float]:
    """Saves many small leaves with Orbax."""
    import jax
    import numpy as np

    from benchmarks.speed.peers import Orbax

    writer, draw = Orbax(source), np.random.default_rng(0)
    state = {
        key: jax.device_put(draw.standard_normal(leaf.shape, leaf.dtype), leaf.sharding)
        for key, leaf in _target(LEAVES, leaves, LAYOUTS[0]).items()
    }
    writer.save(0, state)
    writer.close()
    return {}


def _target(name: str, size: float, layout: str) -> dict[str, Any]:
    """Returns the shapes, dtypes and shardings of the restored state."""
    import jax
    import ml_dtypes
    import numpy as np

    from benchmarks.speed.states import fsdp, tensor_parallel

    shapes: dict[str, tuple[int, ...]]
    if name == LEAVES:
        shapes = {f"leaf/{n}": (64,) for n in range(int(size))}
    else:
        shapes = shapes_of(size)
    placed = {"fsdp": fsdp, "tp": tensor_parallel}[layout](shapes)
    dtypes: Mapping[str, Any] = {
        "params": np.float32,
        "mu": ml_dtypes.bfloat16,
        "nu": ml_dtypes.bfloat16,
    }
    return {
        f"{part}/{key}": jax.ShapeDtypeStruct(shape, dtype, sharding=placed[key])
        for part, dtype in dtypes.items()
        if name != LEAVES or part == "params"
        for key, shape in shapes.items()
    }


def _restore(way: str, source: Path) -> Callable[[dict[str, Any]], Any]:
    """Returns a function that restores the state into a target."""
    if way == "orbax":
        from benchmarks.speed.peers import Orbax

        reader = Orbax(source)
        return lambda target: reader.restore(0, target)
    import storesvc_client as store

    for module in ("tensorstore", "storesvc_client._pytree.restore_target"):
        import_module(module)
    return lambda target: store.open_foreign(f"orbax:{source}").restore(like=target)


def _work(
    way: str, layout: str, name: str, source: Path, size: float
) -> dict[str, float]:
    """Measures one restore in this process."""
    import jax

    target = _target(name, size, layout)
    restore = _restore(way, source)
    back_memory(int(2.5 * bytes_below(source)))
    with measured() as cost:
        found = jax.block_until_ready(restore(target))
    read = sum(leaf.nbytes for leaf in jax.tree.leaves(found))
    return {**asdict(cost), "bytes": read}


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
    parser.add_argument("--leaves", type=int, default=20_000)
    choices = [*FORMATS, LEAVES]
    parser.add_argument("--only", nargs="+", choices=choices, default=list(FORMATS))
    return parser.parse_args()


def main() -> None:
    """Prints the table; ours must not be slower."""
    if sys.argv[1:2] == ["--worker"]:
        way, layout, name, source, size = sys.argv[2:]
        if way == "make":
            print(json.dumps(_make_leaves(Path(source), int(size))))
        else:
            print(json.dumps(_work(way, layout, name, Path(source), float(size))))
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
            source, size = str(Path(folder).absolute()), str(options.gb)
            if name == LEAVES:
                size = str(options.leaves)
                _worker("make", "", name, source, size)
            else:
                _worker("make", name, source, size, module="imports")
            for layout in LAYOUTS:
                found = [
                    {
                        way: _worker(way, layout, name, source, size)
                        for way in random.sample(WAYS, 2)
                    }
                    for _ in range(options.rounds)
                ]
                print(_line(f"{name} {layout}", found), flush=True)


if __name__ == "__main__":
    main()
