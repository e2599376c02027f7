"""One contender at one shape: a process that lives for all rounds, as a training job.

    python -m benchmarks.shapes.worker CONTENDER SHAPE SEED VALUES DIRECTORY [quick]
    python -m benchmarks.shapes.worker begin SHAPE SEED VALUES DIRECTORY [quick]

The first prints a line of JSON once its state is made, with its bytes, or that the
contender's library is not installed. Then it reads one request a line, and prints the
cost of each, until its input ends:

- ``save``: changes and saves the state, as often as a round of the shape does, as new
  steps, and removes all steps before the last;
- ``restore``: drops the state that was restored before, and restores the last step;
- ``check``: compares the restored state with the saved one, bit by bit.

``begin`` saves step 0 with every contender that has a directory in DIRECTORY, so that
the first restore of the other process is like that of a job that resumes.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import jax
import numpy as np

from benchmarks.shapes.drawing import SHAPES, draw
from benchmarks.shapes.making import VALUES, state_of
from benchmarks.speed.changing import Changing
from benchmarks.speed.contenders import NotInstalledError
from benchmarks.speed.floors import FLOORS
from benchmarks.speed.meters import back_memory, family
from benchmarks.speed.ours import OURS
from benchmarks.speed.peers import PEERS
from benchmarks.speed.side_by_side import bytes_of, same_bits, target_of

MAKERS: Final[Any] = {**FLOORS, **OURS, **PEERS}

BACKED: Final = 2
"""Memory that is touched before each save and restore, in sizes of the state."""

_TICK: Final = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Cost:
    """Cost of an operation, by this process and its server."""

    seconds: float = 0
    """Wall time; the median of the saves if they are in a loop."""
    returned: float = 0
    """Seconds until a save gave control back to its caller, likewise."""
    slowest: float = 0
    """Seconds of the slowest one of a loop."""
    user: float = 0
    """CPU seconds in user mode; of a loop: the mean."""
    sys: float = 0
    """CPU seconds in the kernel, likewise."""


class Worker:
    """A contender and its state."""

    def __init__(self, contender: Any, changing: Changing, saves: int) -> None:
        self._contender = contender
        self._changing = changing
        self._target = target_of(changing.state)
        self._saves = saves
        self._last = 0
        self._found: Any = None

    def save(self) -> dict[str, Any]:
        """Saves new values, several times if the shape is a loop."""
        steps = range(self._last + 1, self._last + 1 + self._saves)
        costs = []
        back_memory(BACKED * bytes_of(self._changing.state))
        for self._last in steps:
            self._changing.change()
            costs.append(self._measured(self._save))
        self._contender.remove(*range(steps[0] - 1, self._last))
        return asdict(_summary(costs))

    def restore(self) -> dict[str, Any]:
        """Restores the last step."""
        self._found = None
        back_memory(BACKED * bytes_of(self._changing.state))
        return asdict(self._measured(self._restore))

    def check(self) -> dict[str, Any]:
        """Rejects a restored state that differs in sharding or in any bit."""
        state = self._changing.state
        assert set(state) == set(self._found)
        for key, leaf in state.items():
            found = self._found[key]
            assert found.sharding.is_equivalent_to(leaf.sharding, leaf.ndim), key
            # by shard: a whole leaf would stay cached in its array
            devices = {shard.device: shard.data for shard in found.addressable_shards}
            for shard in leaf.addressable_shards:
                one, other = np.asarray(shard.data), np.asarray(devices[shard.device])
                assert same_bits(one, other), key
        return {}

    def _save(self) -> None:
        self._contender.save(self._last, self._changing.state)

    def _restore(self) -> None:
        found = self._contender.restore(self._last, self._target)
        self._found = jax.block_until_ready(found)

    def _measured(self, work: Callable[[], None]) -> Cost:
        user, system = _cpu(self._contender.pids)
        began = time.perf_counter()
        work()
        ended = time.perf_counter()
        user_end, system_end = _cpu(self._contender.pids)
        return Cost(
            seconds=ended - began,
            returned=getattr(self._contender, "returned", ended) - began,
            user=user_end - user,
            sys=system_end - system,
        )


def _summary(costs: Sequence[Cost]) -> Cost:
    """Returns the cost of one save of a loop."""
    return Cost(
        seconds=median(cost.seconds for cost in costs),
        returned=median(cost.returned for cost in costs),
        slowest=max(cost.seconds for cost in costs),
        user=sum(cost.user for cost in costs) / len(costs),
        sys=sum(cost.sys for cost in costs) / len(costs),
    )


def _cpu(others: Sequence[int]) -> tuple[float, float]:
    """Returns the user and system seconds of this process and others so far."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    user, system = own.ru_utime, own.ru_stime
    for pid in family(others):
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        user += int(after_name[11]) / _TICK
        system += int(after_name[12]) / _TICK
    return user, system


def _state(shape: str, seed: str, values: str, quick: Sequence[str]) -> Changing:
    leaves = draw(shape, int(seed), is_quick=bool(quick))
    return state_of(leaves, int(seed), VALUES[values])


def begin(shape: str, seed: str, values: str, directory: str, *quick: str) -> None:
    """Saves step 0 with each contender."""
    state = _state(shape, seed, values, quick).state
    for place in Path(directory).iterdir():
        try:
            contender = MAKERS[place.name](place)
        except NotInstalledError:
            continue
        try:
            contender.save(0, state)
        finally:
            contender.close()


def main() -> None:
    """Serves the requests."""
    if sys.argv[1] == "begin":
        begin(*sys.argv[2:])
        return
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
            changing = _state(shape, seed, values, quick)
            saves = SHAPES[shape].quick_saves if quick else SHAPES[shape].saves
            worker = Worker(contender, changing, saves)
            state = changing.state
            made = {"bytes": bytes_of(state), "leaves": len(state)}
            del state
            print(json.dumps(made), file=output)
            for line in sys.stdin:
                print(json.dumps(getattr(worker, line.strip())()), file=output)
        finally:
            contender.close()


if __name__ == "__main__":
    main()
