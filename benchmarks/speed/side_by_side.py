"""One save and one restore, the work that every contender can do."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding

from benchmarks.speed.changing import State
from benchmarks.speed.contenders import Contender, Target
from benchmarks.speed.files import drop_from_cache
from benchmarks.speed.meters import Cost, back_memory, measured
from benchmarks.speed.states import States

Layout: TypeAlias = Callable[
    [Mapping[str, tuple[int, ...]]], Mapping[str, NamedSharding]
]

_MIB = 1 << 20

_BACKED = 2
"""Memory that is touched before each timed part, in sizes of the state."""


def save_and_restore(
    contender: Contender,
    states: States,
    directory: Path,
    *,
    layout: Layout | None,
    checks: bool,
) -> dict[str, Any]:
    """Returns the costs of the first save and restore of a state and of the second
    ones, after all of its leaves changed; they are warmed up with a small state.

    The memory is that of the first ones, later ones use it again, without the restored
    state.

    Args:
        contender: The contender.
        states: Makes the states.
        directory: Directory of the contender's files.
        layout: Shardings of the restored state; None: the saved ones.
        checks: Whether to compare the restored state with the saved one.
    """
    small = states.small().state
    contender.save(0, small)
    contender.restore(0, target_of(small, layout))
    changing = states.whole()
    target, size = target_of(changing.state, layout), bytes_of(changing.state)
    costs: dict[str, list[Cost]] = {"save": [], "restore": []}
    for step in (1, 2):
        state, found = changing.change(), None
        back_memory(_BACKED * size)
        with measured(contender.pids) as saved:
            contender.save(step, state)
        drop_from_cache(directory)
        back_memory(_BACKED * size)
        with measured(contender.pids) as restored:
            found = contender.restore(step, target)
        restored.extra_mib -= _held_bytes(found) / _MIB
        costs["save"].append(saved)
        costs["restore"].append(restored)
        if checks:
            check(state, found, target)
    for first, later in costs.values():
        later.extra_mib = first.extra_mib
    return {
        "bytes": size,
        **{phase: asdict(later) for phase, (_, later) in costs.items()},
        "first": {phase: first.seconds for phase, (first, _) in costs.items()},
    }


def target_of(state: State, layout: Layout | None = None) -> Target:
    """Returns the target of a restore; without a layout, with the same shardings."""
    shapes = {key: leaf.shape for key, leaf in state.items()}
    placed = layout(shapes) if layout else {k: x.sharding for k, x in state.items()}
    return {
        key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed[key])
        for key, leaf in state.items()
    }


def bytes_of(state: State) -> int:
    """Returns the bytes of a state, each leaf counted once."""
    return sum(leaf.nbytes for leaf in state.values())


def check(state: State, found: Any, target: Target) -> None:
    """Rejects a state whose bits or shardings differ from the expected ones."""
    assert set(state) == set(found)
    for key, leaf in state.items():
        assert found[key].sharding.is_equivalent_to(target[key].sharding, leaf.ndim)
    assert [] == differing(state, found)


def differing(state: State, found: Any) -> list[str]:
    """Returns the keys of the leaves that differ in any bit."""
    return [key for key, leaf in state.items() if not same_bits(leaf, found[key])]


def same_bits(one: Any, other: Any) -> bool:
    """Returns whether two arrays are equal in shape, dtype and every bit."""
    one, other = np.asarray(one), np.asarray(other)
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return np.array_equal(one.view(np.uint8), other.view(np.uint8))


def _held_bytes(found: Any) -> int:
    """Returns the bytes of a restored state; each replica counts."""
    return sum(
        sum(shard.data.nbytes for shard in leaf.addressable_shards)
        if isinstance(leaf, jax.Array)
        else leaf.nbytes
        for leaf in jax.tree.leaves(found)
    )
