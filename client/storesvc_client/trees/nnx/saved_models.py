"""Saves models and states to a run, and restores them; ``storesvc_client.easydel``.

The class of a state is an argument here: ``EasyDeLState`` saves and loads itself by
these functions.
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
from storesvc_client.trees.nnx import restore_model as rebuild
from storesvc_client.trees.nnx.model_parts import split_module
from storesvc_client.trees.nnx.recipes import Recipe
from storesvc_client.trees.nnx.rehearsal import Rehearser

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
"""The run of a store that is one directory of checkpoints."""


def save_state(
    run: Run,
    state: Any,
    *,
    rehearse: Rehearse = "warn",
    **options: Unpack[SaveKeywords],
) -> Save:
    """Starts a save of the state at its own step; see ``Run.save``.

    Once for each structure the restore is rehearsed, abstractly: the model is built by
    its class from the config that is saved, and each leaf is fitted. It makes no array.

    Args:
        run: The run that the checkpoint is to belong to.
        state: An ``EasyDeLState``: this library's, EasyDeL's, or any other pytree
            with ``step``, ``graphdef``, ``graphstate``, ``graphother`` and
            ``opt_state``. It may be donated as soon as this returns.
        rehearse: What to do where ``restore_state`` would refuse what is saved: "warn",
            in the background after the first save, with the call that works;
            "strict", before it, refuses to save; "off" does not try.
            ``Save.rehearsal`` has what came of it.
        options: As of ``Run.save``: ``metrics``, ``labels``, ``base``, ``snapshot``,
            ``if_busy``, ``distributed`` and ``progress``.

    Raises:
        MismatchError: With ``rehearse="strict"``: it could not be restored.
        StoreError: As ``Run.save``.
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

    Its leaves have the names that they have in a state, ``graphstate/...`` and
    ``graphother/...``.

    Args:
        run: The run that the checkpoint is to belong to.
        step: The step to save it at.
        model: An NNX module, or anything with ``graphdef``, ``graphstate`` and
            ``graphother``.
        rehearse: As of ``save_state``, for ``restore_model``.
        options: As of ``save_state``.

    Raises:
        InvalidRequestError: It is no module.
        MismatchError: As ``save_state``.
        StoreError: As ``Run.save``.
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
    """A save that has begun, and its rehearsal."""
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
        run: As there, and so are the others.
        which: As there.
        model: As there.
        tx: As there.
        mesh: As there.
        rules: As there.
        opt_state: As there.
        cast: As there.
        missing: As there.
        on_mismatch: As there.
        state_class: The class to build by its ``create``; None where there is no
            ``model``.
        options: As there.
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
    wanted = rebuild.Options(
        mesh=mesh,
        rules=rules,
        cast=cast,
        missing=missing,
        on_mismatch=on_mismatch,
        opt_state=opt_state,
        reading=reading,
    )
    return rebuild.restore_state(
        _opened(run, which, distributed, reading),
        rebuild.Request(model=model, tx=tx, options=wanted),
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
    """Returns the module of a checkpoint of a module, or of a state.

    Args:
        run: The run of the checkpoint.
        which: A step, "latest", or a tag.
        model: As of ``restore_state``. None builds the module of the structure that
            was saved. Flax's own modules are known; nothing is imported by a name
            that the checkpoint holds.
        allow: Without ``model``: classes and functions of yours that the structure
            may name.
        mesh: As of ``restore_state``.
        rules: As of ``restore_state``.
        cast: As of ``restore_state``.
        missing: As of ``restore_state``.
        on_mismatch: As of ``restore_state``.
        options: As of ``restore_state``.

    Raises:
        NotFoundError: There is no such checkpoint.
        InvalidRequestError: An argument is not usable, or there is neither a
            ``model`` nor a structure.
        MismatchError: The checkpoint is not of this model.
        StructureError: Without ``model``: the structure names what is not allowed,
            or holds what is no data, such as a closure; give ``model``.
    """
    _check_run(run)
    if model is not None and allow:
        raise InvalidRequestError(
            "expected model= or allow=, got both; allow= is for restoring without code"
        )
    distributed, reading = _reading(options)
    wanted = rebuild.Options(
        mesh=mesh,
        rules=rules,
        cast=cast,
        missing=missing,
        on_mismatch=on_mismatch,
        opt_state="skip",
        reading=reading,
    )
    return rebuild.restore_module(
        _opened(run, which, distributed, reading),
        rebuild.Request(model=model, allow=allow, options=wanted),
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
    """Opens what ``EasyDeLState.save_state`` and ``load_state`` are told.

    Args:
        where: A run; with ``client`` the name of one, which may end in a step, such
            as "prod/llama@latest"; without, a directory.
        client: The store that a name is of.
        creating: Whether a directory that is no store becomes one.

    Raises:
        InvalidRequestError: The name breaks the rules.
        FileNotFoundError: The directory is no store, and none is to be made.
    """
    if isinstance(where, Run):
        yield where, "latest"
        return
    if client is not None:
        if not hasattr(client, "run"):
            raise InvalidRequestError(
                f"client: expected a Client, of connect(), got {client!r}"
            )
        name, at, which = fspath(where).partition("@")
        if creating and at:
            raise InvalidRequestError(
                f"expected a run to save to, got {fspath(where)!r}; a state is saved "
                "at its own step"
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
