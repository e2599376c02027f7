"""Saves and restores the items of one step: trees, JSON values, files of handlers."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from storesvc_client._values.item_values import PerProcess
from storesvc_client.errors import InvalidRequestError
from storesvc_client.orbax.handler_files import pack_files, read_files
from storesvc_client.orbax.step_record import (
    RECORD,
    Kind,
    Part,
    StepRecord,
    foreign_record,
    plan_parts,
)
from storesvc_client.orbax.tree_restore import has_tree

if TYPE_CHECKING:
    from storesvc_client._restore.checkpoint import OpenCheckpoint


@dataclass(frozen=True, slots=True)
class TreeContent:
    """A pytree of arrays."""

    tree: Any
    custom_metadata: Any = None
    """A value of JSON that is kept with it."""


@dataclass(frozen=True, slots=True)
class JsonContent:
    """A value of JSON."""

    value: Any


@dataclass(frozen=True, slots=True)
class FilesContent:
    """Files that a function writes into a folder."""

    write: Callable[[Path], object]
    handler: str | None = None
    """Class of version 1 that writes them."""


Content: TypeAlias = TreeContent | JsonContent | FilesContent


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContents:
    """Tree and items of one step, for ``Run.save``."""

    tree: Any
    items: Mapping[str, Any]


def step_contents(
    place: str,
    step: int,
    contents: Mapping[str, Content],
    *,
    default: str,
    is_default: bool,
    metrics: Any,
    custom_metadata: Any,
) -> StepContents:
    """Returns the tree and the items of a step; lets handlers write their files now.

    Args:
        place: Name of the step, for messages.
        step: Its number.
        contents: The items by the name that Orbax's callers use.
        default: Name of an item whose tree is stored at the root ...
        is_default: ... if it is the only one.
        metrics: Metrics of the step, a value of JSON, or None.
        custom_metadata: Metadata of the step, a value of JSON, or None.

    Raises:
        InvalidRequestError: A tree is empty, or a handler wrote too much.
    """
    kinds = {name: _kind(content) for name, content in contents.items()}
    parts = plan_parts(kinds, default=default, is_default=is_default)
    tree: Any = {}
    items: dict[str, Any] = {}
    for name, content in contents.items():
        part = parts[name]
        match content:
            case TreeContent(tree=found, custom_metadata=custom):
                parts[name] = replace(part, custom_metadata=custom)
                _check_filled(f"{place} item {name!r}", found)
                if part.place:
                    tree[part.place] = found
                else:
                    tree = found
            case JsonContent(value=value):
                items[part.place] = value
            case FilesContent(write=write, handler=handler):
                parts[name] = replace(part, handler=handler)
                with _folder(step, name, part) as folder:
                    write(folder)
                    packed = pack_files(f"{place} item {name!r}", folder)
                items[part.place] = PerProcess(packed)
    record = StepRecord(parts=parts, metrics=metrics, custom_metadata=custom_metadata)
    items[RECORD] = record.value()
    return StepContents(tree=tree, items=items)


def read_record(opened: "OpenCheckpoint") -> StepRecord:
    """Returns the record of a step; that of a plain checkpoint if it has none.

    Raises:
        DataLossError: It is damaged.
    """
    if RECORD not in opened.items:
        return foreign_record()
    return StepRecord.parse(opened.name, opened.items[RECORD])


def find_part(opened: "OpenCheckpoint", record: StepRecord, name: str) -> Part | None:
    """Returns the part of an item; None if the step has none of this name.

    A step without a record has an item for each first key of its tree.
    """
    found = record.parts.get(name)
    if found is None and RECORD not in opened.items and has_tree(opened, name):
        found = Part(kind="tree", place=name)
    return found


def restore_files(
    opened: "OpenCheckpoint", name: str, part: Part, read: Callable[[Path], Any]
) -> Any:
    """Returns what a function reads from a folder with the files of an item.

    The files of all processes that saved some are in it, as they were in one directory
    when they were saved.

    Raises:
        DataLossError: The stored files are damaged.
    """
    place = f"{opened.name} item {name!r}"
    files = read_files(place, opened.items.per_process(part.place))
    with _folder(opened.info.step, name, part) as folder:
        for file, contents in files.items():
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(contents)
        return read(folder)


def _kind(content: Content) -> Kind:
    match content:
        case TreeContent():
            return "tree"
        case JsonContent():
            return "json"
        case FilesContent():
            return "files"


def _check_filled(place: str, tree: Any) -> None:
    """Rejects a tree without leaves, as Orbax does."""
    import jax

    if not jax.tree.leaves(tree, is_leaf=lambda x: x is None):
        raise InvalidRequestError(f"{place}: expected a tree with leaves, got none")


@contextmanager
def _folder(step: int, name: str, part: Part) -> Iterator[Path]:
    """Creates a folder whose parent is named as the step: handlers read the name."""
    with tempfile.TemporaryDirectory(prefix="storesvc-orbax-") as root:
        folder = Path(root, str(step), name if name.isidentifier() else part.place)
        folder.mkdir(parents=True)
        yield folder
