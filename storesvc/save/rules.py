"""Decides how the writers of a save differ.

Each process of a job plans a save by itself, from the same program. A process that runs
another version of the program, or of jax, would store different chunks under the same
names. If several processes hold a leaf that only one of them writes, such as a Python
number, a different value on another process would be lost. So the save plans and the
leaf values of the writers are compared.
"""

from collections.abc import Sequence

import numpy as np

from storesvc.format.checksums import DIGEST_BYTES
from storesvc.format.keys import ENCODED_KINDS, describe, kind_text
from storesvc.format.trees import Leaf, Tree


def first_difference(expected: Tree, got: Tree) -> tuple[str, str]:
    """Returns where two leaf tables differ first, and a message of what differs.

    The place is the key of a leaf, or "" if no leaf differs.
    """
    for key in sorted({*expected.by_key, *got.by_key}):
        theirs, own = _leaf(expected, key), _leaf(got, key)
        if theirs != own:
            wanted, found = _describe_difference(theirs, own)
            return key, f"{describe(key)}: expected {wanted}, got {found}"
    if expected.structure != got.structure:
        return "", "structure: expected the same document, got another one"
    return "", "leaf table: expected the same bytes, got an equal table in other bytes"


def differing_rows(expected: bytes, got: bytes) -> list[int]:
    """Returns the rows of the leaves whose values differ between two writers.

    Args:
        expected: Leaf digests of one writer, 16 bytes each; zeros: not compared.
        got: Leaf digests of the other writer, for the same leaves.
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


def _describe_difference(expected: Leaf | None, got: Leaf | None) -> Sequence[str]:
    """Returns both leaves as texts, by the first property in which they differ."""
    for show in (_type, lambda leaf: f"chunks of {leaf.chunk_shape}", _layout, repr):
        texts = [show(leaf) if leaf else "none" for leaf in (expected, got)]
        if texts[0] != texts[1]:
            return texts
    raise AssertionError


def _type(leaf: Leaf) -> str:
    if leaf.kind in ENCODED_KINDS:
        return f"{kind_text(leaf.kind)} of {leaf.shape[0]} bytes"
    return f"{leaf.shape} {leaf.dtype}"


def _layout(leaf: Leaf) -> str:
    sharding = leaf.sharding
    if sharding is None:
        return "no named sharding"
    sizes = zip(sharding.axis_names, sharding.axis_sizes, strict=True)
    mesh = ", ".join(f"{name}={size}" for name, size in sizes)
    spec = ", ".join("+".join(axes) or "None" for axes in sharding.spec)
    return f"({spec}) on the mesh ({mesh})"
