"""Reads the elements of leaves in the order in which a format stores them.

The elements of a tensor are cut into windows: regions that follow each other in C
order. A window ends where a row of chunks ends, so that each chunk is read once, unless
a row of chunks is larger than ``WINDOW_BYTES``: then its chunks are read again for each
part of it. The windows of small tensors are read together, and the next batch is read
while the previous one is written.

>>> list(windows((4, 6), (2, 3), itemsize=1, limit=12))
[((0, 2), (0, 6)), ((2, 4), (0, 6))]
>>> list(windows((4, 6), (4, 3), itemsize=1, limit=12))
[((0, 2), (0, 6)), ((2, 4), (0, 6))]
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import Region
from storesvc.storage.threads import Threads
from storesvc_client._chunks.buffer_layout import Buffer
from storesvc_client._export.source import Source
from storesvc_client._values.progress import Meter
from storesvc_client.errors import InvalidRequestError

WINDOW_BYTES: Final = 64 << 20
"""Maximum bytes of a window, and of windows that are read together. An export holds two
batches in memory: one that is read, and one that is written."""


TRANSPOSED_BYTES: Final = 256 << 20
"""Maximum bytes of a window of a transposed tensor. Such windows cross the rows of
chunks, so that each window reads its part of the same chunks again: fewer windows read
less."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A region of a leaf."""

    row: int
    region: Region

    def size_bytes(self, itemsize: int) -> int:
        """Returns the bytes of its elements."""
        return math.prod(stop - start for start, stop in self.region) * itemsize


def windows(
    shape: Sequence[int],
    chunk_shape: Sequence[int],
    *,
    itemsize: int,
    limit: int = WINDOW_BYTES,
) -> Iterator[Region]:
    """Yields regions that follow each other in C order and cover an array once.

    Args:
        shape: Shape of the array; nothing is yielded if a size is 0.
        chunk_shape: Shape of its chunks.
        itemsize: Bytes of an element.
        limit: Maximum bytes of a region; one element may be larger.
    """
    if 0 in shape:
        return
    # 1. Lead with as few single indices as make the rest of a row fit.
    dim, inner = 0, math.prod(shape[1:]) * itemsize
    while dim + 1 < len(shape) and inner > limit:
        dim += 1
        inner //= shape[dim]
    if not shape:
        yield ()
        return
    # 2. Take as many rows as fit: whole chunks, if a row of chunks fits.
    step = max(1, limit // max(1, inner))
    if step >= chunk_shape[dim]:
        step -= step % chunk_shape[dim]
    rest = tuple((0, n) for n in shape[dim + 1 :])
    for lead in product(*map(range, shape[:dim])):
        before = tuple((at, at + 1) for at in lead)
        for start in range(0, shape[dim], step):
            yield (*before, (start, min(start + step, shape[dim])), *rest)


def read_in_order(
    source: Source, pieces: Iterable[Piece], meter: Meter
) -> Iterator[NDArray[Any]]:
    """Yields the elements of pieces, in their order; reads ahead by one batch.

    Args:
        source: The checkpoint.
        pieces: Distinct pieces with at least one element each.
        meter: Gets the times of the reads.

    Raises:
        StoreError: Stored bytes are missing or damaged.
    """
    with Threads(1, "storesvc-export") as reader:
        batches = _batches(source, pieces)
        batch = next(batches, None)
        reading = reader.submit(_read, source, batch, meter) if batch else None
        while reading is not None:
            pieces_read, arrays = batch, reading.result()
            batch = next(batches, None)
            reading = reader.submit(_read, source, batch, meter) if batch else None
            for piece in pieces_read or ():
                yield arrays.pop(piece)


def _batches(source: Source, pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Cuts pieces into batches of at most ``WINDOW_BYTES``, or one larger piece."""
    batch: list[Piece] = []
    held = 0
    for piece in pieces:
        size = piece.size_bytes(source.tree.grids[piece.row].itemsize)
        if batch and held + size > WINDOW_BYTES:
            yield batch
            batch, held = [], 0
        batch.append(piece)
        held += size
    if batch:
        yield batch


def _read(
    source: Source, batch: Sequence[Piece], meter: Meter
) -> dict[Piece, NDArray[Any]]:
    wanted: dict[int, list[Region]] = defaultdict(list)
    for piece in batch:
        wanted[piece.row].append(piece.region)
    found: dict[Piece, NDArray[Any]] = {}

    def place(buffer: Buffer) -> None:
        arrays = zip(buffer.regions, buffer.arrays, strict=True)
        found.update((Piece(buffer.row, region), array) for region, array in arrays)

    source.read(wanted.items(), place, meter)
    return found


def cast_array(array: NDArray[Any], dtype: str, place: str) -> NDArray[Any]:
    """Returns an array of another floating-point dtype.

    Args:
        array: The array.
        dtype: Name of the dtype.
        place: Name of the leaf, for the message.

    Raises:
        InvalidRequestError: A finite element exceeds the range of the dtype.
    """
    if array.dtype == DTYPES[dtype]:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(DTYPES[dtype])
    if not np.array_equal(np.isfinite(array), np.isfinite(cast)):
        raise InvalidRequestError(
            f"{place}: expected elements in the range of {dtype}, got larger ones of "
            f"{array.dtype}; leave the cast out, or choose a dtype of a larger range"
        )
    return cast


def raw_bytes(array: NDArray[Any]) -> memoryview:
    """Returns the bytes of an array in C order; arrays of ml_dtypes export no buffer,
    views of their bytes do."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
