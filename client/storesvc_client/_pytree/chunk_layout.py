"""Layout of a leaf: the shard and offset of each part of each of its chunks.

Leaves with one shape and one sharding share a layout. It is computed once and reused by
every save.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from storesvc.format.grids import Grid, Region, intersection

Index: TypeAlias = tuple[slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Part of a block that belongs to a chunk."""

    block: int
    """Index of the block in the leaf's blocks."""
    source: Index
    """Position in the block."""
    target: Index
    """Position in the chunk."""
    span: tuple[int, int, int] | None
    """Offset in the block, offset in the chunk and length, in bytes, if the piece is
    contiguous in both."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Layout:
    """Pieces of all chunks of a leaf."""

    pieces: Sequence[Sequence[Piece]]
    """Pieces of each chunk, ordered by their position in it."""
    is_padded: Sequence[bool]
    """For each chunk, True if it extends past the leaf."""
    is_joined: bool
    """True if the leaf is one chunk that consists of its blocks in order."""

    def contiguous_pieces(self, within: int) -> Sequence[Piece] | None:
        """Returns the pieces of a chunk if they are contiguous ranges in order, else
        None."""
        pieces, at = self.pieces[within], 0
        if self.is_padded[within]:
            return None
        for piece in pieces:
            if piece.span is None or piece.span[1] != at:
                return None
            at += piece.span[2]
        return pieces


@lru_cache(maxsize=4096)
def layout_of(grid: Grid, blocks: tuple[Region, ...]) -> Layout:
    """Returns the layout of a leaf.

    Args:
        grid: The grid of chunks.
        blocks: The regions that are stored on the host or on a device; they do not
            overlap.
    """
    pieces, is_padded = [], []
    for within in range(grid.count):
        region = grid.region(within)
        found = [
            _piece(grid, number, block, region)
            for number, block in enumerate(blocks)
            if _size(intersection(block, region))
        ]
        found.sort(key=lambda piece: [s.start for s in piece.target])
        pieces.append(tuple(found))
        is_padded.append(_lengths(region) != grid.chunk_shape)
    return Layout(
        pieces=tuple(pieces),
        is_padded=tuple(is_padded),
        is_joined=grid.count == 1 and not is_padded[0] and _are_joined(pieces[0]),
    )


def _are_joined(pieces: Sequence[Piece]) -> bool:
    at = 0
    for number, piece in enumerate(pieces):
        if piece.block != number or piece.span is None or piece.span[:2] != (0, at):
            return False
        at += piece.span[2]
    return True


def _piece(grid: Grid, number: int, block: Region, chunk: Region) -> Piece:
    shared = intersection(block, chunk)
    lengths = _lengths(shared)
    source = _index(shared, block)
    target = _index(shared, chunk)
    span = None
    if _is_contiguous(lengths, _lengths(block)) and _is_contiguous(
        lengths, grid.chunk_shape
    ):
        span = (
            _offset(source, _lengths(block)) * grid.itemsize,
            _offset(target, grid.chunk_shape) * grid.itemsize,
            _size(shared) * grid.itemsize,
        )
    return Piece(block=number, source=source, target=target, span=span)


def _is_contiguous(part: Sequence[int], whole: Sequence[int]) -> bool:
    """Returns whether a part of an array is contiguous, in C order."""
    split = next((dim for dim, n in enumerate(part) if n > 1), len(part))
    return list(part[split + 1 :]) == list(whole[split + 1 :])


def _offset(index: Index, shape: Sequence[int]) -> int:
    """Returns the offset in C order, in elements, of the first element of an index."""
    at = 0
    for part, n in zip(index, shape, strict=True):
        at = at * n + int(part.start)
    return at


def _index(part: Region, within: Region) -> Index:
    bounds: Any = zip(part, within, strict=True)
    return tuple(slice(a - first, b - first) for (a, b), (first, _) in bounds)


def _lengths(region: Region) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in region)


def _size(region: Region) -> int:
    size = 1
    for start, stop in region:
        size *= stop - start
    return size
