"""Slabs: chunks that are staged, written and given back together.

A slab holds stored chunks back to back, each with room for its checksum: as they will
lie in a data file. A large chunk is a slab of its own, small ones share one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from storesvc.format.checksums import crc32c, digest
from storesvc.format.trees import Tree
from storesvc.format.zarr import CHECKSUM_BYTES
from storesvc_client._staging import Bytes
from storesvc_client._sums import SumsInProgress

SLAB_BYTES: Final = 4 << 20
"""Small chunks share a slab up to so much."""


@dataclass(frozen=True, slots=True)
class Slab:
    """Neighbouring chunks of a tree."""

    first: int
    """Ordinal of the first."""
    lengths: tuple[int, ...]
    """Bytes of each as stored."""

    @property
    def size(self) -> int:
        """Bytes of all."""
        return sum(self.lengths)

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """Yields ordinal, offset in the slab and bytes of each chunk."""
        at = 0
        for ordinal, length in enumerate(self.lengths, self.first):
            yield ordinal, at, length
            at += length


def slabs_of(tree: Tree) -> list[Slab]:
    """Returns the slabs of all chunks of a tree, in their order."""
    found: list[Slab] = []
    lengths: list[int] = []
    first = size = 0
    for ordinal, length in enumerate(tree.stored_lengths.tolist()):
        if lengths and size + length > SLAB_BYTES:
            found.append(Slab(first, tuple(lengths)))
            first, size, lengths = ordinal, 0, []
        lengths.append(length)
        size += length
    if lengths:
        found.append(Slab(first, tuple(lengths)))
    return found


@dataclass(slots=True, eq=False)
class Filled:
    """A slab in memory."""

    slab: Slab
    buffer: Bytes
    wanted: Sequence[int]
    """Ordinals of the chunks in it that are to be stored."""

    @property
    def wanted_bytes(self) -> int:
        """Bytes of those, as stored."""
        return sum(self.slab.lengths[o - self.slab.first] for o in self.wanted)

    def seal(self, sums: SumsInProgress) -> None:
        """Makes the sums of its wanted chunks, and writes each checksum behind its
        chunk."""
        wanted = set(self.wanted)
        for ordinal, at, length in self.slab.rows():
            if ordinal not in wanted:
                continue
            elements = self.buffer[at : at + length - CHECKSUM_BYTES].data
            if not sums.knows(ordinal):
                sums.set(ordinal, crc32c(elements), digest(elements))
            tail = sums.crc32c(ordinal).to_bytes(CHECKSUM_BYTES, "little")
            self.buffer[at + length - CHECKSUM_BYTES : at + length] = np.frombuffer(
                tail, np.uint8
            )

    def stored(self) -> Iterator[tuple[int, memoryview]]:
        """Yields the wanted chunks as they are stored, once they are sealed."""
        wanted = set(self.wanted)
        for ordinal, at, length in self.slab.rows():
            if ordinal in wanted:
                yield ordinal, self.buffer[at : at + length].data
