"""Connects a training loop to jax: its preemption service, the shapes of a state."""

from collections.abc import Callable
from itertools import count
from typing import Any, TypeGuard

import jax
from jax.experimental.multihost_utils import reached_preemption_sync_point

from storesvc_client._pytree.leaves import list_problems
from storesvc_client._pytree.matching import find_problems
from storesvc_client.errors import MismatchError

_calls = count()
"""Number of each call of ``reached_sync_point``. Steps would not do: a loop may leave
some out, and jax knows only one sequence for all loops of a process."""


def reached_sync_point() -> Callable[[], bool] | None:
    """Returns the function that every process of a job calls as often as the others,
    once a step: it returns True once, when all stop because one received SIGTERM. None
    if jax does not catch SIGTERM for this process.
    """
    # jax has no public way to find out; with the option jax_enable_preemption_service
    # off, reached_preemption_sync_point raises an error.
    from jax._src.distributed import global_state

    manager = global_state.preemption_sync_manager
    if manager is None:
        return None
    # A step that saves nothing does little else. Without a frame of Python, here and in
    # jax's function, it takes half as long in a loop whose caches are cold.
    ask = getattr(manager, "reached_sync_point", reached_preemption_sync_point)
    return map(ask, _calls).__next__


def is_function(init: object) -> TypeGuard[Callable[[], Any]]:
    """Returns whether a value makes a state, rather than being one. Modules are
    callable pytrees."""
    is_leaf = jax.tree_util.treedef_is_leaf(jax.tree.structure(init))
    return is_leaf and callable(init)


def make_target(init: Callable[[], Any]) -> Any:
    """Returns a state as ``init`` makes it, without the values of its arrays.

    A function compiled by ``jax.jit`` with ``out_shardings`` is not run. Another one is
    run, because only its result shows where it places arrays; that result is dropped.
    """
    if hasattr(init, "eval_shape"):
        target = init.eval_shape()
        if all(getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(target)):
            return target
    return without_values(init())


def without_values(state: Any) -> Any:
    """Returns a state with the shapes and placements of its arrays, not the arrays."""
    return jax.tree.map(_without_values, state)


def check_restorable(name: str, state: Any, initial: Any) -> None:
    """Checks that the next process can restore what this one is about to save.

    Args:
        name: Name of the checkpoint.
        state: The state after the first step.
        initial: The initial state, which may lack the values of its arrays.

    Raises:
        MismatchError: It could not; lists all differences.
    """
    problems = find_problems(state, like=initial)
    if problems:
        raise MismatchError(
            f"{name} could not be restored like the initial state of this loop: "
            f"{list_problems(problems)}; make both alike, for example with a jax.jit "
            "function for restore_or, which turns Python numbers into arrays"
        )


def _without_values(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    weak = getattr(leaf, "weak_type", False)  # PRNG keys have none
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=weak
    )
