"""One contender in one round, in a process of its own: prints what it measured."""

import gc
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tests.bench.speed.contenders import CONTENDERS, FLOORS
from tests.bench.speed.meters import measured
from tests.bench.speed.works import WORKS, State


def main() -> None:
    """Runs it: ``worker CONTENDER WORK DIRECTORY``."""
    name, work_name, directory = sys.argv[1:4]
    work, contender = WORKS[work_name], CONTENDERS[name](Path(directory))
    costs = {}
    try:
        small = work.small()
        contender.save(0, small)
        contender.restore(0, _target(work, small))
        state = work.saved()
        target = _target(work, state)
        gc.collect()
        with measured(contender.pids) as costs["save"]:
            contender.save(1, state)
        gc.collect()
        with measured(contender.pids) as costs["restore"]:
            found = contender.restore(1, target)
        if name not in FLOORS:
            _check(state, found, target)
    finally:
        contender.close()
    size = sum(leaf.nbytes for leaf in state.values())
    print(json.dumps({"bytes": size} | {what: asdict(c) for what, c in costs.items()}))


def _target(work: Any, state: State) -> dict[str, jax.ShapeDtypeStruct]:
    placed = work.restored_on({key: leaf.shape for key, leaf in state.items()})
    return {
        key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed[key])
        for key, leaf in state.items()
    }


def _check(state: State, found: Any, target: Any) -> None:
    """Refuses a state that is not, bit by bit, the saved one, where it was to be."""
    assert set(state) == set(found)
    for key, leaf in state.items():
        assert found[key].sharding.is_equivalent_to(target[key].sharding, leaf.ndim)
        expected, actual = (np.asarray(x).view(np.uint8) for x in (leaf, found[key]))
        assert np.array_equal(expected, actual), key


if __name__ == "__main__":
    main()
