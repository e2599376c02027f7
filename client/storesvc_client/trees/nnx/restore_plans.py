"""Plans to rebuild a state or a module from a checkpoint, without reading a leaf.

A restore has five steps; a plan is the result of the first three, and ``saved_models``
does the others.

1. *Draw* the blueprint, the caller's model without arrays.
2. *Compare* it with the checkpoint's recipe: Variables, structure, optimizer.
3. *Find* the source of each Variable (``variable_sources``). RNG counts and keys that
   the checkpoint lacks are recreated. A saved count or key never is, because a resumed
   run must draw the same random numbers. Other missing Variables are initialised only
   if requested.
4. *Restore* the leaves onto their devices. This rejects, in one error, leaves that are
   missing, unexpected, or of another shape or dtype.
5. *Merge* the parts by path, and create the state.
"""

import logging
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from storesvc.format.dtypes import is_floating
from storesvc.format.keys import join_key
from storesvc.format.trees import Tree
from storesvc_client._chunks.memory import collector_paused
from storesvc_client._pytree.containers import nest
from storesvc_client._pytree.leaves import list_problems, named_leaves
from storesvc_client._pytree.matching import LIKE
from storesvc_client._pytree.partition_rules import Rules, check_mesh
from storesvc_client._pytree.restore_target import Target
from storesvc_client._telemetry.progress import ProgressCallback
from storesvc_client._values.arguments import DurationLike, checked_patterns
from storesvc_client._values.key_patterns import (
    Patterns,
    find_patterns,
    matching_keys,
    nearest_keys,
)
from storesvc_client._values.models import LeafInfo
from storesvc_client._values.options import (
    DEFAULT_DEADLINE,
    Indivisible,
    Missing,
    OnMismatch,
    OptState,
    RestoreRequest,
)
from storesvc_client.errors import (
    InvalidRequestError,
    MismatchError,
    NotFoundError,
    StoreError,
    without_advice,
)
from storesvc_client.trees.nnx.blueprints import (
    PARTS,
    Blueprint,
    ModelLike,
    abstract_opt_state,
    cast_floating,
    check_tx,
    draw_blueprint,
    place_like_parameters,
    stand_in,
    stored_blueprint,
)
from storesvc_client.trees.nnx.graphs import (
    GraphState,
    added_fields,
    merge_by_path,
    mesh_of,
    partition_rules_of,
)
from storesvc_client.trees.nnx.recipes import (
    Recipe,
    compare_models,
    container_types,
    format_differences,
    read_recipe,
    reject_differences,
    takes_config,
)
from storesvc_client.trees.nnx.variable_sources import Sources, with_saved_dtypes
from storesvc_client.trees.structure import ABSENT, decode_graphdef


class Stored(Protocol):
    """A checkpoint, or a tree that is about to be saved as one."""

    @property
    def name(self) -> str:
        """Name of the checkpoint, for messages."""

    @property
    def document(self) -> bytes:
        """Document about the tree; b"" if there is none."""

    @property
    def leaves(self) -> Mapping[str, LeafInfo]:
        """Leaves by key."""

    @property
    def tree(self) -> Tree:
        """All leaves in rows."""


@dataclass(frozen=True, slots=True)
class StoredLeaves:
    """A checkpoint of which only some leaves count, or that is about to be saved."""

    name: str
    document: bytes
    leaves: Mapping[str, LeafInfo]
    tree: Tree


def select_leaves(stored: Stored, select: Patterns | None) -> Stored:
    """Returns a checkpoint as if it had only the leaves that match."""
    if select is None:
        return stored
    found = set[str]()
    for pattern in checked_patterns(f"restore of {stored.name}: select=", select):
        keys = matching_keys(pattern, stored.leaves)
        if not keys:
            nearest = ", ".join(nearest_keys(pattern, stored.leaves))
            raise NotFoundError(
                f"no leaf of {stored.name} matches {pattern!r}; nearest: {nearest}"
            )
        found.update(keys)
    leaves = {key: leaf for key, leaf in stored.leaves.items() if key in found}
    return StoredLeaves(stored.name, stored.document, leaves, stored.tree)


_log = logging.getLogger("storesvc_client")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a restore; see ``storesvc_client.easydel.restore_state``."""

    mesh: Mesh | None = None
    rules: "Rules | Literal['recorded'] | None" = None
    indivisible: Indivisible = "error"
    cast: Any = None
    select: Patterns | None = None
    missing: Missing = "error"
    on_mismatch: OnMismatch = "raise"
    opt_state: OptState = "restore"
    step: int | None = None
    """Step of a state whose checkpoint has none among its leaves."""
    deadline: DurationLike = DEFAULT_DEADLINE
    progress: ProgressCallback | None = None

    @property
    def dtype(self) -> Any:
        """The dtype that the parameters are cast to; None: that of the model."""
        return None if isinstance(self.cast, str) and self.cast == LIKE else self.cast

    @property
    def initialises(self) -> bool:
        """True if leaves that the checkpoint lacks are initialised or kept."""
        return self.missing != "error"

    def request(self, like: Any, select: Patterns) -> RestoreRequest:
        """Returns the request for abstract leaves, which have the dtypes of a cast."""
        return RestoreRequest(
            like=like,
            mesh=self.mesh,
            rules=self.rules,
            select=select,
            cast=None if self.cast is None else LIKE,
            indivisible=self.indivisible,
            progress=self.progress,
        )

    def __post_init__(self) -> None:
        if self.mesh is not None:
            check_mesh(self.mesh)
        for name, allowed in _ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise InvalidRequestError(
                    f"restore: expected {name}= {' or '.join(map(repr, allowed))}, "
                    f"got {getattr(self, name)!r}"
                )


_ALLOWED: Final = {
    "missing": ("error", "init", "keep"),
    "on_mismatch": ("raise", "log"),
    "opt_state": ("restore", "init", "skip"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Arguments of a restore: the model, the optimizer and the options."""

    model: ModelLike
    tx: optax.GradientTransformation | None = None
    state_class: Any = None
    """Class whose ``create`` builds the state."""
    allow: Any = ()
    options: Options = field(default_factory=Options)
    is_compared: bool = True
    """False if the structure of the model may differ without a log line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plan of a restore of a state or a module, made without reading a leaf."""

    request: Request
    blueprint: Blueprint
    sources: Sources
    options: Options
    """The options, with the mesh and the rules that the model provides."""
    like: Any
    """The leaves to restore, abstract."""
    select: list[str]
    """Keys of ``like``, and unexpected keys, which the restore rejects."""
    initialises_optimizer: bool = False
    """True if the optimizer state is initialised instead of restored."""
    added: Sequence[str] = ()
    """Fields in ``like`` that the class of the state adds."""
    opt_state: Any = None
    """The whole optimizer state, abstract."""
    lacking: frozenset[str] = frozenset()
    """Leaves of the optimizer's state and of added fields that are not restored."""

    @property
    def restore_request(self) -> RestoreRequest:
        return self.options.request(self.like, self.select)

    def check(self, stored: Stored) -> None:
        """Matches the leaves, as the restore does."""
        tree = stored.tree
        rows = [tree.by_key[key] for key in self.select]
        Target.choose(tree, stored.name, self.restore_request, rows=rows)

    def merge(self, restored: Any) -> tuple[GraphState, GraphState]:
        """Returns the complete parts of a state with restored leaves."""
        options = self.options
        return self.sources.merge(
            restored, options.mesh, options.rules, options.indivisible
        )


def plan_state(stored: Stored, request: Request) -> Plan:
    """Returns the plan of a restore of a state, without creating an array."""
    if request.tx is not None:
        check_tx(request.tx)
    if is_pytree(stored):
        raise MismatchError(
            f"{stored.name} was saved with nnx.state({_pytree_text(stored)}), and has "
            "no state of EasyDeL's form: restore it with storesvc_client.nnx."
            f"restore_into(run, {_pytree_text(stored).strip('()')})"
        )
    stored = select_leaves(stored, request.options.select)
    # 1. Draw the blueprint; the caller's code runs with the garbage collector on.
    recipe = read_recipe(stored.name, stored.document, request.options.on_mismatch)
    blueprint = _draw(stored, request.model, recipe, request.options)
    with collector_paused():
        return _plan_drawn_state(stored, request, recipe, blueprint)


def _plan_drawn_state(
    stored: Stored, request: Request, recipe: Recipe | None, blueprint: Blueprint
) -> Plan:
    options, tx = request.options, request.tx
    options = _with_own_placement(blueprint, options)
    initialises_optimizer = _initialises_optimizer(stored, recipe, tx, options)
    like: dict[str, Any] = {"opt_state": None}
    opt_state = None
    if tx is not None and options.opt_state != "skip":
        opt_state = _abstract_opt_state(stored, tx, blueprint.graphstate)
    if not initialises_optimizer:
        like["opt_state"] = opt_state
    added = _added_fields(stored, recipe, request, blueprint, opt_state)
    # 2. Compare the blueprint with the recipe.
    target = blueprint.recipe(like["opt_state"], added)
    if request.is_compared:
        compare_models(stored.name, recipe, target, on_mismatch=options.on_mismatch)
    # 3. Find the sources of the Variables.
    sources = Sources.find(blueprint, stored.leaves, initialising=options.initialises)
    has_step = "step" in stored.leaves
    if has_step or (options.step is None and not options.initialises):
        # nnx.Optimizer counts in uint32
        is_unsigned = has_step and stored.leaves["step"].dtype == "uint32"
        dtype = jnp.uint32 if is_unsigned else jnp.int32
        like["step"] = jax.ShapeDtypeStruct((), dtype)
    if options.mesh is None:
        known = getattr(request.model, "opt_state", None)
        like = place_like_parameters(like, blueprint.graphstate, known)
    like |= added
    lacking = optimizer_keys(opt_state) if initialises_optimizer else frozenset()
    if options.initialises:
        rest = {name: like[name] for name in ("opt_state", *added)}
        named, treedef = named_leaves(rest)
        lacking |= {"step", *(leaf.key for leaf in named)} - stored.leaves.keys()
        held = [None if leaf.key in lacking else leaf.value for leaf in named]
        like |= jax.tree.unflatten(treedef, held)
    _log_initialised(stored, sources, lacking)
    like = {**sources.like(), **like}
    return Plan(
        request=request,
        blueprint=blueprint,
        sources=sources,
        options=options,
        like=_with_saved_dtypes(stored, like, options),
        select=_select_keys(stored, like, options),
        initialises_optimizer=initialises_optimizer,
        added=[*added],
        opt_state=opt_state,
        lacking=lacking,
    )


def _added_fields(
    stored: Stored,
    recipe: Recipe | None,
    request: Request,
    blueprint: Blueprint,
    opt_state: Any,
) -> dict[str, Any]:
    """Returns the fields that the class of the state adds, abstract, but for those
    without leaves in the checkpoint and in the given state."""
    names = added_fields(request.state_class)
    if not names:
        return {}
    parts = {part: getattr(blueprint, part) for part in PARTS}

    def create(parts: Any) -> dict[str, Any]:
        state = request.state_class.create(
            step=0, graphdef=blueprint.graphdef, tx=request.tx, **parts
        )
        return {name: getattr(state, name) for name in names}

    made = jax.eval_shape(create, parts | {"opt_state": opt_state})
    found = {}
    for name in names:
        given = getattr(request.model, name, None) if blueprint.make is None else None
        saved = [
            leaf for key, leaf in stored.leaves.items() if key.split("/")[0] == name
        ]
        # 1. as in the state that is given; 2. as the class creates it; 3. as saved
        if jax.tree.leaves(like := given) or jax.tree.leaves(like := made[name]):
            found[name] = like
        elif saved:
            alike = [*parts.values(), opt_state]
            found[name] = _like_saved(stored, recipe, name, saved, alike, request)
    return found


def _like_saved(
    stored: Stored,
    recipe: Recipe | None,
    name: str,
    saved: Sequence[LeafInfo],
    alike: Sequence[Any],
    request: Request,
) -> Any:
    """Returns a field of a state as it was saved, abstract: with the containers of a
    part of the state that has the same leaves, such as an average of the parameters, or
    with those that the leaves show."""
    leaves = {leaf.key: stand_in(leaf) for leaf in saved}
    for part in alike:
        named, treedef = named_leaves({name: part})
        if [leaf.key for leaf in named] and {leaf.key for leaf in named} == {*leaves}:
            return jax.tree.unflatten(treedef, [leaves[leaf.key] for leaf in named])[
                name
            ]
    types = recipe.fields if recipe is not None else {}
    below = {t for key, t in types.items() if key.split("/")[0] == name}
    if below <= {"dict", "list", ABSENT} and (below or [*leaves] == [name]):
        return nest(
            (leaf.path[1:], leaf.path_kinds[1:], stand_in(leaf)) for leaf in saved
        )
    cls = request.state_class.__name__
    raise MismatchError(
        f"{stored.name}: field {name!r} of {cls}: expected a state that shows its "
        f"containers ({', '.join(sorted(below)) or 'not recorded'}), got a class; give "
        f"model= a state of {cls} with it, or create the field in {cls}.create"
    )


def plan_module(stored: Stored, request: Request) -> Plan:
    """Returns the plan of a restore of a module; see ``plan_state``."""
    options = request.options
    stored = select_leaves(stored, options.select)
    # 1. Draw the blueprint.
    recipe = read_recipe(stored.name, stored.document, options.on_mismatch)
    if request.model is None:
        # No mesh or rules are read from a stored model: no code is called for it.
        if recipe is None or recipe.graphdef is None:
            raise InvalidRequestError(
                f"{stored.name} holds no structure of a module: expected model=, got "
                "None; give model="
            )
        graphdef = decode_graphdef(recipe.graphdef, allow=request.allow)
        blueprint = stored_blueprint(graphdef, stored.leaves)
        if options.dtype is not None:
            blueprint = blueprint.cast(options.dtype)
    else:
        blueprint = _draw(stored, request.model, recipe, options)
    return _plan_drawn_module(stored, request, recipe, blueprint)


def _plan_drawn_module(
    stored: Stored, request: Request, recipe: Recipe | None, blueprint: Blueprint
) -> Plan:
    options = request.options
    if request.model is not None:
        # 2. Compare the blueprint with the recipe.
        target = blueprint.recipe(None, {})
        if request.is_compared:
            compare_models(stored.name, recipe, target, on_mismatch=options.on_mismatch)
        options = _with_own_placement(blueprint, options)
    # 3. Find the sources of the Variables.
    with collector_paused():
        sources = Sources.find(
            blueprint, stored.leaves, initialising=options.initialises
        )
        like = sources.like()
        _log_initialised(stored, sources, frozenset())
        return Plan(
            request=request,
            blueprint=blueprint,
            sources=sources,
            options=options,
            like=_with_saved_dtypes(stored, like, options),
            select=_select_keys(stored, like, options),
        )


def is_pytree(stored: Stored) -> bool:
    """Returns whether a checkpoint has the leaves of ``nnx.state((model, optimizer))``
    or ``nnx.state(model)``, or of the objects themselves, which a state does not
    have."""
    heads = {_head(key) for key in stored.leaves}
    is_pair = {"0"} <= heads <= {"0", "1"}
    return not stored.document and (is_pair or _is_alone(stored))


def _is_alone(stored: Stored) -> bool:
    """Returns whether a module was saved without an optimizer."""
    heads = {_head(key) for key in stored.leaves}
    parts = {"0", "graphstate", "graphother", "opt_state", "step"}
    return not heads & parts and all(key.endswith("/value") for key in stored.leaves)


def _pytree_text(stored: Stored) -> str:
    return "model" if _is_alone(stored) else "(model, optimizer)"


def _head(key: str) -> str:
    return key.partition("/")[0]


def plan_pytree(
    stored: Stored, request: Request, *others: Any
) -> tuple[Any, RestoreRequest]:
    """Plans to restore a module that was saved as a pytree; see ``is_pytree``.

    Args:
        *others: The state of its optimizer, if it is restored, too.

    Returns:
        The module, and the request for a list: its state, and others; or for its state,
        if that was saved alone.
    """
    options = request.options
    if options.initialises or options.select or options.opt_state == "init":
        raise InvalidRequestError(
            f"{stored.name} was saved with nnx.state({_pytree_text(stored)}): expected "
            "no missing=, select= and opt_state='init', got one; restore it with what "
            "was saved"
        )
    if others and _is_alone(stored):
        raise InvalidRequestError(
            f"{stored.name} was saved as one tree, such as nnx.state(model), in which "
            "no optimizer is known: expected none, got one; leave it out, or restore "
            "the tree with run.restore(like=...)"
        )
    blueprint = _draw(stored, request.model, None, options)
    options = _with_own_placement(blueprint, options)
    module = merge_by_path(
        blueprint.graphdef, blueprint.graphstate, blueprint.graphother
    )
    like = [nnx.state(module), *others]
    if options.cast is not None:  # scalars of the optimizer are not cast
        like[1:] = jax.tree.map(
            lambda x: cast_floating(x, options.cast) if x.shape else x, like[1:]
        )
    is_alone = _is_alone(stored)
    takes_all = is_alone or bool(others)
    select = [key for key in stored.leaves if takes_all or _head(key) == "0"]
    return module, options.request(like[0] if is_alone else like, select)


def plan_containers(stored: Stored, request: Request) -> RestoreRequest:
    """Plans to restore a state as dicts and lists, for a caller without its code."""
    options = request.options
    if request.tx is not None or options.initialises:
        given = "tx=" if request.tx is not None else f"missing={options.missing!r}"
        raise InvalidRequestError(
            f"restore of {stored.name}: expected model= with {given}, got None; give "
            "model=, because without it a state is restored as dicts and lists"
        )
    view = select_leaves(stored, options.select)
    select = _select_keys(view, {"step": None}, options)
    return replace(options.request(None, select), cast=options.cast)


def plan_opt_state(stored: Stored, state: Any) -> RestoreRequest:
    """Plans to restore the optimizer state alone, for the parameters of a state.

    It is placed by the rules and the mesh of the state's model. Without, the shardings
    of the state's own ``opt_state`` take precedence over the parameters'.
    """
    recipe = read_recipe(stored.name, stored.document, "raise")
    if not _holds_optimizer(stored, recipe):
        raise MismatchError(
            f"{stored.name}: expected the state of an optimizer, got a checkpoint "
            "without one; initialise one with init_tx"
        )
    like = {"opt_state": _abstract_opt_state(stored, state.tx, state.graphstate)}
    types = container_types(like["opt_state"], "opt_state")
    found = recipe.optimizer_differences(types) if recipe is not None else []
    advice = "; give the state the optimizer that was saved"
    reject_differences(stored.name, [*map(str, found)], advice=advice)
    mesh, rules = state.mesh, partition_rules_of(state.model)
    if mesh is None or rules is None:
        options = Options()
        like = place_like_parameters(like, state.graphstate, state.opt_state)
    else:
        options = Options(mesh=mesh, rules=rules, indivisible="replicate")
    select = _select_keys(stored, like, options)
    return options.request(_with_saved_dtypes(stored, like, options), select)


def _draw(
    stored: Stored, model: ModelLike, recipe: Recipe | None, options: Options
) -> Blueprint:
    dtype = options.dtype
    blueprint = draw_blueprint(model, recipe, options.mesh, dtype)
    if options.missing == "keep" and blueprint.make is not None:
        raise InvalidRequestError(
            f"restore of {stored.name}: expected model= a module or a state with "
            "missing='keep', got a class or a factory, which has no values; give "
            "missing='init'"
        )
    if options.cast is None and isinstance(model, type) and takes_config(model, recipe):
        # A state may be saved with its parameters cast, past the dtypes of its model.
        saved = {
            leaf.dtype
            for leaf in stored.leaves.values()
            if leaf.path[:1] == ("graphstate",) and is_floating(leaf.dtype)
        }
        dtype = saved.pop() if len(saved) == 1 else None
    return blueprint if dtype is None else blueprint.cast(dtype)


@contextmanager
def add_advice(stored: Stored, request: Request) -> Generator[None]:
    """Adds to a ``MismatchError`` the options with which the checkpoint fits."""
    try:
        with without_advice():
            yield
    except MismatchError as e:
        if request.model is None or is_pytree(stored) or "hints" not in e.metadata:
            raise  # with its own advice
        options = _fitting_options(stored, request)
        if options == {}:  # the model fits: what does not is where its leaves go
            raise
        added = ", ".join(
            f"{name}={value!r}" for name, value in (options or {}).items()
        )
        advice = "read the leaves as dicts and lists with run.restore()"
        if added:
            advice = f"add {added}, to restore what fits"
        raise MismatchError(
            f"{e}; give the model and the optimizer that were saved, the model as a "
            f"factory or a module if its class makes another one, or {advice}"
        ) from e


def _fitting_options(stored: Stored, request: Request) -> dict[str, Any] | None:
    """Returns options to add with which a checkpoint fits; None if it never does."""
    # Anywhere: what a mesh does not divide has advice of its own.
    given = replace(request.options, mesh=None, rules=None, indivisible="error")
    found = dict[str, Any]()
    recipe = read_recipe(stored.name, stored.document, given.on_mismatch)

    def attempt(*, is_compared: bool = False, **more: Any) -> None:
        options = replace(given, **found, **more)
        changed = replace(request, options=options, is_compared=is_compared)
        view = select_leaves(stored, options.select)
        if request.state_class is None:
            plan = _plan_drawn_module(view, changed, recipe, blueprint)
        else:
            plan = _plan_drawn_state(view, changed, recipe, blueprint)
        if not is_compared:
            plan.check(view)

    def find_unfit(**more: Any) -> set[str]:
        try:
            attempt(**more)
        except MismatchError as e:
            return {*e.metadata["unfit"].split("\n")}
        return set()

    try:
        blueprint = _draw(stored, request.model, recipe, given)
        missing = "keep" if blueprint.make is None else "init"
        # 1. Moments of another optimizer are worth nothing.
        if given.opt_state == "restore" and request.tx is not None:
            opt_state = abstract_opt_state(request.tx, blueprint.graphstate)
            if recipe is not None and _has_other_moments(stored, recipe, opt_state):
                found["opt_state"] = "init"
        # 2. The structure.
        try:
            attempt(is_compared=True, missing=missing)
        except MismatchError:
            found["on_mismatch"] = "log"
        # 3. Leaves that the model has in another dtype or shape, or not at all.
        unfit = find_unfit(missing=missing)
        if unfit and given.cast is None:
            others = find_unfit(missing=missing, cast=LIKE)
            if len(others) < len(unfit):
                found["cast"], unfit = LIKE, others
        if unfit:
            keys = select_leaves(stored, given.select).leaves.keys() - unfit
            if not any(_head(key) == "graphstate" for key in keys):
                return None  # it is another model
            found["select"] = find_patterns(stored.leaves, keys)
            attempt(missing=missing)
        # 4. Leaves that the checkpoint lacks.
        try:
            attempt()
        except StoreError:
            found["missing"] = missing
    except (StoreError, LookupError):
        return None
    return found


def _has_other_moments(stored: Stored, recipe: Recipe, opt_state: Any) -> bool:
    """Returns whether arrays are below containers that differ from the saved ones."""
    types = container_types(opt_state, "opt_state")
    places = [each.path for each in recipe.optimizer_differences(types)]
    arrays = [key for key in _opt_state_keys(stored) if stored.leaves[key].shape]
    named = named_leaves({"opt_state": opt_state})[0]
    arrays += [leaf.key for leaf in named if getattr(leaf.value, "shape", ())]
    return any(key.startswith(f"{place}/") for place in places for key in arrays)


def _log_initialised(stored: Stored, sources: Sources, lacking: Iterable[str]) -> None:
    keys = {join_key((part, *map(str, path))) for part, path in sources.initialised}
    if keys := keys.union(lacking):
        text = "%s lacks %d leaves of the model, which are initialised or kept: %s"
        _log.info(text, stored.name, len(keys), list_problems(sorted(keys)))


def _with_own_placement(blueprint: Blueprint, options: Options) -> Options:
    """Returns the options with the mesh and rules that the model provides."""
    if options.mesh is not None and options.rules is not None:
        return options
    # runs code of the model: only for a model of the caller's
    module = merge_by_path(
        blueprint.graphdef, blueprint.graphstate, blueprint.graphother
    )
    own_mesh, own_rules = mesh_of(module), partition_rules_of(module)
    rules = own_rules if options.rules is None else options.rules
    mesh = own_mesh if options.mesh is None and rules is not None else options.mesh
    if mesh is None:
        return options
    # EasyDeL writes its rules for meshes of any shape, and drops the axes that do not
    # divide a leaf. Rules that the caller wrote are exact.
    if options.rules is None:
        options = replace(options, indivisible="replicate")
    return replace(options, mesh=mesh, rules=rules)


def _initialises_optimizer(
    stored: Stored,
    recipe: Recipe | None,
    tx: optax.GradientTransformation | None,
    options: Options,
) -> bool:
    """Returns whether the optimizer is initialised; rejects one on one side only."""
    if options.opt_state == "skip":
        return False
    if options.opt_state == "init":
        if tx is None:
            raise InvalidRequestError(
                f"restore of {stored.name}: expected tx= with opt_state='init', got "
                "None; give the optimizer"
            )
        return True
    holds = _holds_optimizer(stored, recipe)
    if holds and tx is None:
        raise InvalidRequestError(
            f"{stored.name} holds the state of an optimizer: expected tx=, got None; "
            "give tx=, the optimizer, or opt_state='skip'"
        )
    if tx is None or holds:
        return False
    if recipe is not None and not options.initialises:
        raise InvalidRequestError(
            f"{stored.name} holds no state of an optimizer: expected no tx=, got one; "
            "leave it out, or give missing='init' to initialise its state"
        )
    return options.initialises


def _abstract_opt_state(
    stored: Stored, tx: optax.GradientTransformation, graphstate: GraphState
) -> optax.OptState:
    """Returns the state of an optimizer, initial or after an update, that was saved."""
    initial = abstract_opt_state(tx, graphstate)
    saved = set(_opt_state_keys(stored))
    if optimizer_keys(initial) == saved:
        return initial
    # A few optimizers, such as optax.monitor, have some leaves only after an update.
    try:
        updated = jax.eval_shape(tx.update, graphstate, initial, graphstate)[1]
    except Exception:  # noqa: BLE001 - the caller's own code
        return initial
    return updated if optimizer_keys(updated) == saved else initial


def optimizer_keys(opt_state: optax.OptState) -> frozenset[str]:
    return frozenset(leaf.key for leaf in named_leaves({"opt_state": opt_state})[0])


def _holds_optimizer(stored: Stored, recipe: Recipe | None) -> bool:
    """Returns whether an optimizer was saved, possibly one without leaves."""
    saved = recipe is not None and recipe.opt_state is not None
    all_keys = stored.tree.by_key
    # An optimizer without leaves was saved, or select= leaves all of them out.
    is_empty = not any(key.startswith("opt_state") for key in all_keys)
    return bool(_opt_state_keys(stored)) or (saved and is_empty)


def _with_saved_dtypes(stored: Stored, like: Any, options: Options) -> Any:
    """Returns the leaves in their saved form; logs those with another dtype."""
    casting = options.cast is not None
    found, changed = with_saved_dtypes(like, stored.leaves, casting=casting)
    if changed:
        text = "%s: leaves are restored with their saved dtypes: %s"
        _log.info(text, stored.name, format_differences(changed))
    return found


def _select_keys(stored: Stored, like: Any, options: Options) -> list[str]:
    skipped: set[str] = set()
    if options.opt_state != "restore":
        skipped.update(_opt_state_keys(stored))
    if "step" not in like:  # a module takes only the Variables of a state
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
