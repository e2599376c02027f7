"""``params``: a restore of only the parameters of a training state, in bfloat16."""

from pathlib import Path
from typing import Any, Final

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks.speed.changing import State
from benchmarks.speed.meters import measured
from benchmarks.speed.ours import Ours
from benchmarks.speed.side_by_side import same_bits
from benchmarks.speed.states import States

_PARTS: Final = {"params": "graphstate", "mu": "opt_state", "nu": "opt_state"}
"""Keys of the parts of a state."""


def params(contender: Ours, states: States, directory: Path) -> dict[str, Any]:
    """Returns the bytes read from files per byte returned, counted before the cast.
    Only reads of files are counted, as the client receives no byte twice."""
    del directory
    for step, changing in enumerate((states.small(), states.whole())):
        tree = _training_tree(changing.state)
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
    """Returns a state with the keys of an NNX module and its optimizer."""
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
