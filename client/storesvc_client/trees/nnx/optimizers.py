"""Optimizer states: begun where they belong, and described before they exist.

The optimizer itself is the caller's code and is never stored. What it remembers lies
beside the parameters: a moment as its parameter lies, a count on every device.
"""

from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from storesvc_client._pytree.leaves import named_leaves
from storesvc_client._pytree.partition_rules import Rules, shardings_by_rules
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
    "beside_parameters",
    "check_tx",
    "init_opt_state",
    "replicated_beside",
    "updated_opt_state",
]


def check_tx(tx: Any) -> None:
    """Refuses what is no optimizer.

    Raises:
        InvalidRequestError: It has no ``init`` and ``update``.
    """
    if not callable(getattr(tx, "init", None)) or not hasattr(tx, "update"):
        advice = "; call it: optax.adam(1e-3)" if callable(tx) else ""
        raise InvalidRequestError(
            f"tx: expected an optax.GradientTransformation, got {tx!r}{advice}"
        )


def abstract_opt_state(
    tx: optax.GradientTransformation, graphstate: GraphState
) -> optax.OptState:
    """Returns the state that an optimizer begins with, each array abstract.

    Raises:
        InvalidRequestError: ``tx`` is no optimizer.
    """
    check_tx(tx)
    return jax.eval_shape(tx.init, graphstate)


def updated_opt_state(
    tx: optax.GradientTransformation, opt_state: optax.OptState, graphstate: GraphState
) -> optax.OptState | None:
    """Returns what the first update makes of an abstract state; None where that needs
    more than gradients.

    A few optimizers, such as ``optax.monitor``, have leaves from then on only.
    """
    try:
        return jax.eval_shape(tx.update, graphstate, opt_state, graphstate)[1]
    except Exception:  # noqa: BLE001 - the caller's own code
        return None


def init_opt_state(
    tx: optax.GradientTransformation,
    graphstate: GraphState,
    *,
    mesh: Mesh | None,
    rules: Rules | None,
) -> optax.OptState:
    """Returns the state that an optimizer begins with, spread as it is to stay.

    Args:
        tx: The optimizer.
        graphstate: The parameters.
        mesh: The devices, with rules.
        rules: How leaves are spread. None: as ``tx.init`` leaves them, which for
            moments is as their parameters lie.

    Raises:
        InvalidRequestError: ``tx`` is no optimizer, or no rule matches a leaf.
    """
    if mesh is None or rules is None:
        check_tx(tx)
        return tx.init(graphstate)
    abstract = abstract_opt_state(tx, graphstate)
    shardings = shardings_by_rules({"opt_state": abstract}, mesh, rules)
    # as lists: two traces of one optimizer may have unequal tree structures
    init = jax.jit(
        lambda parameters: jax.tree.leaves(tx.init(parameters)),
        out_shardings=jax.tree.leaves(shardings),
    )
    return jax.tree.unflatten(jax.tree.structure(abstract), init(graphstate))


def beside_parameters(
    opt_state: optax.OptState, graphstate: GraphState, known: Any = None
) -> optax.OptState:
    """Returns an abstract optimizer state whose leaves say where they are to lie.

    Args:
        opt_state: Of ``abstract_opt_state``.
        graphstate: The parameters; where they say nothing, neither does the result.
        known: An optimizer state that lies somewhere already; it decides for the
            leaves that it has.
    """
    tree = {"opt_state": opt_state}
    shardings = follow_parameters(opt_state, graphstate)
    own = shardings_by_key({"opt_state": known})
    if own:
        keys = {leaf.key for leaf in named_leaves(tree)[0]}
        shardings |= {key: own[key] for key in own if key in keys}
    return reshard(tree, shardings)["opt_state"] if shardings else opt_state


def replicated_beside(graphstate: GraphState) -> Sharding | None:
    """Returns where a scalar lies that goes with parameters; None where those say
    nothing."""
    mesh = mesh_of_leaves(graphstate)
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())
