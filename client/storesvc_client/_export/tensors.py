"""Decides which tensors a flat format stores: names, dtypes and shapes.

A flat format, safetensors or npz, is a list of named arrays. What it would lose is
rejected, with the name of the leaf: a Python number would come back as an array, a PRNG
key as numbers; texts and bytes have no dtype.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from storesvc.format.dtypes import DTYPES, is_floating
from storesvc.format.grids import Region
from storesvc.format.keys import split_key
from storesvc.format.trees import Leaf
from storesvc_client._export.renames import Rule, renamed
from storesvc_client._export.source import Source
from storesvc_client.errors import InvalidRequestError, PreconditionError
from storesvc_proto.v1 import tree_pb2 as pb

ARRAYS: Final = frozenset(
    {pb.LEAF_KIND_ARRAY, pb.LEAF_KIND_HOST_ARRAY, pb.LEAF_KIND_HOST_SCALAR}
)
"""Kinds of leaves that every format holds, and that a cast applies to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """An array of an exported file."""

    row: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    """Shape of the stored chunks, in the order of the exported dimensions."""
    axes: tuple[int, ...] | None
    """Permutation of the saved dimensions; None for none."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        itemsize: int = DTYPES[self.dtype].itemsize
        return itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.itemsize

    def saved(self, region: Region) -> Region:
        """Returns the region of the saved leaf for a region of the tensor."""
        if self.axes is None:
            return region
        found = list(region)
        for at, axis in enumerate(self.axes):
            found[axis] = region[at]
        return tuple(found)


def exported_dtype(leaf: Leaf, cast: str | None) -> str:
    """Returns the dtype of an exported leaf: the cast's, for floating-point arrays."""
    if cast is not None and leaf.kind in ARRAYS and is_floating(leaf.dtype):
        return cast
    return leaf.dtype


def plan_tensors(
    source: Source,
    *,
    cast: str | None,
    rules: Sequence[Rule],
    separator: str,
    dtypes: Collection[str],
    target: str,
) -> list[Tensor]:
    """Returns the tensors of the selected leaves, in the order of their names.

    Args:
        source: The checkpoint.
        cast: Name of the dtype to cast to, or None.
        rules: Renames.
        separator: Joins the parts of a path that no rule renames; "/" keeps the key.
        dtypes: Names of the dtypes that the format holds.
        target: Name of the format, for messages.

    Raises:
        PreconditionError: The format would lose a leaf, or two have one name.
        InvalidRequestError: A rule does not fit a leaf.
    """
    fault = partial(_fault, source, cast=cast, dtypes=dtypes, target=target)
    source.check_rejected([(row, text) for row in source.rows if (text := fault(row))])
    by_name: dict[str, Tensor] = {}
    for row in source.rows:
        leaf = source.leaf(row)
        parts = split_key(leaf.key)
        name, axes = renamed(".".join(parts), rules)
        if name == ".".join(parts) and separator != ".":
            name = leaf.key
        _check_axes(source, row, axes)
        tensor = Tensor(
            row=row,
            name=name,
            dtype=exported_dtype(leaf, cast),
            shape=_permuted(leaf.shape, axes),
            chunk_shape=_permuted(leaf.chunk_shape, axes),
            axes=axes,
        )
        other = by_name.setdefault(name, tensor)
        if other is not tensor:
            raise PreconditionError(
                f"{source.describe(row)}: expected a name of its own, got {name!r}, "
                f"which leaf {source.leaf(other.row).key!r} has; rename one of them "
                "with rename=, or leave one out with select= (--select)"
            )
    return [by_name[name] for name in sorted(by_name)]


def _fault(
    source: Source,
    row: int,
    *,
    cast: str | None,
    dtypes: Collection[str],
    target: str,
) -> str | None:
    """Returns why the format would lose a leaf; None if it holds it."""
    leaf = source.leaf(row)
    remedy = "leave it out with select= (--select)"
    if leaf.kind not in ARRAYS:
        return (
            f"expected an array, got the kind {source.kind(row)}, which {target} would "
            f"not give back; {remedy}"
        )
    dtype = exported_dtype(leaf, cast)
    if dtype in dtypes:
        return None
    if is_floating(dtype):
        remedy = f"cast it (cast='float32', --dtype float32), or {remedy}"
    return f"expected a dtype that {target} holds, got {dtype}; {remedy}"


def _check_axes(source: Source, row: int, axes: tuple[int, ...] | None) -> None:
    shape = source.leaf(row).shape
    if axes is not None and len(axes) != len(shape):
        raise InvalidRequestError(
            f"{source.describe(row)}: expected {len(axes)} dimensions, which its "
            f"rename transposes, got the shape {shape}; correct the rule"
        )


def _permuted(sizes: tuple[int, ...], axes: tuple[int, ...] | None) -> tuple[int, ...]:
    return sizes if axes is None else tuple(sizes[axis] for axis in axes)
