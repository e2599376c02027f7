"""Diff rules: decides which leaves of two checkpoints differ, from the manifests alone.

Leaves are matched by key. If shape and dtype agree, the digests of the chunks decide
whether the bytes agree. This requires the same chunk grid on both sides; with different
grids the result is UNKNOWN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from storesvc.format.chunks import I64
from storesvc.format.keys import ENCODED_KINDS, is_item, kind_text
from storesvc.format.manifests import Manifest
from storesvc.format.trees import Leaf, Tree
from storesvc_proto.v1 import checkpoint_service_pb2 as api

Kind: TypeAlias = "api.LeafDifference.Kind.ValueType"

ADDED = api.LeafDifference.KIND_ADDED
REMOVED = api.LeafDifference.KIND_REMOVED
SHAPE = api.LeafDifference.KIND_SHAPE
DTYPE = api.LeafDifference.KIND_DTYPE
CONTENT = api.LeafDifference.KIND_CONTENT
UNKNOWN = api.LeafDifference.KIND_UNKNOWN


@dataclass(frozen=True, slots=True)
class Difference:
    """One leaf that differs."""

    kind: Kind
    before: Leaf | None
    after: Leaf | None
    """At least one of the two is set."""
    changed_chunks: int = 0
    """Number of chunks whose bytes differ, if they can be compared."""

    @property
    def is_of_item(self) -> bool:
        """True if it is a difference of an item, not of a leaf of the tree."""
        return is_item(self.leaf.key)

    @property
    def leaf(self) -> Leaf:
        """The leaf in the second checkpoint; a removed leaf in the first."""
        leaf = self.after or self.before
        assert leaf is not None
        return leaf


def differences(before: Manifest, after: Manifest) -> list[Difference]:
    """Returns the leaves and items of two checkpoints that differ, ascending by key."""
    found: dict[str, Difference] = {}
    comparable: list[tuple[int, int]] = []
    old, new = before.tree, after.tree
    for leaf in old.leaves:
        if leaf.key not in new.by_key:
            found[leaf.key] = Difference(REMOVED, leaf, None)
    for row, leaf in enumerate(new.leaves):
        at = old.by_key.get(leaf.key)
        if at is None:
            found[leaf.key] = Difference(ADDED, None, leaf)
        elif kind := _outer_kind(old.leaves[at], leaf):
            count = leaf.grid.count if kind == CONTENT else 0
            found[leaf.key] = Difference(kind, old.leaves[at], leaf, count)
        else:
            comparable.append((at, row))
    changed = changed_chunks(before, after, comparable).tolist()
    for (at, row), count in zip(comparable, changed, strict=True):
        if count:
            leaf = new.leaves[row]
            found[leaf.key] = Difference(CONTENT, old.leaves[at], leaf, count)
    return [found[key] for key in sorted(found)]


def changed_chunks(
    before: Manifest, after: Manifest, rows: Sequence[tuple[int, int]]
) -> I64:
    """Returns the number of different chunks for pairs of leaves with the same grid.

    Args:
        before: Manifest of the first checkpoint.
        after: Manifest of the second checkpoint.
        rows: For each pair the row of the leaf in each manifest.

    Returns:
        One count (int64) for each pair.
    """
    pairs = np.array(rows, np.int64).reshape(-1, 2)
    counts = np.diff(after.tree.first_chunk)[pairs[:, 1]]
    of_pair = np.repeat(np.arange(len(pairs)), counts)
    ends = np.cumsum(counts)
    within = np.arange(len(of_pair)) - np.repeat(ends - counts, counts)
    one = before.sums.digests[_first(before.tree, pairs[:, 0])[of_pair] + within]
    other = after.sums.digests[_first(after.tree, pairs[:, 1])[of_pair] + within]
    differ = (one != other).any(axis=1)
    return np.bincount(of_pair[differ], minlength=len(pairs)).astype(np.int64)


def dtype_text(leaf: Leaf) -> str:
    """Returns the dtype of a leaf; for PRNG keys with their implementation; for encoded
    values their kind."""
    if leaf.kind in ENCODED_KINDS:
        return kind_text(leaf.kind)
    return f"key<{leaf.prng_impl}>" if leaf.prng_impl else leaf.dtype


def shape_of(leaf: Leaf) -> tuple[int, ...]:
    """Returns the shape of a leaf; for PRNG keys without the words of their data."""
    return leaf.shape[:-1] if leaf.prng_impl else leaf.shape


def _outer_kind(before: Leaf, after: Leaf) -> "Kind | None":
    """Returns the first difference of two leaves apart from their bytes, or None."""
    if shape_of(before) != shape_of(after):
        # The number of bytes of an encoded value is part of its content.
        if {before.kind, after.kind} <= ENCODED_KINDS:
            return CONTENT if before.kind == after.kind else DTYPE
        return SHAPE
    if dtype_text(before) != dtype_text(after):
        return DTYPE
    if before.chunk_shape != after.chunk_shape and 0 not in after.shape:
        return UNKNOWN
    return None


def _first(tree: Tree, rows: I64) -> I64:
    first: I64 = tree.first_chunk[rows]
    return first
