"""Slabs: chunks that are staged, written and given back together.

A slab holds the elements of neighbouring chunks back to back. A large chunk is a slab
of its own, small ones share one.

Where the owner of a tree waits until it is stored, a slab need not be staged: the tree
lends the memory in which its chunks lie.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from storesvc.format.checksums import ChunkHasher
from storesvc.format.chunks import I64
from storesvc.format.trees import Tree
from storesvc.format.zarr import CHECKSUM_BYTES
from storesvc_client._chunks.chunk_checksums import SumsInProgress
from storesvc_client._chunks.staging_pool import Bytes
from storesvc_client._values.progress import Meter

SLAB_BYTES: Final = 4 << 20
"""Small chunks share a slab up to so much."""

PIECE_BYTES: Final = 256 << 10
"""The sums are made, and the bytes then written, of so much at a time: it is in the
processor's cache meanwhile, and memory is read once."""


@dataclass(frozen=True, slots=True)
class Slab:
    """Neighbouring chunks of a tree."""

    first: int
    """Ordinal of the first."""
    sizes: tuple[int, ...]
    """Bytes of the elements of each."""

    @property
    def size(self) -> int:
        """Bytes of all."""
        return sum(self.sizes)

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """Yields ordinal, offset in the slab and bytes of each chunk."""
        at = 0
        for ordinal, size in enumerate(self.sizes, self.first):
            yield ordinal, at, size
            at += size


def slabs_of(tree: Tree, chunks: I64) -> list[Slab]:
    """Returns the slabs of some chunks of a tree, ascending."""
    found: list[Slab] = []
    sizes: list[int] = []
    first = total = 0
    lengths = (tree.stored_lengths[chunks] - CHECKSUM_BYTES).tolist()
    for ordinal, size in zip(chunks.tolist(), lengths, strict=True):
        if sizes and (total + size > SLAB_BYTES or ordinal != first + len(sizes)):
            found.append(Slab(first, tuple(sizes)))
            total, sizes = 0, []
        if not sizes:
            first = ordinal
        sizes.append(size)
        total += size
    if sizes:
        found.append(Slab(first, tuple(sizes)))
    return found


@dataclass(slots=True, eq=False)
class Filled:
    """A slab in memory."""

    slab: Slab
    wanted: Sequence[int]
    """Ordinals of the chunks in it that are to be stored."""
    buffer: "Bytes | None"
    """Where it is staged; None: it is lent."""
    lent: "Sequence[Sequence[Bytes]]" = ()
    """The elements of each of its chunks then, one run after another."""

    @property
    def wanted_bytes(self) -> int:
        """Bytes of those, as stored."""
        return sum(size + CHECKSUM_BYTES for _, _, size in self._wanted_rows())

    def sum_up(self, sums: SumsInProgress, meter: Meter) -> None:
        """Makes the sums of its wanted chunks."""
        with meter.phase("digest"):
            for ordinal, at, size in self._wanted_rows():
                if sums.knows(ordinal):
                    continue
                summing = ChunkHasher()
                for piece in _pieces(self._runs(ordinal, at, size)):
                    summing.add(piece)
                sums.set(ordinal, summing.crc32c, summing.digest)

    def stored(
        self, sums: SumsInProgress, meter: Meter
    ) -> Iterator[tuple[int, int, Iterator[memoryview]]]:
        """Yields each wanted chunk as it is stored: its ordinal, its bytes, and its
        parts one after another, of which the sums are made as they are asked for."""
        if len(self.wanted) * PIECE_BYTES > self.slab.size:  # they fit the cache
            self.sum_up(sums, meter)
        for ordinal, at, size in self._wanted_rows():
            runs = self._runs(ordinal, at, size)
            parts = self._parts(ordinal, runs, sums, meter)
            yield ordinal, size + CHECKSUM_BYTES, parts

    def _parts(
        self,
        ordinal: int,
        runs: "Sequence[Bytes]",
        sums: SumsInProgress,
        meter: Meter,
    ) -> Iterator[memoryview]:
        if sums.knows(ordinal):
            yield from (run.data for run in runs)
        else:
            summing = ChunkHasher()
            for piece in _pieces(runs):
                since = meter.clock()
                summing.add(piece)
                meter.times["digest"] += meter.clock() - since
                yield piece
            sums.set(ordinal, summing.crc32c, summing.digest)
        yield memoryview(sums.crc32c(ordinal).to_bytes(CHECKSUM_BYTES, "little"))

    def _wanted_rows(self) -> Iterator[tuple[int, int, int]]:
        wanted = set(self.wanted)
        return (row for row in self.slab.rows() if row[0] in wanted)

    def _runs(self, ordinal: int, at: int, size: int) -> "Sequence[Bytes]":
        if self.buffer is None:
            return self.lent[ordinal - self.slab.first]
        return [self.buffer[at : at + size]]


def _pieces(runs: "Iterable[Bytes]") -> Iterator[memoryview]:
    for run in runs:
        for at in range(0, len(run), PIECE_BYTES):
            yield run[at : at + PIECE_BYTES].data
