"""Parses jax's serialized tree structure, without jax and without I/O.

``pytreedef.json`` holds a FlatBuffer of nodes, in base64. Source: ``PyTreeDef`` in
``jax/_src/export/serialization.fbs``: kind (0 leaf, 1 None, 2 tuple, 3 list, 4 dict, 5
custom), children, names of the children of a dict. Classes of custom nodes are not
imported: their children are numbered.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from storesvc_client.errors import DataLossError

MAX_DEPTH: Final = 1000
"""Maximum nodes above a leaf; a key could not hold the path of a deeper one."""

_LEAF: Final = 0
_NONE: Final = 1
_DICT: Final = 4
_EMPTY: Final = {2: "()", 3: "[]", 4: "{}"}
"""Containers by kind, as ``_values/containers.py`` names them without children."""
_TUPLE: Final = 2
_CUSTOM: Final = 5

_KIND, _CHILDREN, _NAMES = range(3)
"""Fields of a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A leaf, or a container that the paths of leaves do not show."""

    what: str
    """"leaf", "none", "tuple", "()", "[]" or "{}"."""
    parts: tuple[str, ...]
    path_kinds: str


def parse_nodes(data: bytes, *, what: str) -> Iterator[Node]:
    """Yields the leaves in jax's order, and the containers between them.

    Args:
        data: The FlatBuffer.
        what: Name of the file for messages.

    Raises:
        DataLossError: It is damaged.
    """
    tables = _Tables(data)
    seen: set[int] = set()
    try:
        left: list[tuple[int, tuple[str, ...], str]] = [(tables.root(), (), "")]
        while left:
            at, parts, kinds = left.pop()
            if at in seen or len(parts) > MAX_DEPTH:
                raise ValueError("its nodes are no tree, or too deep")
            seen.add(at)
            kind = tables.kind(at)
            children = tables.vector(at, _CHILDREN)
            if kind in (_LEAF, _NONE) and children:
                raise ValueError("a leaf has children")
            if not _LEAF <= kind <= _CUSTOM:
                raise ValueError(f"a node has the kind {kind}")
            shown = _shown(kind, bool(children))
            if shown:
                yield Node(what=shown, parts=parts, path_kinds=kinds)
            names, letter = _names(tables, at, kind, len(children))
            below = zip(children, names, strict=True)
            left += [(c, (*parts, n), kinds + letter) for c, n in below][::-1]
    except (struct.error, ValueError, IndexError) as e:
        raise DataLossError(f"{what}: expected the structure of a tree, got {e}") from e


def _shown(kind: int, has_children: bool) -> str:  # noqa: FBT001 - private
    """Returns what to say about a node, or "" if its children show it."""
    if kind == _LEAF:
        return "leaf"
    if kind == _NONE:
        return "none"
    if kind == _TUPLE and has_children:
        return "tuple"
    return "" if has_children else _EMPTY.get(kind, "")


def _names(tables: "_Tables", at: int, kind: int, count: int) -> tuple[list[str], str]:
    """Returns the parts of a node's children, and the letter of their kind."""
    if kind == _DICT:
        names = [tables.text(name) for name in tables.vector(at, _NAMES)]
        if len(names) != count:
            raise ValueError(f"{len(names)} names of {count} children")
        return names, "k"
    return [str(n) for n in range(count)], "f" if kind == _CUSTOM else "i"


class _Tables:
    """Tables of a FlatBuffer; each access is checked against its bounds."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def root(self) -> int:
        return self._unsigned(0)

    def kind(self, table: int) -> int:
        at = self._field(table, _KIND)
        return self._data[at] if at else 0  # absent: the default

    def vector(self, table: int, field: int) -> list[int]:
        """Returns the offsets in a vector; none if the table lacks it."""
        at = self._field(table, field)
        if not at:
            return []
        start = at + self._unsigned(at)
        count = self._unsigned(start)
        if count * 4 > len(self._data):
            raise ValueError(f"a vector of {count} entries")
        places = range(start + 4, start + 4 + 4 * count, 4)
        return [place + self._unsigned(place) for place in places]

    def text(self, at: int) -> str:
        end = at + 4 + self._unsigned(at)
        if end > len(self._data):
            raise ValueError("a name that ends after the file")
        return self._data[at + 4 : end].decode()

    def _field(self, table: int, field: int) -> int:
        """Returns the offset of a field; 0 if the table lacks it."""
        vtable = table - self._signed(table)
        if vtable < 0:
            raise ValueError("a table before the file")
        (size,) = struct.unpack_from("<H", self._data, vtable)
        place = 4 + 2 * field
        if place + 2 > size:
            return 0
        (offset,) = struct.unpack_from("<H", self._data, vtable + place)
        return table + int(offset) if offset else 0

    def _unsigned(self, at: int) -> int:
        return int(struct.unpack_from("<I", self._data, at)[0])

    def _signed(self, at: int) -> int:
        return int(struct.unpack_from("<i", self._data, at)[0])
