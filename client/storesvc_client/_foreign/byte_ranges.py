"""Plans which bytes of a row-major array a region needs.

A region is read in pieces. A piece is either a contiguous range, or a range that covers
parts with small gaps between them, which cost less to read than a request for each.

>>> [(p.start, p.stop) for p in pieces((4, 8), ((1, 3), (0, 8)), itemsize=2)]
[(16, 48)]
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from storesvc.format.grids import Region

MAX_PIECE_BYTES: Final = 16 << 20
"""Maximum bytes of a piece, so memory for a read is bounded."""

MAX_GAP_BYTES: Final = 256 << 10
"""Maximum bytes that are read and not needed, between two parts of a piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A range of bytes that holds a part of a region."""

    start: int
    """Offset in the array, in bytes."""
    stop: int
    region: Region
    """Part of the region that it holds."""
    is_contiguous: bool
    """True if the range holds nothing else."""


def pieces(shape: tuple[int, ...], region: Region, *, itemsize: int) -> Iterator[Piece]:
    """Yields the pieces of a region, ascending.

    Args:
        shape: Shape of the array.
        region: Region within it.
        itemsize: Bytes of an element.
    """
    if any(start >= stop for start, stop in region):
        return
    strides = strides_of(shape, itemsize=itemsize)
    left = [region]
    while left:
        box = left.pop()
        piece = _piece(box, strides, itemsize)
        size = piece.stop - piece.start
        fits = size <= MAX_PIECE_BYTES or all(b - a == 1 for a, b in box)
        if fits and (
            piece.is_contiguous or _gap(box, strides, itemsize) <= MAX_GAP_BYTES
        ):
            yield piece
        else:
            first, second = _halves(box)
            left += [second, first]


def strides_of(shape: tuple[int, ...], *, itemsize: int) -> tuple[int, ...]:
    """Returns the bytes between neighbours along each dimension."""
    sizes = accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)
    return tuple(itemsize * n for n in reversed(list(sizes)))[: len(shape)]


def _piece(box: Region, strides: tuple[int, ...], itemsize: int) -> Piece:
    start = sum(a * n for (a, _), n in zip(box, strides, strict=True))
    last = sum((b - 1) * n for (_, b), n in zip(box, strides, strict=True))
    stop = last + itemsize
    needed = math.prod(b - a for a, b in box) * itemsize
    return Piece(
        start=start, stop=stop, region=box, is_contiguous=needed == stop - start
    )


def _gap(box: Region, strides: tuple[int, ...], itemsize: int) -> int:
    """Returns the largest number of bytes between two parts of a box."""
    below, largest = itemsize, 0
    for (start, stop), stride in zip(reversed(box), reversed(strides), strict=True):
        if stop - start > 1:
            largest = max(largest, stride - below)
        below += (stop - start - 1) * stride
    return largest


def _halves(box: Region) -> tuple[Region, Region]:
    """Divides a box along its first dimension that is longer than 1."""
    dim = next(d for d, (a, b) in enumerate(box) if b - a > 1)
    start, stop = box[dim]
    middle = (start + stop) // 2
    return (
        (*box[:dim], (start, middle), *box[dim + 1 :]),
        (*box[:dim], (middle, stop), *box[dim + 1 :]),
    )
