"""One contender at one shape: a process that lives for all rounds, as a training job.

    python -m benchmarks.shapes.worker CONTENDER SHAPE SEED VALUES DIRECTORY [quick]

Prints a line of JSON once its state is made, with its bytes, or that the contender's
library is not installed. Then reads one request a line, ``DO STEP``, and prints the
cost of each, until its input ends:

- ``save``: saves the state, as often as a round of the shape does, and counts steps up;
- ``restore``: drops the state that was restored before, and restores the step;
- ``check``: compares the restored state with the saved one, bit by bit;
- ``remove``: removes the step, and those that follow it in a loop.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import jax
import numpy as np

from benchmarks.shapes.drawing import SHAPES, draw
from benchmarks.shapes.making import VALUES, state_of
from benchmarks.speed.contenders import NotInstalledError
from benchmarks.speed.floors import FLOORS
from benchmarks.speed.meters import family
from benchmarks.speed.ours import OURS
from benchmarks.speed.peers import PEERS
from benchmarks.speed.side_by_side import bytes_of, same_bits, target_of

MAKERS: Final[Any] = {**FLOORS, **OURS, **PEERS}

_TICK: Final = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Cost:
    """Cost of an operation, by this process and its server."""

    seconds: float = 0
    """Wall time; the median of the saves if they are in a loop."""
    slowest: float = 0
    """Seconds of the slowest one of a loop."""
    user: float = 0
    """CPU seconds in user mode; of a loop: the mean."""
    sys: float = 0
    """CPU seconds in the kernel, likewise."""


class Worker:
    """A contender and its state."""

    def __init__(self, contender: Any, state: dict[str, jax.Array], saves: int) -> None:
        self._contender = contender
        self._state = state
        self._target = target_of(state)
        self._saves = saves
        self._found: Any = None

    def save(self, step: int) -> dict[str, Any]:
        """Saves the state, several times if the shape is a loop."""
        steps = range(step, step + self._saves)
        with measured(self._contender.pids, len(steps)) as (cost, seconds):
            for each in steps:
                began = time.perf_counter()
                self._contender.save(each, self._state)
                seconds.append(time.perf_counter() - began)
        return asdict(cost)

    def restore(self, step: int) -> dict[str, Any]:
        """Restores the last one of these steps."""
        self._found = None
        with measured(self._contender.pids, 1) as (cost, seconds):
            began = time.perf_counter()
            found = self._contender.restore(step + self._saves - 1, self._target)
            self._found = jax.block_until_ready(found)
            seconds.append(time.perf_counter() - began)
        return asdict(cost)

    def check(self, step: int) -> dict[str, Any]:
        """Rejects a restored state that differs in sharding or in any bit."""
        del step
        assert set(self._state) == set(self._found)
        for key, leaf in self._state.items():
            found = self._found[key]
            assert found.sharding.is_equivalent_to(leaf.sharding, leaf.ndim), key
            # by shard: a whole leaf would stay cached in its array
            devices = {shard.device: shard.data for shard in found.addressable_shards}
            for shard in leaf.addressable_shards:
                one, other = np.asarray(shard.data), np.asarray(devices[shard.device])
                assert same_bits(one, other), key
        return {}

    def remove(self, step: int) -> dict[str, Any]:
        """Removes these steps."""
        self._contender.remove(*range(step, step + self._saves))
        return {}


@contextmanager
def measured(others: Sequence[int], count: int) -> Iterator[tuple[Cost, list[float]]]:
    """Measures operations of this process and others.

    Yields:
        The cost, filled in at the end, and a list for the seconds of each operation.
    """
    cost, seconds = Cost(), list[float]()
    user, system = _cpu(others)
    yield cost, seconds
    user_end, system_end = _cpu(others)
    cost.user, cost.sys = (user_end - user) / count, (system_end - system) / count
    cost.seconds, cost.slowest = median(seconds), max(seconds)


def _cpu(others: Sequence[int]) -> tuple[float, float]:
    """Returns the user and system seconds of this process and others so far."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    user, system = own.ru_utime, own.ru_stime
    for pid in family(others):
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        user += int(after_name[11]) / _TICK
        system += int(after_name[12]) / _TICK
    return user, system


def main() -> None:
    """Serves the requests."""
    name, shape, seed, values, directory, *quick = sys.argv[1:]
    # what libraries print must not come between the lines of JSON
    with os.fdopen(os.dup(1), "w", buffering=1) as output:
        os.dup2(2, 1)
        try:
            contender = MAKERS[name](Path(directory))
        except NotInstalledError as e:
            print(json.dumps({"absent": f"{e} is not installed"}), file=output)
            return
        try:
            leaves = draw(shape, int(seed), is_quick=bool(quick))
            state = state_of(leaves, int(seed), VALUES[values])
            saves = SHAPES[shape].quick_saves if quick else SHAPES[shape].saves
            worker = Worker(contender, state, saves)
            made = {"bytes": bytes_of(state), "leaves": len(state)}
            print(json.dumps(made), file=output)
            del state
            for line in sys.stdin:
                what, step = line.split()
                print(json.dumps(getattr(worker, what)(int(step))), file=output)
        finally:
            contender.close()


if __name__ == "__main__":
    main()
