"""Compares saves on a base with saves without one, of a state whose leaves all change.

    python -m benchmarks changes [--mib 220] [--rounds 9]

A training step changes every leaf, so a base saves no byte, and the search for equal
chunks is lost time. The kinds of saves alternate in one process, with an embedded
server: on the last save, whose checksums the client knows; on the save before it; and
without a base. CPU seconds are of the process, its server included.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

import jax.numpy as jnp

import storesvc_client as store

MIB: Final = 1 << 20
LEAF_MIB: Final = (48, 18, 7, 2, 0.25, 0.01)
"""Sizes of leaves, repeated until the state has its size."""


def make_state(mib: float) -> dict[str, Any]:
    """Returns leaves of mixed sizes, float32 and bfloat16."""
    state: dict[str, Any] = {}
    while sum(leaf.nbytes for leaf in state.values()) < mib * MIB:
        number = len(state)
        dtype = (jnp.float32, jnp.bfloat16)[number % 2]
        count = int(LEAF_MIB[number % len(LEAF_MIB)] * MIB) // dtype.dtype.itemsize
        state[f"leaf-{number:03d}"] = jnp.linspace(1, 2, count, dtype=dtype)
    return state


KINDS: Final = {"last": 1, "other": 2, "none": 0}
"""Kinds of bases, and how many steps before the save each is."""


def _compare(root: Path, state: dict[str, Any], rounds: int, snapshot: Any) -> None:
    """Prints the times of saves on each kind of base, and their ratios to ``none``."""
    taken: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in KINDS}
    with store.connect(root.as_uri()) as client:
        run = client.run("bench/changes")
        for step in range(len(KINDS) * (rounds + 1)):  # the first round is a warm-up
            state = {key: -leaf * 1.5 + 1 for key, leaf in state.items()}
            for leaf in state.values():
                leaf.block_until_ready()
            kind = list(KINDS)[step % len(KINDS)]
            back = KINDS[kind] if step >= 2 else 0
            began, cpu_began = time.perf_counter(), time.process_time()
            save = run.save(
                step, state, base=step - back if back else None, snapshot=snapshot
            )
            held_up = time.perf_counter() - began
            report = save.report()
            whole = time.perf_counter() - began
            assert report.sent_bytes == report.total_bytes
            if step >= len(KINDS):
                taken[kind].append((whole, held_up, time.process_time() - cpu_began))
    size = sum(leaf.nbytes for leaf in state.values())
    columns: dict[str, list[tuple[float, ...]]]
    columns = {kind: [*zip(*all_, strict=True)] for kind, all_ in taken.items()}
    for kind, (seconds, blocked, cpu) in columns.items():
        ratios = [
            pick(columns["none"][at]) / pick(columns[kind][at])
            for at in (0, 2)
            for pick in (min, median)
        ]
        print(
            f"{snapshot:9}{kind:6}"
            f"{min(seconds):9.3f}{median(seconds):9.3f}{median(blocked):9.3f}"
            f"{min(cpu) / size * 1e9:9.3f}{median(cpu) / size * 1e9:9.3f}"
            + "".join(f"{ratio:9.2f}" for ratio in ratios),
            flush=True,
        )


def main() -> None:
    """Compares both, for a copy of the state and for a save that blocks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=float, default=220)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--root", type=Path, default=Path("/dev/shm"))
    arguments = parser.parse_args()
    state = make_state(arguments.mib)
    print(
        f"{os.cpu_count()} cores, {sum(v.nbytes for v in state.values()) / 1e6:.0f} MB"
    )
    print(
        "snapshot base      seconds       blocked     CPU s/GB      ratio  to none, CPU"
    )
    print(f"{'':15}" + "     best   median   median" + "     best   median" * 3)
    for snapshot in ("host", "none"):
        with tempfile.TemporaryDirectory(dir=arguments.root) as directory:
            _compare(Path(directory) / "store", state, arguments.rounds, snapshot)


if __name__ == "__main__":
    main()
