"""Saves models and states to a run, and restores them.

``save_state``, ``save_model`` and ``restore_model`` are public in
``storesvc_client.easydel``. The class of the state is an argument here, as
``EasyDeLState`` itself calls these functions.

``save`` and ``restore_into``, public in ``storesvc_client.nnx``, take a module and its
``nnx.Optimizer``. The checkpoint has the leaves of an ``EasyDeLState`` with the same
parameters, which are the Variables that the optimizer updates (its ``wrt``), so
``restore_state`` and ``restore_model`` read it, too. Checkpoints of
``nnx.state((model, optimizer))`` are restored as well.
"""

import json
import operator
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Literal, Self, SupportsIndex

import jax
import jax.numpy as jnp
from flax import nnx

from storesvc.format.names import Which
from storesvc.format.trees import Leaf
from storesvc_client._api.opening import Prepare
from storesvc_client._api.run import Run, get_parts
from storesvc_client._foreign.mount import ForeignRun
from storesvc_client._pytree.leaves import named_leaves, tracer_text
from storesvc_client._restore.mapped import MappedReader
from storesvc_client._restore.open_tree import TreeReader
from storesvc_client._save.saver import Save
from storesvc_client._values.arguments import checked_choice
from storesvc_client._values.options import (
    ALL_PROCESSES,
    DEFAULT_DEADLINE,
    Distributed,
    IfBusy,
    Indivisible,
    MappingRules,
    Missing,
    OnMismatch,
    OptState,
    Rehearse,
    RestoreRequest,
    SaveRequest,
    SnapshotMode,
    collect_arguments,
)
from storesvc_client.errors import InvalidRequestError, NotFoundError
from storesvc_client.trees.nnx.blueprints import abstract_opt_state, init_opt_state
from storesvc_client.trees.nnx.graphs import (
    GraphState,
    added_fields,
    drop_caches,
    merge_by_path,
    replace_fields,
    split_module,
)
from storesvc_client.trees.nnx.recipes import Recipe
from storesvc_client.trees.nnx.rehearsal import Rehearser
from storesvc_client.trees.nnx.restore_plans import (
    Options,
    Plan,
    Request,
    add_advice,
    is_pytree,
    optimizer_keys,
    plan_containers,
    plan_module,
    plan_pytree,
    plan_state,
)
from storesvc_client.trees.nnx.variable_sources import fill_rng_values

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import SupportsFloat

    from jax.sharding import Mesh
    from numpy.typing import DTypeLike

    from storesvc_client._api.client import Client
    from storesvc_client._telemetry.progress import ProgressCallback
    from storesvc_client._values.arguments import DurationLike
    from storesvc_client._values.key_patterns import Patterns
    from storesvc_client._values.models import Checkpoint
    from storesvc_client._values.options import Rules

DIRECTORY_RUN: Final = "local/state"
"""Name of the only run of a store in a directory."""


def save_state(
    run: Run,
    state: Any,
    *,
    rehearse: Rehearse = "warn",
    metrics: "Mapping[str, SupportsFloat] | None" = None,
    labels: "Mapping[str, str] | None" = None,
    items: "Mapping[str, Any] | None" = None,
    base: Which | None = "latest",
    snapshot: SnapshotMode | None = None,
    if_busy: IfBusy | None = None,
    distributed: Distributed = ALL_PROCESSES,
    progress: "ProgressCallback | None" = None,
) -> Save:
    """Starts to save a state at its own step; see ``Run.save``.

    For each new structure the restore is rehearsed once, abstractly: the class of the
    model builds it from the saved config, and each leaf is matched. No array is
    created.

    >>> save_state(run, state, metrics={"loss": 2.31}).result()

    Arguments that are not listed are as for ``Run.save``.

    Args:
        run: Run that the checkpoint will belong to.
        state: An ``EasyDeLState``: this library's, EasyDeL's, or any other pytree
            with ``step``, ``graphdef``, ``graphstate``, ``graphother`` and
            ``opt_state``. It may be donated as soon as this returns.
        rehearse: What to do if ``restore_state`` would reject the checkpoint. "warn":
            rehearses in the background after the first save, and logs a warning with
            the call that works; "strict": rehearses before the save, and rejects it;
            "off": no rehearsal. ``Save.rehearsal`` has the result.

    Raises:
        MismatchError: With ``rehearse="strict"``: the state could not be restored.
        StoreError: See for ``Run.save``.
    """
    check_run(run)
    parts = ("step", "graphdef", "graphstate", "graphother", "opt_state")
    lacking = [part for part in parts if not hasattr(state, part)]
    if lacking or isinstance(state, type):
        raise InvalidRequestError(
            f"save to {run.name}: expected a state with {', '.join(parts)}, got a "
            f"{type(state).__name__} without {', '.join(lacking) or 'values'}; save "
            "a module with save_model, any other tree with run.save"
        )
    model = drop_caches((state.graphdef, state.graphstate, state.graphother))
    other = fill_rng_values(model[2])
    if other is not state.graphother:
        state = replace_fields(state, graphdef=model[0], graphother=other)
    added = {name: getattr(state, name) for name in added_fields(state)}
    recipe = Recipe.from_graph(*model, state.opt_state, added)
    rehearser = _rehearser(run, state, rehearse, is_state=True)
    request = collect_arguments(
        SaveRequest,
        locals(),
        step=_find_step(run, state.step),
        tree=state,
        document=recipe.pack(),
    )
    return _begin_save(run, request, rehearser)


def save_model(
    run: Run,
    step: SupportsIndex,
    model: Any,
    *,
    rehearse: Rehearse = "warn",
    metrics: "Mapping[str, SupportsFloat] | None" = None,
    labels: "Mapping[str, str] | None" = None,
    items: "Mapping[str, Any] | None" = None,
    base: Which | None = "latest",
    snapshot: SnapshotMode | None = None,
    if_busy: IfBusy | None = None,
    distributed: Distributed = ALL_PROCESSES,
    progress: "ProgressCallback | None" = None,
) -> Save:
    """Starts to save a module without optimizer and step; see ``Run.save``.

    Its leaves have the same keys as in a state, ``graphstate/...`` and
    ``graphother/...``.

    Arguments that are not listed are as for ``Run.save``.

    Args:
        run: Run that the checkpoint will belong to.
        step: Training step, >= 0.
        model: An NNX module, or an object with ``graphdef``, ``graphstate`` and
            ``graphother``.
        rehearse: As for ``save_state``, with ``restore_model``.

    Raises:
        InvalidRequestError: ``model`` is not a module.
        MismatchError: See for ``save_state``.
        StoreError: See for ``Run.save``.
    """
    check_run(run)
    try:
        graphdef, graphstate, graphother = drop_caches(split_module(model))
        graphother = fill_rng_values(graphother)
    except TypeError as e:
        raise InvalidRequestError(f"save to {run.name}: {e}") from e
    parts = SimpleNamespace(
        graphdef=graphdef, graphstate=graphstate, graphother=graphother
    )
    rehearser = _rehearser(run, parts, rehearse, is_state=False)
    recipe = Recipe.from_graph(graphdef, graphstate, graphother)
    tree = {"graphstate": graphstate, "graphother": graphother}
    request = collect_arguments(
        SaveRequest, locals(), tree=tree, document=recipe.pack()
    )
    return _begin_save(run, request, rehearser)


def _begin_save(run: Run, request: SaveRequest, rehearser: Rehearser | None) -> Save:
    if rehearser is None:
        return Save(get_parts(run).begin(request))
    # 1. With "strict", the rehearsal precedes the save: a rejected save sends nothing.
    pending = get_parts(run).begin(request, rehearser.check)
    save = Save(pending)
    # 2. With "warn", it follows the save, which it must not delay.
    save.rehearsal = rehearser.after(pending)
    return save


def _rehearser(
    run: Run, saved: Any, rehearse: Rehearse, *, is_state: bool
) -> Rehearser | None:
    checked_choice(f"save to {run.name}: rehearse=", rehearse, Rehearse)
    if rehearse == "off":
        return None
    return Rehearser(run, saved, rehearse=rehearse, is_state=is_state)


def restore_model(
    run: Run | ForeignRun,
    which: Which = "latest",
    *,
    model: Any = None,
    allow: Any = (),
    mesh: "Mesh | None" = None,
    rules: "Rules | None" = None,
    indivisible: Indivisible = "error",
    cast: "DTypeLike | None" = None,
    select: "Patterns | None" = None,
    missing: Missing = "error",
    on_mismatch: OnMismatch = "raise",
    distributed: Distributed = ALL_PROCESSES,
    deadline: "DurationLike" = DEFAULT_DEADLINE,
    progress: "ProgressCallback | None" = None,
) -> Any:
    """Returns the module of a checkpoint of a module or a state.

    >>> model = restore_model(run, cast="bfloat16")

    Arguments that are not listed are as for ``restore_state`` and ``Run.restore``.

    Args:
        run: Run of the checkpoint.
        which: A step, "latest", or a tag.
        model: As for ``restore_state``. None builds the module from the saved
            structure: of Flax's own classes and those in ``allow``; no other name in
            the checkpoint is imported.
        allow: Without ``model``: your classes and functions that the structure may
            name.

    Raises:
        NotFoundError: There is no such checkpoint.
        InvalidRequestError: An argument is out of range, or there is neither a
            ``model`` nor a saved structure.
        MismatchError: The checkpoint was saved from another model.
        StructureError: Without ``model``: the structure names objects that are not
            allowed, or contains values that are no data, such as closures; give
            ``model``.
    """
    check_run(run, Run | ForeignRun)
    if model is not None and allow:
        raise InvalidRequestError(
            "expected model= or allow=, got both; allow= is for restoring without code"
        )
    reader, _ = open_checkpoint(run, which, model, distributed, deadline)
    wanted = collect_arguments(Options, locals(), opt_state="skip")
    request = Request(model=model, allow=allow, options=wanted)
    if is_pytree(reader) and model is not None:
        module, pytree = plan_pytree(reader, request)
        restored = reader.restore(pytree, deadline)
        nnx.update(module, restored[0] if isinstance(restored, list) else restored)
        return module
    with add_advice(reader, request):
        plan = plan_module(reader, request)
        # 4. Restore the leaves.
        restored = reader.restore(plan.restore_request, deadline)
    # 5. Merge the parts.
    return merge_by_path(plan.blueprint.graphdef, *plan.merge(restored))


def rebuild_state(reader: TreeReader, request: Request) -> Any:
    """Returns the state of a checkpoint; see ``storesvc_client.easydel``."""
    if request.model is None:
        wanted = plan_containers(reader, request)
        return reader.restore(wanted, request.options.deadline)
    with add_advice(reader, request):
        plan = plan_state(reader, request)
        # 4. Restore the leaves.
        restored = reader.restore(plan.restore_request, request.options.deadline)
    return create_state(plan, restored)


def create_state(plan: Plan, restored: Any) -> Any:
    # 5. Merge the parts, and create the state.
    request, options = plan.request, plan.options
    tx = request.tx
    graphstate, graphother = plan.merge(restored)
    opt_state = restored["opt_state"]
    lacks = not optimizer_keys(plan.opt_state).isdisjoint(plan.lacking)
    if tx is not None and (lacks or plan.initialises_optimizer):
        keeps = options.missing == "keep" and options.opt_state == "restore"
        initial = getattr(request.model, "opt_state", None) if keeps else None
        if initial is None or optimizer_keys(initial) != optimizer_keys(plan.opt_state):
            rules = options.rules if not isinstance(options.rules, str) else None
            initial = init_opt_state(
                tx, graphstate, options.mesh, rules, options.indivisible
            )
        opt_state = _fill(initial, opt_state)
    own_step = getattr(request.model, "step", 0) if options.missing == "keep" else 0
    state = request.state_class.create(
        step=restored.get("step", own_step if options.step is None else options.step),
        graphdef=plan.blueprint.graphdef,
        graphstate=graphstate,
        graphother=graphother,
        tx=tx,
        opt_state=opt_state,
    )
    fields = {}
    for name in plan.added:
        given = getattr(request.model, name, None)
        own = getattr(state, name) if given is None else given
        lacks = any(key.split("/")[0] == name for key in plan.lacking)
        fields[name] = _fill(own, restored[name]) if lacks else restored[name]
    if isinstance(request.model, type(state)):  # nothing in a checkpoint shows these
        statics = added_fields(state, static=True)
        fields |= {name: getattr(request.model, name) for name in statics}
    return replace_fields(state, **fields) if fields else state


def _fill(tree: Any, values: Any) -> Any:
    """Returns a tree with the leaves of another one that has some of them."""
    found = {leaf.key: leaf.value for leaf in named_leaves(values)[0]}
    named, treedef = named_leaves(tree)
    return jax.tree.unflatten(
        treedef, [found.get(leaf.key, leaf.value) for leaf in named]
    )


def open_checkpoint(
    run: Run | ForeignRun,
    which: Which,
    model: Any,
    distributed: Distributed,
    deadline: "DurationLike",
    mapping: "MappingRules | None" = None,
) -> tuple[TreeReader, int | None]:
    """Opens a checkpoint, and returns its reader, as the mapping or the migrations of
    the run show it; with a model and without these, see ``as_state``."""
    if isinstance(run, ForeignRun):
        foreign = run if mapping is None else run.map(mapping)
        reader: Any = foreign.read(which)
        view = reader.map(foreign.mapping)
    else:
        opening = get_parts(run).opening(
            which, distributed=distributed, deadline=deadline
        )
        reader = opening.read(migrates=mapping is None)
        view = reader.map_or_migrate(mapping)
    return (view, None) if model is None or view is not reader else as_state(reader)


def as_state(reader: Any) -> tuple[TreeReader, int | None]:
    """Returns a checkpoint that EasyDeL wrote with the keys and the config of a state,
    and its step, for which it has no leaf; any other one unchanged, and None."""
    trees = {leaf.path[:1] for leaf in reader.leaves.values()}
    if ("model",) not in trees or trees - {("model",), ("tx",)}:
        return reader, None
    config = reader.items.get("config")
    try:
        config = json.loads(config) if isinstance(config, str) else None
    except ValueError:
        config = None  # an item of the caller's own
    document = b"" if config is None else Recipe.from_config(config).pack()
    return reader.rename_leaves(_in_state, document), reader.info.step


def _in_state(leaf: Leaf) -> Leaf:
    """Returns a leaf of EasyDeL's own checkpoint with its key in a state."""
    tree, _, key = leaf.key.partition("/")
    if tree == "tx":
        return replace(leaf, key=f"opt_state/{key}")
    if key.endswith("/value"):
        return replace(leaf, key=f"graphstate/{key}")
    kinds = f"{leaf.path_kinds}a"  # the value of a Variable is an attribute
    return replace(leaf, key=f"graphstate/{key}/value", path_kinds=kinds)


@contextmanager
def open_run(
    where: "str | PathLike[str] | Run",
    *,
    client: "Client | None",
    creating: bool = False,
) -> Generator[tuple[Run, Which]]:
    """Opens the run that ``EasyDeLState.save_state`` or ``load_state`` names.

    Args:
        where: A run; with ``client`` the name of a run, which may end in a step, such
            as "prod/llama@latest"; without it, a directory.
        creating: Whether to create a store in a directory that has none.

    Raises:
        InvalidRequestError: The name is not valid.
        FileNotFoundError: The directory has no store, and ``creating`` is False.
    """
    if isinstance(where, Run):
        yield where, "latest"
        return
    if client is not None:
        if not hasattr(client, "run"):
            raise InvalidRequestError(
                f"client: expected a Client from connect(), got {client!r}"
            )
        name, at, which = fspath(where).partition("@")
        if creating and at:
            raise InvalidRequestError(
                f"expected a run to save to, got {fspath(where)!r}; leave the step "
                "out, because a state is saved at its own step"
            )
        yield client.run(name), _which(which, where)
        return
    from storesvc_client._api.client import connect

    if any(sign in fspath(where) for sign in ("@", "://")):
        raise InvalidRequestError(
            f"expected a directory, got {fspath(where)!r}; give client= for the name "
            "of a run"
        )
    root = Path(where).absolute()
    if not creating and not (root / "store.binpb").is_file():
        raise FileNotFoundError(
            f"expected a directory that a state was saved to, got {fspath(where)!r}; "
            "give client= for the name of a run"
        )
    with connect(root.as_uri()) as embedded:
        run = embedded.run(DIRECTORY_RUN)
        try:
            if not creating:
                run.latest()
        except NotFoundError as e:
            raise FileNotFoundError(f"no state was saved to {fspath(where)!r}") from e
        yield run, "latest"


def _which(text: str, where: "str | PathLike[str]") -> Which:
    if text in ("", "latest"):
        return "latest"
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise InvalidRequestError(
            f"expected a run and a step such as 'prod/llama@100', got {where!r}"
        )
    return int(text)


def check_run(run: Any, kinds: Any = Run, what: str = "") -> None:
    if not isinstance(run, kinds):
        raise InvalidRequestError(
            f"{what}expected a Run, such as client.run('prod/llama'), got {run!r}"
        )


def _find_step(run: Run, step: Any) -> int:
    if isinstance(step, jax.core.Tracer):
        got = f"{tracer_text(step)}: call save_state outside jit"
    elif isinstance(step, bool) or not hasattr(step, "__index__"):
        got = repr(step)
    else:
        try:
            return operator.index(step)
        except TypeError:  # an array of floating-point numbers, or of several
            got = repr(step)
    raise InvalidRequestError(
        f"save to {run.name}: expected an integer in the step of the state, got {got}"
    )


class _Parts(SimpleNamespace):
    @classmethod
    def create(cls, **parts: Any) -> Self:
        return cls(**parts)


def save(
    run: Run,
    step: SupportsIndex,
    model: "nnx.Module | tuple[nnx.Module, nnx.Optimizer[Any]]",
    optimizer: "nnx.Optimizer[Any] | None" = None,
    metrics: "Mapping[str, SupportsFloat] | None" = None,
    labels: "Mapping[str, str] | None" = None,
    items: "Mapping[str, Any] | None" = None,
    base: Which | None = "latest",
    snapshot: SnapshotMode | None = None,
    if_busy: IfBusy | None = None,
    distributed: Distributed = ALL_PROCESSES,
    progress: "ProgressCallback | None" = None,
) -> "Save":
    """Starts to save a module and its optimizer; see ``Run.save``.

    >>> save(run, 100, model, optimizer, metrics={"loss": 2.31}).result().step
    100

    Arguments that are not listed are as for ``Run.save``.

    Args:
        run: Run that the checkpoint will belong to.
        step: Training step, >= 0.
        model: The module, or a pair of it and its optimizer, as a loop takes it.
        optimizer: Its optimizer; None saves the module alone.

    Raises:
        InvalidRequestError: ``model`` is no module, or ``optimizer`` is no optimizer of
            it.
        StoreError: See for ``Run.save``.
    """
    check_run(run, what="save to: ")
    tree, document = tree_to_save(run, *_pair(model, optimizer))
    request = collect_arguments(SaveRequest, locals(), tree=tree, document=document)
    return Save(get_parts(run).begin(request))


def _pair(model: Any, optimizer: Any) -> tuple[Any, Any]:
    """Returns a module and its optimizer that may be given as a pair."""
    is_pair = optimizer is None and type(model) in (tuple, list) and len(model) == 2
    is_trained = is_pair and isinstance(model[1], nnx.Optimizer)
    return tuple(model) if is_trained else (model, optimizer)


def tree_to_save(run: Run, model: Any, optimizer: Any) -> tuple[Any, bytes]:
    """Returns the tree of a module and its optimizer, and the document about it."""
    parts = _split_parts(run, model, optimizer)
    graphother = fill_rng_values(parts.graphother)
    tree = {"graphstate": parts.graphstate, "graphother": graphother}
    if optimizer is not None:
        tree |= {"step": parts.step, "opt_state": parts.opt_state}
    recipe = Recipe.from_graph(
        parts.graphdef, parts.graphstate, parts.graphother, parts.opt_state
    )
    return tree, recipe.pack()


def restore_into(
    run: Run,
    model: "nnx.Module | tuple[nnx.Module, nnx.Optimizer[Any]]",
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

    Arguments that are not listed are as for ``Run.restore`` and ``restore_state``.

    Args:
        run: Run of the checkpoint.
        model: The module, or a pair of it and its optimizer; also an abstract module,
            of ``nnx.eval_shape``.
        optimizer: Its optimizer; None restores the module alone.
        which: A step, "latest", or a tag.
        cast: A floating-point dtype for the parameters, and for the moments that the
            optimizer keeps of them; the module's arrays get it. None: the saved dtypes.
        missing: What to do with leaves that the checkpoint lacks: "error", or "keep"
            their values.
        opt_state: "restore" the saved state of the optimizer, "init" it as
            ``optimizer`` begins, or "skip" it, which leaves ``optimizer`` unchanged.
        on_mismatch: What to do if the structure or the optimizer differs from the saved
            one: "raise" a ``MismatchError``, or "log" a warning. The leaves must fit in
            any case.

    Raises:
        NotFoundError: There is no such checkpoint.
        InvalidRequestError: An argument is out of range, or the checkpoint has no state
            of an optimizer, but ``optimizer`` is given.
        MismatchError: The checkpoint was saved from another module or optimizer.
    """
    check_run(run, what="restore of: ")
    model, optimizer = _pair(model, optimizer)
    optimizer = None if opt_state == "skip" else optimizer
    opt_state = "skip" if optimizer is None else opt_state
    options = collect_arguments(Options, locals())
    request = _make_request(run, model, optimizer, options)
    source, step = open_checkpoint(run, which, model, distributed, deadline)
    if step is not None:
        request = replace(request, options=replace(options, step=step))
    with add_advice(source, request):
        wanted, put = planner(run, model, optimizer, request)(source)
        restored = source.restore(wanted, deadline)
    put(restored)
    stored: Any = source.inner if isinstance(source, MappedReader) else source
    info: Checkpoint = stored.info
    return info


def _make_request(run: Run, model: Any, optimizer: Any, options: Options) -> Request:
    parts = _split_parts(run, model, optimizer)
    if optimizer is None:
        return Request(model=parts, options=options)
    return Request(model=parts, tx=optimizer.tx, state_class=_Parts, options=options)


def planner(
    run: Run, model: Any, optimizer: Any, request: Request | None = None
) -> Prepare:
    """Returns a function that plans the restore of a checkpoint into a module and its
    optimizer."""
    options = Options(opt_state="skip" if optimizer is None else "restore")
    request = request or _make_request(run, model, optimizer, options)

    def plan(reader: TreeReader) -> "tuple[RestoreRequest, Callable[[Any], None]]":
        others = [] if optimizer is None else [optimizer]
        if is_pytree(reader):
            states = map(nnx.state, others)
            found, wanted = None, plan_pytree(reader, request, *states)[1]
        else:
            found = (plan_state if others else plan_module)(reader, request)
            wanted = found.restore_request

        def put(restored: Any) -> None:
            if found is None:
                states = restored if isinstance(restored, list) else [restored]
                for part, state in zip([model, *others], states, strict=True):
                    nnx.update(part, state)
                return
            if optimizer is None:
                nnx.update(model, *found.merge(restored))
                return
            state = create_state(found, restored)
            nnx.update(model, state.graphstate, state.graphother)
            containers = jax.tree.structure(  # of the optimizer, around Variables
                optimizer.opt_state, is_leaf=lambda x: isinstance(x, nnx.Variable)
            )
            leaves = jax.tree.leaves(state.opt_state)
            opt_state = jax.tree.unflatten(containers, leaves)
            nnx.update(optimizer.opt_state, nnx.state(opt_state))
            optimizer.step.set_value(jnp.asarray(state.step, jnp.uint32))

        return wanted, put

    return plan


def _split_parts(run: Run, model: Any, optimizer: Any) -> _Parts:
    if optimizer is None:
        try:
            graphdef, graphstate, graphother = drop_caches(split_module(model))
        except TypeError as e:
            raise InvalidRequestError(f"{run.name}: {e}") from e
        graphs = {"graphstate": graphstate, "graphother": graphother}
        return _Parts(graphdef=graphdef, opt_state=None, **graphs)
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
        opt_state=_read_opt_state(run, optimizer, graphstate),
    )


def _read_opt_state(run: Run, optimizer: Any, graphstate: GraphState) -> Any:
    """Returns the state of an optimizer without the Variables around leaves."""
    expected = abstract_opt_state(optimizer.tx, graphstate)
    leaves = jax.tree.leaves(optimizer.opt_state)
    shapes = [leaf.shape for leaf in leaves]
    if shapes != [leaf.shape for leaf in jax.tree.leaves(expected)]:
        raise InvalidRequestError(
            f"{run.name}: expected the optimizer of this module, got one whose state "
            "has other leaves; create it from the module that is given"
        )
    return jax.tree.unflatten(jax.tree.structure(expected), leaves)
