"""Orbax's managers over a store: change one import, keep the training loop.

``CheckpointManager`` and ``Checkpointer`` have the methods of Orbax's classes in its
versions 0 and 1. Arguments, options and policies are Orbax's own classes, so this
package needs orbax-checkpoint (``storesvc[orbax]``); nothing else of storesvc does.
``docs/orbax.md`` lists where the behaviour differs.

Example:
    manager = CheckpointManager("file:///ckpts#prod/llama-8b", options=options)
    manager.save(step, args=ocp.args.StandardSave(state))
    state = manager.restore(None, args=ocp.args.StandardRestore(state))

Begin with ``manager.py``. ``options.py`` decides; ``sequence.py`` calls the run.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from storesvc_client.orbax.checkpointer import Checkpointer
    from storesvc_client.orbax.items import StepPath
    from storesvc_client.orbax.manager import CheckpointManager
    from storesvc_client.orbax.step_errors import (
        ItemMissingError,
        StepExistsError,
        StepMissingError,
        TreeMismatchError,
    )

__all__ = [
    "CheckpointManager",
    "Checkpointer",
    "ItemMissingError",
    "StepExistsError",
    "StepMissingError",
    "StepPath",
    "TreeMismatchError",
]

_HOMES: Final = {
    "CheckpointManager": "manager",
    "Checkpointer": "checkpointer",
    "ItemMissingError": "step_errors",
    "StepExistsError": "step_errors",
    "StepMissingError": "step_errors",
    "StepPath": "items",
    "TreeMismatchError": "step_errors",
}


def _register_scheme() -> None:
    """Makes ``epath.Path("file:///ckpts#prod/llama-8b")`` a path, which programs pass
    their directory through; etils knows no files with a scheme."""
    try:
        from etils import epath
    except ModuleNotFoundError:
        return
    try:
        epath.Path("file:///")
    except KeyError:

        @epath.register_path_cls("file://")
        class FilePath:
            def __new__(cls, place: str) -> Any:
                return epath.Path(place.removeprefix("file://"))


_register_scheme()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as e:
        if e.name is None or e.name.startswith(__name__):
            raise
        raise ModuleNotFoundError(
            f"{__name__} needs {e.name}: pip install 'storesvc[server,jax,orbax]'",
            name=e.name,
        ) from e
    return getattr(home, name)
