"""Reads what ``jax.experimental.array_serialization.pytree_serialization`` saves.

A step is a folder with ``pytreedef.json``, the structure and the form of each leaf, and
``array_store/``, an OCDBT database with a zarr3 array for each leaf that is an array,
named by its number. jax has no steps: the name of the folder states it, or it is 0.
jax writes no sign that a save has ended, so a folder counts as finished as soon as both
exist; a missing array is found when the step is opened.

``pytreedef.json`` is parsed without jax. It holds a FlatBuffer of nodes, in base64.
Source: ``PyTreeDef`` in ``jax/_src/export/serialization.fbs``: kind (0 leaf, 1 None, 2
tuple, 3 list, 4 dict, 5 custom), children, names of the children of a dict. Classes of
custom nodes are not imported: their children are numbered.
"""

import base64
import binascii
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import xxhash

from storesvc.format.keys import InvalidKeyError, join_key
from storesvc_client._foreign.bounded_json import parse_object
from storesvc_client._foreign.foreign_step import ForeignRoot, ForeignStep
from storesvc_client._foreign.locations import Location
from storesvc_client._foreign.steps import (
    FolderRoot,
    Row,
    join,
    make_step,
    named_steps,
    place,
)
from storesvc_client._foreign.zarr_arrays import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    TensorStoreArray,
    database_base,
    open_keys,
)
from storesvc_client._items.values import Container, pack_container_document
from storesvc_client.errors import DataLossError, PreconditionError

MAX_DEPTH: Final = 1000
"""Maximum nodes above a leaf; a key could not hold the path of a deeper one."""

_LEAF, _EMPTY_LEAF, _TUPLE, _, _DICT, _CUSTOM = range(6)
"""Kinds of nodes."""

_EMPTY: Final = {2: "()", 3: "[]", 4: "{}"}
"""Containers by kind, as ``_items/values.py`` names them without children."""

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
    """Yields the leaves in jax's order, and the containers between them."""
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
            if kind in (_LEAF, _EMPTY_LEAF) and children:
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
    if kind == _EMPTY_LEAF:
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
        return self._read_unsigned(0)

    def kind(self, table: int) -> int:
        at = self._field(table, _KIND)
        return self._data[at] if at else 0  # absent: the default

    def vector(self, table: int, field: int) -> list[int]:
        """Returns the offsets in a vector; none if the table lacks it."""
        at = self._field(table, field)
        if not at:
            return []
        start = at + self._read_unsigned(at)
        count = self._read_unsigned(start)
        if count * 4 > len(self._data):
            raise ValueError(f"a vector of {count} entries")
        places = range(start + 4, start + 4 + 4 * count, 4)
        return [place + self._read_unsigned(place) for place in places]

    def text(self, at: int) -> str:
        end = at + 4 + self._read_unsigned(at)
        if end > len(self._data):
            raise ValueError("a name that ends after the file")
        return self._data[at + 4 : end].decode()

    def _field(self, table: int, field: int) -> int:
        """Returns the offset of a field; 0 if the table lacks it."""
        (before,) = struct.unpack_from("<i", self._data, table)
        vtable = table - int(before)
        if vtable < 0:
            raise ValueError("a table before the file")
        (size,) = struct.unpack_from("<H", self._data, vtable)
        place = 4 + 2 * field
        if place + 2 > size:
            return 0
        (offset,) = struct.unpack_from("<H", self._data, vtable + place)
        return table + int(offset) if offset else 0

    def _read_unsigned(self, at: int) -> int:
        return int(struct.unpack_from("<I", self._data, at)[0])


MAX_STRUCTURE_BYTES: Final = 64 << 20

_STRUCTURE: Final = "pytreedef.json"
_STORE: Final = "array_store"
_TREE: Final = "__jax_pytreedef_repr"
_LEAVES: Final = "__jax_leaf_ids"
_NONE: Final = (None, "null")
"""Forms of a leaf that is None."""

_ARRAY: Final = re.compile(r"Array\(([a-z0-9_]+)\[([0-9, ]*)\]\)")


def open_root(location: Location) -> ForeignRoot:
    """Returns the trees that jax saved below a location."""
    find = partial(
        named_steps,
        is_finished=lambda _, names: {_STRUCTURE, f"{_STORE}/"} <= set(names),
        expected=f"a tree that jax saved, with {_STRUCTURE} and {_STORE}/, or "
        "folders of such trees that name steps",
    )
    return FolderRoot(location, "jax", find=find, read=_read_step)


def _read_step(location: Location, folder: str, step: int) -> ForeignStep:
    path = join(folder, _STRUCTURE)
    what = place(location, path)
    data = location.read(path, limit=MAX_STRUCTURE_BYTES)
    fields = parse_object(data, what=what)
    nodes = list(parse_nodes(_tree_bytes(fields, what), what=what))
    leaves = [node for node in nodes if node.what == "leaf"]
    forms = fields.get(_LEAVES)
    if not isinstance(forms, list) or len(forms) != len(leaves):
        raise DataLossError(
            f"{what}: expected the forms of {len(leaves)} leaves in {_LEAVES}"
        )
    none = [leaves[n] for n, form in enumerate(forms) if form in _NONE]
    stored = [n for n, form in enumerate(forms) if form not in _NONE]
    base = database_base(location, join(folder, _STORE))
    names = [(_name(leaves[n]), str(n)) for n in stored]
    arrays = open_keys(location, base, names)
    rows = [
        _row(leaves[n], array, forms[n])
        for n, array in zip(stored, arrays, strict=True)
    ]
    containers = [_container(node.what, node) for node in nodes if node.what != "leaf"]
    containers += [_container("none", node) for node in none]
    # the root of the database changes with every write to it
    digest = xxhash.xxh3_128(data)
    manifest = join(folder, f"{_STORE}/{MANIFEST}")
    digest.update(location.read(manifest, limit=MAX_MANIFEST_BYTES))
    return make_step(
        location,
        folder,
        rows,
        step=step,
        format="jax",
        structure=pack_container_document(containers),
        digest=digest.hexdigest(),
    )


def _tree_bytes(fields: dict[str, Any], what: str) -> bytes:
    text = fields.get(_TREE)
    if not isinstance(text, str):
        raise DataLossError(f"{what}: expected the structure of a tree in {_TREE}")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as e:
        raise DataLossError(f"{what}: expected base64 in {_TREE}, got {e}") from e


def _name(leaf: Node) -> str:
    return "/".join(leaf.parts)


def _container(what: str, node: Node) -> Container:
    try:
        return Container(what, join_key(node.parts), node.path_kinds)
    except InvalidKeyError as e:
        raise PreconditionError(f"container {_name(node)[:200]!r}: {e}") from e


def _row(leaf: Node, array: TensorStoreArray, form: Any) -> Row:
    """Returns the row of an array; rejects one that differs from its form in the
    structure."""
    name = _name(leaf)
    found = _ARRAY.fullmatch(form) if isinstance(form, str) else None
    if found is None:
        raise PreconditionError(
            f"array {name!r}: expected an array or None, got {ascii(form)[:80]}"
        )
    shape = tuple(int(n) for n in found[2].split(",") if n.strip())
    array.check_form(name, shape, found[1])
    return array.row(leaf.parts, name=name, path_kinds=leaf.path_kinds)
