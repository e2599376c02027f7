"""Saves a module with its ``nnx.Optimizer``, and restores both in place.

The checkpoint is that of a state: it has the leaves of an ``EasyDeLState`` with the
same parameters and optimizer, so ``restore_state`` and ``restore_model`` read it, too.
The Variables that the optimizer updates, its ``wrt``, are the parameters. Checkpoints
of ``nnx.state((model, optimizer))`` are restored, too.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsIndex, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from storesvc.format.names import Which
from storesvc_client._api.run import Run
from storesvc_client._values.options import (
    ALL_PROCESSES,
    DEFAULT_DEADLINE,
    Distributed,
    Indivisible,
    OnMismatch,
    OptState,
    SaveKeywords,
    check_keywords,
)
from storesvc_client.errors import InvalidRequestError
from storesvc_client.trees.nnx.graphs import GraphState
from storesvc_client.trees.nnx.model_parts import drop_caches, split_module
from storesvc_client.trees.nnx.optimizers import abstract_opt_state
from storesvc_client.trees.nnx.recipes import Recipe
from storesvc_client.trees.nnx.restore_model import (
    Options,
    Request,
    advised,
    create_state,
    is_pytree,
    plan_module,
    plan_pytree,
    plan_state,
)
from storesvc_client.trees.nnx.rng_values import fill_rng_values
from storesvc_client.trees.nnx.saved_models import as_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.sharding import Mesh
    from numpy.typing import DTypeLike

    from storesvc_client._restore.checkpoint import OpenCheckpoint
    from storesvc_client._save.saver import Save
    from storesvc_client._values.arguments import DurationLike
    from storesvc_client._values.key_patterns import Patterns
    from storesvc_client._values.options import Rules
    from storesvc_client._values.progress import ProgressCallback
    from storesvc_client._values.values import Checkpoint

__all__ = ["restore_into", "save"]


class _Parts(SimpleNamespace):
    """Parts of a state: ``step``, ``graphdef``, ``graphstate``, ``graphother``, ``tx``
    and ``opt_state``."""

    @classmethod
    def create(cls, **parts: Any) -> Self:
        return cls(**parts)


def save(
    run: Run,
    step: SupportsIndex,
    model: nnx.Module,
    optimizer: "nnx.Optimizer[Any] | None" = None,
    **options: Unpack[SaveKeywords],
) -> "Save":
    """Starts to save a module and its optimizer; see ``Run.save``.

    >>> save(run, 100, model, optimizer, metrics={"loss": 2.31}).result().step
    100

    Args:
        run: Run that the checkpoint will belong to.
        step: Training step, >= 0.
        model: The module.
        optimizer: Its optimizer; None saves the module alone.
        **options: ``metrics``, ``labels``, ``base``, ``snapshot``, ``if_busy``,
            ``distributed`` and ``progress``, as for ``Run.save``.

    Raises:
        InvalidRequestError: ``model`` is no module, or ``optimizer`` is no optimizer of
            it.
        StoreError: See for ``Run.save``.
    """
    check_keywords("save", options, SaveKeywords)
    _check(run, "save to")
    tree, document = tree_to_save(run, model, optimizer)
    return run.save(step, tree, document=document, **options)


def tree_to_save(run: Run, model: Any, optimizer: Any) -> tuple[Any, bytes]:
    """Returns the tree of a module and its optimizer, and the document about it."""
    parts = _parts_of(run, model, optimizer)
    graphother = fill_rng_values(parts.graphother)
    tree = {"graphstate": parts.graphstate, "graphother": graphother}
    if optimizer is not None:
        tree |= {"step": parts.step, "opt_state": parts.opt_state}
    recipe = Recipe.of(
        parts.graphdef, parts.graphstate, parts.graphother, parts.opt_state
    )
    return tree, recipe.pack()


def restore_into(
    run: Run,
    model: nnx.Module,
    optimizer: "nnx.Optimizer[Any] | None" = None,
    which: Which = "latest",
    *,
    mesh: "Mesh | None" = None,
    rules: "Rules | None" = None,
    indivisible: Indivisible = "error",
    cast: "DTypeLike | None" = None,
    select: "Patterns | None" = None,
    missing: Literal["error", "keep"] = "error",
    opt_state: OptState = "restore",
    on_mismatch: OnMismatch = "raise",
    distributed: Distributed = ALL_PROCESSES,
    deadline: "DurationLike" = DEFAULT_DEADLINE,
    progress: "ProgressCallback | None" = None,
) -> "Checkpoint":
    """Restores a checkpoint into a module and its optimizer, and returns it.

    Each leaf is placed as the one that it replaces, unless there are ``rules``; until
    then, both are in memory, unless the module is abstract. Nothing is changed unless
    everything is restored.

    >>> start = restore_into(run, model, optimizer).step + 1

    Args:
        run: Run of the checkpoint.
        model: The module; also an abstract one, of ``nnx.eval_shape``.
        optimizer: Its optimizer; None restores the module alone.
        which: A step, "latest", or a tag.
        mesh: As for ``Run.restore``.
        rules: As for ``Run.restore``.
        indivisible: As for ``Run.restore``.
        cast: A floating-point dtype for the parameters, and for the moments that the
            optimizer keeps of them; the module's arrays get it. None: the saved dtypes.
        select: As for ``easydel.restore_state``.
        missing: What to do with leaves that the checkpoint lacks: "error", or "keep"
            their values.
        opt_state: "restore" the saved state of the optimizer, "init" it as
            ``optimizer`` begins, or "skip" it, which leaves ``optimizer`` unchanged.
        on_mismatch: What to do if the structure or the optimizer differs from the saved
            one: "raise" a ``MismatchError``, or "log" a warning. The leaves must fit in
            any case.
        distributed: As for ``Run.restore``.
        deadline: As for ``Run.restore``.
        progress: As for ``Run.restore``.

    Raises:
        NotFoundError: There is no such checkpoint.
        InvalidRequestError: An argument is out of range, or the checkpoint has no state
            of an optimizer, but ``optimizer`` is given.
        MismatchError: The checkpoint was saved from another module or optimizer.
    """
    _check(run, "restore of")
    optimizer = None if opt_state == "skip" else optimizer
    options = Options(
        mesh=mesh,
        rules=rules,
        indivisible=indivisible,
        cast=cast,
        select=select,
        missing=missing,
        on_mismatch=on_mismatch,
        opt_state="skip" if optimizer is None else opt_state,
    )
    request = _request_of(run, model, optimizer, options)
    opened = run.open(which, distributed=distributed, deadline=deadline)
    source, step = as_state(opened)
    if step is not None:
        request = replace(request, options=replace(options, step=step))
    with advised(source, request):
        target, put = planner(run, model, optimizer, request)(source)
        restored = source.restore(**target, deadline=deadline, progress=progress)
    put(restored)
    return opened.info


def _request_of(run: Run, model: Any, optimizer: Any, options: Options) -> Request:
    parts = _parts_of(run, model, optimizer)
    if optimizer is None:
        return Request(model=parts, options=options)
    return Request(model=parts, tx=optimizer.tx, state_class=_Parts, options=options)


def planner(
    run: Run, model: Any, optimizer: Any, request: Request | None = None
) -> "Callable[[OpenCheckpoint], tuple[dict[str, Any], Callable[[Any], None]]]":
    """Returns a function that plans the restore of a checkpoint into a module and its
    optimizer: the arguments of the restore, and a function that gets its result."""
    options = Options(opt_state="skip" if optimizer is None else "restore")
    request = request or _request_of(run, model, optimizer, options)

    def plan(
        opened: "OpenCheckpoint",
    ) -> "tuple[dict[str, Any], Callable[[Any], None]]":
        others = [] if optimizer is None else [optimizer]
        if is_pytree(opened):
            states = map(nnx.state, others)
            found, target = None, plan_pytree(opened, request, *states)[1]
        else:
            found = (plan_state if others else plan_module)(opened, request)
            target = {**found.target, "select": found.select}

        def put(restored: Any) -> None:
            if found is None:
                for part, state in zip([model, *others], restored, strict=True):
                    nnx.update(part, state)
                return
            if optimizer is None:
                nnx.update(model, *found.merge(restored))
                return
            state = create_state(found, restored)
            nnx.update(model, state.graphstate, state.graphother)
            opt_state = _as_in(optimizer, state.opt_state)
            nnx.update(optimizer.opt_state, nnx.state(opt_state))
            optimizer.step.set_value(jnp.asarray(state.step, jnp.uint32))

        return target, put

    return plan


def _parts_of(run: Run, model: Any, optimizer: Any) -> _Parts:
    """Returns a module and its optimizer in the parts of a state.

    Raises:
        InvalidRequestError: ``model`` is no module, or ``optimizer`` is no optimizer of
            it.
    """
    if optimizer is None:
        try:
            graphdef, graphstate, graphother = drop_caches(split_module(model))
        except TypeError as e:
            raise InvalidRequestError(f"{run.name}: {e}") from e
        return _Parts(
            graphdef=graphdef,
            graphstate=graphstate,
            graphother=graphother,
            opt_state=None,
        )
    if not isinstance(optimizer, nnx.Optimizer):
        raise InvalidRequestError(
            f"{run.name}: expected an nnx.Optimizer, got {type(optimizer).__name__}; "
            "save the state of another optimizer with run.save"
        )
    if not isinstance(model, nnx.Module):
        raise InvalidRequestError(
            f"{run.name}: expected an nnx.Module, got {type(model).__name__}"
        )
    graphdef, *states = nnx.split(model, optimizer.wrt, ...)
    graphdef, graphstate, graphother = drop_caches((graphdef, states[0], states[1]))
    return _Parts(
        step=jax.tree.leaves(optimizer.step)[0],
        graphdef=graphdef,
        graphstate=graphstate,
        graphother=graphother,
        opt_state=_opt_state_of(run, optimizer, graphstate),
    )


def _opt_state_of(run: Run, optimizer: Any, graphstate: GraphState) -> Any:
    """Returns the state of an optimizer as ``tx.init`` returns it, without the
    Variables around its leaves."""
    expected = abstract_opt_state(optimizer.tx, graphstate)
    leaves = jax.tree.leaves(optimizer.opt_state)
    shapes = [leaf.shape for leaf in leaves]
    if shapes != [leaf.shape for leaf in jax.tree.leaves(expected)]:
        raise InvalidRequestError(
            f"{run.name}: expected the optimizer of this module, got one whose state "
            "has other leaves; create it from the module that is given"
        )
    return jax.tree.unflatten(jax.tree.structure(expected), leaves)


def _as_in(optimizer: Any, opt_state: Any) -> Any:
    """Returns the leaves of a state in the containers of an ``nnx.Optimizer``."""
    structure = jax.tree.structure(
        optimizer.opt_state, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    return jax.tree.unflatten(structure, jax.tree.leaves(opt_state))


def _check(run: Any, what: str) -> None:
    if not isinstance(run, Run):
        raise InvalidRequestError(
            f"{what}: expected a Run, such as client.run('prod/llama'), got {run!r}"
        )
