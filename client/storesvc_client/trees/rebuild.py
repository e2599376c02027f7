"""Rebuilding a state or a module from a checkpoint, in five steps.

1. *Draw* the blueprint: the caller's model, abstract; no array exists.
2. *Compare* it with the recipe of the checkpoint: Variables, structure, optimizer.
3. *Find* for each Variable the leaves that it comes from (``sourcing``). RNG counts
   and keys that the checkpoint lacks are made anew; a count or key that was saved
   never is: a run that goes on must draw the numbers it would have drawn. What else
   is lacking is initialised only where that was asked for.
4. *Restore* the leaves onto their devices. This refuses, listing all of them,
   leaves that are missing, left over or of another shape or dtype.
5. *Merge* the pieces by path, and make the state of them.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from storesvc_client._opened import OpenCheckpoint
from storesvc_client._options import ReadOptions
from storesvc_client.errors import InvalidRequestError, MismatchError
from storesvc_client.trees.blueprints import (
    Blueprint,
    ModelLike,
    draw_blueprint,
    stored_blueprint,
)
from storesvc_client.trees.comparison import compare, recipe_of, refuse
from storesvc_client.trees.easydel import EasyDeLState
from storesvc_client.trees.graphs import GraphState, merge_by_path
from storesvc_client.trees.optimizers import (
    abstract_opt_state,
    beside_parameters,
    check_tx,
    init_opt_state,
    replicated_beside,
)
from storesvc_client.trees.partitioning import Rules
from storesvc_client.trees.parts import partition_rules_of
from storesvc_client.trees.recipes import Recipe
from storesvc_client.trees.sourcing import Sources, as_saved
from storesvc_client.trees.structure import decode_graphdef

__all__ = ["Options", "restore_module", "restore_opt_state", "restore_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to restore; see ``storesvc_client.easydel.restore_state``."""

    mesh: Mesh | None = None
    rules: "Rules | Literal['recorded'] | None" = None
    dtype: Any = None
    missing: Literal["error", "init"] = "error"
    structure: Literal["check", "report"] = "check"
    opt_state: Literal["restore", "skip"] = "restore"
    reading: ReadOptions = field(default_factory=ReadOptions)

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
    "structure": ("check", "report"),
    "opt_state": ("restore", "skip"),
}


def restore_state(
    opened: OpenCheckpoint,
    *,
    model: ModelLike,
    tx: optax.GradientTransformation | None,
    state_class: Any,
    options: Options,
) -> Any:
    """Returns the state of a checkpoint; see ``storesvc_client.easydel``."""
    if tx is not None:
        check_tx(tx)
    recipe = recipe_of(opened, options.structure)
    blueprint = _drawn(model, recipe, options)
    options = _with_own_placement(blueprint, options)
    begins = _begins_optimizer(opened, recipe, tx, options)
    like: dict[str, Any] = {"opt_state": None}
    if tx is not None and options.opt_state == "restore" and not begins:
        like["opt_state"] = abstract_opt_state(tx, blueprint.graphstate)
    compare(
        opened,
        recipe,
        blueprint.recipe(like["opt_state"]),
        structure=options.structure,
        casting=options.dtype is not None,
    )
    sources = Sources.find(blueprint, opened.leaves, initialising=options.initialises)
    if "step" in opened.leaves or not options.initialises:
        like["step"] = jax.ShapeDtypeStruct((), jnp.int32)
    if options.mesh is None:
        known = getattr(model, "opt_state", None)
        like = _beside_parameters(like, blueprint.graphstate, known)
    restored = _restored(opened, {**sources.like(), **like}, options)
    graphstate, graphother = sources.merge(restored, options.mesh, options.rules)
    opt_state = restored["opt_state"]
    if begins and tx is not None:
        rules = options.rules if not isinstance(options.rules, str) else None
        opt_state = init_opt_state(tx, graphstate, mesh=options.mesh, rules=rules)
    return state_class.create(
        step=restored.get("step", 0),
        graphdef=blueprint.graphdef,
        graphstate=graphstate,
        graphother=graphother,
        tx=tx,
        opt_state=opt_state,
    )


def restore_module(
    opened: OpenCheckpoint, *, model: ModelLike, allow: Any, options: Options
) -> Any:
    """Returns the module of a checkpoint; see ``storesvc_client.easydel``."""
    recipe = recipe_of(opened, options.structure)
    if model is None:
        # its mesh and its rules are not asked for: what is stored calls nothing
        blueprint = _as_stored(opened, recipe, allow, options)
    else:
        blueprint = _drawn(model, recipe, options)
        compare(
            opened,
            recipe,
            blueprint.recipe(None),
            structure=options.structure,
            casting=options.dtype is not None,
        )
        options = _with_own_placement(blueprint, options)
    sources = Sources.find(blueprint, opened.leaves, initialising=options.initialises)
    restored = _restored(opened, sources.like(), options)
    parts = sources.merge(restored, options.mesh, options.rules)
    return merge_by_path(blueprint.graphdef, *parts)


def restore_opt_state(opened: OpenCheckpoint, state: EasyDeLState) -> Any:
    """Returns the optimizer state of a checkpoint for the parameters of a state.

    Raises:
        MismatchError: The checkpoint's is of another optimizer or other parameters,
            or there is none.
    """
    options = Options(mesh=state.mesh, rules=partition_rules_of(state.model))
    recipe = recipe_of(opened, options.structure)
    if not _holds_optimizer(opened, recipe):
        raise MismatchError(
            f"{opened.name}: expected the state of an optimizer, got a checkpoint "
            "without one; begin one with init_tx"
        )
    abstract = abstract_opt_state(state.tx, state.graphstate)
    target = Recipe.of(state.graphdef, state.graphstate, state.graphother, abstract)
    if recipe is not None:
        found = recipe.optimizer_differences(target)
        refuse(opened, found, advice="give the state the optimizer that was saved")
    like = {"opt_state": abstract}
    if options.mesh is None or options.rules is None:
        options = replace(options, mesh=None, rules=None)
        like = _beside_parameters(like, state.graphstate, state.opt_state)
    return _restored(opened, like, options)["opt_state"]


def _drawn(model: ModelLike, recipe: Recipe | None, options: Options) -> Blueprint:
    blueprint = draw_blueprint(model, recipe, options.mesh)
    return blueprint if options.dtype is None else blueprint.cast(options.dtype)


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
    opened: OpenCheckpoint,
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
    holds = _holds_optimizer(opened, recipe)
    if holds and tx is None:
        raise InvalidRequestError(
            f"{opened.name} holds the state of an optimizer: expected tx=, got None; "
            "give the optimizer, or opt_state='skip'"
        )
    if tx is None or holds:
        return False
    if recipe is not None and not options.initialises:
        raise InvalidRequestError(
            f"{opened.name} holds no state of an optimizer: expected no tx=, got one; "
            "leave it out, or give missing='init' to begin it anew"
        )
    return options.initialises


def _holds_optimizer(opened: OpenCheckpoint, recipe: Recipe | None) -> bool:
    """Whether an optimizer was saved, be it one without a leaf."""
    saved = recipe is not None and recipe.opt_state is not None
    return saved or bool(_opt_state_keys(opened))


def _as_stored(
    opened: OpenCheckpoint, recipe: Recipe | None, allow: Any, options: Options
) -> Blueprint:
    """The blueprint of the structure in the checkpoint."""
    if recipe is None or recipe.graphdef is None:
        raise InvalidRequestError(
            f"{opened.name} holds no structure of a module: expected model=, got None"
        )
    graphdef = decode_graphdef(recipe.graphdef, allow=allow)
    blueprint = stored_blueprint(graphdef, opened.leaves)
    return blueprint if options.dtype is None else blueprint.cast(options.dtype)


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


def _restored(opened: OpenCheckpoint, like: Any, options: Options) -> Any:
    skipped: set[str] = set()
    if options.opt_state == "skip":
        skipped.update(_opt_state_keys(opened))
    if "step" not in like:  # of a state, a module takes the Variables
        skipped.add("step")
    if set(like) == {"opt_state"}:
        skipped.update(opened.leaves.keys() - set(_opt_state_keys(opened)))
    select = [key for key in opened.leaves if key not in skipped]
    return opened.restore(
        like=as_saved(like, opened.leaves, casting=options.dtype is not None),
        mesh=options.mesh,
        rules=options.rules,
        select=select,
        cast=options.dtype,
        **options.reading,
    )


def _opt_state_keys(opened: OpenCheckpoint) -> list[str]:
    return [
        key
        for key in opened.leaves
        if key == "opt_state" or key.startswith("opt_state/")
    ]
