"""Measures saves from an accelerator and restores to it, against its link.

    python -m benchmarks device [--mb 1000] [--rounds 5]

The link's speed is that of copies of the same leaves by jax, to and from ordinary
memory and, where jax offers it, pinned memory. A save blocks its caller until ``save``
returns; it ends when the checkpoint is durable. Each round copies the state on the
device first, because an array keeps its bytes once they were copied to the host.
Without an accelerator, nothing is measured.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.speed.changing import State
from benchmarks.speed.ours import Direct
from benchmarks.speed.side_by_side import differing, target_of
from benchmarks.speed.states import random_bits
from storesvc_client._values.options import SnapshotMode

LEAF_MB: Final = 20
MODES: Final[Sequence[SnapshotMode]] = ("none", "host", "device")

Seconds: TypeAlias = dict[str, list[float]]
"""Seconds in each round, by what took them."""


def main() -> None:
    """Prints the speeds, if there is an accelerator."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks device")
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    found = [device for device in jax.devices() if device.platform != "cpu"]
    if not found:
        print("no accelerator: jax sees only CPU devices")
        return
    leaves = max(1, arguments.mb // LEAF_MB)
    with tempfile.TemporaryDirectory(
        prefix="storesvc-bench-", dir="/dev/shm"
    ) as directory:
        seconds = measure(found[0], leaves, arguments.rounds, Path(directory))
    size = leaves * LEAF_MB / 1000
    print(f"{found[0].device_kind}: {size:.2f} GB, medians of {arguments.rounds}")
    print(table(seconds, size))


def measure(device: Any, leaves: int, rounds: int, directory: Path) -> Seconds:
    """Returns the seconds of copies, saves and restores; the first round warms up."""
    rng, dtype = np.random.default_rng(0), np.dtype(np.float32)
    shape = (LEAF_MB * 250, 1000)
    host = {f"leaf/{i}": random_bits(rng, shape, dtype) for i in range(leaves)}
    placed = jax.sharding.SingleDeviceSharding(device)
    state = jax.block_until_ready(jax.device_put(host, placed))
    seconds: Seconds = {}
    contender = Direct(directory)
    try:
        for number in range(rounds + 1):
            _copy(host, state, placed, seconds)
            for mode in MODES:
                _save(contender, number, mode, state, seconds)
            _restore(contender, number, state, seconds)
    finally:
        contender.close()
    return {what: each[1:] for what, each in seconds.items()}


def table(seconds: Seconds, size: float) -> str:
    """Returns GB/s, and the ratio to the fastest copy in the same direction.

    Args:
        seconds: Seconds in each round.
        size: Gigabytes of the state.
    """
    speeds = {what: size / median(each) for what, each in seconds.items()}
    lines = [f"{'':28}{'GB/s':>8}{'/ link':>8}"]
    for what, speed in speeds.items():
        way = "to device" if "to device" in what else "from device"
        link = max(
            other
            for name, other in speeds.items()
            if name.startswith("link ") and way in name
        )
        lines.append(f"{what:28}{speed:8.2f}{speed / link:8.2f}")
    return "\n".join(lines)


def _copy(host: Any, state: State, placed: Any, seconds: Seconds) -> None:
    """Copies the leaves over the link, in both directions."""
    _timed(seconds, "link to device", lambda: jax.device_put(host, placed))
    fresh = _fresh(state)
    _timed(seconds, "link from device", lambda: [*map(np.asarray, fresh.values())])
    (device,) = placed.device_set
    if "pinned_host" not in {each.kind for each in device.addressable_memories()}:
        return
    pinned = placed.with_memory_kind("pinned_host")
    fresh = _fresh(state)
    held = _timed(
        seconds, "link from device, pinned", lambda: jax.device_put(fresh, pinned)
    )
    _timed(seconds, "link to device, pinned", lambda: jax.device_put(held, placed))


def _save(
    contender: Direct, number: int, mode: SnapshotMode, state: State, seconds: Seconds
) -> None:
    """Saves the state; notes when the call returned, and when it was durable."""
    step, fresh = number * len(MODES) + MODES.index(mode), _fresh(state)
    began = time.perf_counter()
    pending = contender.run.save(step, fresh, base=None, snapshot=mode)
    blocked = time.perf_counter() - began
    pending.result()
    ended = time.perf_counter() - began
    seconds.setdefault(f"save from device, {mode}", []).append(ended)
    seconds.setdefault(f"  from device, {mode}, blocked", []).append(blocked)
    if mode != MODES[-1]:  # the last one is restored
        contender.remove(step)


def _restore(contender: Direct, number: int, state: State, seconds: Seconds) -> None:
    """Restores the last step; compares its bits the first time."""
    step, target = number * len(MODES) + len(MODES) - 1, target_of(state)
    found = _timed(
        seconds, "restore to device", lambda: contender.restore(step, target)
    )
    if number == 0:
        assert [] == differing(_fresh(state), found)
    contender.remove(step)


def _timed(seconds: Seconds, what: str, work: Callable[[], Any]) -> Any:
    """Returns what the work returns, ready, and notes its seconds."""
    began = time.perf_counter()
    done = jax.block_until_ready(work())
    seconds.setdefault(what, []).append(time.perf_counter() - began)
    return done


def _fresh(state: State) -> State:
    """Returns a copy on the device, of which the host has nothing yet."""
    fresh: State = {key: jnp.copy(leaf) for key, leaf in state.items()}
    jax.block_until_ready(fresh)
    return fresh


if __name__ == "__main__":
    main()
