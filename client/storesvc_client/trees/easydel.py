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

from collections.abc import Callable, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsFloat, TypeAlias

import jax
import numpy as np
import optax
from flax import nnx, struct
from jax.sharding import Mesh

from storesvc_client._pytree.partition_rules import Rules, shardings_by_rules
from storesvc_client._values.options import ALL_PROCESSES, OnMismatch
from storesvc_client.errors import InvalidRequestError
from storesvc_client.trees.nnx.casting import cast_floating
from storesvc_client.trees.nnx.graphs import (
    GraphState,
    merge_by_path,
    refine_graphs,
    with_values,
)
from storesvc_client.trees.nnx.model_parts import (
    mesh_of,
    partition_rules_of,
    split_module,
)
from storesvc_client.trees.nnx.optimizers import init_opt_state
from storesvc_client.trees.nnx.resharding import (
    gather,
    mesh_of_leaves,
    required_shardings,
    reshard,
    shardings_by_key,
)
from storesvc_client.trees.nnx.restore_model import restore_opt_state
from storesvc_client.trees.nnx.saved_models import (
    opened_run,
    restore_state,
    save_state,
)

if TYPE_CHECKING:
    from storesvc_client import Checkpoint, Client, Run

__all__ = ["EasyDeLState"]

Where: TypeAlias = "str | PathLike[str] | Run"
"""A run, the name of one on a client, or a directory; see ``save_state``."""


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
        return merge_by_path(self.graphdef, tree, self.graphother)

    def merge_to_state(self, tree: Any) -> Self:
        """Returns the state with the parameters of ``tree``.

        Args:
            tree: A tree like ``graphstate``, of Variables or of bare arrays.

        Raises:
            ValueError: ``tree`` has other paths than ``graphstate``, or Variables of
                another type or shape there.
        """
        merge_by_path(self.graphdef, tree, self.graphother)  # refuses other paths
        return self.replace(graphstate=with_values(self.graphstate, tree))

    @property
    def size(self) -> int:
        """Bytes of the parameters and of the optimizer's state."""
        return sum(map(_size, jax.tree.leaves((self.graphstate, self.opt_state))))

    @property
    def shardings(self) -> Any:
        """A tree like this one that holds the sharding of each leaf, or None."""
        return jax.tree.map(lambda leaf: getattr(leaf, "sharding", None), self)

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that the model names, or else that the arrays lie on."""
        return mesh_of(self.model) or mesh_of_leaves(self)

    def init_tx(
        self, tx: optax.GradientTransformation, partition_rules: Rules | None = None
    ) -> Self:
        """Returns the state with an optimizer and a fresh state of it.

        Args:
            tx: The optimizer.
            partition_rules: How its state is spread. None: by the rules that the
                model knows; without any, as ``tx.init`` leaves it, which for
                moments is as their parameters lie.

        Raises:
            InvalidRequestError: There are rules and no mesh, or no rule matches a
                leaf.
        """
        rules = partition_rules or partition_rules_of(self.model)
        mesh = None if rules is None else self._mesh(None)
        opt_state = init_opt_state(tx, self.graphstate, mesh=mesh, rules=rules)
        return self.replace(tx=tx, opt_state=opt_state)

    def shard_model(
        self, partition_rules: Rules | None = None, mesh: Mesh | None = None
    ) -> Self:
        """Returns the state with the model's leaves spread over a mesh.

        Args:
            partition_rules: Pairs of a regex, searched in the leaf key, and a
                ``PartitionSpec``; the first match decides. None: the model's own.
            mesh: The devices. None: the model's, or those that the arrays lie on.

        Raises:
            InvalidRequestError: No rules or no mesh are known, or no rule matches a
                leaf.
        """
        sharded = self._sharded(self.replace(opt_state=None), partition_rules, mesh)
        return self.replace(
            graphstate=sharded.graphstate, graphother=sharded.graphother
        )

    def shard_optimizer_state(
        self,
        opt_state: optax.OptState | None = None,
        partition_rules: Rules | None = None,
        *,
        mesh: Mesh | None = None,
    ) -> Self:
        """Returns the state with an optimizer state spread over a mesh.

        Args:
            opt_state: The optimizer state; None: this state's own.
            partition_rules: As of ``shard_model``.
            mesh: As of ``shard_model``.

        Raises:
            ValueError: There is no optimizer state.
            InvalidRequestError: As ``shard_model``.
        """
        opt_state = self.opt_state if opt_state is None else opt_state
        if opt_state is None:
            raise ValueError("expected an opt_state to shard, got none; see init_tx")
        empty: GraphState = nnx.State({})
        only = self.replace(graphstate=empty, graphother=empty, opt_state=opt_state)
        return self.replace(
            opt_state=self._sharded(only, partition_rules, mesh).opt_state
        )

    def shard_state(
        self, partition_rules: Rules | None = None, mesh: Mesh | None = None
    ) -> Self:
        """Returns the state with all leaves spread over a mesh.

        A step that is a Python number becomes an array, as under ``jax.jit``.

        Args:
            partition_rules: As of ``shard_model``.
            mesh: As of ``shard_model``.

        Raises:
            InvalidRequestError: As ``shard_model``.
        """
        step = self.step
        if not isinstance(step, jax.Array):
            step = jax.numpy.asarray(step, jax.numpy.int32)
        return self._sharded(self.replace(step=step), partition_rules, mesh)

    def shard_with_shape(self, shape: Any) -> Self:
        """Returns the state with its leaves where those of another tree lie.

        Args:
            shape: A tree of leaves of the same names: shardings, such as
                ``state.shardings``, or arrays, real or abstract, that have them.
                Leaves without one stay where they are.

        Raises:
            MismatchError: A sharding is for no leaf of this state, or does not fit.
            InvalidRequestError: There is no sharding in the tree.
        """
        resharded: Self = reshard(self, required_shardings(shape))
        return resharded

    def gather_model(
        self, partition_rules: Rules | None = None, mesh: Mesh | None = None
    ) -> Self:
        """Returns the state with the model's arrays whole on the host.

        Args:
            partition_rules: Taken as EasyDeL takes it; an array knows how it lies.
            mesh: Likewise.
        """
        del partition_rules, mesh
        return self.replace(
            graphstate=gather(self.graphstate), graphother=gather(self.graphother)
        )

    def gather_optimizer_state(self, partition_rules: Rules | None = None) -> Self:
        """Returns the state with the optimizer's arrays whole on the host.

        Args:
            partition_rules: As of ``gather_model``.

        Raises:
            AssertionError: There is no ``opt_state``.
        """
        del partition_rules
        if self.opt_state is None:
            raise AssertionError("expected an opt_state to gather, got none")
        return self.replace(opt_state=gather(self.opt_state))

    def gather_state(self) -> Self:
        """Returns the state with all arrays whole on the host, as NumPy arrays."""
        gathered: Self = gather(self)
        return gathered

    def save_state(
        self,
        save_directory: Where,
        float_dtype: Any = None,
        *,
        client: "Client | None" = None,
        save_optimizer: bool = True,
        metrics: Mapping[str, SupportsFloat] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> "Checkpoint":
        """Saves the state at its own step, and waits for the commit.

        ``storesvc_client.easydel.save_state`` does the same in the background.
        EasyDeL's ``verbose``, ``mismatch_allowed`` and ``enable`` are not taken: a
        save is never partial, and each process that calls this saves.

        Args:
            save_directory: Where to: a ``Run``; with ``client``, the name of a run
                such as "prod/llama"; without it, a directory, which becomes a store
                of its own and holds any number of steps.
            float_dtype: The dtype of floating-point parameters in the checkpoint;
                None: as they are.
            client: The store that the run is in.
            save_optimizer: Whether to save ``opt_state``.
            metrics: Numbers to keep with the checkpoint.
            labels: Texts to keep with the checkpoint.

        Returns:
            The checkpoint.

        Raises:
            StoreError: As ``Run.save`` and ``Save.result``.
        """
        state = self if save_optimizer else self.replace(opt_state=None)
        if float_dtype is not None:
            state = state.replace(
                graphstate=cast_floating(state.graphstate, float_dtype)
            )
        with opened_run(save_directory, client=client, creating=True) as (run, _):
            return save_state(
                run, state, metrics=metrics, labels=labels, snapshot="none"
            ).result()

    @classmethod
    def load_state(
        cls,
        load_directory: Where,
        *,
        model: Any,
        tx: optax.GradientTransformation | None = None,
        client: "Client | None" = None,
        mesh: Mesh | None = None,
        partition_rules: "Rules | Literal['recorded'] | None" = None,
        opt_state: Literal["restore", "skip"] = "restore",
        cast: Any = None,
        missing: Literal["error", "init"] = "error",
        on_mismatch: OnMismatch = "raise",
    ) -> Self:
        """Returns a state that ``save_state`` saved.

        Args:
            load_directory: As of ``save_state``; the name of a run may end in a step,
                "prod/llama@100". Without one: the newest checkpoint.
            model: As of ``storesvc_client.easydel.restore_state``.
            tx: The optimizer that the state was trained with.
            client: The store that the run is in.
            mesh: The devices.
            partition_rules: How the leaves are spread over them.
            opt_state: As of ``restore_state``.
            cast: As of ``restore_state``.
            missing: As of ``restore_state``.
            on_mismatch: As of ``restore_state``.

        Raises:
            FileNotFoundError: The directory holds no state.
            StoreError: As ``restore_state``.
        """
        with opened_run(load_directory, client=client) as (run, which):
            state: Self = restore_state(
                run,
                which,
                model=model,
                tx=tx,
                mesh=mesh,
                rules=partition_rules,
                opt_state=opt_state,
                cast=cast,
                missing=missing,
                on_mismatch=on_mismatch,
                state_class=cls,
            )
            return state

    def load_optimizer(
        self, load_directory: Where, *, client: "Client | None" = None
    ) -> Self:
        """Returns the state with the optimizer state of a checkpoint.

        Its arrays lie as those of this state's ``opt_state``, or where ``init_tx``
        would put them.

        Args:
            load_directory: As of ``load_state``.
            client: The store that the run is in.

        Raises:
            AssertionError: There is no ``tx``.
            FileNotFoundError: The directory holds no state.
            MismatchError: The checkpoint's is of another optimizer or model.
        """
        if self.tx is None:
            raise AssertionError("expected a state with tx to load for, got none")
        with opened_run(load_directory, client=client) as (run, which):
            opened = run.open(which, distributed=ALL_PROCESSES)
            return self.replace(opt_state=restore_opt_state(opened, self))

    def _sharded(self, state: Self, rules: Rules | None, mesh: Mesh | None) -> Self:
        """The leaves of a state like this one, spread as this one's model says."""
        rules = rules or partition_rules_of(self.model)
        if rules is None:
            raise InvalidRequestError(
                "expected partition_rules=, as the model knows none, got None"
            )
        shardings = shardings_by_rules(state, self._mesh(mesh), rules)
        sharded: Self = reshard(state, shardings_by_key(shardings))
        return sharded

    def _mesh(self, mesh: Mesh | None) -> Mesh:
        found = mesh or self.mesh
        if found is None:
            raise InvalidRequestError(
                "expected mesh=, as neither the model nor its arrays name one, got None"
            )
        return found


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
        graphdef, graphstate, graphother = split_module(model)
    if graphdef is None or graphstate is None or graphother is None:
        raise ValueError(f"expected model or all of {list(parts)}, got {given}")
    merge_by_path(graphdef, graphstate, graphother)  # refuses other paths
    # The Variables of `split` are the module's own; those of `refine_graphs` new.
    return graphdef, refine_graphs(graphstate), refine_graphs(graphother)


def _initial_opt_state(
    tx: optax.GradientTransformation | None, opt_state: Any, graphstate: GraphState
) -> optax.OptState:
    if opt_state is not None:
        raise ValueError("expected init_opt_state or opt_state, got both")
    if tx is None:
        raise ValueError("init_opt_state expected tx, got None")
    return init_opt_state(tx, graphstate, mesh=None, rules=None)
