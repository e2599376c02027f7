"""Saves models and states to a run and restores them, for ``storesvc_client.easydel``.

The class of the state is an argument here, as ``EasyDeLState`` itself calls these
functions.
"""

import json
import operator
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from types import SimpleNamespace
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    SupportsIndex,
    Unpack,
)

import jax

from storesvc.format.names import Which
from storesvc.format.trees import Leaf
from storesvc_client._api.run import Run, save_checked
from storesvc_client._foreign.mount import ForeignRun
from storesvc_client._pytree.leaves import tracer_text
from storesvc_client._restore.open_tree import OpenTree, rename_leaves
from storesvc_client._save.saver import Save
from storesvc_client._values.arguments import checked_choice
from storesvc_client._values.options import (
    ALL_PROCESSES,
    DEFAULT_DEADLINE,
    Distributed,
    Indivisible,
    Missing,
    ModelRestoreKeywords,
    OnMismatch,
    ReadKeywords,
    Rehearse,
    SaveKeywords,
    check_keywords,
)
from storesvc_client.errors import InvalidRequestError, NotFoundError
from storesvc_client.trees.nnx.model_parts import (
    added_fields,
    drop_caches,
    replace_fields,
    split_module,
)
from storesvc_client.trees.nnx.recipes import Recipe
from storesvc_client.trees.nnx.rehearsal import Rehearser
from storesvc_client.trees.nnx.restore_model import (
    Options,
    Request,
    rebuild_module,
)
from storesvc_client.trees.nnx.rng_values import fill_rng_values

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from numpy.typing import DTypeLike

    from storesvc_client._api.client import Client
    from storesvc_client._values.key_patterns import Patterns
    from storesvc_client._values.options import Rules

__all__ = [
    "as_state",
    "check_run",
    "open_checkpoint",
    "opened_run",
    "restore_model",
    "save_model",
    "save_state",
    "split_reading",
]

DIRECTORY_RUN: Final = "local/state"
"""Name of the only run of a store in a directory."""


def save_state(
    run: Run,
    state: Any,
    *,
    rehearse: Rehearse = "warn",
    **options: Unpack[SaveKeywords],
) -> Save:
    """Starts to save a state at its own step; see ``Run.save``.

    For each new structure the restore is rehearsed once, abstractly: the class of the
    model builds it from the saved config, and each leaf is matched. No array is
    created.

    >>> save_state(run, state, metrics={"loss": 2.31}).result()

    Args:
        run: Run that the checkpoint will belong to.
        state: An ``EasyDeLState``: this library's, EasyDeL's, or any other pytree
            with ``step``, ``graphdef``, ``graphstate``, ``graphother`` and
            ``opt_state``. It may be donated as soon as this returns.
        rehearse: What to do if ``restore_state`` would reject the checkpoint. "warn":
            rehearses in the background after the first save, and logs a warning with
            the call that works; "strict": rehearses before the save, and rejects it;
            "off": no rehearsal. ``Save.rehearsal`` has the result.
        **options: ``metrics``, ``labels``, ``base``, ``snapshot``, ``if_busy``,
            ``distributed`` and ``progress``, as for ``Run.save``.

    Raises:
        MismatchError: With ``rehearse="strict"``: the state could not be restored.
        StoreError: See for ``Run.save``.
    """
    check_keywords("save_state", options, SaveKeywords)
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
    recipe = Recipe.of(*model, state.opt_state, added)
    rehearser = _rehearser(run, state, rehearse, is_state=True)
    step = _step_of(run, state.step)
    return _begun(run, step, state, recipe, rehearser, options)


def save_model(
    run: Run,
    step: SupportsIndex,
    model: Any,
    *,
    rehearse: Rehearse = "warn",
    **options: Unpack[SaveKeywords],
) -> Save:
    """Starts to save a module without optimizer and step; see ``Run.save``.

    Its leaves have the same keys as in a state, ``graphstate/...`` and
    ``graphother/...``.

    Args:
        run: Run that the checkpoint will belong to.
        step: Training step, >= 0.
        model: An NNX module, or an object with ``graphdef``, ``graphstate`` and
            ``graphother``.
        rehearse: As for ``save_state``, with ``restore_model``.
        **options: As for ``save_state``.

    Raises:
        InvalidRequestError: ``model`` is not a module.
        MismatchError: See for ``save_state``.
        StoreError: See for ``Run.save``.
    """
    check_keywords("save_model", options, SaveKeywords)
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
    recipe = Recipe.of(graphdef, graphstate, graphother)
    tree = {"graphstate": graphstate, "graphother": graphother}
    return _begun(run, step, tree, recipe, rehearser, options)


def _begun(
    run: Run,
    step: SupportsIndex,
    tree: Any,
    recipe: Recipe,
    rehearser: Rehearser | None,
    options: SaveKeywords,
) -> Save:
    """Starts the save and its rehearsal."""
    document = recipe.pack()
    if rehearser is None:
        return run.save(step, tree, document=document, **options)
    # 1. With "strict", the rehearsal precedes the save: a rejected save sends nothing.
    save = save_checked(
        run, step, tree, document=document, check=rehearser.check, **options
    )
    # 2. With "warn", it follows the save, which it must not delay.
    save.rehearsal = rehearser.after(save)
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
    **options: Unpack[ModelRestoreKeywords],
) -> Any:
    """Returns the module of a checkpoint of a module or a state.

    >>> model = restore_model(run, cast="bfloat16")

    Args:
        run: Run of the checkpoint.
        which: A step, "latest", or a tag.
        model: As for ``restore_state``. None builds the module from the saved
            structure: of Flax's own classes and those in ``allow``; no other name in
            the checkpoint is imported.
        allow: Without ``model``: your classes and functions that the structure may
            name.
        mesh: As for ``restore_state``.
        rules: As for ``restore_state``.
        indivisible: As for ``restore_state``.
        cast: As for ``restore_state``.
        select: As for ``restore_state``.
        missing: As for ``restore_state``.
        on_mismatch: As for ``restore_state``.
        **options: As for ``restore_state``.

    Raises:
        NotFoundError: There is no such checkpoint.
        InvalidRequestError: An argument is out of range, or there is neither a
            ``model`` nor a saved structure.
        MismatchError: The checkpoint was saved from another model.
        StructureError: Without ``model``: the structure names objects that are not
            allowed, or contains values that are no data, such as closures; give
            ``model``.
    """
    check_keywords("restore_model", options, ModelRestoreKeywords)
    check_run(run, Run | ForeignRun)
    if model is not None and allow:
        raise InvalidRequestError(
            "expected model= or allow=, got both; allow= is for restoring without code"
        )
    distributed, reading = split_reading(options)
    opened, _ = open_checkpoint(run, which, distributed, reading, model)
    wanted = Options(
        mesh=mesh,
        rules=rules,
        indivisible=indivisible,
        cast=cast,
        select=select,
        missing=missing,
        on_mismatch=on_mismatch,
        opt_state="skip",
        reading=reading,
    )
    return rebuild_module(
        opened,
        Request(model=model, allow=allow, options=wanted),
    )


def split_reading(options: ModelRestoreKeywords) -> tuple[Distributed, ReadKeywords]:
    """Splits the options into ``Run.open``'s and ``OpenCheckpoint.restore``'s."""
    reading: Any = dict(options)
    return reading.pop("distributed", ALL_PROCESSES), reading


def open_checkpoint(
    run: Run | ForeignRun,
    which: Which,
    distributed: Distributed,
    reading: ReadKeywords,
    model: Any,
) -> tuple[Any, int | None]:
    """Opens a checkpoint; with a model, see ``as_state``."""
    opened: OpenTree
    if isinstance(run, ForeignRun):
        opened = run.open(which)
    else:
        deadline = reading.get("deadline", DEFAULT_DEADLINE)
        opened = run.open(which, distributed=distributed, deadline=deadline)
    return (opened, None) if model is None else as_state(opened)


def as_state(opened: Any) -> tuple[Any, int | None]:
    """Returns a checkpoint that EasyDeL wrote with the keys and the config of a state,
    and its step, for which it has no leaf; any other one unchanged, and None."""
    trees = {leaf.path[:1] for leaf in opened.leaves.values()}
    if ("model",) not in trees or trees - {("model",), ("tx",)}:
        return opened, None
    config = opened.items.get("config")
    try:
        config = json.loads(config) if isinstance(config, str) else None
    except ValueError:
        config = None  # an item of the caller's own
    document = b"" if config is None else Recipe.of_config(config).pack()
    return rename_leaves(opened, _in_state, document), opened.info.step


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
def opened_run(
    where: "str | PathLike[str] | Run",
    *,
    client: "Client | None",
    creating: bool = False,
) -> Generator[tuple[Run, Which]]:
    """Opens the run that ``EasyDeLState.save_state`` or ``load_state`` names.

    Args:
        where: A run; with ``client`` the name of a run, which may end in a step, such
            as "prod/llama@latest"; without it, a directory.
        client: Client of the store of a named run.
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


def check_run(run: Any, kinds: Any = Run) -> None:
    if not isinstance(run, kinds):
        raise InvalidRequestError(
            f"expected a Run, such as client.run('prod/llama'), got {run!r}"
        )


def _step_of(run: Run, step: Any) -> int:
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
