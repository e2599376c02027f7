"""Chunk grids: how a leaf is divided into chunks, and which chunks a region needs.

A chunk is the unit of storage, checksums and transfer. It is large enough to be worth a
request, and small enough that readers read little more than they need. Chunks are cut
along the shards of the save, leading dimensions first, so that a chunk is one
contiguous range of its shard wherever possible.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import Any, Final, TypeAlias

from numpy.typing import NDArray

MIN_CHUNK_BYTES: Final = 4 << 20
"""Shards smaller than this share a chunk with those that follow them in the leaf."""

MIN_STRIDED_BYTES: Final = 1 << 20
"""Shards smaller than this also share a chunk with neighbours whose rows alternate with
their own. Such a chunk is a contiguous range of no shard, so each of its bytes is
copied once more."""

MAX_CHUNK_BYTES: Final = 16 << 20
"""Shards larger than this are divided."""

MAX_RANK: Final = 32
"""Maximum dimensions of a leaf; TensorStore's limit."""

MAX_ELEMENTS: Final = 2**58
"""Maximum elements of a leaf, with each size of 0 counted as 1. Of any dtype they are
at most 2^62 bytes, so no sum overflows an int64, and neither do the sizes that
libraries of arrays multiply, also of an array without elements."""

_MAX_TRIES: Final = 1 << 16

Region: TypeAlias = tuple[tuple[int, int], ...]
"""``(start, stop)`` for each dimension."""


def shape_problem(shape: Sequence[int]) -> str | None:
    """Returns why no leaf may have a shape; None if one may."""
    if len(shape) > MAX_RANK:
        return f"expected at most {MAX_RANK} dimensions, got {len(shape)}"
    if math.prod(n or 1 for n in shape) > MAX_ELEMENTS:
        return (
            f"expected at most {MAX_ELEMENTS} elements, each size of 0 counted as 1, "
            f"got the shape {tuple(shape)}"
        )
    return None


def whole(shape: Sequence[int]) -> Region:
    return tuple((0, n) for n in shape)


def intersection(a: Region, b: Region) -> Region:
    """Returns the intersection of two regions; sizes may be 0, but not negative."""
    shared = ((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return tuple((start, max(start, stop)) for start, stop in shared)


def part(array: NDArray[Any], holds: Region, wanted: Region) -> NDArray[Any]:
    """Returns a view of an array's part of `wanted`; the array has the region
    `holds`."""
    index: tuple[Any, ...] = tuple(
        slice(p - r, q - r)
        for (p, q), (r, _) in zip(intersection(wanted, holds), holds, strict=True)
    )
    # The ellipsis makes a view also of an array without dimensions.
    view: NDArray[Any] = array[(*index, ...)]
    return view


@dataclass(frozen=True, slots=True)
class Grid:
    """The regular chunk grid of one leaf, with chunks numbered in C order."""

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    itemsize: int
    """Bytes of an element."""
    counts: tuple[int, ...] = field(init=False, compare=False, repr=False)
    """Chunks along each dimension."""
    count: int = field(init=False, compare=False, repr=False)
    """Number of chunks; 0 for a leaf without elements."""

    def __post_init__(self) -> None:
        along = zip(self.shape, self.chunk_shape, strict=True)
        counts = tuple(-(-n // c) for n, c in along)
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "count", math.prod(counts))

    @property
    def chunk_bytes(self) -> int:
        """Bytes of every chunk; chunks at the far edges are stored whole, too."""
        return math.prod(self.chunk_shape) * self.itemsize

    @property
    def leaf_bytes(self) -> int:
        """Bytes of the leaf's own elements."""
        return math.prod(self.shape) * self.itemsize

    def index(self, chunk: int) -> tuple[int, ...]:
        """Returns the position of a chunk in the grid."""
        index = []
        for count in reversed(self.counts):
            chunk, at = divmod(chunk, count)
            index.append(at)
        return tuple(reversed(index))

    def region(self, chunk: int) -> Region:
        """Returns the region of a chunk, clipped to the leaf's shape."""
        return tuple(
            (at * c, min(at * c + c, n))
            for at, c, n in zip(
                self.index(chunk), self.chunk_shape, self.shape, strict=True
            )
        )

    def covering(self, region: Region) -> Iterator[int]:
        """Yields the chunks that overlap a region, ascending."""
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

    At most ``MAX_CHUNK_BYTES``, and at least as many as ``least_bytes`` says unless the
    leaf is smaller; every size >= 1, even if the shape has a 0.
    """
    chunk = [max(1, n) for n in shard_shape]
    size = math.prod(chunk) * itemsize
    # Too large: divide, leading dimension first.
    for dim, n in enumerate(chunk):
        if size <= MAX_CHUNK_BYTES:
            break
        chunk[dim] = -(-n // _parts(n, -(-size // MAX_CHUNK_BYTES)))
        size = math.prod(chunk) * itemsize
    # Too small: add neighbouring shards, trailing dimension first.
    for dim in reversed(range(len(chunk))):
        shards = -(-max(1, shape[dim]) // chunk[dim])
        wanted = -(-least_bytes(shape, chunk, dim) // size)
        if shards == 1 or wanted <= 1:
            continue
        taken = min(_parts(shards, wanted), shards)
        chunk[dim] = min(chunk[dim] * taken, max(1, shape[dim]))
        size = math.prod(chunk) * itemsize
    return tuple(chunk)


def least_bytes(shape: Sequence[int], chunk: Sequence[int], dim: int) -> int:
    """Returns the bytes below which neighbours along a dimension share a chunk.

    Args:
        chunk: Shape of the chunk so far.
    """
    is_contiguous = all(n == 1 for n in chunk[:dim]) and all(
        n >= m for n, m in zip(chunk[dim + 1 :], shape[dim + 1 :], strict=True)
    )
    return MIN_CHUNK_BYTES if is_contiguous else MIN_STRIDED_BYTES


def _parts(n: int, wanted: int) -> int:
    """The number of parts, from `wanted` to n, into which to divide n: one that divides
    n evenly, if one is at most twice `wanted` and is found soon."""
    if wanted >= n:
        return n
    most = min(2 * wanted, n, wanted + _MAX_TRIES)
    even = (k for k in range(wanted, most + 1) if n % k == 0)
    return next(even, wanted)
