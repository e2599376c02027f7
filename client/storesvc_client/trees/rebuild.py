"""Rebuilding an ``EasyDeLState`` from a checkpoint, in three steps.

1. ``abstract_state`` describes the state that a model and an optimizer have, and
   materialises nothing.
2. ``without_absent_rng`` takes out of it the RNG counts and keys that a checkpoint
   lacks (EasyDeL's own files hold none, for example). What is left is exactly what
   the checkpoint must hold; the restore itself refuses any other difference.
3. ``rebuild_state`` puts fresh counts and keys beside what was restored, and makes
   the state of the whole. A count or key that was saved is never made anew: a run
   that goes on must draw the numbers it would have drawn.
"""

from collections.abc import Callable, Container
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from storesvc.format.keys import join_key
from storesvc_client.trees.easydel import EasyDeLState
from storesvc_client.trees.traversals import (
    GraphPath,
    GraphState,
    graph_leaves,
    recreate_meta_values,
    refine_graphs,
)

__all__ = ["abstract_state", "rebuild_state", "without_absent_rng"]

M = TypeVar("M", bound=nnx.Module)


def abstract_state(
    model: Callable[[], nnx.Module], tx: optax.GradientTransformation
) -> EasyDeLState:
    """Returns the state of a new model, each array leaf a ShapeDtypeStruct.

    Args:
        model: Makes the module; it runs under ``nnx.eval_shape``.
        tx: The optimizer.
    """
    state = EasyDeLState.create(model=nnx.eval_shape(model), tx=tx)
    return state.replace(
        step=jax.eval_shape(lambda: jnp.zeros((), jnp.int32)),
        opt_state=jax.eval_shape(tx.init, state.graphstate),
    )


def without_absent_rng(
    target: EasyDeLState, held: Container[str]
) -> tuple[EasyDeLState, GraphState]:
    """Returns the target without the RNG Variables that are not held, and those.

    Args:
        target: An abstract state.
        held: The leaf keys of a checkpoint.
    """
    absent = {
        path: variable
        for path, variable in graph_leaves(target.graphother).items()
        if isinstance(variable, nnx.RngState) and _key(path) not in held
    }
    present = {
        path: variable
        for path, variable in graph_leaves(target.graphother).items()
        if path not in absent
    }
    return target.replace(graphother=refine_graphs(present)), refine_graphs(absent)


def _key(path: GraphPath) -> str:
    return join_key(("graphother", *map(str, path), "value"))


def rebuild_state(
    target: EasyDeLState, restored: EasyDeLState, absent: GraphState, mesh: Mesh | None
) -> EasyDeLState:
    """Returns the whole state: what was restored, and fresh RNG Variables.

    Args:
        target: The abstract state, whole.
        restored: What ``without_absent_rng`` left of it, with values.
        absent: The RNG Variables that it took out.
        mesh: Where the fresh values go, replicated; none: the default device.

    Raises:
        ValueError: The leaves are not those of the target's module.
    """
    fresh = recreate_meta_values(absent)
    if mesh is not None:
        replicated = PartitionSpec()
        fresh = jax.device_put(fresh, NamedSharding(mesh, replicated))
    whole = refine_graphs(restored.graphstate, restored.graphother, fresh)
    graphstate, graphother = nnx.split_state(whole, nnx.Param, ...)
    return EasyDeLState.create(
        step=restored.step,
        graphdef=target.graphdef,
        graphstate=graphstate,
        graphother=graphother,
        tx=target.tx,
        opt_state=restored.opt_state,
    )
