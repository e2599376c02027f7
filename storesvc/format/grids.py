"""Chunk grids: how a leaf is cut, and which chunks a region needs.

A chunk is the unit of storage, checksum and transfer. It is as large as keeps a
request worth its price, no larger than keeps a reader from waste, and it is cut
along the shards of the save, leading dimensions first, so that a chunk is one
contiguous run of its shard wherever that is possible.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import Any, Final, TypeAlias

from numpy.typing import NDArray

MIN_CHUNK_BYTES: Final = 4 << 20
"""Shards smaller than this share a chunk with their neighbours."""

MAX_CHUNK_BYTES: Final = 16 << 20
"""Shards larger than this are cut."""

MAX_RANK: Final = 32
"""Dimensions of a leaf; TensorStore's limit."""

Region: TypeAlias = tuple[tuple[int, int], ...]
"""``(start, stop)`` for each dimension."""


def whole(shape: Sequence[int]) -> Region:
    """Returns the region that is all of a leaf."""
    return tuple((0, n) for n in shape)


def intersection(a: Region, b: Region) -> Region:
    """Returns the region that two regions share; empty, at times, but never of a
    negative size."""
    shared = ((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return tuple((start, max(start, stop)) for start, stop in shared)


def part(array: NDArray[Any], holds: Region, wanted: Region) -> NDArray[Any]:
    """Returns what an array, that holds one region, has of another, as a view."""
    index: tuple[Any, ...] = tuple(
        slice(p - r, q - r)
        for (p, q), (r, _) in zip(intersection(wanted, holds), holds, strict=True)
    )
    # the ellipsis makes a view also where there is no dimension to index
    view: NDArray[Any] = array[(*index, ...)]
    return view


@dataclass(frozen=True, slots=True)
class Grid:
    """The regular chunk grid of one leaf. Chunks are numbered in C order."""

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    itemsize: int
    """Bytes of an element."""
    counts: tuple[int, ...] = field(init=False, compare=False, repr=False)
    """Chunks along each dimension."""
    count: int = field(init=False, compare=False, repr=False)
    """Chunks of the leaf: 0 where it has no element."""

    def __post_init__(self) -> None:
        along = zip(self.shape, self.chunk_shape, strict=True)
        counts = tuple(-(-n // c) for n, c in along)
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "count", math.prod(counts))

    @property
    def chunk_bytes(self) -> int:
        """Bytes of every chunk: those at the far edges are stored whole."""
        return math.prod(self.chunk_shape) * self.itemsize

    @property
    def leaf_bytes(self) -> int:
        """Bytes of the leaf's own elements."""
        return math.prod(self.shape) * self.itemsize

    def index(self, chunk: int) -> tuple[int, ...]:
        """Returns where a chunk lies in the grid."""
        index = []
        for count in reversed(self.counts):
            chunk, at = divmod(chunk, count)
            index.append(at)
        return tuple(reversed(index))

    def region(self, chunk: int) -> Region:
        """Returns the part of the leaf that a chunk holds, clipped to its shape."""
        return tuple(
            (at * c, min(at * c + c, n))
            for at, c, n in zip(
                self.index(chunk), self.chunk_shape, self.shape, strict=True
            )
        )

    def covering(self, region: Region) -> Iterator[int]:
        """Yields the chunks that hold any element of a region, ascending."""
        counts = self.counts
        if any(start >= stop for start, stop in region):
            return
        along = [
            range(start // c, -(-stop // c))
            for (start, stop), c in zip(region, self.chunk_shape, strict=True)
        ]
        for index in product(*along):
            chunk = 0
            for at, count in zip(index, counts, strict=True):
                chunk = chunk * count + at
            yield chunk


@lru_cache(maxsize=1024)  # a tree has many leaves, and few shapes
def choose_chunk_shape(
    shape: tuple[int, ...], itemsize: int, shard_shape: tuple[int, ...]
) -> tuple[int, ...]:
    """Returns the chunk shape for a leaf saved in shards of ``shard_shape``.

    At most ``MAX_CHUNK_BYTES``, and at least ``MIN_CHUNK_BYTES`` where the leaf
    is; every size >= 1, also where the shape has a 0.
    """
    chunk = [max(1, n) for n in shard_shape]
    size = math.prod(chunk) * itemsize
    # Too large: cut, leading dimension first.
    for dim, n in enumerate(chunk):
        if size <= MAX_CHUNK_BYTES:
            break
        chunk[dim] = -(-n // _parts(n, -(-size // MAX_CHUNK_BYTES)))
        size = math.prod(chunk) * itemsize
    # Too small: take neighbouring shards in, trailing dimension first.
    for dim in reversed(range(len(chunk))):
        if size >= MIN_CHUNK_BYTES:
            break
        shards = -(-max(1, shape[dim]) // chunk[dim])
        taken = min(_parts(shards, -(-MIN_CHUNK_BYTES // size)), shards)
        chunk[dim] = min(chunk[dim] * taken, max(1, shape[dim]))
        size = math.prod(chunk) * itemsize
    return tuple(chunk)


def _parts(n: int, wanted: int) -> int:
    """A number of parts >= wanted to cut n into, evenly where that costs at most
    twice the parts; at most n."""
    if wanted >= n:
        return n
    even = (k for k in range(wanted, min(2 * wanted, n) + 1) if n % k == 0)
    return next(even, wanted)
