"""Plans reads: the ranges of data files that hold some chunks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from storesvc.format.chunks import I64, ChunkLocations

READ_BYTES: Final = 16 << 20
"""Maximum bytes of neighbouring chunks that are read together."""


@dataclass(frozen=True, slots=True)
class Read:
    """A range of a data file that holds whole chunks, in the order of their offsets."""

    file: str
    start: int
    stop: int
    chunks: tuple[int, ...]
    lengths: tuple[int, ...]
    offsets: tuple[int, ...]
    """Offset of each chunk in the file. Consecutive, unless gaps were requested."""


def plan_reads(
    places: ChunkLocations,
    chunks: I64,
    *,
    at_most: int | None = None,
    gap_bytes: int = 0,
) -> Iterator[Read]:
    """Yields the reads that fetch chunks, ordered by file and offset.

    Args:
        places: Locations of all chunks.
        chunks: Rows of the chunks to fetch.
        at_most: Maximum bytes of a read of more than one chunk; None for READ_BYTES.
        gap_bytes: Maximum bytes between two chunks that are read together.
    """
    columns = (column[chunks] for column in (places.file, places.offset, places.length))
    file, offset, length = columns
    order = np.lexsort((offset, file))
    chunks, file, offset, length = (x[order] for x in (chunks, file, offset, length))
    gaps = offset[1:] - (offset[:-1] + length[:-1])
    apart = (file[1:] != file[:-1]) | (gaps < 0) | (gaps > gap_bytes)
    ends = [*(np.flatnonzero(apart) + 1).tolist(), len(order)]
    stops, at = offset + length, 0
    for end in ends if len(order) else ():
        while at < end:
            # The last neighbour that still fits; the first one always does.
            limit = int(offset[at]) + (at_most or READ_BYTES)
            to = at + int(np.searchsorted(stops[at:end], limit, side="right"))
            to = max(to, at + 1)
            yield Read(
                places.files[file[at]],
                int(offset[at]),
                int(stops[to - 1]),
                tuple(chunks[at:to].tolist()),
                tuple(length[at:to].tolist()),
                tuple(offset[at:to].tolist()),
            )
            at = to
