"""Compares checkpoints of any projects by their elements, which are read.

A store compares digests; other projects have none. So this also compares a checkpoint
of another project with one of a store, such as the import of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storesvc.format.grids import Grid
from storesvc_client._restore.items import Items
from storesvc_client._restore.open_tree import OpenTree
from storesvc_client._values.models import ItemDifference, LeafDifference, LeafInfo
from storesvc_client._views.texts import dtype_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Differences between two checkpoints, by their elements."""

    base: str
    """Name of the earlier checkpoint."""
    checkpoint: str
    """Name of the later checkpoint."""
    same_leaf_count: int
    """Number of leaves that are equal."""
    differences: tuple[LeafDifference, ...]
    """The other leaves, in the order of keys."""
    items: tuple[ItemDifference, ...]
    """The items that differ, in the order of their names."""


def compare(before: OpenTree, after: OpenTree) -> Comparison:
    """Returns the differences between two checkpoints; reads what both have."""
    base, leaves = before.leaves, after.leaves
    keys = {**base, **leaves}
    found = {key: _difference(key, base.get(key), leaves.get(key)) for key in keys}
    alike = [key for key, difference in found.items() if difference is None]
    for (_, one), (leaf, other) in zip(
        before.read(alike), after.read(alike), strict=True
    ):
        changed = _changed_chunks(leaf, one, other)
        if changed:
            found[leaf.key] = _leaf_difference("content", base[leaf.key], leaf, changed)
    differing = sorted(
        (each for each in found.values() if each is not None), key=lambda each: each.key
    )
    return Comparison(
        base=before.name,
        checkpoint=after.name,
        same_leaf_count=len(found) - len(differing),
        differences=tuple(differing),
        items=tuple(_item_differences(before.items, after.items)),
    )


def _difference(
    key: str, one: LeafInfo | None, other: LeafInfo | None
) -> LeafDifference | None:
    """Returns the difference of two leaves that no element decides; None if there is
    none."""
    if one is None:
        return _leaf_difference("added", None, other)
    if other is None:
        return _leaf_difference("removed", one, None)
    assert key == one.key == other.key
    if one.shape != other.shape:
        return _leaf_difference("shape", one, other)
    if dtype_text(one) != dtype_text(other):
        return _leaf_difference("dtype", one, other)
    return None


def _leaf_difference(
    kind: str, one: LeafInfo | None, other: LeafInfo | None, changed: int = 0
) -> LeafDifference:
    some = other or one
    assert some is not None
    return LeafDifference(
        key=some.key,
        kind=kind,
        base_dtype=None if one is None else dtype_text(one),
        base_shape=None if one is None else _shape(one),
        dtype=None if other is None else dtype_text(other),
        shape=None if other is None else _shape(other),
        changed_chunk_count=changed,
        chunk_count=some.chunk_count,
    )


def _shape(leaf: LeafInfo) -> tuple[int, ...]:
    return leaf.shape[:-1] if leaf.prng_impl else leaf.shape


def _changed_chunks(leaf: LeafInfo, one: NDArray[Any], other: NDArray[Any]) -> int:
    """Returns the number of chunks of a leaf whose bytes differ."""
    grid = Grid(leaf.shape, leaf.chunk_shape, one.itemsize)
    changed = 0
    for chunk in range(grid.count):
        # the ellipsis returns an array also for one without dimensions
        index: Any = (*(slice(*bounds) for bounds in grid.region(chunk)), ...)
        changed += not np.array_equal(_bytes(one[index]), _bytes(other[index]))
    return changed


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _item_differences(one: Items, other: Items) -> Iterator[ItemDifference]:
    for name in sorted({*one, *other}):
        numbers = {*_processes(one, name), *_processes(other, name)}
        for process in sorted(numbers, key=lambda n: -1 if n is None else n):
            old = _read_encoded(one, name, process)
            new = _read_encoded(other, name, process)
            if old == new:
                continue
            kind = "content"
            if old is None or new is None:
                kind = "added" if old is None else "removed"
            elif old[0] != new[0]:
                kind = "kind"
            yield ItemDifference(
                name=name,
                process=process,
                kind=kind,
                base_value_kind=None if old is None else old[0],
                base_size_bytes=None if old is None else len(old[1]),
                value_kind=None if new is None else new[0],
                size_bytes=None if new is None else len(new[1]),
            )


def _processes(items: Items, name: str) -> Sequence[int | None]:
    if name not in items:
        return []
    count = items.info(name).process_count
    return [None] if count is None else range(count)


def _read_encoded(
    items: Items, name: str, process: int | None
) -> tuple[str, bytes] | None:
    """Returns kind and bytes of an item; None if there is none of that process."""
    if process not in _processes(items, name):
        return None
    return items.info(name).kind, items.encoded(name, process)
