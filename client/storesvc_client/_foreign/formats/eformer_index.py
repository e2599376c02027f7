"""Parses the indexes of eformer's checkpoints, without I/O.

``tensorstore_index.json`` lists path, shape and dtype of each array, by prefix
(``prefixes``, written for EasyDeL's model and optimizer), or in one list (``arrays``).
Source: ``eformer/serialization/serialization.py``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from storesvc_client._foreign.bounded_json import integers, parse_object
from storesvc_client._foreign.step_folders import relative_path
from storesvc_client.errors import DataLossError, PreconditionError

_FORMAT: Final = "tensorstore"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedArray:
    """One entry of an index."""

    prefix: str
    """Name of its tree, which is also the first part of its path; "" if it has none."""
    path: str
    """Folder of the array, below that of the step."""
    shape: tuple[int, ...]
    dtype: str


def parse_index(data: bytes, *, what: str) -> list[IndexedArray]:
    """Returns the arrays of a step.

    Args:
        data: Contents of ``tensorstore_index.json``.
        what: Its name for messages.

    Raises:
        DataLossError: It is damaged, or a path leads out of the step.
        PreconditionError: It is of another format.
    """
    fields = parse_object(data, what=what)
    if fields.get("format") != _FORMAT:
        raise PreconditionError(
            f"{what}: expected the format {_FORMAT!r}, got "
            f"{ascii(fields.get('format'))[:80]}"
        )
    prefixes = fields.get("prefixes", {})
    if not isinstance(prefixes, dict):
        raise DataLossError(f"{what}: expected the arrays by prefix in prefixes")
    found = list(_entries(fields.get("arrays", []), "", f"{what}, arrays"))
    for prefix, entries in prefixes.items():
        found += _entries(entries, prefix, f"{what}, prefixes[{prefix[:80]!r}]")
    if not found:
        raise DataLossError(f"{what}: expected arrays, got none")
    return found


def parse_unread(data: bytes, *, what: str) -> list[str]:
    """Returns the names of the leaves that a ``*_structure.json`` holds as pickles,
    which are never opened.

    Raises:
        DataLossError: It is damaged.
    """
    fields = parse_object(data, what=what)
    names, pickles = fields.get("leaf_keys_full"), fields.get("nonarray_payload")
    if not isinstance(names, list) or not isinstance(pickles, dict):
        raise DataLossError(f"{what}: expected leaf_keys_full and nonarray_payload")
    return [
        str(names[int(n)]) if n.isdigit() and int(n) < len(names) else n[:80]
        for n in pickles
    ]


def _entries(entries: Any, prefix: str, what: str) -> Iterator[IndexedArray]:
    if not isinstance(entries, list):
        raise DataLossError(f"{what}: expected a list of arrays")
    for n, entry in enumerate(entries):
        place = f"{what}[{n}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
            raise DataLossError(f"{place}: expected path, shape and dtype")
        path = relative_path(entry.get("path"), what=f"{place}, path")
        _check_prefix(path, prefix, place)
        yield IndexedArray(
            prefix=prefix,
            path=path,
            shape=integers(entry.get("shape"), what=f"{place}, shape"),
            dtype=entry["dtype"],
        )


def _check_prefix(path: str, prefix: str, place: str) -> None:
    """Rejects an array of a prefix that is not below its folder."""
    parts: Sequence[str] = prefix.split(".") if prefix else []
    if path.split("/")[: len(parts)] != list(parts):
        raise DataLossError(
            f"{place}: expected a path below {prefix!r}, got {path[:200]!r}"
        )
