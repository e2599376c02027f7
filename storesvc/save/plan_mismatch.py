"""Compares the plans and the values of several writers, and finds where they differ.

Each process of a job plans a save for itself, from the same program. One that runs
another version of it, or of jax, would store other chunks under the same names. And
where several processes hold a leaf that one of them writes, such as a Python number,
another value than that one's would be lost.
"""

from collections.abc import Sequence

import numpy as np

from storesvc.format.checksums import DIGEST_BYTES
from storesvc.format.trees import Leaf, SavedSharding, Tree


def difference(expected: Tree, got: Tree) -> tuple[str, str]:
    """Returns the key of the first leaf in which two trees differ, "" where it is no
    leaf, and what is expected and got there."""
    for key in sorted({*expected.by_key, *got.by_key}):
        theirs, own = _leaf(expected, key), _leaf(got, key)
        if theirs != own:
            told = _differing(theirs, own)
            return key, f"leaf {key!r}: expected {told[0]}, got {told[1]}"
    if expected.structure != got.structure:
        return "", "structure: expected the same document, got another one"
    return "", "leaf table: expected the same bytes, got others that say the same"


def differing_rows(expected: bytes, got: bytes) -> list[int]:
    """Returns the rows of the leaves that two writers hold different values of.

    Args:
        expected: The leaf digests of one writer; 16 zero bytes: it compares none.
        got: Those of another, of the same leaves.
    """
    one, other = (
        np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)
        for digests in (expected, got)
    )
    is_compared = one.any(axis=1) & other.any(axis=1)
    found: list[int] = np.flatnonzero(is_compared & (one != other).any(axis=1)).tolist()
    return found


def _leaf(tree: Tree, key: str) -> Leaf | None:
    at = tree.by_key.get(key)
    return None if at is None else tree.leaves[at]


def _differing(expected: Leaf | None, got: Leaf | None) -> Sequence[str]:
    """What tells two leaves apart, in words."""
    for show in (_type, _grid, _layout, repr):
        told = [show(leaf) if leaf else "none" for leaf in (expected, got)]
        if told[0] != told[1]:
            return told
    raise AssertionError


def _type(leaf: Leaf) -> str:
    return f"{leaf.shape} {leaf.dtype}"


def _grid(leaf: Leaf) -> str:
    return f"chunks of {leaf.chunk_shape}"


def _layout(leaf: Leaf) -> str:
    return _sharding(leaf.sharding) if leaf.sharding else "no named sharding"


def _sharding(sharding: SavedSharding) -> str:
    sizes = zip(sharding.axis_names, sharding.axis_sizes, strict=True)
    mesh = ", ".join(f"{name}={size}" for name, size in sizes)
    spec = ", ".join("+".join(axes) or "None" for axes in sharding.spec)
    return f"({spec}) on the mesh ({mesh})"
