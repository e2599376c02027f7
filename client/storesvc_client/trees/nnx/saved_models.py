"""Saves models and states to a run and restores them, for ``storesvc_client.easydel``.

The class of a state is an argument here, because ``EasyDeLState`` calls these functions
to save and load itself.
"""

import operator
from collections.abc import Generator
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from types import SimpleNamespace
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    SupportsIndex,
    Unpack,
)

from storesvc.format.names import Which
from storesvc_client._api.run import Run, save_checked
from storesvc_client._save.handle import Save
from storesvc_client._values.arguments import checked_choice
from storesvc_client._values.options import (
    ALL_PROCESSES,
    DEFAULT_DEADLINE,
    Distributed,
    ModelRestoreKeywords,
    OnMismatch,
    ReadKeywords,
    Rehearse,
    SaveKeywords,
)
from storesvc_client.errors import InvalidRequestError, NotFoundError
from storesvc_client.trees.nnx.model_parts import split_module
from storesvc_client.trees.nnx.recipes import Recipe
from storesvc_client.trees.nnx.rehearsal import Rehearser
from storesvc_client.trees.nnx.restore_model import (
    Options,
    Request,
    rebuild_module,
    rebuild_state,
)

if TYPE_CHECKING:
    import optax
    from jax.sharding import Mesh
    from numpy.typing import DTypeLike

    from storesvc_client._api.client import Client
    from storesvc_client._restore.checkpoint import OpenCheckpoint
    from storesvc_client._values.options import Rules

__all__ = [
    "opened_run",
    "restore_model",
    "restore_state",
    "save_model",
    "save_state",
]

DIRECTORY_RUN: Final = "local/state"
"""Run in a store that is a directory for one state."""


def save_state(
    run: Run,
    state: Any,
    *,
    rehearse: Rehearse = "warn",
    **options: Unpack[SaveKeywords],
) -> Save:
    """Starts a save of the state at its own step; see ``Run.save``.

    The restore of each new structure is rehearsed abstractly: the model is built by its
    class from the saved config, and each leaf is matched. No array is created.

    Args:
        run: The run of the checkpoint.
        state: An ``EasyDeLState`` of this library or of EasyDeL, or any other pytree
            with ``step``, ``graphdef``, ``graphstate``, ``graphother`` and
            ``opt_state``. It may be donated as soon as this returns.
        rehearse: Action if ``restore_state`` would reject the checkpoint: "warn" logs
            the call that works, in the background after the first save; "strict"
            rejects the save before it begins; "off" skips the rehearsal.
            ``Save.rehearsal`` has the result.
        options: See ``Run.save``: ``metrics``, ``labels``, ``base``, ``snapshot``,
            ``if_busy``, ``distributed`` and ``progress``.

    Raises:
        MismatchError: With ``rehearse="strict"``: it could not be restored.
        StoreError: See ``Run.save``.
    """
    _check_run(run)
    parts = ("step", "graphdef", "graphstate", "graphother", "opt_state")
    lacking = [part for part in parts if not hasattr(state, part)]
    if lacking or isinstance(state, type):
        raise InvalidRequestError(
            f"save to {run.name}: expected a state with {', '.join(parts)}, got a "
            f"{type(state).__name__} without {', '.join(lacking) or 'values'}; save "
            "a module with save_model, any other tree with run.save"
        )
    recipe = Recipe.of(
        state.graphdef, state.graphstate, state.graphother, state.opt_state
    )
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
    """Starts a save of a module without optimizer and step; see ``Run.save``.

    Its leaves have the same names as in a state, ``graphstate/...`` and
    ``graphother/...``.

    Args:
        run: The run of the checkpoint.
        step: The step of the checkpoint.
        model: An NNX module, or anything with ``graphdef``, ``graphstate`` and
            ``graphother``.
        rehearse: See ``save_state``; for ``restore_model``.
        options: See ``save_state``.

    Raises:
        InvalidRequestError: ``model`` is not a module.
        MismatchError: See ``save_state``.
        StoreError: See ``Run.save``.
    """
    _check_run(run)
    try:
        graphdef, graphstate, graphother = split_module(model)
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
    """Starts a save, and its rehearsal."""
    document = recipe.pack()
    if rehearser is None:
        return run.save(step, tree, document=document, **options)
    save = save_checked(
        run, step, tree, document=document, check=rehearser.check, **options
    )
    save.rehearsal = rehearser.after(save)
    return save


def _rehearser(
    run: Run, saved: Any, rehearse: Rehearse, *, is_state: bool
) -> Rehearser | None:
    checked_choice(f"save to {run.name}: rehearse=", rehearse, Rehearse)
    if rehearse == "off":
        return None
    return Rehearser(run, saved, rehearse=rehearse, is_state=is_state)


def restore_state(
    run: Run,
    which: Which = "latest",
    *,
    model: Any = None,
    tx: "optax.GradientTransformation | None" = None,
    mesh: "Mesh | None" = None,
    rules: "Rules | None" = None,
    opt_state: Literal["restore", "skip"] = "restore",
    cast: "DTypeLike | None" = None,
    missing: Literal["error", "init"] = "error",
    on_mismatch: OnMismatch = "raise",
    state_class: Any = None,
    **options: Unpack[ModelRestoreKeywords],
) -> Any:
    """Returns the state of a checkpoint; see ``storesvc_client.easydel``.

    Args:
        run: See ``storesvc_client.easydel.restore_state``, also for the others.
        which: See there.
        model: See there.
        tx: See there.
        mesh: See there.
        rules: See there.
        opt_state: See there.
        cast: See there.
        missing: See there.
        on_mismatch: See there.
        state_class: The class whose ``create`` builds the state; None without
            ``model``.
        options: See there.
    """
    _check_run(run)
    if model is None and state_class is not None:
        raise InvalidRequestError(
            f"restore of {run.name}: expected model= with state_class=, got None"
        )
    if state_class is not None and not hasattr(state_class, "create"):
        raise InvalidRequestError(
            "state_class: expected a class with the create() of EasyDeLState, got "
            f"{state_class!r}"
        )
    distributed, reading = _reading(options)
    wanted = Options(
        mesh=mesh,
        rules=rules,
        cast=cast,
        missing=missing,
        on_mismatch=on_mismatch,
        opt_state=opt_state,
        reading=reading,
    )
    return rebuild_state(
        _opened(run, which, distributed, reading),
        Request(model=model, tx=tx, options=wanted),
        state_class,
    )


def restore_model(
    run: Run,
    which: Which = "latest",
    *,
    model: Any = None,
    allow: Any = (),
    mesh: "Mesh | None" = None,
    rules: "Rules | None" = None,
    cast: "DTypeLike | None" = None,
    missing: Literal["error", "init"] = "error",
    on_mismatch: OnMismatch = "raise",
    **options: Unpack[ModelRestoreKeywords],
) -> Any:
    """Returns the module of a checkpoint of a module or of a state.

    Args:
        run: The run of the checkpoint.
        which: A step, "latest", or a tag.
        model: See ``restore_state``. None builds the module of the saved structure.
            Flax's own modules are known; nothing is imported by a name in the
            checkpoint.
        allow: Without ``model``: your classes and functions that the structure may
            name.
        mesh: See ``restore_state``.
        rules: See ``restore_state``.
        cast: See ``restore_state``.
        missing: See ``restore_state``.
        on_mismatch: See ``restore_state``.
        options: See ``restore_state``.

    Raises:
        NotFoundError: There is no such checkpoint.
        InvalidRequestError: An argument is not usable, or there is neither a ``model``
            nor a saved structure.
        MismatchError: The checkpoint is of another model.
        StructureError: Without ``model``: the structure names something not allowed, or
            contains values that are not data, such as a closure; give ``model``.
    """
    _check_run(run)
    if model is not None and allow:
        raise InvalidRequestError(
            "expected model= or allow=, got both; allow= is for restoring without code"
        )
    distributed, reading = _reading(options)
    wanted = Options(
        mesh=mesh,
        rules=rules,
        cast=cast,
        missing=missing,
        on_mismatch=on_mismatch,
        opt_state="skip",
        reading=reading,
    )
    return rebuild_module(
        _opened(run, which, distributed, reading),
        Request(model=model, allow=allow, options=wanted),
    )


def _reading(options: ModelRestoreKeywords) -> tuple[Distributed, ReadKeywords]:
    """Splits the options of ``Run.open`` from those of ``OpenCheckpoint.restore``."""
    reading: Any = dict(options)
    return reading.pop("distributed", ALL_PROCESSES), reading


def _opened(
    run: Run, which: Which, distributed: Distributed, reading: ReadKeywords
) -> "OpenCheckpoint":
    deadline = reading.get("deadline", DEFAULT_DEADLINE)
    return run.open(which, distributed=distributed, deadline=deadline)


@contextmanager
def opened_run(
    where: "str | PathLike[str] | Run",
    *,
    client: "Client | None",
    creating: bool = False,
) -> Generator[tuple[Run, Which]]:
    """Opens the run for the arguments of ``EasyDeLState.save_state`` and
    ``load_state``.

    Args:
        where: A run; with ``client``, the name of one, optionally with a step, such as
            "prod/llama@latest"; without it, a directory.
        client: The store of the named run.
        creating: Create a store in the directory if it is not one.

    Raises:
        InvalidRequestError: The name is not valid.
        FileNotFoundError: The directory is not a store, and ``creating`` is false.
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


def _check_run(run: Any) -> None:
    if not isinstance(run, Run):
        raise InvalidRequestError(
            f"expected a Run, such as client.run('prod/llama'), got {run!r}"
        )


def _step_of(run: Run, step: Any) -> int:
    try:
        if isinstance(step, bool):
            raise TypeError
        return operator.index(step)
    except TypeError as e:
        raise InvalidRequestError(
            f"save to {run.name}: expected an integer in the step of the state, got "
            f"{step!r}"
        ) from e
