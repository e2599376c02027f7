"""Builds the tree of a foreign step from its rows, in the order and by the rules of
``tree.proto``.

Two names of a foreign checkpoint can become one key, or one the ancestor of the other;
such a step is rejected, and both names are in the message.
"""

import re
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from storesvc.format.grids import Region
from storesvc.format.keys import (
    InvalidItemError,
    InvalidKeyError,
    ItemName,
    is_item,
    join_key,
)
from storesvc.format.trees import (
    InvalidTreeError,
    Leaf,
    Tree,
    pack_leaves,
    unpack_leaves,
)
from storesvc_client._foreign.foreign_step import ForeignArray
from storesvc_client._foreign.location import Location
from storesvc_client._foreign.plain_array import PlainArray
from storesvc_client._values.item_values import encode_item
from storesvc_client.errors import DataLossError, NotFoundError, PreconditionError
from storesvc_proto.v1 import tree_pb2 as pb

FILE_CHUNK_BYTES: Final = 8 << 20
"""Bytes of a file that are read together."""


MAX_NAME: Final = 63
"""Maximum length of the name of an item."""

_OTHERS: Final = re.compile(r"[^a-z0-9]+")


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


def encoded_row(
    key: str, path_kinds: str, kind: "pb.LeafKind.ValueType", data: bytes, *, name: str
) -> Row:
    """Returns the row of an encoded value, such as a text in a tree.

    Args:
        key: Its key.
        path_kinds: One letter for each part of the key.
        kind: Kind of the value.
        data: Its bytes.
        name: Its name in its format, for messages.
    """
    leaf = _byte_leaf(key, path_kinds, kind, len(data), chunk_bytes=len(data))
    return Row(leaf=leaf, array=BytesArray(data), name=name)


def item_name(path: str) -> str:
    """Returns the name of an item for a path or a name of another project,
    which may have characters that no name of an item has.

    >>> item_name("model_config"), item_name("assets/vocab.TXT")
    ('model-config', 'assets-vocab-txt')
    """
    name = _OTHERS.sub("-", path.lower()).strip("-")
    name = name if name[:1].isalpha() else f"item-{name}"
    return name[:MAX_NAME].strip("-")


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
    found = ItemName(item)
    return encoded_row(
        found.key, found.path_kinds, encoded.kind, encoded.data, name=name
    )


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


def file_item_row(
    location: Location, path: str, item: str, process: int | None = None
) -> Row:
    """Returns the row of an item that has the bytes of a file, read on demand.

    Args:
        location: Location of the file.
        path: Path of the file.
        item: Name of the item.
        process: Number of the process whose value it is; None: of all.

    Raises:
        NotFoundError: There is no such file.
    """
    size = location.size(path)
    name = f"{location.url}/{path}"
    if size is None:
        raise NotFoundError(f"{name}: expected a file, found none")
    found = ItemName(item, process)
    leaf = _byte_leaf(
        found.key,
        found.path_kinds,
        pb.LEAF_KIND_BYTES,
        size,
        chunk_bytes=min(size, FILE_CHUNK_BYTES),
    )
    array = PlainArray(
        location=location,
        path=path,
        start=0,
        shape=leaf.shape,
        dtype=leaf.dtype,
        row=f"item {item!r}",
    )
    return Row(leaf=leaf, array=array, name=name)


def tree_of(
    rows: Iterable[Row], *, place: str, advice: str, structure: bytes = b""
) -> tuple[Tree, tuple[ForeignArray, ...]]:
    """Returns the tree of rows, and the array of each of its rows.

    Args:
        rows: Leaves and items, in any order.
        place: Name of the step in messages.
        advice: What to do if no checkpoint can hold the rows, for the message.
        structure: Document for ``Tree.structure``.

    Raises:
        PreconditionError: No checkpoint can hold the rows: two leaves have one key, or
            one is an ancestor of another, or an item has no valid name.
    """
    ordered = sorted(rows, key=lambda row: (is_item(row.leaf.key), row.leaf.key))
    leaves = tuple(row.leaf for row in ordered)
    # The rules of tree.proto are checked by its reader; chunks may be of any size.
    small = (replace(leaf, chunk_shape=(1,) * len(leaf.shape)) for leaf in leaves)
    try:
        table = pb.LeafTable()
        for part in pack_leaves(Tree(tuple(small), structure)):
            table.MergeFromString(part)
        unpack_leaves(table)
    except (InvalidTreeError, InvalidItemError, ValueError) as e:
        why = _collision([row for row in ordered if not is_item(row.leaf.key)]) or e
        raise PreconditionError(
            f"{place}: a checkpoint cannot hold its arrays: {why}; {advice}"
        ) from e
    return Tree(leaves, structure), tuple(row.array for row in ordered)


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


def _byte_leaf(
    key: str,
    path_kinds: str,
    kind: "pb.LeafKind.ValueType",
    size: int,
    *,
    chunk_bytes: int,
) -> Leaf:
    return Leaf(
        key=key,
        path_kinds=path_kinds,
        kind=kind,
        dtype="uint8",
        shape=(size,),
        chunk_shape=(max(1, chunk_bytes),),
    )


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
