"""Assigns the chunks of a tree to the processes of a job that write or read them.

Every process computes the same assignment from shapes and shardings alone. A chunk to
be written is within what one process holds, so that no process needs bytes of another.
A chunk that several processes hold is written by one of them, such that all write about
the same number of bytes. A chunk that several processes need is read by one of them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from storesvc.format.grids import (
    MAX_CHUNK_BYTES,
    Grid,
    Region,
    choose_chunk_shape,
    least_bytes,
)

Holders: TypeAlias = frozenset[int]
"""Processes that hold or need something."""

SLACK_BYTES: Final = 4 << 20
"""Bytes by which a process may be ahead of others, so that neighbouring chunks go to
the same process."""


_KIB: Final = 1 << 10

_STEADY_PARTS: Final = ((48, 256 * _KIB), (24, 256 * _KIB), (12, 32 * _KIB), (4, 0))
"""Parts of a dimension, and the size of a chunk from which on it is divided into so
many: 48 can be shared by 2, 3, 4, 6, 8, 12, 16, 24 and 48 processes."""

_FEW_CHUNKS: Final = 48
"""Chunks of a leaf that may be of any size; more small ones would take long to plan."""

_COARSE_BYTES: Final = 32 * _KIB
"""Smallest chunk of a leaf of more."""


@dataclass(frozen=True, slots=True)
class Held:
    """The processes that hold each shard of a leaf."""

    shard_shape: tuple[int, ...]
    counts: tuple[int, ...]
    """Number of shards along each dimension."""
    holders: tuple[Holders, ...]
    """Processes that hold each shard, in C order."""

    def of(self, along: Sequence[range]) -> Holders:
        """Returns the processes that hold all shards of a block: ranges of shards along
        each dimension."""
        found: Holders | None = None
        for index in product(*along):
            at = 0
            for number, count in zip(index, self.counts, strict=True):
                at = at * count + number
            found = self.holders[at] if found is None else found & self.holders[at]
        return found or frozenset()


@lru_cache(maxsize=1024)  # a tree has many leaves but few shapes
def shared_chunk_shape(
    shape: tuple[int, ...], itemsize: int, held: Held
) -> tuple[int, ...]:
    """Returns the chunk shape of a leaf that several processes hold.

    Like ``choose_chunk_shape``, but every chunk is within what one process holds; if
    that is small, so are the chunks. Where it can be, the shape is the same for any
    number of processes, so that a save by fewer or more of them reuses chunks.
    """
    if 0 in shape:  # no chunk will be stored, and the sizes may be of any magnitude
        return choose_chunk_shape(shape, itemsize, held.shard_shape)
    if len(set(held.holders)) > 1:
        chunk_shape = _steady_chunk_shape(shape, itemsize, held)
        grid = Grid(shape, chunk_shape, itemsize)
        # rows that are cut along their last dimension would be millions of tiny chunks
        is_coarse = grid.count <= _FEW_CHUNKS or grid.chunk_bytes >= _COARSE_BYTES
        is_fit = is_coarse and grid.chunk_bytes <= MAX_CHUNK_BYTES
        if is_fit and all(holders_of_chunks(grid, held)):
            return chunk_shape
    chunk = [max(1, n) for n in held.shard_shape]
    size = math.prod(chunk) * itemsize
    # 1. Too large: cut, leading dimension first. Shards are cut evenly, because a chunk
    # must not extend into the next shard.
    for dim, n in enumerate(chunk):
        if size <= MAX_CHUNK_BYTES:
            break
        wanted = min(n, -(-size // MAX_CHUNK_BYTES))
        if held.counts[dim] > 1:
            wanted = next(k for k in range(wanted, n + 1) if n % k == 0)
        chunk[dim] = -(-n // wanted)
        size = math.prod(chunk) * itemsize
    # 2. Too small: join neighbouring shards, trailing dimension first.
    for dim in reversed(range(len(chunk))):
        wanted = min(-(-least_bytes(shape, chunk, dim) // size), held.counts[dim])
        whole = chunk[dim] == max(1, held.shard_shape[dim])
        taken = _count_joined(held, chunk, dim, wanted) if whole else 1
        chunk[dim] = min(chunk[dim] * taken, max(1, shape[dim]))
        size = math.prod(chunk) * itemsize
    return tuple(chunk)


def _steady_chunk_shape(
    shape: tuple[int, ...], itemsize: int, held: Held
) -> tuple[int, ...]:
    """Returns a chunk shape that does not depend on into how many shards the leading
    sharded dimension is divided; its chunks may be held by no process.

    That dimension is divided into parts whose number many numbers of processes divide,
    as far as the size of a chunk allows. The dimensions before it are divided into
    single rows, so that a chunk is a contiguous range of its shard.
    """
    dim = next(at for at, count in enumerate(held.counts) if count > 1)
    size, after = shape[dim], held.shard_shape[dim + 1 :]
    row_bytes = math.prod(after) * itemsize
    parts = 1
    for wanted, least in _STEADY_PARTS:
        parts = math.gcd(size, wanted)
        if size // parts * row_bytes >= least:
            break
    while size // parts * row_bytes > MAX_CHUNK_BYTES and not size // parts % 2:
        parts *= 2
    return (*(1,) * dim, size // parts, *after)


def _count_joined(held: Held, chunk: Sequence[int], dim: int, wanted: int) -> int:
    """Returns how many neighbouring shards, up to `wanted`, can share a chunk."""
    for taken in range(wanted, 1, -1):
        larger = list(chunk)
        larger[dim] *= taken
        shape = [n * c for n, c in zip(held.shard_shape, held.counts, strict=True)]
        blocks = product(*_blocks(held, larger, shape))
        if all(held.of(block) for block in blocks):
            return taken
    return 1


def _blocks(
    held: Held, chunk: Sequence[int], shape: Sequence[int]
) -> Iterator[list[range]]:
    """Yields, for each dimension, the ranges of shards of the chunks along it."""
    for size, n, shard in zip(chunk, shape, held.shard_shape, strict=True):
        yield [
            range(at // shard, -(-min(at + size, n) // shard))
            for at in range(0, n, size)
        ]


@lru_cache(maxsize=1024)
def holders_of_chunks(grid: Grid, held: Held) -> tuple[Holders, ...]:
    """Returns the processes that hold each chunk of a leaf."""
    if grid.count == 0:
        return ()
    along = product(*_blocks(held, grid.chunk_shape, grid.shape))
    return tuple(held.of(block) for block in along)


def needers_of_chunks(
    grid: Grid, regions: Mapping[Region, Holders]
) -> dict[int, Holders]:
    """Returns the processes that need each chunk of a leaf, from those that need each
    region; without unneeded chunks."""
    found: dict[int, Holders] = {}
    for region, of in regions.items():
        for within in grid.covering(region):
            before = found.get(within)
            found[within] = of if before is None or before == of else before | of
    return found


def assign_chunks(
    holders: Sequence[Holders], sizes: Sequence[int], *, count: int
) -> NDArray[np.int64]:
    """Returns the process that writes, or reads, each chunk, from those that hold, or
    need, it."""
    load = np.zeros(count, np.int64)
    writers = np.zeros(len(sizes), np.int64)
    shared = []
    for chunk, of in enumerate(holders):
        if len(of) == 1:
            (writers[chunk],) = of
            load[writers[chunk]] += sizes[chunk]
        else:
            shared.append(chunk)
    rows: dict[Holders, NDArray[np.int64]] = {}
    last = 0
    for chunk in shared:
        of = holders[chunk]
        if of not in rows:
            rows[of] = np.array(sorted(of), np.int64)
        least = int(rows[of][np.argmin(load[rows[of]])])
        if last not in of or load[last] - load[least] > SLACK_BYTES:
            last = least
        writers[chunk] = last
        load[last] += sizes[chunk]
    return writers
