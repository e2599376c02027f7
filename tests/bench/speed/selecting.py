"""``params``: of a training state only the parameters, in bfloat16."""

from pathlib import Path
from typing import Any, Final

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tests.bench.speed.meters import measured
from tests.bench.speed.ours import Ours
from tests.bench.speed.side_by_side import same_bits
from tests.bench.speed.states import State, States

_PARTS: Final = {"params": "graphstate", "mu": "opt_state", "nu": "opt_state"}
"""Where the parts of a state go."""


def params(contender: Ours, states: States, directory: Path) -> dict[str, Any]:
    """Returns how many bytes were read from files for each that was returned, before
    the cast; files, because on the way to a client nothing is read twice."""
    del directory
    for step, state in enumerate((states.small(), states.whole())):
        tree = _training_tree(state)
        contender.run.save(step, tree, base=None).result()
        with measured(contender.pids) as cost:
            found = contender.run.restore(step, select="graphstate/**", cast="bfloat16")
    wanted = tree["graphstate"]
    assert {"graphstate"} == set(found)
    assert set(wanted) == set(found["graphstate"])
    for key, leaf in wanted.items():
        expected = np.asarray(leaf).astype(ml_dtypes.bfloat16)
        assert same_bits(expected, found["graphstate"][key]), key
    returned = sum(leaf.nbytes for leaf in wanted.values())
    return {
        "bytes": returned,
        "seconds": cost.seconds,
        "cpu_seconds": cost.cpu_seconds,
        "read_bytes": cost.read_bytes,
        "read_per_returned": cost.read_bytes / returned,
    }


def _training_tree(state: State) -> dict[str, dict[str, Any]]:
    """A state as an NNX module and its optimizer have it."""
    tree: dict[str, dict[str, Any]] = {
        "graphstate": {},
        "graphother": {"rngs.count": jnp.arange(4)},
        "opt_state": {},
    }
    for key, leaf in state.items():
        part, _, rest = key.partition("/")
        names = rest if part == "params" else f"{part}/{rest}"
        tree[_PARTS[part]][names.replace("/", ".")] = leaf
    return tree
