"""Checkpointables of Orbax's version 1: pytrees, and objects that save themselves."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etils import epath

from storesvc_client.errors import InvalidRequestError
from storesvc_client.orbax.step_items import (
    Content,
    FilesContent,
    TreeContent,
    restore_files,
)
from storesvc_client.orbax.step_record import Part
from storesvc_client.orbax.tree_restore import restore_tree

if TYPE_CHECKING:
    from storesvc_client._restore.checkpoint import OpenCheckpoint


def checkpointable_content(value: Any) -> Content:
    """Returns the content of a checkpointable."""
    if not _is_stateful(value):
        return TreeContent(value)

    def write(folder: Path) -> None:
        _run(value.save(_CreatedPath(folder)))

    return FilesContent(write)


def restored_checkpointable(
    opened: "OpenCheckpoint", part: Part, name: str, target: Any, *, partial: bool
) -> Any:
    """Returns a checkpointable, or loads it into an object and returns that.

    Args:
        opened: The checkpoint.
        part: Where it is.
        name: Its name, for messages.
        target: What to return, or the object to load it into; None: as it was saved.
        partial: Whether the checkpoint may have leaves that the target lacks.

    Raises:
        InvalidRequestError: The target cannot load itself.
        StoreError: As for ``OpenCheckpoint.restore``.
    """
    if part.kind == "tree":
        return restore_tree(opened, part.place, target, partial=partial)
    if part.kind == "json":
        return opened.items[part.place]
    if not _is_stateful(target):
        raise InvalidRequestError(
            f"{opened.name} checkpointable {name!r}: expected the object to load it "
            f"into, which has save and load, got {type(target).__name__}"
        )

    def read(folder: Path) -> Any:
        _run(target.load(epath.Path(folder)))
        return target

    return restore_files(opened, name, part, read)


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


def _is_stateful(value: Any) -> bool:
    """Returns whether an object saves itself, as ``StatefulCheckpointable`` does."""
    methods: list[Callable[..., Any] | None] = [
        getattr(type(value), name, None) for name in ("save", "load")
    ]
    return all(map(asyncio.iscoroutinefunction, methods))


def _run(started: Awaitable[Any]) -> Any:
    """Runs a coroutine, and the work in the background that it returns."""

    async def both() -> Any:
        background = await started
        return await background if background is not None else None

    return asyncio.run(both())
