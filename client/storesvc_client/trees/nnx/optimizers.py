"""Initialises optimizer states on their devices, and describes them abstractly.

The optimizer itself is the caller's code and is never stored. Its state is placed with
the parameters: a moment like its parameter, a count on every device.
"""

from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from storesvc_client._pytree.leaves import named_leaves
from storesvc_client._pytree.partition_rules import Rules, shardings_by_rules
from storesvc_client._values.options import Indivisible
from storesvc_client.errors import InvalidRequestError
from storesvc_client.trees.nnx.graphs import GraphState
from storesvc_client.trees.nnx.resharding import (
    follow_parameters,
    mesh_of_leaves,
    reshard,
    shardings_by_key,
)

__all__ = [
    "abstract_opt_state",
    "check_tx",
    "init_opt_state",
    "placed_like_parameters",
    "replicated_sharding",
    "updated_opt_state",
]


def check_tx(tx: Any) -> None:
    """Rejects anything that is not an optimizer.

    Raises:
        InvalidRequestError: It has no ``init`` or no ``update``.
    """
    if not callable(getattr(tx, "init", None)) or not hasattr(tx, "update"):
        advice = "; call it: optax.adam(1e-3)" if callable(tx) else ""
        raise InvalidRequestError(
            f"tx: expected an optax.GradientTransformation, got {tx!r}{advice}"
        )


def abstract_opt_state(
    tx: optax.GradientTransformation, graphstate: GraphState
) -> optax.OptState:
    """Returns the initial state of an optimizer, with abstract arrays.

    Raises:
        InvalidRequestError: ``tx`` is not an optimizer.
    """
    check_tx(tx)
    return jax.eval_shape(tx.init, graphstate)


def updated_opt_state(
    tx: optax.GradientTransformation, opt_state: optax.OptState, graphstate: GraphState
) -> optax.OptState | None:
    """Returns the abstract state after a first update, or None if that fails.

    A few optimizers, such as ``optax.monitor``, have some leaves only after an update.
    """
    try:
        return jax.eval_shape(tx.update, graphstate, opt_state, graphstate)[1]
    except Exception:  # noqa: BLE001 - the caller's own code
        return None


def init_opt_state(
    tx: optax.GradientTransformation,
    graphstate: GraphState,
    mesh: Mesh | None,
    rules: Rules | None,
    indivisible: Indivisible = "error",
) -> optax.OptState:
    """Returns the initial state of an optimizer, in its final placement.

    Args:
        tx: The optimizer.
        graphstate: The parameters.
        mesh: The mesh, if there are rules.
        rules: Partition rules for the leaves. None: the placement that ``tx.init``
            gives them; moments then have their parameter's sharding.
        indivisible: As for ``Run.restore``.

    Raises:
        InvalidRequestError: ``tx`` is not an optimizer.
        MismatchError: The rules do not fit a leaf.
    """
    if mesh is None or rules is None:
        check_tx(tx)
        return tx.init(graphstate)
    abstract = abstract_opt_state(tx, graphstate)
    shardings = shardings_by_rules({"opt_state": abstract}, mesh, rules, indivisible)
    # As lists, because two traces of one optimizer may have unequal tree structures.
    init = jax.jit(
        lambda parameters: jax.tree.leaves(tx.init(parameters)),
        out_shardings=jax.tree.leaves(shardings),
    )
    return jax.tree.unflatten(jax.tree.structure(abstract), init(graphstate))


def placed_like_parameters(
    opt_state: optax.OptState, graphstate: GraphState, known: Any = None
) -> optax.OptState:
    """Returns an abstract optimizer state with shardings for its leaves.

    Args:
        opt_state: A result of ``abstract_opt_state``.
        graphstate: The parameters; without shardings, the result has none either.
        known: A placed optimizer state; its shardings take precedence.
    """
    tree = {"opt_state": opt_state}
    shardings = follow_parameters(opt_state, graphstate)
    own = shardings_by_key({"opt_state": known})
    if own:
        keys = {leaf.key for leaf in named_leaves(tree)[0]}
        shardings |= {key: own[key] for key in own if key in keys}
    return reshard(tree, shardings)["opt_state"] if shardings else opt_state


def replicated_sharding(graphstate: GraphState) -> Sharding | None:
    """Returns the sharding of a replicated scalar on the parameters' mesh, or None."""
    mesh = mesh_of_leaves(graphstate)
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())
