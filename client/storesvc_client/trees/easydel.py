"""``EasyDeLState``: model, optimizer and step of a training run, as one pytree.

It is ``easydel.infra.base_state.EasyDeLState`` without the easydel package: the
same fields, names and errors, for any NNX module. Two things it keeps true:

* **It is a value.** A module made of a state has Variables of its own; calling it,
  dropout and all, changes nothing in the state.
* **Names decide, never positions.** ``nnx.merge`` assigns leaves by sorted position
  and checks only their number, so a renamed or re-keyed tree would merge into the
  wrong layers without a word. Here every merge compares paths first.

>>> state = EasyDeLState.create(
...     model=nnx.Linear(2, 3, rngs=nnx.Rngs(0)), tx=optax.sgd(0.1), init_opt_state=True
... )
>>> state.model(jnp.ones((1, 2))).shape
(1, 3)
"""

from collections.abc import Callable
from typing import Any, Self, TypeAlias

import jax
import numpy as np
import optax
from flax import nnx, struct

from storesvc_client.trees.traversals import (
    GraphPath,
    GraphState,
    graph_leaves,
    refine_graphs,
)

__all__ = ["EasyDeLState"]


class EasyDeLState(struct.PyTreeNode):
    """The state of a model in training. Immutable; ``replace`` makes another."""

    step: int | jax.Array
    """Number of updates done."""

    graphdef: "nnx.GraphDef[nnx.Module]" = struct.field(pytree_node=False)
    """The structure of the model; static."""

    graphstate: GraphState
    """The parameters."""

    graphother: GraphState
    """All other Variables of the model: counts and keys of its RNG streams, ..."""

    tx: optax.GradientTransformation | None = struct.field(pytree_node=False)
    """The optimizer; static, and never stored."""

    opt_state: optax.OptState | None
    """What the optimizer remembers."""

    apply_fn: Callable[..., Any] | None = struct.field(pytree_node=False, default=None)
    """A function that applies the model, for callers that carry one."""

    @classmethod
    def create(
        cls,
        *,
        step: int | jax.Array | None = None,
        graphdef: "nnx.GraphDef[nnx.Module] | None" = None,
        graphstate: GraphState | None = None,
        graphother: GraphState | None = None,
        model: nnx.Module | None = None,
        tx: optax.GradientTransformation | None = None,
        opt_state: optax.OptState | None = None,
        init_opt_state: bool = False,
    ) -> Self:
        """Returns a state made of a module, or of the three parts of one.

        Args:
            step: Number of updates done; 0 if not given.
            graphdef: The structure, with ``graphstate`` and ``graphother``.
            graphstate: The parameters.
            graphother: The other Variables.
            model: The module, instead of the three parts.
            tx: The optimizer.
            opt_state: Its state.
            init_opt_state: Whether to make that state with ``tx.init``.

        Raises:
            ValueError: ``model`` and parts are given, or some parts and not all;
                ``init_opt_state`` with ``opt_state`` or without ``tx``; the parts
                are not of one module.
        """
        parts = _parts(model, graphdef, graphstate, graphother)
        if init_opt_state:
            opt_state = _initial_opt_state(tx, opt_state, parts[1])
        return cls(
            step=0 if step is None else step,
            graphdef=parts[0],
            graphstate=parts[1],
            graphother=parts[2],
            tx=tx,
            opt_state=opt_state,
        )

    def apply_gradients(self, *, grads: Any) -> Self:
        """Returns the state after one update of the optimizer.

        Args:
            grads: Gradients, a tree like ``graphstate``.

        Raises:
            AssertionError: There is no ``tx`` or no ``opt_state``.
        """
        if self.tx is None or self.opt_state is None:
            lacking = "tx" if self.tx is None else "opt_state"
            raise AssertionError(
                f"expected a state with an optimizer, got none in {lacking}"
            )
        updates, opt_state = self.tx.update(grads, self.opt_state, self.graphstate)
        return self.replace(
            step=self.step + 1,
            graphstate=optax.apply_updates(self.graphstate, updates),
            opt_state=opt_state,
        )

    @property
    def model(self) -> Any:
        """The module, with Variables of its own."""
        return self.merge(self.graphstate)

    def merge(self, tree: Any) -> Any:
        """Returns the module with the parameters of ``tree``.

        Args:
            tree: Parameters, a tree like ``graphstate``.

        Raises:
            ValueError: ``tree`` has other paths than the module.
        """
        return _merged(self.graphdef, tree, self.graphother)

    def merge_to_state(self, tree: Any) -> Self:
        """Returns the state with the parameters of ``tree``.

        Raises:
            ValueError: ``tree`` has other paths than ``graphstate``.
        """
        _refuse_other_paths(set(graph_leaves(self.graphstate)), set(graph_leaves(tree)))
        return self.replace(graphstate=refine_graphs(tree))

    @property
    def size(self) -> int:
        """Bytes of the parameters and of the optimizer's state."""
        return sum(map(_size, jax.tree.leaves((self.graphstate, self.opt_state))))

    @property
    def shardings(self) -> Any:
        """A tree like this one that holds the sharding of each leaf, or None."""
        return jax.tree.map(lambda leaf: getattr(leaf, "sharding", None), self)


def _size(leaf: Any) -> int:
    array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return int(array.size * array.dtype.itemsize)


_Parts: TypeAlias = tuple["nnx.GraphDef[nnx.Module]", GraphState, GraphState]


def _parts(
    model: nnx.Module | None,
    graphdef: "nnx.GraphDef[nnx.Module] | None",
    graphstate: GraphState | None,
    graphother: GraphState | None,
) -> _Parts:
    parts = {"graphdef": graphdef, "graphstate": graphstate, "graphother": graphother}
    given = [name for name, part in parts.items() if part is not None]
    if model is not None:
        if given:
            raise ValueError(f"expected model or its parts, got model and {given}")
        graphdef, *states = nnx.split(model, nnx.Param, ...)
        graphstate, graphother = states
    if graphdef is None or graphstate is None or graphother is None:
        raise ValueError(f"expected model or all of {list(parts)}, got {given}")
    _merged(graphdef, graphstate, graphother)
    # The Variables of `split` are the module's own; those of `refine_graphs` new.
    return graphdef, refine_graphs(graphstate), refine_graphs(graphother)


def _initial_opt_state(
    tx: optax.GradientTransformation | None, opt_state: Any, graphstate: GraphState
) -> optax.OptState:
    if opt_state is not None:
        raise ValueError("expected init_opt_state or opt_state, got both")
    if tx is None:
        raise ValueError("init_opt_state expected tx, got None")
    return tx.init(graphstate)


def _merged(graphdef: "nnx.GraphDef[nnx.Module]", *states: Any) -> nnx.Module:
    whole = refine_graphs(*states)
    _refuse_other_paths(_paths_of(graphdef), set(graph_leaves(whole)))
    return nnx.merge(graphdef, whole)


def _paths_of(graphdef: "nnx.GraphDef[nnx.Module]") -> set[GraphPath]:
    """The paths at which a module of this structure has leaves.

    A GraphDef tells only how many there are; a module built of as many numbers
    tells where each one went.
    """
    numbers = nnx.State(dict(enumerate(range(graphdef.num_leaves))))
    return set(graph_leaves(nnx.state(nnx.merge(graphdef, numbers))))


def _refuse_other_paths(expected: set[GraphPath], got: set[GraphPath]) -> None:
    if expected == got:
        return
    missing = sorted(map(str, expected - got))
    unexpected = sorted(map(str, got - expected))
    raise ValueError(
        f"expected the {len(expected)} leaves of the module, got {len(got)}: "
        f"missing {missing}, unexpected {unexpected}"
    )
