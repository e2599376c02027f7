"""Measures saves from an accelerator and restores to it, against its link.

    python -m benchmarks device [--mb 1000] [--rounds 5] [--root /dev/shm]

The link's speed is that of copies of the same leaves by jax, to and from ordinary
memory, and pinned memory where jax offers it. A save blocks its caller until ``save``
returns; it ends when the checkpoint is durable. Each save is of a state that the device
has changed in place, of which the host has no copy.

"hidden" is how much of the shorter part was done during the longer one: 1 if a save
from the device takes as long as the slower one of its copy over the link and the save
of the same bytes in host memory, 0 if it takes as long as both together.

Without an accelerator the same runs on the CPU, whose link is a copy in memory.
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
from benchmarks.speed.ours import Embedded
from benchmarks.speed.side_by_side import differing, target_of
from benchmarks.speed.states import random_bits
from storesvc_client._values.options import SnapshotMode

LEAF_MB: Final = 20
MODES: Final[Sequence[SnapshotMode]] = ("none", "host", "device")
PINNED: Final = "pinned_host"

Seconds: TypeAlias = dict[str, list[float]]
"""Seconds in each round, by what took them."""


def main() -> None:
    """Prints the speeds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks device")
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--root", type=Path, default=Path("/dev/shm"))
    arguments = parser.parse_args()
    device = next((d for d in jax.devices() if d.platform != "cpu"), jax.devices()[0])
    leaves = max(1, arguments.mb // LEAF_MB)
    with tempfile.TemporaryDirectory(
        prefix="storesvc-bench-", dir=arguments.root
    ) as directory:
        seconds = _Trial(device, leaves, Path(directory)).run(arguments.rounds)
    size = leaves * LEAF_MB / 1000
    print(
        f"{device.device_kind}, jax {jax.__version__}: {size:.2f} GB, "
        f"medians of {arguments.rounds}"
    )
    if device.platform == "cpu":
        print("no accelerator: the link is a copy in memory")
    if not _has_pinned(device):
        print(f"no {PINNED} memory")
    print(table(seconds, size))


def table(seconds: Seconds, size: float) -> str:
    """Returns GB/s, the ratio to the fastest copy in the same direction, and what was
    hidden.

    Args:
        seconds: Seconds in each round.
        size: Gigabytes of the state.
    """
    took = {what: median(each) for what, each in seconds.items()}
    lines = [f"{'':34}{'GB/s':>8}{'/ link':>8}{'hidden':>8}"]
    for what, whole in took.items():
        way = "to device" if "to" in what.split() else "from device"
        link = min(t for name, t in took.items() if name.startswith(f"link {way}"))
        line = f"{what:34}{size / whole:8.2f}{link / whole:8.2f}"
        host = took["restore to host" if way == "to device" else "save from host"]
        if "device" in what and not what.startswith(("link", "  ")):
            line += f"{(host + link - whole) / min(host, link):8.2f}"
        lines.append(line)
    return "\n".join(lines)


class _Trial:
    """The state on the device, its changes, and what took how long."""

    def __init__(self, device: Any, leaves: int, directory: Path) -> None:
        rng, dtype = np.random.default_rng(0), np.dtype(np.float32)
        shape = (LEAF_MB * 250, 1000)
        drawn = (random_bits(rng, shape, dtype) for _ in range(leaves))
        self._host = {f"leaf/{i}": leaf for i, leaf in enumerate(drawn)}
        self._is_cpu = device.platform == "cpu"
        self._placed = jax.sharding.SingleDeviceSharding(device)
        self._pinned = None
        if _has_pinned(device):
            self._pinned = self._placed.with_memory_kind(PINNED)
        self._state: State = self._copied(self._host, self._placed)
        self._change = jax.jit(_change, donate_argnums=0)
        self._contender = Embedded(directory)
        self._step = 0
        self._seconds: Seconds = {}

    def run(self, rounds: int) -> Seconds:
        """Returns the seconds of all rounds but the first, which warms up."""
        try:
            for _ in range(rounds + 1):
                self._copy()
                self._save("save from host", self._changed_host(), "none")
                self._timed(
                    "restore to host", lambda: self._contender.run.restore(self._step)
                )
                for mode in MODES:
                    self._save(f"save from device, {mode}", self._changed(), mode)
                self._restore("restore to device", self._state)
                if self._pinned:
                    state = self._copied(self._changed(), self._pinned)
                    self._save(f"save from {PINNED}", state, "none")
                    self._restore(f"restore to {PINNED}", state)
        finally:
            self._contender.close()
        return {what: each[1:] for what, each in self._seconds.items()}

    def _copy(self) -> None:
        """Copies the leaves over the link, in both directions."""
        to_host = np.array if self._is_cpu else np.asarray  # which is free on the CPU
        fresh = self._changed()
        self._timed("link from device", lambda: [*map(to_host, fresh.values())])
        self._timed("link to device", lambda: self._copied(self._host, self._placed))
        if self._pinned is None:
            return
        fresh = self._changed()
        held = self._timed(
            "link from device, pinned", lambda: self._copied(fresh, self._pinned)
        )
        self._timed("link to device, pinned", lambda: self._copied(held, self._placed))

    def _copied(self, state: Any, placed: Any) -> Any:
        return jax.block_until_ready(jax.device_put(state, placed, may_alias=False))

    def _changed(self) -> State:
        """Returns the state that the device has changed in place."""
        self._state = jax.block_until_ready(self._change(self._state))
        return self._state

    def _changed_host(self) -> Any:
        for leaf in self._host.values():
            bits = leaf.view(np.uint32)
            np.add(bits, 1, out=bits)
        return self._host

    def _save(self, what: str, state: Any, mode: SnapshotMode) -> None:
        """Saves a state; notes when the call returned, and when it was durable."""
        self._step += 1
        began = time.perf_counter()
        pending = self._contender.run.save(self._step, state, snapshot=mode)
        blocked = time.perf_counter() - began
        pending.result()
        self._seconds.setdefault(what, []).append(time.perf_counter() - began)
        if mode != "none":
            self._seconds.setdefault(f"  {what}: blocked", []).append(blocked)
        if self._step > 1:
            self._contender.remove(self._step - 1)

    def _restore(self, what: str, state: State) -> None:
        """Restores the last step; compares its bits the first time."""
        target = target_of(state)
        found = self._timed(what, lambda: self._contender.restore(self._step, target))
        for key, leaf in found.items():
            assert leaf.sharding == state[key].sharding, key
        if len(self._seconds[what]) == 1:
            assert [] == differing(state, found)

    def _timed(self, what: str, work: Callable[[], Any]) -> Any:
        """Returns what the work returns, ready, and notes its seconds."""
        began = time.perf_counter()
        done = jax.block_until_ready(work())
        self._seconds.setdefault(what, []).append(time.perf_counter() - began)
        return done


def _has_pinned(device: Any) -> bool:
    return PINNED in {memory.kind for memory in device.addressable_memories()}


def _change(state: State) -> State:
    bits = jax.lax.bitcast_convert_type
    return {
        key: bits(bits(leaf, jnp.uint32) + 1, leaf.dtype) for key, leaf in state.items()
    }


if __name__ == "__main__":
    main()
