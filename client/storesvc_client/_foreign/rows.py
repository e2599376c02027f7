"""Rows of a foreign step: leaves and items, each with its elements."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from storesvc.format.grids import Region
from storesvc.format.items import InvalidItemError, ItemName, is_item
from storesvc.format.trees import (
    InvalidTreeError,
    Leaf,
    Tree,
    pack_leaves,
    unpack_leaves,
)
from storesvc_client._foreign.foreign_step import ForeignArray, Reading
from storesvc_client._foreign.location import Location
from storesvc_client.errors import NotFoundError, PreconditionError
from storesvc_proto.v1 import tree_pb2 as pb

FILE_CHUNK_BYTES: Final = 8 << 20
"""Bytes of a file that are read together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A leaf or an item, and its elements."""

    leaf: Leaf
    array: ForeignArray


class Done:
    """A read that has ended."""

    def result(self, timeout: float | None = None) -> Any:  # noqa: ARG002
        """See ``Reading``."""
        return None


@dataclass(frozen=True, slots=True, eq=False)
class HeldArray:
    """Elements that are in memory already, such as the bytes of a text."""

    data: bytes

    def read(self, region: Region, into: NDArray[Any]) -> Reading:
        """See ``ForeignArray``."""
        ((start, stop),) = region
        into[...] = np.frombuffer(self.data, np.uint8)[start:stop]
        return Done()


def encoded_row(
    key: str, path_kinds: str, kind: "pb.LeafKind.ValueType", data: bytes
) -> Row:
    """Returns the row of an encoded value."""
    leaf = Leaf(
        key=key,
        path_kinds=path_kinds,
        kind=kind,
        dtype="uint8",
        shape=(len(data),),
        chunk_shape=(max(1, len(data)),),
    )
    return Row(leaf=leaf, array=HeldArray(data))


def item_row(
    name: str,
    kind: "pb.LeafKind.ValueType",
    data: bytes,
    process: int | None = None,
) -> Row:
    """Returns the row of an item, or of the value of one process."""
    item = ItemName(name, process)
    return encoded_row(item.key, item.path_kinds, kind, data)


def tree_of(
    place: str, rows: Iterable[Row], structure: bytes = b""
) -> tuple[Tree, Sequence[ForeignArray]]:
    """Returns rows as a tree, and the arrays of its rows.

    Args:
        place: Name of the step in messages.
        rows: The rows in any order.
        structure: Document of the tree.

    Raises:
        PreconditionError: No checkpoint can hold the rows, such as two leaves
            of one key.
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
        raise PreconditionError(
            f"{place}: a checkpoint cannot hold its arrays: {e}; import a part of it, "
            "or write it again with other names"
        ) from e
    return Tree(leaves, structure), [row.array for row in ordered]


@dataclass(frozen=True, slots=True, eq=False)
class FileArray:
    """The bytes of a file, read on demand."""

    location: Location
    path: str

    def read(self, region: Region, into: NDArray[Any]) -> Reading:
        """See ``ForeignArray``."""
        ((start, stop),) = region
        if into.flags.c_contiguous and start < stop:
            self.location.read_into(self.path, start, into.data)
        else:
            data = self.location.read_range(self.path, start, stop)
            into[...] = np.frombuffer(data, np.uint8)
        return Done()


def file_item_row(
    location: Location, path: str, name: str, process: int | None = None
) -> Row:
    """Returns the row of an item that has the bytes of a file.

    Raises:
        NotFoundError: There is no such file.
    """
    size = location.size(path)
    if size is None:
        raise NotFoundError(f"{location.url}/{path}: expected a file, found none")
    item = ItemName(name, process)
    leaf = Leaf(
        key=item.key,
        path_kinds=item.path_kinds,
        kind=pb.LEAF_KIND_BYTES,
        dtype="uint8",
        shape=(size,),
        chunk_shape=(max(1, min(size, FILE_CHUNK_BYTES)),),
    )
    return Row(leaf=leaf, array=FileArray(location, path))
