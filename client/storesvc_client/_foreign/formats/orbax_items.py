"""Items of an Orbax step that are no trees: JSON, states of iterators, other files.

Which item is what is decided by its files, never by the names of handlers. The bytes
are passed on as they are; only JSON that storesvc stores itself becomes a JSON item.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from storesvc_client._foreign.bounded_json import read_json
from storesvc_client._foreign.location import Location
from storesvc_client._foreign.tree_rows import (
    Row,
    file_item_row,
    item_name,
    item_row,
)
from storesvc_client.errors import PreconditionError, StoreError

COMMITTED: Final = "commit_success.txt"
JSON_FILES: Final = (["metadata"], ["data.json"])
"""Files of a JSON item, of version 0 and of version 1."""

METRICS: Final = "metrics"
"""Name of the item with the metrics of a step, and of its file."""

MAX_FILES: Final = 1000
"""Maximum files of an item; a checkpoint holds at most 64 items."""

_PROCESS: Final = re.compile(r"process_(0|[1-9]\d{0,5})-of-([1-9]\d{0,5})\.json")
"""Files of the states of Grain's iterators."""


def files_below(location: Location, folder: str) -> list[str]:
    """Returns the paths of all files below a folder, relative to it.

    Raises:
        PreconditionError: There are too many.
    """
    found: list[str] = []
    left = [""]
    while left:
        inside = left.pop()
        for name in location.names(f"{folder}/{inside}".rstrip("/")):
            path = f"{inside}{name}"
            if name.endswith("/"):
                left.append(path)
            elif name != COMMITTED:
                found.append(path)
            if len(found) + len(left) > MAX_FILES:
                raise PreconditionError(
                    f"{location.url}/{folder}: expected an item of at most {MAX_FILES} "
                    "files, got more; restore it with its own library"
                )
    return sorted(found)


def read_metrics(location: Location, folder: str) -> Mapping[str, float] | None:
    """Returns the metrics of an item; None if they are no numbers."""
    value, _ = read_json(location, f"{folder}/{METRICS}")
    return as_metrics(value)


def as_metrics(value: Any) -> Mapping[str, float] | None:
    """Returns a JSON value as metrics; None if it is none. Orbax writes NaN and
    infinite metrics as Python's JSON does, and reads them again."""
    if not isinstance(value, dict) or not all(
        type(number) in (int, float) for number in value.values()
    ):
        return None
    try:
        return {name: float(number) for name, number in value.items()}
    except OverflowError:  # an integer larger than every float
        return None


def item_rows(location: Location, folder: str, item: str) -> Iterator[tuple[str, Row]]:
    """Yields the rows of an item that is no tree, each with the path that its name is
    for.

    Args:
        location: Location of the checkpoints.
        folder: Folder of the item.
        item: Name of the item.

    Raises:
        PreconditionError: It has too many files, or the states of some processes only.
    """
    files = files_below(location, folder)
    if files in JSON_FILES:
        yield item, _json_row(location, f"{folder}/{files[0]}", item_name(item))
        return
    processes = [_PROCESS.fullmatch(name) for name in files]
    states = [found for found in processes if found is not None]
    if states and len(states) == len(files):
        for row in _state_rows(location, folder, item_name(item), states):
            yield item, row
        return
    for path in files:
        full = item if len(files) == 1 else f"{item}/{path}"
        yield full, file_item_row(location, f"{folder}/{path}", item_name(full))


def _json_row(location: Location, path: str, item: str) -> Row:
    value, _ = read_json(location, path)
    try:
        return item_row(item, value, name=f"{location.url}/{path}")
    except StoreError:  # such as NaN, which is no JSON
        return file_item_row(location, path, item)


def _state_rows(
    location: Location, folder: str, item: str, states: list[re.Match[str]]
) -> Iterator[Row]:
    count = int(states[0][2])
    numbers = sorted(int(found[1]) for found in states)
    if numbers != list(range(count)) or any(int(each[2]) != count for each in states):
        raise PreconditionError(
            f"{location.url}/{folder}: expected the states of the processes 0 to "
            f"{count - 1}, got {len(states)}: {states[0][0]}, ...; copy all of them"
        )
    for found in states:
        path = f"{folder}/{found[0]}"
        yield file_item_row(location, path, item, int(found[1]))
