"""Units: what streams of one checkpoint read, keep and share.

A data file is cut into windows, whoever asks for what. A unit is some chunks of one
manifest that lie back to back and begin in one window: so two requests for the same
part of a checkpoint come to the same units, wherever else they differ.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from storesvc.format.chunks import I64
from storesvc.format.frames import Part, parts_of
from storesvc.format.manifests import Manifest

WINDOW_BYTES: Final = 8 << 20
"""Of a data file; a unit exceeds it by a chunk at most."""


class Unit(NamedTuple):
    """Chunks that are read together."""

    manifest: Manifest
    place: str
    """Of the data file."""
    start: int
    size: int
    """Bytes."""
    chunks: bytes
    """Ordinals (int64), as the chunks lie: soon compared, however many there are."""

    def ordinals(self) -> I64:
        """Returns those of its chunks, as they lie."""
        return np.frombuffer(self.chunks, np.int64)

    def parts(self) -> Iterator[Part]:
        """Yields the responses that carry it."""
        chunks = self.ordinals()
        lengths = self.manifest.places.length[chunks]
        yield from parts_of(self.start, chunks.tolist(), lengths.tolist())


def plan_units(manifest: Manifest, pool: str, chunks: I64) -> list[Unit]:
    """Returns the units that hold chunks, in the order in which they lie."""
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
