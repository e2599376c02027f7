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

import logging
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from storesvc_client._opened import OpenCheckpoint
from storesvc_client.errors import InvalidRequestError, MismatchError
from storesvc_client.trees.blueprints import (
    Blueprint,
    ModelLike,
    draw_blueprint,
    stored_blueprint,
)
from storesvc_client.trees.easydel import EasyDeLState
from storesvc_client.trees.flattening import list_problems
from storesvc_client.trees.graphs import merge_by_path
from storesvc_client.trees.partitioning import Rules, shardings_by_rules
from storesvc_client.trees.parts import partition_rules_of
from storesvc_client.trees.recipes import Recipe
from storesvc_client.trees.resharding import reshard, shardings_by_key
from storesvc_client.trees.sourcing import Sources
from storesvc_client.trees.structure import decode_graphdef

__all__ = ["Options", "restore_module", "restore_opt_state", "restore_state"]

_log = logging.getLogger("storesvc_client")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to restore; see ``storesvc_client.easydel.restore_state``."""

    mesh: Mesh | None = None
    rules: "Rules | Literal['recorded'] | None" = None
    dtype: Any = None
    missing: Literal["error", "init"] = "error"
    structure: Literal["check", "report"] = "check"
    opt_state: Literal["restore", "skip"] = "restore"

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


_SHOWN: Final = 5
"""Places of the structure that one message lists beside fields of the config."""

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
    recipe = _recipe_of(opened)
    blueprint = _drawn(model, recipe, options)
    options = _with_own_placement(blueprint, options)
    holds = _holds_optimizer(opened, recipe)
    if holds and tx is None and options.opt_state == "restore":
        raise InvalidRequestError(
            f"{opened.name} holds the state of an optimizer: expected tx=, got None; "
            "give the optimizer, or opt_state='skip'"
        )
    abstract = None
    if (
        tx is not None
        and options.opt_state == "restore"
        and (holds or not options.initialises)
    ):
        abstract = jax.eval_shape(tx.init, blueprint.graphstate)
    _compare(opened, recipe, blueprint, abstract, options)
    sources = Sources.find(blueprint, opened.leaves, initialising=options.initialises)
    like = {**sources.like(), "opt_state": abstract, **_step(opened, options)}
    restored = {"step": 0, **_restored(opened, like, options)}
    graphstate, graphother = sources.merge(restored, options.mesh, options.rules)
    opt_state = restored["opt_state"]
    if tx is not None and not holds and options.initialises:
        opt_state = tx.init(graphstate)
    return state_class.create(
        step=restored["step"],
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
    recipe = _recipe_of(opened)
    if model is None:
        blueprint = _as_stored(opened, recipe, allow, options)
    else:
        blueprint = _drawn(model, recipe, options)
        _compare(opened, recipe, blueprint, None, options)
    options = _with_own_placement(blueprint, options)
    sources = Sources.find(blueprint, opened.leaves, initialising=options.initialises)
    restored = _restored(opened, sources.like(), options)
    parts = sources.merge(restored, options.mesh, options.rules)
    return merge_by_path(blueprint.graphdef, *parts)


def restore_opt_state(opened: OpenCheckpoint, state: EasyDeLState) -> Any:
    """Returns the optimizer state of a checkpoint for the parameters of a state.

    Raises:
        MismatchError: The checkpoint's is of another optimizer or other parameters.
    """
    assert state.tx is not None
    recipe = Recipe.unpack(opened.structure) if opened.structure else None
    like = state.opt_state
    if like is None:
        like = jax.eval_shape(state.tx.init, state.graphstate)
        rules, mesh = partition_rules_of(state.model), state.mesh
        if rules is not None and mesh is not None:
            whole = state.replace(opt_state=like)
            own = shardings_by_rules(whole, mesh, rules)
            like = reshard(whole, shardings_by_key(own.replace(step=0))).opt_state
    target = Recipe.of(state.graphdef, state.graphstate, state.graphother, like)
    if recipe is not None:
        _refuse(opened, recipe.optimizer_differences(target))
    restored = opened.restore(like={"opt_state": like}, select=_opt_state_keys(opened))
    return restored["opt_state"]


def _recipe_of(opened: OpenCheckpoint) -> Recipe | None:
    return Recipe.unpack(opened.structure) if opened.structure else None


def _drawn(model: ModelLike, recipe: Recipe | None, options: Options) -> Blueprint:
    blueprint = draw_blueprint(model, recipe, options.mesh)
    return blueprint if options.dtype is None else blueprint.cast(options.dtype)


def _with_own_placement(blueprint: Blueprint, options: Options) -> Options:
    """The options with the mesh and the rules that the model knows itself, where
    the caller named none."""
    mesh, rules = options.mesh, options.rules
    if rules is None and (own := blueprint.own_rules) is not None:
        mesh, rules = mesh or blueprint.own_mesh, own
    return options if mesh is None else replace(options, mesh=mesh, rules=rules)


def _holds_optimizer(opened: OpenCheckpoint, recipe: Recipe | None) -> bool:
    """Whether an optimizer was saved, be it one without a leaf."""
    saved = recipe is not None and recipe.opt_state is not None
    return saved or bool(_opt_state_keys(opened))


def _compare(
    opened: OpenCheckpoint,
    recipe: Recipe | None,
    blueprint: Blueprint,
    opt_state: Any,
    options: Options,
) -> None:
    """Refuses a model or an optimizer that is not the one that was saved."""
    if recipe is None:
        return
    target = Recipe.of(
        blueprint.graphdef, blueprint.graphstate, blueprint.graphother, opt_state
    )
    casting = options.dtype is not None
    config = recipe.config_differences(target, casting=casting)
    found = recipe.optimizer_differences(target)
    found += recipe.model_differences(target, casting=casting)
    if config and len(found) > _SHOWN:
        # the config names in the caller's words what the structure shows everywhere
        found[_SHOWN:] = [f"and {len(found) - _SHOWN} more places of the structure"]
    if found and options.structure == "check":
        _refuse(opened, [*config, *found])
    if config or found:
        _log.warning(
            "%s was saved from another model: %s",
            opened.name,
            list_problems([*config, *found]),
        )


def _refuse(opened: OpenCheckpoint, problems: list[str]) -> None:
    if problems:
        raise MismatchError(
            f"{opened.name} was saved from another model or optimizer: "
            f"{list_problems(problems)}; mend what is given, or restore with "
            "structure='report' what fits"
        )


def _as_stored(
    opened: OpenCheckpoint, recipe: Recipe | None, allow: Any, options: Options
) -> Blueprint:
    """The blueprint of the structure in the checkpoint."""
    if recipe is None:
        raise InvalidRequestError(
            f"{opened.name} holds no structure of a module: expected model=, got None"
        )
    graphdef = decode_graphdef(recipe.graphdef, allow=allow)
    blueprint = stored_blueprint(graphdef, opened.leaves)
    return blueprint if options.dtype is None else blueprint.cast(options.dtype)


def _step(opened: OpenCheckpoint, options: Options) -> dict[str, Any]:
    """A step of the kind that was saved: a Python number counts in ``create``, an
    array it becomes in the first ``jax.jit``. Without one, it may begin at 0."""
    held = opened.leaves.get("step")
    if held is None and options.initialises:
        return {}
    if held is not None and held.kind == "python_scalar":
        return {"step": 0}
    dtype = jnp.int32
    if held is not None and jnp.issubdtype(held.dtype, jnp.integer):
        dtype = held.dtype
    return {"step": jax.ShapeDtypeStruct((), dtype)}


def _restored(opened: OpenCheckpoint, like: Any, options: Options) -> Any:
    skipped: set[str] = set()
    if options.opt_state == "skip":
        skipped.update(_opt_state_keys(opened))
    if "step" not in like:  # of a state, a module takes the Variables
        skipped.add("step")
    select = [key for key in opened.leaves if key not in skipped]
    return opened.restore(
        like=like,
        mesh=options.mesh,
        rules=options.rules,
        select=select,
        cast=options.dtype,
    )


def _opt_state_keys(opened: OpenCheckpoint) -> list[str]:
    return [
        key for key in opened.leaves if key == "opt_state" or key[:10] == "opt_state/"
    ]
