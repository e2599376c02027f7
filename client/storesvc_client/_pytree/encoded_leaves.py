"""Leaves that are stored as encoded bytes: texts, bytes and large integers of a tree,
and the items next to it.

A save replaces each of them by an ``EncodedLeaf`` before it plans, so that all later
stages see an array of bytes.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from storesvc.format.grids import Grid, choose_chunk_shape, whole
from storesvc.format.keys import ENCODED_KINDS, kind_text
from storesvc_client._pytree.chunk_layout import Layout, layout_of
from storesvc_client._values.item_values import Encoded, encode_python
from storesvc_proto.v1 import tree_pb2 as pb

INTEGER: Final = kind_text(pb.LEAF_KIND_INTEGER)
"""Family of all Python integers: those that int64 holds are stored as such."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedLeaf:
    """A value in stored form, as an array."""

    kind: "pb.LeafKind.ValueType"
    array: NDArray[np.uint8]
    """Its bytes; shares their memory."""

    @classmethod
    def of(cls, encoded: Encoded) -> "EncodedLeaf":
        """Returns the leaf of an encoded value."""
        return cls(encoded.kind, np.frombuffer(encoded.data, np.uint8))


def with_encoded(value: Any) -> Any:
    """Returns the encoding of a leaf that is stored as one, and any other leaf
    unchanged."""
    if type(value) not in (str, bytes, int):  # most leaves
        return value
    try:
        encoded = encode_python(value)
    except ValueError:  # the plan rejects it, with its key
        return value
    return value if encoded is None else EncodedLeaf.of(encoded)


def as_array(value: Any) -> Any:
    """Returns the array of an encoded leaf, and any other leaf unchanged."""
    return value.array if type(value) is EncodedLeaf else value


def family(kind: "pb.LeafKind.ValueType", dtype: str) -> str | None:
    """Returns the name of the Python type that a leaf of this kind is restored as, if
    leaves of that type are stored encoded or in both ways; else None."""
    if kind == pb.LEAF_KIND_PYTHON_SCALAR and dtype == "int64":
        return INTEGER
    return kind_text(kind) if kind in ENCODED_KINDS else None


def is_encoded(kind: "pb.LeafKind.ValueType") -> bool:
    """Returns whether leaves of this kind are encoded bytes."""
    return kind in ENCODED_KINDS


def encoded_chunks(size: int) -> tuple[tuple[int, ...], Layout]:
    """Returns the chunk shape of an encoded value of some bytes, and its layout."""
    shape = (size,)
    chunk_shape = choose_chunk_shape(shape, 1, shape)
    return chunk_shape, layout_of(Grid(shape, chunk_shape, 1), (whole(shape),))
