"""Reads: which ranges of which data files hold some chunks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from storesvc.format.chunks import I64, Places

READ_BYTES: Final = 16 << 20
"""Neighbouring chunks are read together up to so much."""


@dataclass(frozen=True, slots=True)
class Read:
    """A range of a data file that holds whole chunks, in the order they lie."""

    file: str
    start: int
    stop: int
    chunks: tuple[int, ...]
    lengths: tuple[int, ...]
    offsets: tuple[int, ...]
    """Of each chunk in the file. Back to back, unless gaps were asked for."""


def plan_reads(
    places: Places, chunks: I64, *, at_most: int | None = None, gap_bytes: int = 0
) -> Iterator[Read]:
    """Yields the reads that fetch chunks, in the order in which they lie.

    Args:
        places: Of all chunks.
        chunks: Which of them.
        at_most: Bytes of a read that holds more than one chunk; None: READ_BYTES.
        gap_bytes: What may lie between two chunks that are read together.
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
            # the last of the neighbours that still fits; the first always does
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
