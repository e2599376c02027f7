"""``EasyDeLState``: model, optimizer and step of a training run, as one pytree.

A version of ``easydel.infra.base_state.EasyDeLState`` without the easydel package: the
same fields, names and errors, for any NNX module. Two guarantees:

* **It is a value.** A module created from a state has its own Variables; calling it,
  even with dropout, does not change the state.
* **Leaves are matched by name, never by position.** ``nnx.merge`` assigns leaves by
  sorted position and checks only their number, so a renamed or re-keyed tree would be
  merged into the wrong layers silently. Here every merge compares paths first.

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

from storesvc.format.names import Which
from storesvc_client._api.run import Run
from storesvc_client._foreign.mount import ForeignRun
from storesvc_client._pytree.partition_rules import Rules, shardings_by_rules
from storesvc_client._values.options import (
    ALL_PROCESSES,
    DEFAULT_DEADLINE,
    Distributed,
    Indivisible,
    MappingRules,
    Missing,
    OnMismatch,
    OptState,
    collect_arguments,
)
from storesvc_client.errors import InvalidRequestError
from storesvc_client.trees.nnx.blueprints import (
    cast_floating,
    find_leaf_mesh,
    gather,
    init_opt_state,
    required_shardings,
    reshard,
    shardings_by_key,
)
from storesvc_client.trees.nnx.graphs import (
    GraphState,
    merge_by_path,
    mesh_of,
    partition_rules_of,
    refine_graphs,
    split_module,
    with_values,
)
from storesvc_client.trees.nnx.restore_plans import Options, Request, plan_opt_state
from storesvc_client.trees.nnx.saved_models import (
    check_run,
    open_checkpoint,
    open_run,
    rebuild_state,
    save_state,
)

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from storesvc_client import Checkpoint, Client
    from storesvc_client._telemetry.progress import ProgressCallback
    from storesvc_client._values.arguments import DurationLike
    from storesvc_client._values.key_patterns import Patterns

__all__ = ["EasyDeLState"]

Where: TypeAlias = "str | PathLike[str] | Run"
"""A run, the name of a run on a client, or a directory; see ``save_state``."""


class EasyDeLState(struct.PyTreeNode):
    """State of a model in training. Immutable; ``replace`` returns a changed copy."""

    step: int | jax.Array
    """Number of updates done."""

    graphdef: "nnx.GraphDef[nnx.Module]" = struct.field(pytree_node=False)
    """Structure of the model; static."""

    graphstate: GraphState
    """Parameters."""

    graphother: GraphState
    """All other Variables of the model, such as counts and keys of its RNG streams."""

    tx: optax.GradientTransformation | None = struct.field(pytree_node=False)
    """Optimizer; static, never stored."""

    opt_state: optax.OptState | None
    """State of the optimizer."""

    apply_fn: Callable[..., Any] | None = struct.field(pytree_node=False, default=None)
    """Function that applies the model, for callers that need one."""

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
        """Returns a state created from a module, or from its three parts.

        Args:
            step: Number of updates done; 0 by default.
            graphdef: The structure, with ``graphstate`` and ``graphother``.
            graphstate: The parameters.
            graphother: The other Variables.
            model: The module, instead of the three parts.
            tx: The optimizer.
            opt_state: Its state.
            init_opt_state: Create ``opt_state`` with ``tx.init``.

        Raises:
            ValueError: ``model`` and parts are given, or only some parts;
                ``init_opt_state`` is given with ``opt_state`` or without ``tx``; or the
                parts are of different modules.
        """
        parts = {
            "graphdef": graphdef,
            "graphstate": graphstate,
            "graphother": graphother,
        }
        given = [name for name, part in parts.items() if part is not None]
        if model is not None:
            if given:
                raise ValueError(f"expected model or its parts, got model and {given}")
            graphdef, graphstate, graphother = split_module(model)
        if graphdef is None or graphstate is None or graphother is None:
            raise ValueError(f"expected model or all of {list(parts)}, got {given}")
        merge_by_path(graphdef, graphstate, graphother)  # rejects other paths
        # split_module returns the module's own Variables; refine_graphs copies them.
        graphstate = refine_graphs(graphstate)
        if init_opt_state:
            opt_state = _initial_opt_state(tx, opt_state, graphstate)
        return cls(
            step=0 if step is None else step,
            graphdef=graphdef,
            graphstate=graphstate,
            graphother=refine_graphs(graphother),
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
                f"expected a state with an optimizer, got none in {lacking}; "
                "see init_tx"
            )
        updates, opt_state = self.tx.update(grads, self.opt_state, self.graphstate)
        return self.replace(
            step=self.step + 1,
            graphstate=optax.apply_updates(self.graphstate, updates),
            opt_state=opt_state,
        )

    @property
    def model(self) -> Any:
        """Module with its own Variables."""
        return self.merge(self.graphstate)

    def merge(self, tree: Any) -> Any:
        """Returns the module with the parameters of ``tree``.

        Args:
            tree: Parameters, a tree like ``graphstate``.

        Raises:
            ValueError: The paths of ``tree`` differ from the module's.
        """
        return merge_by_path(self.graphdef, tree, self.graphother)

    def merge_to_state(self, tree: Any) -> Self:
        """Returns the state with the parameters of ``tree``.

        Args:
            tree: A tree like ``graphstate``, of Variables or of arrays.

        Raises:
            ValueError: The paths of ``tree`` differ from those in ``graphstate``, or a
                Variable has another type or shape.
        """
        merge_by_path(self.graphdef, tree, self.graphother)  # rejects other paths
        return self.replace(graphstate=with_values(self.graphstate, tree))

    @property
    def size(self) -> int:
        """Bytes of the parameters and of the optimizer's state."""
        leaves = jax.tree.leaves((self.graphstate, self.opt_state))
        arrays = [x if hasattr(x, "dtype") else np.asarray(x) for x in leaves]
        return sum(int(each.size * each.dtype.itemsize) for each in arrays)

    @property
    def shardings(self) -> Any:
        """A tree like this one with the sharding of each leaf, or None."""
        return jax.tree.map(lambda leaf: getattr(leaf, "sharding", None), self)

    @property
    def mesh(self) -> Mesh | None:
        """Mesh of the model, or of the arrays if the model has none."""
        return mesh_of(self.model) or find_leaf_mesh(self)

    def init_tx(
        self,
        tx: optax.GradientTransformation,
        partition_rules: Rules | None = None,
        *,
        indivisible: Indivisible = "error",
    ) -> Self:
        """Returns the state with an optimizer and its initial state.

        Args:
            tx: The optimizer.
            partition_rules: Partition rules for its state. None: the model's rules; if
                it has none, the placement that ``tx.init`` gives, which for moments is
                their parameter's.
            indivisible: See ``shard_model``.

        Raises:
            InvalidRequestError: There are rules but no mesh.
            MismatchError: The rules do not fit a leaf.
        """
        rules, indivisible = self._rules(partition_rules, indivisible)
        mesh = None if rules is None else self._mesh(None)
        opt_state = init_opt_state(tx, self.graphstate, mesh, rules, indivisible)
        return self.replace(tx=tx, opt_state=opt_state)

    def shard_model(
        self,
        partition_rules: Rules | None = None,
        mesh: Mesh | None = None,
        *,
        indivisible: Indivisible = "error",
    ) -> Self:
        """Returns the state with the model's leaves sharded over a mesh.

        Args:
            partition_rules: Pairs of a regular expression, searched in the leaf key,
                and a ``PartitionSpec``; the first match applies. None: the model's
                rules.
            mesh: The mesh. None: the model's, or else the mesh of its arrays.
            indivisible: As for ``Run.restore``. The model's rules are always applied
                with "replicate", as EasyDeL does.

        Raises:
            InvalidRequestError: There are no rules or no mesh.
            MismatchError: The rules do not fit a leaf.
        """
        only = self.replace(opt_state=None)
        sharded = self._shard_state(only, partition_rules, mesh, indivisible)
        return self.replace(
            graphstate=sharded.graphstate, graphother=sharded.graphother
        )

    def shard_optimizer_state(
        self,
        opt_state: optax.OptState | None = None,
        partition_rules: Rules | None = None,
        *,
        mesh: Mesh | None = None,
        indivisible: Indivisible = "error",
    ) -> Self:
        """Returns the state with an optimizer state sharded over a mesh.

        Arguments that are not listed are as for ``shard_model``.

        Args:
            opt_state: The optimizer state; None: this state's own.

        Raises:
            ValueError: There is no optimizer state.
            StoreError: See ``shard_model``.
        """
        opt_state = self.opt_state if opt_state is None else opt_state
        if opt_state is None:
            raise ValueError("expected an opt_state to shard, got none; see init_tx")
        empty: GraphState = nnx.State({})
        only = self.replace(graphstate=empty, graphother=empty, opt_state=opt_state)
        sharded = self._shard_state(only, partition_rules, mesh, indivisible)
        return self.replace(opt_state=sharded.opt_state)

    def shard_state(
        self,
        partition_rules: Rules | None = None,
        mesh: Mesh | None = None,
        *,
        indivisible: Indivisible = "error",
    ) -> Self:
        """Returns the state with all leaves sharded over a mesh.

        A step that is a Python number becomes an array, as under ``jax.jit``.

        The arguments are as for ``shard_model``.

        Raises:
            StoreError: See ``shard_model``.
        """
        step = self.step
        if not isinstance(step, jax.Array):
            step = jax.numpy.asarray(step, jax.numpy.int32)
        placed = self.replace(step=step)
        return self._shard_state(placed, partition_rules, mesh, indivisible)

    def shard_with_shape(self, shape: Any) -> Self:
        """Returns the state with its leaves placed like another tree's leaves.

        Args:
            shape: A tree with leaves of the same names: shardings, such as
                ``state.shardings``, or arrays, concrete or abstract, with shardings.
                Leaves without one are not moved.

        Raises:
            MismatchError: A sharding is for a leaf that this state lacks, or does not
                fit.
            InvalidRequestError: There is no sharding in the tree.
        """
        resharded: Self = reshard(self, required_shardings(shape))
        return resharded

    def gather_model(
        self, partition_rules: Rules | None = None, mesh: Mesh | None = None
    ) -> Self:
        """Returns the state with the model's arrays complete on the host.

        Args:
            partition_rules: Not used; accepted because EasyDeL accepts it.
            mesh: Not used.
        """
        del partition_rules, mesh
        return self.replace(
            graphstate=gather(self.graphstate), graphother=gather(self.graphother)
        )

    def gather_optimizer_state(self, partition_rules: Rules | None = None) -> Self:
        """Returns the state with the optimizer's arrays complete on the host.

        Args:
            partition_rules: Not used.

        Raises:
            AssertionError: There is no ``opt_state``.
        """
        del partition_rules
        if self.opt_state is None:
            raise AssertionError(
                "expected an opt_state to gather, got none; see init_tx"
            )
        return self.replace(opt_state=gather(self.opt_state))

    def gather_state(self) -> Self:
        """Returns the state with all arrays complete on the host, as NumPy arrays."""
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
        EasyDeL's ``verbose``, ``mismatch_allowed`` and ``enable`` are not accepted: a
        save is never partial, and every process that calls this takes part in it.

        Args:
            save_directory: Destination: a ``Run``; with ``client``, the name of a run
                such as "prod/llama"; without it, a directory, which becomes a store of
                its own and holds any number of steps.
            float_dtype: dtype of floating-point parameters in the checkpoint, which a
                class restores as they are; a factory must create it, or be given with
                ``cast="like"``. None: unchanged.
            client: The store of the named run.
            save_optimizer: Save ``opt_state``, too.
            metrics: Numbers to store with the checkpoint.
            labels: Texts to store with the checkpoint.

        Returns:
            The checkpoint.

        Raises:
            StoreError: See ``Run.save`` and ``Save.result``.
        """
        state = self if save_optimizer else self.replace(opt_state=None)
        if float_dtype is not None:
            state = state.replace(
                graphstate=cast_floating(state.graphstate, float_dtype, "float_dtype=")
            )
        with open_run(save_directory, client=client, creating=True) as (run, _):
            return save_state(
                run, state, metrics=metrics, labels=labels, snapshot="none"
            ).result()

    @classmethod
    def load_state(
        cls,
        load_directory: Where,
        *,
        model: Any = None,
        tx: optax.GradientTransformation | None = None,
        client: "Client | None" = None,
        mesh: Mesh | None = None,
        partition_rules: "Rules | Literal['recorded'] | None" = None,
        indivisible: Indivisible = "error",
        opt_state: OptState = "restore",
        cast: Any = None,
        select: "Patterns | None" = None,
        missing: Missing = "error",
        on_mismatch: OnMismatch = "raise",
    ) -> Self:
        """Returns a state that ``save_state`` saved.

        Arguments that are not listed are as for
        ``storesvc_client.easydel.restore_state``.

        Args:
            load_directory: See ``save_state``; the name of a run may end in a step,
                "prod/llama@100". Without a step: the newest checkpoint.
            tx: The optimizer that the state was trained with.
            client: The store of the named run.
            mesh: The mesh.
            partition_rules: Partition rules for the leaves, or "recorded".

        Raises:
            FileNotFoundError: The directory holds no state.
            StoreError: See ``restore_state``.
        """
        with open_run(load_directory, client=client) as (run, which):
            state: Self = restore_state(
                run,
                which,
                model=model,
                tx=tx,
                mesh=mesh,
                rules=partition_rules,
                indivisible=indivisible,
                opt_state=opt_state,
                cast=cast,
                select=select,
                missing=missing,
                on_mismatch=on_mismatch,
                state_class=cls,
            )
            return state

    def load_optimizer(
        self, load_directory: Where, *, client: "Client | None" = None
    ) -> Self:
        """Returns the state with the optimizer state of a checkpoint.

        Its arrays are placed like the arrays of this state's ``opt_state``, or as
        ``init_tx`` would place them.

        Args:
            load_directory: See ``load_state``.
            client: The store of the named run.

        Raises:
            AssertionError: There is no ``tx``.
            FileNotFoundError: The directory holds no state.
            MismatchError: The checkpoint has the state of another optimizer or model.
        """
        if self.tx is None:
            raise AssertionError(
                "expected a state with tx to load for, got none; see init_tx"
            )
        with open_run(load_directory, client=client) as (run, which):
            reader, _ = open_checkpoint(
                run, which, None, ALL_PROCESSES, DEFAULT_DEADLINE
            )
            request = plan_opt_state(reader, self)
            restored: Any = reader.restore(request, DEFAULT_DEADLINE)
            return self.replace(opt_state=restored["opt_state"])

    def _rules(
        self, rules: Rules | None, indivisible: Indivisible
    ) -> tuple[Rules | None, Indivisible]:
        """Returns the given rules, or the model's, which fit as far as they do."""
        own = None if rules else partition_rules_of(self.model)
        return (rules, indivisible) if own is None else (own, "replicate")

    def _shard_state(
        self,
        state: Self,
        rules: Rules | None,
        mesh: Mesh | None,
        indivisible: Indivisible,
    ) -> Self:
        """Returns a state like this one, sharded by this state's model and mesh."""
        rules, indivisible = self._rules(rules, indivisible)
        if rules is None:
            raise InvalidRequestError(
                "expected partition_rules=, because the model has none, got None; "
                "pass partition_rules="
            )
        shardings = shardings_by_rules(state, self._mesh(mesh), rules, indivisible)
        sharded: Self = reshard(state, shardings_by_key(shardings))
        return sharded

    def _mesh(self, mesh: Mesh | None) -> Mesh:
        found = mesh or self.mesh
        if found is None:
            raise InvalidRequestError(
                "expected mesh=, because neither the model nor its arrays have one, "
                "got None; pass mesh="
            )
        return found


def restore_state(
    run: "Run | ForeignRun",
    which: Which = "latest",
    *,
    model: Any = None,
    tx: "optax.GradientTransformation | None" = None,
    mesh: "Mesh | None" = None,
    rules: "Rules | Literal['recorded'] | None" = None,
    indivisible: Indivisible = "error",
    opt_state: OptState = "restore",
    cast: "DTypeLike | None" = None,
    select: "Patterns | None" = None,
    missing: Missing = "error",
    on_mismatch: OnMismatch = "raise",
    state_class: Any = None,
    mapping: "MappingRules | None" = None,
    distributed: Distributed = ALL_PROCESSES,
    deadline: "DurationLike" = DEFAULT_DEADLINE,
    progress: "ProgressCallback | None" = None,
) -> Any:
    """Returns the state of a checkpoint, on the given mesh.

    RNG counts and keys that the checkpoint lacks are initialised; those that it has are
    restored as they were.

    >>> state = restore_state(run, model=LlamaForCausalLM, tx=optax.adamw(1e-4))

    Arguments that are not listed are as for ``Run.restore``.

    Args:
        run: Run of the checkpoint, or ``open_foreign("eformer:...")``: a checkpoint
            that EasyDeL wrote, imported or not, has the keys of a state, its config and
            its step. RNG values are new, and a class computes in its own ``dtype``.
        which: A step, "latest", or a tag.
        model: The model: a class, a factory (a callable without arguments), a module,
            or a state; modules and states may be abstract. Factories run under
            ``nnx.eval_shape``. A class whose constructor takes a config, as EasyDeL's
            models do, receives the saved config and dtypes. None returns a dict of
            dicts and lists, with all leaves as they were saved.
        tx: The optimizer that the state was trained with.
        mesh: Mesh of any shape. None: the mesh of the model, else the sharding of each
            leaf of ``model``, or the default device.
        rules: With ``mesh``: ``(pattern, PartitionSpec)`` pairs; the first whose
            regular expression is found in the key of a leaf applies. Or "recorded": the
            saved sharding. None: the rules of the model; of these, axes that do not
            divide a leaf are dropped, as EasyDeL does, which is logged.
        opt_state: "restore" the saved state of the optimizer; "init" initialises it by
            ``tx``, which may be another optimizer; "skip" leaves it out, for inference.
        cast: A floating-point dtype for the parameters (``graphstate``) and for the
            moments that ``tx`` keeps of them; a model given as a class gets it as
            ``param_dtype``. "like": the dtypes of the model. None: the saved dtypes,
            which a factory must have.
        select: Globs or compiled expressions of the keys of leaves that count; the
            checkpoint is restored as if it lacked all others.
        missing: What to do with leaves that the checkpoint lacks, such as LoRA weights,
            a layer, or the count of a schedule: "error"; "init" initialises them by the
            model or ``tx``, and "keep" keeps their values in ``model``, a module or a
            state. With either a parameter may also have become a frozen Variable of
            ``graphother``, or vice versa. If adapters wrap their layers, as EasyDeL's
            do, restore the model without them, and apply them to it.
        on_mismatch: What to do if the config, the structure or the optimizer differs
            from the saved one: "raise" a ``MismatchError``, or "log" a warning. The
            leaves must fit in any case.
        state_class: Class whose ``create`` builds the state. Fields that it adds, such
            as averages of the parameters, are restored with the structure that they
            have in ``model``, if it is a state, or after ``create``, or that they had
            when saved, if they were like a part of the state or of dicts and lists.
            None: the class of the state in ``model``, else ``EasyDeLState`` of this
            library.
        mapping: Rules that make the tree of a state of the checkpoint, as for
            ``Run.restore``; None: the migrations of the run. The saved config and
            structure then do not count: give ``model`` as a factory, module or state.

    Raises:
        NotFoundError: There is no such checkpoint.
        InvalidRequestError: An argument is out of range, or ``tx`` is None but the
            checkpoint has the state of an optimizer.
        MismatchError: The checkpoint was saved from another model or optimizer.
    """
    check_run(run, Run | ForeignRun)
    if model is None and state_class is not None:
        raise InvalidRequestError(
            f"restore of {run.name}: expected model= with state_class=, got None; "
            "give the class of the model, a factory, or a module"
        )
    if state_class is None and model is not None:
        is_state = hasattr(model, "opt_state") and hasattr(type(model), "create")
        state_class = type(model) if is_state else EasyDeLState
    if state_class is not None and not hasattr(state_class, "create"):
        raise InvalidRequestError(
            "state_class: expected a class with the create() of EasyDeLState, got "
            f"{state_class!r}"
        )
    reader, step = open_checkpoint(run, which, model, distributed, deadline, mapping)
    wanted = collect_arguments(Options, locals(), step=step)
    request = Request(model=model, tx=tx, state_class=state_class, options=wanted)
    return rebuild_state(reader, request)


def _initial_opt_state(
    tx: optax.GradientTransformation | None, opt_state: Any, graphstate: GraphState
) -> optax.OptState:
    if opt_state is not None:
        raise ValueError("expected init_opt_state or opt_state, got both")
    if tx is None:
        raise ValueError("init_opt_state expected tx, got None")
    return init_opt_state(tx, graphstate, None, None)
