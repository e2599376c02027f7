"""Decides how the chunks of a foreign step become chunks of ours.

A format reads its own chunk as a whole, for example because it is compressed. So our
chunks are cut such that each is within one of them or consists of several of them, and
a ``Unit`` is what one piece of memory receives: all our chunks of one foreign chunk, or
neighbouring chunks that are read one by one. Each foreign chunk is read once.

Nothing is read here.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np

from storesvc.format.grids import MAX_CHUNK_BYTES, Grid, Region, choose_chunk_shape
from storesvc.format.trees import Leaf, Tree
from storesvc_client._chunks.slabs import Slab, slabs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRead:
    """A region of a row, and its place in the memory of a unit."""

    row: int
    region: Region
    """Within the shape of the row."""
    start: int
    """Offset of its first byte in the memory."""
    shape: tuple[int, ...]
    """Shape of its array in memory: the chunks are whole, also past the shape of the
    row, where they are zero."""

    @property
    def is_padded(self) -> bool:
        """True if the array is larger than the region."""
        return self.shape != tuple(stop - start for start, stop in self.region)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Chunks that are read into one piece of memory."""

    slabs: tuple[tuple[int, Slab], ...]
    """Slabs, each with its offset in the memory."""
    reads: tuple[RegionRead, ...]
    size: int
    """Bytes of memory."""


def stored_tree(foreign: Tree) -> Tree:
    """Returns the rows of a foreign step with the chunks that the store gets.

    Args:
        foreign: Rows whose chunks are those that the format reads as a whole.
    """
    return Tree(tuple(map(_cut, foreign.leaves)), foreign.structure)


def units_of(foreign: Tree, stored: Tree) -> list[Unit]:
    """Returns the units of all chunks, in the order of their first chunk.

    Args:
        foreign: Rows with the chunks of the format.
        stored: The same rows with our chunks.
    """
    found: list[Unit] = []
    simple = np.ones(stored.chunk_count, np.bool_)
    for row, (leaf, grid) in enumerate(zip(foreign.leaves, stored.grids, strict=True)):
        together = _together(grid, leaf.chunk_shape)
        if together is not None:
            first = int(stored.first_chunk[row])
            simple[first : first + grid.count] = False
            found += _cut_units(row, first, grid, together)
    for slab in slabs_of(stored, np.flatnonzero(simple)):
        found.append(_slab_unit(stored, slab))
    return sorted(found, key=lambda unit: unit.slabs[0][1].first)


def _cut(leaf: Leaf) -> Leaf:
    grid = leaf.grid
    chosen = _chunk_shape(leaf.shape, grid.itemsize, leaf.chunk_shape)
    return replace(leaf, chunk_shape=chosen)


@lru_cache(maxsize=1024)  # a tree has many leaves, and few shapes
def _chunk_shape(
    shape: tuple[int, ...], itemsize: int, foreign: tuple[int, ...]
) -> tuple[int, ...]:
    """Returns our chunk shape: the one of a save in shards of the foreign chunk shape,
    unless such a chunk crosses foreign chunks, or is no contiguous range of one."""
    shard = tuple(min(n, max(1, m)) for n, m in zip(foreign, shape, strict=True))
    chosen = choose_chunk_shape(shape, itemsize, shard)
    crosses = any(
        outer < size and inner < size and outer % inner and inner % outer
        for outer, inner, size in zip(shard, chosen, shape, strict=True)
    )
    if not crosses and _is_contiguous(shard, chosen):
        return chosen
    return _divided(shape, itemsize, shard)


def _is_contiguous(outer: Sequence[int], inner: Sequence[int]) -> bool:
    """Returns whether the chunks `inner` are contiguous ranges of the chunks `outer`,
    or consist of several of them."""
    cut = [dim for dim, (m, n) in enumerate(zip(outer, inner, strict=True)) if n < m]
    return not cut or all(n == 1 for n in inner[: cut[-1]])


def _divided(
    shape: Sequence[int], itemsize: int, shard: Sequence[int]
) -> tuple[int, ...]:
    """Returns the largest chunk shape that divides a foreign chunk into contiguous
    ranges of at most ``MAX_CHUNK_BYTES``."""
    chunk = list(shard)
    for dim, n in enumerate(shard):
        rows = MAX_CHUNK_BYTES // (math.prod(chunk[dim + 1 :]) * itemsize)
        chunk[dim] = max(1, min(n, rows))
        if n < shape[dim]:  # the last range of a chunk must not cross into the next one
            chunk[dim] = next(k for k in range(chunk[dim], 0, -1) if n % k == 0)
        if rows:
            break
    return tuple(chunk)


def _together(grid: Grid, foreign: Sequence[int]) -> tuple[int, ...] | None:
    """Returns how many of our chunks a foreign chunk has along each dimension; None if
    it has one, or is a part of one."""
    counts = tuple(
        1 if outer <= inner else n if outer >= size else outer // inner
        for outer, inner, n, size in zip(
            foreign, grid.chunk_shape, grid.counts, grid.shape, strict=True
        )
    )
    return None if grid.count == 0 or math.prod(counts) == 1 else counts


def _cut_units(
    row: int, first: int, grid: Grid, together: Sequence[int]
) -> Iterator[Unit]:
    """Yields a unit for each foreign chunk of a row."""
    blocks = [range(0, n, k) for n, k in zip(grid.counts, together, strict=True)]
    for corner in product(*blocks):
        counts = tuple(
            min(k, n - at)
            for at, n, k in zip(corner, grid.counts, together, strict=True)
        )
        slabs = []
        for number, within in enumerate(product(*map(range, counts))):
            ordinal = 0
            for at, more, n in zip(corner, within, grid.counts, strict=True):
                ordinal = ordinal * n + at + more
            slab = Slab(first + ordinal, (grid.chunk_bytes,))
            slabs.append((number * grid.chunk_bytes, slab))
        region = tuple(
            (at * c, min((at + k) * c, n))
            for at, k, c, n in zip(
                corner, counts, grid.chunk_shape, grid.shape, strict=True
            )
        )
        shape = tuple(k * c for k, c in zip(counts, grid.chunk_shape, strict=True))
        read = RegionRead(row=row, region=region, start=0, shape=shape)
        size = len(slabs) * grid.chunk_bytes
        yield Unit(slabs=tuple(slabs), reads=(read,), size=size)


def _slab_unit(stored: Tree, slab: Slab) -> Unit:
    """Returns the unit of a slab whose chunks are read one by one."""
    reads = []
    for ordinal, start, _ in slab.rows():
        row, within = stored.locate(ordinal)
        grid = stored.grids[row]
        reads.append(
            RegionRead(
                row=row,
                region=grid.region(within),
                start=start,
                shape=grid.chunk_shape,
            )
        )
    return Unit(slabs=((0, slab),), reads=tuple(reads), size=slab.size)
