"""Batches: the chunks of one stream that become one data file, checked on arrival.

Frames carry chunks back to back. The data file holds the bytes of the frames in the
order in which they arrive, so nothing is copied or reordered.
"""

from dataclasses import dataclass, field
from typing import Final

from storesvc.errors import InvalidChunkError, StalledError
from storesvc.format.checksums import ChunkHasher
from storesvc.format.chunks import ChunkLocations, Sums
from storesvc.format.dtypes import CHECKSUM_BYTES
from storesvc.format.trees import Tree
from storesvc.format.wire import Frame

BATCH_BYTES: Final = 64 << 20
"""Size at which a batch ends; it exceeds this by one chunk at most."""

BATCH_SECONDS: Final = 5.0
"""Age at which a batch ends, so that chunks of a slow client are acknowledged and its
permit is released as soon as the permits of other clients."""

BATCH_CHUNKS: Final = 10_000
"""Chunks at which a batch ends: their rows take 4 MiB, even if their bytes are in a
file."""

CHUNK_SECONDS: Final = 60.0
"""Time from the first to the last byte of a chunk, at most."""

CHUNK_OVERHEAD_BYTES: Final = 400
"""Estimated memory of a chunk in addition to its bytes."""

FRAME_BYTES: Final = 2 << 20
"""Maximum bytes of data in a frame."""


@dataclass(slots=True)
class _OpenChunk:
    """A chunk that is not complete yet."""

    chunk: int
    since: float
    at: int
    """Offset of its first byte in the data file."""
    length: int
    """Its length in bytes, checksum included."""
    held: int = 0
    """Bytes received so far."""
    summing: ChunkHasher = field(default_factory=ChunkHasher)
    tail: bytes = b""
    """The checksum that it carries, as far as received."""

    def add(self, piece: memoryview) -> None:
        """Adds the next bytes of the chunk."""
        elements = max(0, self.length - CHECKSUM_BYTES - self.held)
        self.summing.add(piece[:elements])
        self.tail += piece[elements:]
        self.held += len(piece)


class Batch:
    """The chunks of one data file that is being written."""

    def __init__(self, tree: Tree, *, now: float) -> None:
        self._tree = tree
        self._rows: dict[int, tuple[int, bytes, int]] = {}
        """CRC-32C, digest and offset in the data file, by ordinal of the chunk."""
        self._open: _OpenChunk | None = None
        self.began = now
        self.file_bytes = 0
        """Bytes of the data file."""
        self.completed = 0
        """Chunks completed; a chunk that arrives twice counts twice."""

    @property
    def size_bytes(self) -> int:
        """Upper estimate of the memory that the batch takes."""
        return self.file_bytes + CHUNK_OVERHEAD_BYTES * len(self._rows)

    @property
    def is_whole(self) -> bool:
        """True if no chunk is incomplete."""
        return self._open is None

    def is_due(self, now: float) -> bool:
        """Returns whether the batch must end without waiting for more chunks."""
        return self.is_whole and (
            self.size_bytes >= BATCH_BYTES
            or len(self._rows) >= BATCH_CHUNKS
            or now - self.began >= BATCH_SECONDS
        )

    def check_progress(self, now: float) -> None:
        """Rejects a chunk that takes too long, because other streams need the permit.

        Raises:
            StalledError: The current chunk is older than ``CHUNK_SECONDS``.
        """
        if self._open is not None and now - self._open.since > CHUNK_SECONDS:
            raise StalledError(
                f"{self._tree.describe_chunk(self._open.chunk)} was not complete "
                f"{CHUNK_SECONDS:.0f} s after its first byte; send it again"
            )

    def add_frame(self, received: Frame, *, now: float) -> None:
        """Adds a frame, whose bytes come next in the data file.

        Raises:
            InvalidChunkError: The frame does not fit the leaf table, or the checksum
                of a chunk does not match.
        """
        frame, data = received
        if not 0 < len(frame.chunk) == len(frame.offset) == len(frame.length):
            raise InvalidChunkError(
                f"frame: expected columns of one length, got {len(frame.chunk)}, "
                f"{len(frame.offset)} and {len(frame.length)}"
            )
        if not sum(frame.length) == len(data) <= FRAME_BYTES:
            raise InvalidChunkError(
                f"frame: expected {sum(frame.length)} bytes, at most {FRAME_BYTES}, "
                f"got {len(data)}"
            )
        at = 0
        for chunk, offset, length in zip(
            frame.chunk, frame.offset, frame.length, strict=True
        ):
            self._add(chunk, offset, data[at : at + length], now)
            at += length

    def _add(self, chunk: int, offset: int, data: memoryview, now: float) -> None:
        """Adds the next bytes of the open chunk, or the first bytes of another one."""
        if not 0 <= chunk < self._tree.chunk_count:
            raise InvalidChunkError(
                f"chunk {chunk}: the tree has {self._tree.chunk_count} chunks"
            )
        if self._open is not None and chunk != self._open.chunk:
            raise InvalidChunkError(
                f"{self._tree.describe_chunk(chunk)}: expected the rest of "
                f"{self._tree.describe_chunk(self._open.chunk)} first"
            )
        length = int(self._tree.lengths[chunk])
        current = self._open or _OpenChunk(chunk, now, self.file_bytes, length)
        if offset != current.held or not 0 < len(data) <= length - offset:
            raise InvalidChunkError(
                f"{self._tree.describe_chunk(chunk)}: expected bytes "
                f"{current.held} to {length}, got {offset} to {offset + len(data)}"
            )
        current.add(data)
        self.file_bytes += len(data)
        self._open = current
        if current.held == length:
            self._complete(current)

    def _complete(self, chunk: _OpenChunk) -> None:
        expected, actual = int.from_bytes(chunk.tail, "little"), chunk.summing.crc32c
        if actual != expected:
            raise InvalidChunkError(
                f"{self._tree.describe_chunk(chunk.chunk)}: expected the checksum "
                f"{expected:08x} that it carries, got {actual:08x}; it was corrupted "
                "in transit, send it again"
            )
        self._rows[chunk.chunk] = (actual, chunk.summing.digest, chunk.at)
        self._open = None
        self.completed += 1

    def table(self, file: str) -> tuple[Sums, ChunkLocations]:
        """Returns the checksums and the locations of its chunks, ascending by ordinal.

        Args:
            file: The name of the data file, relative to the pool.
        """
        rows = sorted(self._rows.items())
        lengths = self._tree.lengths
        return (
            Sums.of_rows(
                [(chunk, crc32c, digest) for chunk, (crc32c, digest, _) in rows]
            ),
            ChunkLocations.of_rows(
                [(file, at, int(lengths[chunk])) for chunk, (_, _, at) in rows]
            ),
        )
