"""Read units: the pieces of a checkpoint that streams read, buffer and share.

A data file is divided into windows of a fixed size. A unit is a sequence of chunks of
one manifest that are stored back to back and begin in the same window. The windows do
not depend on a request, so two requests for overlapping parts of a checkpoint mostly
have the same units.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from storesvc.format.chunks import I64
from storesvc.format.manifests import Manifest
from storesvc.format.wire import Part, parts_of

WINDOW_BYTES: Final = 8 << 20
"""Window of a data file; a unit exceeds it by one chunk at most."""


class Unit(NamedTuple):
    """Chunks that are read together."""

    manifest: Manifest
    place: str
    """Path of the data file in the bucket."""
    start: int
    """Offset of the first byte in the data file."""
    size: int
    """Length in bytes."""
    chunks: bytes
    """Ordinals (int64) in storage order; as bytes, because they compare and hash
    faster."""

    def ordinals(self) -> I64:
        """Returns the ordinals of its chunks, in storage order."""
        return np.frombuffer(self.chunks, np.int64)

    def parts(self) -> Iterator[Part]:
        """Yields the response messages that carry the unit: a header, and a range of
        the data file."""
        chunks = self.ordinals()
        lengths = self.manifest.places.length[chunks]
        yield from parts_of(self.start, chunks.tolist(), lengths.tolist())


def plan_units(manifest: Manifest, pool: str, chunks: I64) -> list[Unit]:
    """Returns the units that hold some chunks, in storage order.

    Args:
        manifest: Manifest of the checkpoint.
        pool: Path of the pool in the bucket.
        chunks: Ordinals of the chunks.
    """
    if not len(chunks):
        return []
    places = manifest.places
    file, offset = places.file[chunks], places.offset[chunks]
    order = np.lexsort((offset, file))
    chunks, file, offset = chunks[order], file[order], offset[order]
    stop, window = offset + places.length[chunks], offset // WINDOW_BYTES
    cut = file[1:] != file[:-1]
    cut |= offset[1:] != stop[:-1]
    cut |= window[1:] != window[:-1]
    bounds = [0, *(np.flatnonzero(cut) + 1).tolist(), len(chunks)]
    return [
        Unit(
            manifest,
            pool + places.files[file[a]],
            int(offset[a]),
            int(stop[b - 1] - offset[a]),
            chunks[a:b].tobytes(),
        )
        for a, b in pairwise(bounds)
    ]
