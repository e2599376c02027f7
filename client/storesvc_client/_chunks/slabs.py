"""Slabs: bounded blocks of neighbouring chunks that are staged and sent together; and
the frames that carry chunks over the wire.

A slab holds the elements of its chunks back to back. A large chunk is a slab of its
own; small chunks share one. If the caller waits until the save is stored, a slab need
not be staged: the tree lends the memory that holds its chunks.

The checksums of chunks are computed while their bytes are sent, so that memory is read
once.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from storesvc.format import wire
from storesvc.format.checksums import ChunkHasher
from storesvc.format.chunks import I64, Sums
from storesvc.format.dtypes import CHECKSUM_BYTES
from storesvc.format.trees import Tree
from storesvc_client._chunks.memory import Bytes
from storesvc_client._rpc.connection import MAX_FRAME_BYTES
from storesvc_client._telemetry.progress import Meter
from storesvc_proto.v1 import chunk_service_pb2 as chunk_api
from storesvc_proto.v1 import upload_service_pb2 as api

SLAB_BYTES: Final = 4 << 20
"""Maximum size of a slab of several chunks."""

PIECE_BYTES: Final = 1 << 20
"""Bytes whose checksum is computed and that are then written at a time: they stay in
the processor's cache in between, so memory is read once. With fewer, threads wait for
the interpreter more often than they save reads."""


@dataclass(frozen=True, slots=True)
class Slab:
    """Neighbouring chunks of a tree."""

    first: int
    """Ordinal of the first chunk."""
    sizes: tuple[int, ...]
    """Size of each chunk's elements in bytes."""

    @property
    def ordinals(self) -> range:
        return range(self.first, self.first + len(self.sizes))

    @property
    def size(self) -> int:
        """Size of the slab in bytes."""
        return sum(self.sizes)

    @property
    def stored_bytes(self) -> int:
        """Stored size of its chunks in bytes."""
        return self.size + CHECKSUM_BYTES * len(self.sizes)

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """Yields ordinal, offset in the slab, and size in bytes of each chunk."""
        at = 0
        for ordinal, size in enumerate(self.sizes, self.first):
            yield ordinal, at, size
            at += size


def cut_slabs(tree: Tree, chunks: I64) -> list[Slab]:
    """Returns the slabs of the given chunks of a tree, ascending."""
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


class SumsInProgress:
    """The checksums of all chunks of a tree; each is set once."""

    def __init__(self, count: int) -> None:
        self._crc32c = np.zeros(count, np.uint32)
        self._digests = np.zeros((count, 16), np.uint8)
        self._known = np.zeros(count, np.bool_)

    def knows(self, ordinal: int) -> bool:
        """Returns whether the checksums of a chunk are set."""
        return bool(self._known[ordinal])

    def crc32c(self, ordinal: int) -> int:
        """Returns the CRC-32C of a chunk whose checksums are set."""
        return int(self._crc32c[ordinal])

    def set(self, ordinal: int, crc32c: int, digest: bytes) -> None:
        self._crc32c[ordinal] = crc32c
        self._digests[ordinal] = np.frombuffer(digest, np.uint8)
        self._known[ordinal] = True

    def copy(self, sums: Sums, rows: I64) -> None:
        """Copies the checksums of chunks from another save of the same tree."""
        self._crc32c[rows] = sums.crc32c[rows]
        self._digests[rows] = sums.digests[rows]
        self._known[rows] = True

    def result(self, ordinals: I64 | None = None) -> Sums:
        """Returns the checksums of the given chunks, ascending; of all if None."""
        at = np.arange(len(self._crc32c)) if ordinals is None else ordinals
        return Sums(ordinal=at, crc32c=self._crc32c[at], digests=self._digests[at])


@dataclass(slots=True, eq=False)
class FilledSlab:
    """A slab with its bytes."""

    slab: Slab
    wanted: Sequence[int]
    """Ordinals of its chunks that are to be stored."""
    buffer: "Bytes | None"
    """Its staging buffer; None if the memory is lent."""
    lent: "Sequence[Sequence[Bytes]]" = ()
    """The elements of each of its chunks if lent, one range after another."""
    returned: Callable[[], None] | None = None
    """Called when lent memory is no longer read; None if its owner keeps it."""

    @property
    def wanted_bytes(self) -> int:
        """Stored size of the wanted chunks, in bytes."""
        return sum(size + CHECKSUM_BYTES for _, _, size in self._wanted_rows())

    def sum_up(
        self, sums: SumsInProgress, meter: Meter, chunks: Container[int]
    ) -> None:
        """Computes the checksums of the wanted chunks that are in `chunks`."""
        with meter.phase("digest"):
            for ordinal, at, size in self._wanted_rows():
                if sums.knows(ordinal) or ordinal not in chunks:
                    continue
                summing = ChunkHasher()
                for piece in _pieces(self._runs(ordinal, at, size)):
                    summing.add(piece)
                sums.set(ordinal, summing.crc32c, summing.digest)

    def stored(
        self, sums: SumsInProgress, meter: Meter
    ) -> Iterator[tuple[int, int, Iterator[memoryview]]]:
        """Yields each wanted chunk in stored form: ordinal, size in bytes, and its
        parts; computes the checksums while the parts are consumed."""
        if len(self.wanted) * PIECE_BYTES > self.slab.size:  # small chunks: one pass
            self.sum_up(sums, meter, self.wanted)
        for ordinal, at, size in self._wanted_rows():
            runs = self._runs(ordinal, at, size)
            parts = self._parts(ordinal, runs, sums, meter)
            yield ordinal, size + CHECKSUM_BYTES, parts

    def _parts(
        self, ordinal: int, runs: "Sequence[Bytes]", sums: SumsInProgress, meter: Meter
    ) -> Iterator[memoryview]:
        if sums.knows(ordinal):
            yield from (run.data for run in runs)
        else:
            summing = ChunkHasher()
            for piece in _pieces(runs):
                since = meter.clock()
                summing.add(piece)
                meter.spend("digest", since)
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


_RECEIVED: Final = wire.tag(chunk_api.ReadChunksResponse.FRAME_FIELD_NUMBER)
_SENT: Final = wire.tag(api.WriteChunksRequest.FRAME_FIELD_NUMBER)


class SentFrame:
    """A frame that is being filled with pieces of chunks."""

    def __init__(self) -> None:
        self._columns = api.ChunkFrame()
        self._data: list[bytes | memoryview] = []
        self.size = 0
        """Bytes of the pieces added so far."""

    def add(self, chunk: int, offset: int, *parts: bytes | memoryview) -> None:
        """Adds a piece of a chunk, from an offset of the stored chunk in bytes; the
        memory of its parts must not change before ``request``."""
        length = sum(map(len, parts))
        self._columns.chunk.append(chunk)
        self._columns.offset.append(offset)
        self._columns.length.append(length)
        self._data += parts
        self.size += length

    def request(self) -> bytes:
        """Returns the serialized ``WriteChunksRequest`` with this frame."""
        return b"".join((wire.head(_SENT, self._columns, self.size), *self._data))


def frames(
    slabs: Iterable[FilledSlab], sums: SumsInProgress, meter: Meter
) -> Iterator[bytes]:
    """Yields the serialized requests that send slabs, and fills in the checksums; small
    chunks share a request, a large one takes several."""
    frame = SentFrame()
    for filled in slabs:
        for ordinal, size, parts in filled.stored(sums, meter):
            if frame.size and frame.size + size > MAX_FRAME_BYTES:
                yield frame.request()
                frame = SentFrame()
            if size <= MAX_FRAME_BYTES:
                frame.add(ordinal, 0, *parts)
                continue
            for at, piece in _cut(parts, MAX_FRAME_BYTES):
                frame.add(ordinal, at, *piece)
                yield frame.request()
                frame = SentFrame()
    if frame.size:
        yield frame.request()


def _cut(
    parts: Iterable[memoryview], size: int
) -> Iterator[tuple[int, list[memoryview]]]:
    """Cuts the concatenation of parts into pieces of a size; yields each with its
    offset."""
    piece: list[memoryview] = []
    begin = room = 0
    for part in parts:
        at = 0
        while at < len(part):
            room = room or size
            piece.append(part[at : at + room])
            at += len(piece[-1])
            room -= len(piece[-1])
            if not room:
                yield begin, piece
                piece, begin = [], begin + size
    if piece:
        yield begin, piece


def parse_frame(response: bytes) -> wire.Frame:
    """Returns the frame of a serialized ``ReadChunksResponse``, without a copy.

    Raises:
        DecodeError: The response is invalid.
    """
    found = wire.split(response, _RECEIVED)
    if found is None:  # an unusual field order, so let protobuf parse it
        frame = chunk_api.ReadChunksResponse.FromString(response).frame
        found = wire.Frame(frame, memoryview(frame.data))
    return found
