"""Save and restore, as every contender can."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding

from tests.bench.speed.contenders import Contender, Target
from tests.bench.speed.files import drop_from_cache
from tests.bench.speed.meters import back_memory, measured
from tests.bench.speed.states import State, States

Layout: TypeAlias = Callable[
    [Mapping[str, tuple[int, ...]]], Mapping[str, NamedSharding]
]

_MIB = 1 << 20

_BACKED = 2
"""States that fit the memory that is backed before each timed part."""


def save_and_restore(
    contender: Contender,
    states: States,
    directory: Path,
    *,
    layout: Layout | None,
    checks: bool,
) -> dict[str, Any]:
    """Returns what a save and a restore cost, the memory of the restored state not
    counted; both were warmed up with a small state.

    Args:
        contender: Who does it.
        states: Of what.
        directory: Where its files lie.
        layout: Where the state is restored; None: where it lay.
        checks: Whether what it restores is a state.
    """
    small = states.small()
    contender.save(0, small)
    contender.restore(0, target_of(small, layout))
    state = states.whole()
    target = target_of(state, layout)
    back_memory(_BACKED * bytes_of(state))
    with measured(contender.pids) as saved:
        contender.save(1, state)
    drop_from_cache(directory)
    back_memory(_BACKED * bytes_of(state))
    with measured(contender.pids) as restored:
        found = contender.restore(1, target)
    restored.extra_mib -= _held_bytes(found) / _MIB
    if checks:
        check(state, found, target)
    return {
        "bytes": bytes_of(state),
        "save": asdict(saved),
        "restore": asdict(restored),
    }


def target_of(state: State, layout: Layout | None = None) -> Target:
    """Returns what a restore shall give; without a layout, on the same devices."""
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
    """Refuses a state that is not, bit by bit, the saved one, where it was to be."""
    assert set(state) == set(found)
    for key, leaf in state.items():
        assert found[key].sharding.is_equivalent_to(target[key].sharding, leaf.ndim)
    assert [] == differing(state, found)


def differing(state: State, found: Any) -> list[str]:
    """Returns the keys of the leaves that are not the same in every bit."""
    return [key for key, leaf in state.items() if not same_bits(leaf, found[key])]


def same_bits(one: Any, other: Any) -> bool:
    """Returns whether two arrays are the same in every bit."""
    one, other = np.asarray(one), np.asarray(other)
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return np.array_equal(one.view(np.uint8), other.view(np.uint8))


def _held_bytes(found: Any) -> int:
    """Of what was returned, as often as it lies in memory."""
    return sum(
        sum(shard.data.nbytes for shard in leaf.addressable_shards)
        if isinstance(leaf, jax.Array)
        else leaf.nbytes
        for leaf in jax.tree.leaves(found)
    )
