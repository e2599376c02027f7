"""Checkpointables of Orbax's version 1: pytrees, and objects that save themselves."""

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from etils import epath
from orbax.checkpoint.experimental.v1 import handlers

# Orbax has no public access to how it finds the handler of a checkpointable.
from orbax.checkpoint.experimental.v1._src.handlers import registration

from storesvc_client.errors import InvalidRequestError
from storesvc_client.orbax.leaf_targets import saved_target
from storesvc_client.orbax.step_items import (
    Content,
    FilesContent,
    TreeContent,
    restore_files,
)
from storesvc_client.orbax.step_record import Part
from storesvc_client.orbax.tree_restore import restore_tree, tree_structs

if TYPE_CHECKING:
    from storesvc_client._restore.checkpoint import OpenCheckpoint

_PLAIN: Final = (handlers.PyTreeHandler, handlers.JsonHandler)
"""Handlers whose checkpointables a store keeps as trees: they are never called."""


def checkpointable_content(name: str, value: Any, registry: Any) -> Content:
    """Returns the content of a checkpointable.

    Args:
        name: Its name, which may have a handler of its own.
        value: The checkpointable.
        registry: Orbax's handlers of the context.
    """
    handler = None
    with suppress(registration.NoEntryError):  # the save says which leaf is none
        if value is not None:
            handler = registration.resolve_handler_for_save(registry, value, name=name)
    if handler is None or type(handler) in _PLAIN:
        return TreeContent(value)

    def write(folder: Path) -> None:
        _run(handler.save(_CreatedPath(folder), value))

    cls = type(handler)
    return FilesContent(write, handler=f"{cls.__module__}.{cls.__qualname__}")


def restore_checkpointable(
    opened: "OpenCheckpoint",
    name: str,
    part: Part,
    target: Any,
    registry: Any,
    *,
    partial: bool,
) -> Any:
    """Returns a checkpointable, or loads it into an object and returns that.

    Args:
        opened: The checkpoint.
        name: Name of the checkpointable.
        part: Where it is.
        target: What to return, or the object to load it into; None: as it was saved.
        registry: Orbax's handlers of the context.
        partial: Whether the checkpoint may have leaves that the target lacks.

    Raises:
        InvalidRequestError: No handler loads it into the target.
        StoreError: As for ``OpenCheckpoint.restore``.
    """
    if part.kind == "tree":
        return restore_tree(opened, part.place, target, partial=partial)
    if part.kind == "json":
        return opened.items[part.place]
    handler = _find_handler(name, part, target, registry)
    is_stateful = type(handler).__name__ == "StatefulCheckpointableHandler"
    if handler is None or (is_stateful and target is None):
        raise InvalidRequestError(
            f"{opened.name} checkpointable {name!r}: expected the object to load it "
            f"into, which has save and load, or a target of the handler that wrote it, "
            f"{part.handler}, registered with register_handler, got "
            f"{type(target).__name__}"
        )
    return restore_files(
        *(opened, name, part),
        lambda folder: _run(handler.load(epath.Path(folder), target)),
    )


def describe_checkpointable(
    opened: "OpenCheckpoint", name: str, part: Part, registry: Any
) -> Any:
    """Returns the metadata of a checkpointable; None if its handler has none."""
    if part.kind == "tree":
        return tree_structs(opened, part.place, saved_target)
    handler = _find_handler(name, part, None, registry)
    if handler is None:
        return None

    def read(folder: Path) -> Any:
        try:
            return asyncio.run(handler.metadata(epath.Path(folder)))
        except NotImplementedError:
            return None

    return restore_files(opened, name, part, read)


def _find_handler(name: str, part: Part, target: Any, registry: Any) -> Any:
    """Returns the handler that reads the files of a checkpointable; None: there is
    none."""
    if part.kind != "files":
        return None
    try:
        return registration.resolve_handler_for_load(
            registry, target, name=name, handler_typestr=part.handler
        )
    except registration.NoEntryError:
        return None


class _CreatedPath:
    """A directory that exists; Orbax passes one that it creates in the background."""

    def __init__(self, folder: Path) -> None:
        self.path = epath.Path(folder)

    def __truediv__(self, part: str) -> "_CreatedPath":
        return _CreatedPath(Path(self.path) / part)

    def __fspath__(self) -> str:
        return str(self.path)

    async def await_creation(self) -> Any:
        """Returns the directory."""
        return self.path


def _run(started: Awaitable[Any]) -> Any:
    """Runs a coroutine, and the work in the background that it returns."""

    async def both() -> Any:
        background = await started
        return await background if background is not None else None

    return asyncio.run(both())
