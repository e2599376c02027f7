"""Builds the tree of a foreign step from its rows, in the order and by the rules of
``tree.proto``.

Two names of a foreign checkpoint can become one key, or one the ancestor of the other;
such a step is rejected, and both names are in the message.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storesvc.format.grids import Region
from storesvc.format.items import InvalidItemError, ItemName, check_items
from storesvc.format.keys import InvalidKeyError, check_keys, join_key
from storesvc.format.trees import Leaf, Tree
from storesvc_client._foreign.foreign_step import ForeignArray
from storesvc_client._values.documents import CONTAINERS, pack_document
from storesvc_client._values.item_values import Encoded, encode_item
from storesvc_client.errors import DataLossError, PreconditionError
from storesvc_proto.v1 import tree_pb2 as pb


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Row:
    """One row, before it has its place in the tree."""

    leaf: Leaf
    array: ForeignArray
    name: str
    """Name of the array in its format, for messages."""


def array_row(
    parts: Sequence[str],
    array: ForeignArray,
    *,
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    chunk_shape: tuple[int, ...],
    path_kinds: str | None = None,
) -> Row:
    """Returns the row of a device array.

    Args:
        parts: Its path.
        array: Its elements.
        name: Its name in its format, for messages.
        dtype: Its dtype, by the name of the format.
        shape: Its shape.
        chunk_shape: Shape of the pieces in which it is read.
        path_kinds: One letter for each part; None: all are keys of mappings.

    Raises:
        PreconditionError: Its path is too long for a key, or is no Unicode.
    """
    try:
        key = join_key(parts)
    except InvalidKeyError as e:
        raise PreconditionError(f"array {name[:200]!r}: {e}") from e
    leaf = Leaf(
        key=key,
        path_kinds="k" * len(parts) if path_kinds is None else path_kinds,
        kind=pb.LEAF_KIND_ARRAY,
        dtype=dtype,
        shape=shape,
        chunk_shape=chunk_shape,
    )
    return Row(leaf=leaf, array=array, name=name)


def item_row(item: str, value: Any, *, name: str) -> Row:
    """Returns the row of an item that holds a document next to the arrays.

    Args:
        item: Name of the item.
        value: A text, bytes, or a value of JSON.
        name: Name of the file for messages.

    Raises:
        DataLossError: An item cannot hold the value.
    """
    try:
        encoded = encode_item(value)
    except ValueError as e:
        raise DataLossError(f"{name}: {e}") from e
    return _encoded_row(ItemName(item), encoded, name)


def text_row(item: str, data: bytes, *, name: str) -> Row:
    """Returns the row of an item that holds a text file next to the arrays.

    Args:
        item: Name of the item.
        data: Contents of the file.
        name: Its name for messages.

    Raises:
        DataLossError: It is no UTF-8.
    """
    try:
        return item_row(item, data.decode(), name=name)
    except UnicodeDecodeError as e:
        raise DataLossError(f"{name}: expected UTF-8, got other bytes ({e})") from e


def tree_of(
    rows: Iterable[Row], *, advice: str, structure: bytes = b""
) -> tuple[Tree, tuple[ForeignArray, ...]]:
    """Returns the tree of rows, and the array of each of its rows.

    Args:
        rows: Leaves and items, in any order.
        advice: What to do if two leaves cannot be in one tree, for the message.
        structure: Document for ``Tree.structure``.

    Raises:
        PreconditionError: Two leaves have one key, or one is an ancestor of another.
    """
    leaves: list[Row] = []
    items: list[Row] = []
    for row in rows:
        (items if row.leaf.path_kinds.startswith("r") else leaves).append(row)
    leaves.sort(key=attrgetter("leaf.key"))
    items.sort(key=attrgetter("leaf.key"))
    try:
        check_keys([row.leaf.key for row in leaves])
        check_items([row.leaf for row in items])
    except InvalidKeyError as e:
        raise PreconditionError(f"{_collision(leaves) or e}; {advice}") from e
    except InvalidItemError as e:
        raise PreconditionError(str(e)) from e
    ordered = [*leaves, *items]
    tree = Tree(tuple(row.leaf for row in ordered), structure)
    return tree, tuple(row.array for row in ordered)


def containers_document(
    containers: Iterable[tuple[str, Sequence[str], str]],
) -> bytes:
    """Returns the document for ``Tree.structure`` of containers that leaves do not
    show: name, path and path kinds of each, as ``_values/containers.py`` reads it.

    Raises:
        PreconditionError: A path is too long for a key, or is no Unicode.
        StructureError: It is too large.
    """
    try:
        rows = sorted(
            [what, join_key(parts), kinds] for what, parts, kinds in containers
        )
    except InvalidKeyError as e:
        raise PreconditionError(str(e)) from e
    return CONTAINERS + pack_document({"containers": rows}) if rows else b""


class BytesArray:
    """A ``ForeignArray`` over bytes in memory."""

    def __init__(self, data: bytes) -> None:
        self._elements = np.frombuffer(data, np.uint8)

    def read(self, region: Region, into: NDArray[Any]) -> "Future[None]":
        """Copies a region."""
        ((start, stop),) = region
        into[...] = self._elements[start:stop]
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _encoded_row(item: ItemName, encoded: Encoded, name: str) -> Row:
    size = len(encoded.data)
    leaf = Leaf(
        key=item.key,
        path_kinds=item.path_kinds,
        kind=encoded.kind,
        dtype="uint8",
        shape=(size,),
        chunk_shape=(max(1, size),),
    )
    return Row(leaf=leaf, array=BytesArray(encoded.data), name=name)


def _collision(rows: Sequence[Row]) -> str:
    """Returns a message that names two arrays that cannot be in one tree."""
    known: dict[str, str] = {}
    for row in rows:
        if row.leaf.key in known:
            return (
                f"arrays {known[row.leaf.key]!r} and {row.name!r} have one key, "
                f"{row.leaf.key!r}"
            )
        known[row.leaf.key] = row.name
    for row in rows:
        key = row.leaf.key
        above = (key[:at] for at, c in enumerate(key) if c == "/")
        found = next((known[k] for k in ("", *above) if k in known and k != key), None)
        if found is not None:
            return f"array {found!r} is also a container, of array {row.name!r}"
    return ""
