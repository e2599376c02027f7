"""A batch: the chunks of a stream that become one data file, checked as they come.

What comes is back to back already, chunk by chunk: the bytes of the frames, one after
another, are what the file holds.
"""

from dataclasses import dataclass, field
from typing import Final

from storesvc.errors import InvalidChunkError, StalledError
from storesvc.format.checksums import ChunkHasher
from storesvc.format.chunks import Places, Sums
from storesvc.format.trees import Tree
from storesvc.format.wire import Frame
from storesvc.format.zarr import CHECKSUM_BYTES

BATCH_BYTES: Final = 64 << 20
"""A batch ends once it holds so much; it exceeds it by a chunk at most."""

BATCH_SECONDS: Final = 5.0
"""A batch ends when it is so old, so that a slow client is acknowledged and holds its
place no longer than others do."""

BATCH_CHUNKS: Final = 10_000
"""A batch ends once it holds so many: their rows take 4 MiB, also where their bytes are
in a file."""

CHUNK_SECONDS: Final = 60.0
"""A chunk must be complete so long after its first byte."""

CHUNK_OVERHEAD_BYTES: Final = 400
"""What a chunk takes in memory beside its bytes, about."""

FRAME_BYTES: Final = 2 << 20
"""Bytes of data in a frame that a client sends, at most."""


@dataclass(slots=True)
class _Open:
    """A chunk that is not complete yet."""

    chunk: int
    since: float
    at: int
    """Where in the data file it begins."""
    length: int
    """Bytes, checksum included."""
    held: int = 0
    summing: ChunkHasher = field(default_factory=ChunkHasher)
    tail: bytes = b""

    def add(self, piece: memoryview) -> None:
        """Adds its next piece."""
        elements = max(0, self.length - CHECKSUM_BYTES - self.held)
        self.summing.add(piece[:elements])
        self.tail += piece[elements:]
        self.held += len(piece)


class Batch:
    """Chunks on their way to one data file."""

    def __init__(self, tree: Tree, *, now: float) -> None:
        self._tree = tree
        self._rows: dict[int, tuple[int, bytes, int]] = {}
        """Of each chunk its sums, and where it begins."""
        self._open: _Open | None = None
        self.began = now
        self.file_bytes = 0
        """Bytes of the data file."""
        self.completed = 0
        """Chunks completed; the same one twice is two."""

    @property
    def size_bytes(self) -> int:
        """What it takes in memory at most, about."""
        return self.file_bytes + CHUNK_OVERHEAD_BYTES * len(self._rows)

    @property
    def is_whole(self) -> bool:
        """Whether no chunk is open."""
        return self._open is None

    def is_ripe(self, now: float) -> bool:
        """Whether to end it without waiting for more."""
        return self.is_whole and (
            self.size_bytes >= BATCH_BYTES
            or len(self._rows) >= BATCH_CHUNKS
            or now - self.began >= BATCH_SECONDS
        )

    def check_progress(self, now: float) -> None:
        """Refuses a chunk that takes too long: others wait for its place.

        Raises:
            StalledError: It does.
        """
        if self._open is not None and now - self._open.since > CHUNK_SECONDS:
            raise StalledError(
                f"{self._tree.describe_chunk(self._open.chunk)} was not complete "
                f"{CHUNK_SECONDS:.0f} s after its first byte; send it again"
            )

    def add_frame(self, received: Frame, *, now: float) -> None:
        """Adds the pieces of a frame, whose bytes lie next in the data file.

        Raises:
            InvalidChunkError: They do not fit the tree, or a checksum does not match.
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
        """Adds a piece of a chunk: the next of the open one, or the first."""
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
        current = self._open or _Open(chunk, now, self.file_bytes, length)
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

    def _complete(self, chunk: _Open) -> None:
        expected, actual = int.from_bytes(chunk.tail, "little"), chunk.summing.crc32c
        if actual != expected:
            raise InvalidChunkError(
                f"{self._tree.describe_chunk(chunk.chunk)}: expected the checksum "
                f"{expected:08x} that it carries, got {actual:08x}; it was damaged on "
                "its way, send it again"
            )
        self._rows[chunk.chunk] = (actual, chunk.summing.digest, chunk.at)
        self._open = None
        self.completed += 1

    def table(self, file: str) -> tuple[Sums, Places]:
        """Returns the sums of its chunks, and where they lie, ascending.

        Args:
            file: The name of the data file, relative to the pool.
        """
        rows = sorted(self._rows.items())
        lengths = self._tree.lengths
        return (
            Sums.of_rows(
                [(chunk, crc32c, digest) for chunk, (crc32c, digest, _) in rows]
            ),
            Places.of_rows(
                [(file, at, int(lengths[chunk])) for chunk, (_, _, at) in rows]
            ),
        )
