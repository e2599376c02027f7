"""Slabs: chunks that are staged, written and given back together.

A slab holds stored chunks back to back, each with room for its checksum: as they will
lie in a data file. A large chunk is a slab of its own, small ones share one.

Where the owner of a tree waits until it is stored, a large chunk is not staged: the
tree lends the memory in which it lies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from storesvc.format.checksums import Summing
from storesvc.format.trees import Tree
from storesvc.format.zarr import CHECKSUM_BYTES
from storesvc_client._staging import Bytes
from storesvc_client._sums import SumsInProgress

SLAB_BYTES: Final = 4 << 20
"""Small chunks share a slab up to so much."""

PIECE_BYTES: Final = 256 << 10
"""Both sums are made of so much before the next: it is in the processor's cache then.
"""


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
    wanted: Sequence[int]
    """Ordinals of the chunks in it that are to be stored."""
    buffer: "Bytes | None"
    """Where it is staged; None: it is one chunk, and lent."""
    lent: "Sequence[Bytes]" = ()
    """The elements of that chunk, one run after another."""
    _checksum: bytes = field(default=b"", init=False)
    """What is stored behind its last chunk, once that is sealed."""

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
            end = at + length - CHECKSUM_BYTES
            if not sums.knows(ordinal):
                runs = self.lent if self.buffer is None else [self.buffer[at:end]]
                sums.set(ordinal, *_summed(runs))
            self._checksum = sums.crc32c(ordinal).to_bytes(CHECKSUM_BYTES, "little")
            if self.buffer is not None:
                into = self.buffer[end : end + CHECKSUM_BYTES]
                into[:] = np.frombuffer(self._checksum, np.uint8)

    def stored(self) -> Iterator[tuple[int, Sequence[memoryview]]]:
        """Yields the wanted chunks as they are stored, once they are sealed: each in
        parts that follow one another."""
        wanted = set(self.wanted)
        for ordinal, at, length in self.slab.rows():
            if ordinal not in wanted:
                continue
            if self.buffer is None:
                runs = [run.data for run in self.lent]
                yield ordinal, [*runs, memoryview(self._checksum)]
            else:
                yield ordinal, [self.buffer[at : at + length].data]


def _summed(runs: "Sequence[Bytes]") -> tuple[int, bytes]:
    """The checksum and the digest of a chunk's elements."""
    summing = Summing()
    for run in runs:
        for at in range(0, len(run), PIECE_BYTES):
            summing.add(run[at : at + PIECE_BYTES].data)
    return summing.crc32c, summing.digest
