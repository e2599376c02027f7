"""Rebuilding a state or a module from a checkpoint, in five steps.

1. *Draw* the blueprint: the caller's model, abstract; no array exists.
2. *Compare* it with the recipe of the checkpoint: Variables, structure, optimizer.
3. *Find* for each Variable the leaves that it comes from (``variable_sources``). RNG
   counts and keys that the checkpoint lacks are made anew; a count or key that was
   saved never is: a run that goes on must draw the numbers it would have drawn. What
   else is lacking is initialised only where that was asked for.
4. *Restore* the leaves onto their devices. This refuses, listing all of them,
   leaves that are missing, left over or of another shape or dtype.
5. *Merge* the pieces by path, and make the state of them.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from storesvc_client._pytree.leaves import named_leaves
from storesvc_client._pytree.partition_rules import Rules
from storesvc_client._restore.checkpoint import OpenCheckpoint
from storesvc_client._values.gc_pause import collector_paused
from storesvc_client._values.options import OnMismatch, ReadKeywords, TargetOptions
from storesvc_client.errors import InvalidRequestError, MismatchError
from storesvc_client.trees.nnx.blueprints import (
    Blueprint,
    ModelLike,
    draw_blueprint,
    stored_blueprint,
)
from storesvc_client.trees.nnx.compatibility import (
    Stored,
    compare,
    recipe_of,
    refuse,
    report_as_saved,
)
from storesvc_client.trees.nnx.containers import containers
from storesvc_client.trees.nnx.graphs import GraphState, merge_by_path
from storesvc_client.trees.nnx.model_parts import partition_rules_of
from storesvc_client.trees.nnx.optimizers import (
    abstract_opt_state,
    beside_parameters,
    check_tx,
    init_opt_state,
    replicated_beside,
    updated_opt_state,
)
from storesvc_client.trees.nnx.recipes import Recipe
from storesvc_client.trees.nnx.variable_sources import Sources, as_saved
from storesvc_client.trees.structure import decode_graphdef

if TYPE_CHECKING:
    from storesvc_client.trees.easydel import EasyDeLState

__all__ = [
    "Options",
    "Plan",
    "Request",
    "plan_module",
    "plan_opt_state",
    "plan_state",
    "restore_module",
    "restore_opt_state",
    "restore_state",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to restore; see ``storesvc_client.easydel.restore_state``."""

    mesh: Mesh | None = None
    rules: "Rules | Literal['recorded'] | None" = None
    cast: Any = None
    missing: Literal["error", "init"] = "error"
    on_mismatch: OnMismatch = "raise"
    opt_state: Literal["restore", "skip"] = "restore"
    reading: ReadKeywords = field(default_factory=ReadKeywords)

    @property
    def initialises(self) -> bool:
        """Whether what the checkpoint lacks is made anew."""
        return self.missing == "init"

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise InvalidRequestError(
                    f"restore: expected {name}= {' or '.join(map(repr, allowed))}, "
                    f"got {getattr(self, name)!r}"
                )


_ALLOWED: Final = {
    "missing": ("error", "init"),
    "on_mismatch": ("raise", "log"),
    "opt_state": ("restore", "skip"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of a restore: the model, the optimizer and the options."""

    model: ModelLike
    tx: optax.GradientTransformation | None = None
    allow: Any = ()
    options: Options = field(default_factory=Options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a checkpoint becomes a state or a module. Made without reading a leaf."""

    request: Request
    blueprint: Blueprint
    sources: Sources
    options: Options
    """With the mesh and the rules that the model knows itself."""
    like: Any
    """The leaves to restore, abstract."""
    select: list[str]
    """Their keys, and those that nothing asks for: a restore refuses them."""
    begins: bool = False
    """Whether the optimizer state is initialised instead of restored."""

    @property
    def target(self) -> TargetOptions:
        """The arguments of the restore that it takes."""
        return {
            "like": self.like,
            "mesh": self.options.mesh,
            "rules": self.options.rules,
            "cast": self.options.cast,
            "missing": "error",
        }

    def restored(self, opened: OpenCheckpoint) -> Any:
        """Returns the leaves of a checkpoint."""
        return opened.restore(**self.target, select=self.select, **self.options.reading)


def restore_state(opened: OpenCheckpoint, request: Request, state_class: Any) -> Any:
    """Returns the state of a checkpoint; see ``storesvc_client.easydel``."""
    if request.model is None:
        return _containers(opened, request)
    plan = plan_state(opened, request)
    restored = plan.restored(opened)
    options, tx = plan.options, request.tx
    graphstate, graphother = plan.sources.merge(restored, options.mesh, options.rules)
    opt_state = restored["opt_state"]
    if plan.begins and tx is not None:
        rules = options.rules if not isinstance(options.rules, str) else None
        opt_state = init_opt_state(tx, graphstate, mesh=options.mesh, rules=rules)
    return state_class.create(
        step=restored.get("step", 0),
        graphdef=plan.blueprint.graphdef,
        graphstate=graphstate,
        graphother=graphother,
        tx=tx,
        opt_state=opt_state,
    )


def restore_module(opened: OpenCheckpoint, request: Request) -> Any:
    """Returns the module of a checkpoint; see ``storesvc_client.easydel``."""
    plan = plan_module(opened, request)
    restored = plan.restored(opened)
    parts = plan.sources.merge(restored, plan.options.mesh, plan.options.rules)
    return merge_by_path(plan.blueprint.graphdef, *parts)


def plan_state(stored: Stored, request: Request) -> Plan:
    """Returns the plan of a restore of a state; no array is made.

    Raises:
        StoreError: As ``restore_state``, but for what leaves have to fit.
    """
    if request.tx is not None:
        check_tx(request.tx)
    recipe = recipe_of(stored, request.options.on_mismatch)
    blueprint = _drawn(request.model, recipe, request.options)
    with collector_paused():
        return _planned_state(stored, request, recipe, blueprint)


def _planned_state(
    stored: Stored, request: Request, recipe: Recipe | None, blueprint: Blueprint
) -> Plan:
    options, tx = request.options, request.tx
    options = _with_own_placement(blueprint, options)
    begins = _begins_optimizer(stored, recipe, tx, options)
    like: dict[str, Any] = {"opt_state": None}
    if tx is not None and options.opt_state == "restore" and not begins:
        like["opt_state"] = _abstract_opt_state(stored, tx, blueprint.graphstate)
    _compare(stored, recipe, blueprint.recipe(like["opt_state"]), options)
    sources = Sources.find(blueprint, stored.leaves, initialising=options.initialises)
    if "step" in stored.leaves or not options.initialises:
        like["step"] = jax.ShapeDtypeStruct((), jnp.int32)
    if options.mesh is None:
        known = getattr(request.model, "opt_state", None)
        like = _beside_parameters(like, blueprint.graphstate, known)
    like = {**sources.like(), **like}
    return Plan(
        request=request,
        blueprint=blueprint,
        sources=sources,
        options=options,
        like=_as_saved(stored, like, options),
        select=_selected(stored, like, options),
        begins=begins,
    )


def plan_module(stored: Stored, request: Request) -> Plan:
    """Returns the plan of a restore of a module; see ``plan_state``."""
    options = request.options
    recipe = recipe_of(stored, options.on_mismatch)
    if request.model is None:
        # its mesh and its rules are not asked for: what is stored calls nothing
        blueprint = _as_stored(stored, recipe, request.allow, options)
    else:
        blueprint = _drawn(request.model, recipe, options)
        _compare(stored, recipe, blueprint.recipe(None), options)
        options = _with_own_placement(blueprint, options)
    with collector_paused():
        sources = Sources.find(
            blueprint, stored.leaves, initialising=options.initialises
        )
        like = sources.like()
        return Plan(
            request=request,
            blueprint=blueprint,
            sources=sources,
            options=options,
            like=_as_saved(stored, like, options),
            select=_selected(stored, like, options),
        )


def _containers(opened: OpenCheckpoint, request: Request) -> Any:
    """The state as dicts and lists, for a caller without its code."""
    options = request.options
    if request.tx is not None or options.initialises:
        given = "tx=" if request.tx is not None else "missing='init'"
        raise InvalidRequestError(
            f"restore of {opened.name}: expected model= with {given}, got None; "
            "without a model, a state comes back as dicts and lists"
        )
    select = _selected(opened, {"step": None}, options)
    return opened.restore(
        mesh=options.mesh,
        rules=options.rules,
        select=select,
        cast=options.cast,
        **options.reading,
    )


def restore_opt_state(opened: OpenCheckpoint, state: "EasyDeLState") -> Any:
    """Returns the optimizer state of a checkpoint for the parameters of a state.

    Raises:
        MismatchError: The checkpoint's is of another optimizer or other parameters,
            or there is none.
    """
    options = Options(mesh=state.mesh, rules=partition_rules_of(state.model))
    like = plan_opt_state(opened, state.tx, state.graphstate)
    if options.mesh is None or options.rules is None:
        options = replace(options, mesh=None, rules=None)
        like = _beside_parameters(like, state.graphstate, state.opt_state)
    return opened.restore(
        like=_as_saved(opened, like, options),
        mesh=options.mesh,
        rules=options.rules,
        select=_selected(opened, like, options),
        **options.reading,
    )["opt_state"]


def plan_opt_state(
    stored: Stored, tx: optax.GradientTransformation, graphstate: GraphState
) -> dict[str, Any]:
    """Returns the optimizer state that ``tx`` has for parameters, abstract, below
    "opt_state".

    Raises:
        MismatchError: The checkpoint holds none, or one of other containers.
    """
    recipe = recipe_of(stored, "raise")
    if not _holds_optimizer(stored, recipe):
        raise MismatchError(
            f"{stored.name}: expected the state of an optimizer, got a checkpoint "
            "without one; begin one with init_tx"
        )
    abstract = _abstract_opt_state(stored, tx, graphstate)
    if recipe is not None:
        found = recipe.optimizer_differences(containers(abstract, "opt_state"))
        advice = "give the state the optimizer that was saved"
        refuse(stored, [*map(str, found)], advice=advice)
    return {"opt_state": abstract}


def _drawn(model: ModelLike, recipe: Recipe | None, options: Options) -> Blueprint:
    blueprint = draw_blueprint(model, recipe, options.mesh, options.cast)
    return blueprint if options.cast is None else blueprint.cast(options.cast)


def _with_own_placement(blueprint: Blueprint, options: Options) -> Options:
    """The options with the mesh and the rules that the model knows itself, where
    the caller named none."""
    if options.mesh is not None and options.rules is not None:
        return options
    own_mesh, own_rules = blueprint.own_placement()
    rules = own_rules if options.rules is None else options.rules
    mesh = own_mesh if options.mesh is None and rules is not None else options.mesh
    return replace(
        options, mesh=mesh, rules=rules if mesh is not None else options.rules
    )


def _begins_optimizer(
    stored: Stored,
    recipe: Recipe | None,
    tx: optax.GradientTransformation | None,
    options: Options,
) -> bool:
    """Whether the optimizer begins anew, as the checkpoint holds none.

    Raises:
        InvalidRequestError: There is an optimizer in one of the two only.
    """
    if options.opt_state == "skip":
        return False
    holds = _holds_optimizer(stored, recipe)
    if holds and tx is None:
        raise InvalidRequestError(
            f"{stored.name} holds the state of an optimizer: expected tx=, got None; "
            "give the optimizer, or opt_state='skip'"
        )
    if tx is None or holds:
        return False
    if recipe is not None and not options.initialises:
        raise InvalidRequestError(
            f"{stored.name} holds no state of an optimizer: expected no tx=, got one; "
            "leave it out, or give missing='init' to begin it anew"
        )
    return options.initialises


def _abstract_opt_state(
    stored: Stored, tx: optax.GradientTransformation, graphstate: GraphState
) -> optax.OptState:
    """The state that an optimizer begins with; or, where only that has the leaves of
    the checkpoint, the one that it has after an update."""
    begun = abstract_opt_state(tx, graphstate)
    saved = set(_opt_state_keys(stored))
    if _keys_of(begun) == saved:
        return begun
    updated = updated_opt_state(tx, begun, graphstate)
    return updated if updated is not None and _keys_of(updated) == saved else begun


def _keys_of(opt_state: optax.OptState) -> set[str]:
    return {leaf.key for leaf in named_leaves({"opt_state": opt_state})[0]}


def _holds_optimizer(stored: Stored, recipe: Recipe | None) -> bool:
    """Whether an optimizer was saved, be it one without a leaf."""
    saved = recipe is not None and recipe.opt_state is not None
    return saved or bool(_opt_state_keys(stored))


def _as_stored(
    stored: Stored, recipe: Recipe | None, allow: Any, options: Options
) -> Blueprint:
    """The blueprint of the structure in the checkpoint."""
    if recipe is None or recipe.graphdef is None:
        raise InvalidRequestError(
            f"{stored.name} holds no structure of a module: expected model=, got None"
        )
    graphdef = decode_graphdef(recipe.graphdef, allow=allow)
    blueprint = stored_blueprint(graphdef, stored.leaves)
    return blueprint if options.cast is None else blueprint.cast(options.cast)


def _beside_parameters(
    like: dict[str, Any], graphstate: GraphState, known: Any
) -> dict[str, Any]:
    """The step and the optimizer's state, abstract, where their parameters lie."""
    placed = {
        **like,
        "opt_state": beside_parameters(like["opt_state"], graphstate, known),
    }
    sharding = replicated_beside(graphstate)
    if "step" in like and sharding is not None:
        placed["step"] = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding)
    return placed


def _compare(
    stored: Stored, recipe: Recipe | None, target: Recipe, options: Options
) -> None:
    casting = options.cast is not None
    compare(stored, recipe, target, on_mismatch=options.on_mismatch, casting=casting)


def _as_saved(stored: Stored, like: Any, options: Options) -> Any:
    """The leaves to restore, as they were saved; in what that is not what the code
    makes is logged."""
    casting = options.cast is not None
    found, changed = as_saved(like, stored.leaves, casting=casting)
    report_as_saved(stored, changed)
    return found


def _selected(stored: Stored, like: Any, options: Options) -> list[str]:
    skipped: set[str] = set()
    if options.opt_state == "skip":
        skipped.update(_opt_state_keys(stored))
    if "step" not in like:  # of a state, a module takes the Variables
        skipped.add("step")
    if set(like) == {"opt_state"}:
        skipped.update(stored.leaves.keys() - set(_opt_state_keys(stored)))
    return [key for key in stored.leaves if key not in skipped]


def _opt_state_keys(stored: Stored) -> list[str]:
    return [
        key
        for key in stored.leaves
        if key == "opt_state" or key.startswith("opt_state/")
    ]
