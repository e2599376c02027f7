"""Batches: the chunks of one stream that become one data file, checked on arrival.

Frames carry chunks back to back. The data file holds the bytes of the frames in the
order in which they arrive, so nothing is copied or reordered.

A batch takes memory or an open file, so a process has a fixed number of permits for
them. A stream asks for a permit once it has bytes to write. No stream waits for the
client of another stream, because:

- When a stream has waited for ``patience_seconds``, the permit of the slowest client is
  recalled, if that client is slower than ``LEAST_BYTES_PER_SECOND`` or has kept its
  permit waiting for ``client_seconds`` in total. The server's own time does not count.
- A free permit goes to the peer that was served least recently; among its streams, to
  the namespace that was served least recently; then to the stream that asked first.
- A stream that gets no permit within ``wait_seconds`` is rejected, and may retry.
- A permit is released without an ``await``, because a call can be cancelled at any
  ``await``.

Example::

    permit = await admission.acquire(peer="10.0.0.7", namespace="prod", recall=end)
    try:
        with permit.awaiting_client():
            frame = await anext(frames)
        permit.count(len(frame))
    finally:
        admission.release(permit)
"""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from storesvc.errors import InvalidChunkError, LimitExceededError, StalledError
from storesvc.format.checksums import ChunkHasher
from storesvc.format.chunks import ChunkLocations, Sums
from storesvc.format.dtypes import CHECKSUM_BYTES
from storesvc.format.trees import Tree
from storesvc.format.wire import Frame
from storesvc_proto.v1 import upload_service_pb2 as upload_api

LEAST_BYTES_PER_SECOND: Final = 64 << 10
"""Rate below which a client may lose its permit. A modem is faster; at this rate a
chunk of the usual 4 MiB takes more than a minute."""

RETRY_SECONDS: Final = 1
"""Delay before a rejected stream may retry; streams that wait already come first."""

_TICK_SECONDS: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Times that clients may take."""

    patience_seconds: float = 1.0
    """Time a stream waits before the permit of another stream is recalled for it."""
    credit_seconds: float = 2.0
    """Longest pause of a client, whatever it sent before: the rate counts over the last
    few seconds, so a burst at the start does not allow a long pause later."""
    first_seconds: float = 0.5
    """Pause that a new client may make: a 2 MiB frame of a large chunk earns the whole
    credit above, a single byte earns almost nothing."""
    client_seconds: float = 15.0
    """Total time that a permit may wait for its client while other streams wait. A
    batch that is 5 s old ends with its current chunk: 10 s remain for the largest, of
    32 MiB."""
    wait_seconds: float = 20.0
    """Longest wait for a permit: shorter than the deadlines of calls."""


class Permit:
    """Permission for one stream to fill one batch, requested or granted."""

    def __init__(
        self,
        peer: str,
        namespace: str,
        recall: Callable[[], None],
        *,
        limits: AdmissionLimits,
        now: float,
    ) -> None:
        self.peer = peer
        self.namespace = namespace
        self.recall = recall
        self.is_recalled = False
        self.since = now
        """Time of the request, by the clock of the event loop."""
        self.granted: asyncio.Future[None] = asyncio.Future()
        self._clock = self.granted.get_loop().time
        self._limits = limits
        self._credit = limits.first_seconds
        self._client_seconds = limits.client_seconds
        self._awaits_since: float | None = None

    @contextmanager
    def awaiting_client(self) -> Generator[None]:
        """Counts the time spent in the context as the client's."""
        self._awaits_since = began = self._clock()
        try:
            yield
        finally:
            self._awaits_since = None
            waited = self._clock() - began
            self._credit -= waited
            self._client_seconds -= waited

    def count(self, size_bytes: int) -> None:
        """Credits the client with bytes that it sent."""
        earned = max(0.0, self._credit) + size_bytes / LEAST_BYTES_PER_SECOND
        self._credit = min(self._limits.credit_seconds, earned)

    @property
    def spare_seconds(self) -> float:
        """Time for which the client may still keep it waiting; infinite while the
        server does not wait for the client."""
        if self._awaits_since is None:
            return float("inf")
        waited = self._clock() - self._awaits_since
        return min(self._credit, self._client_seconds) - waited


class BatchAdmission:
    """Grants the batch permits of one process, in one event loop."""

    def __init__(self, limit: int, limits: AdmissionLimits = AdmissionLimits()) -> None:
        """Creates the permits, all free.

        Args:
            limits: Times that clients may take.
        """
        self.limits = limits
        self._limit = limit
        self._waiting: list[Permit] = []
        self._held: set[Permit] = set()
        self._turns = count(1)
        self._served: dict[tuple[str, ...], int] = {}
        """Last turn of each peer, and of each namespace of a peer."""

    @property
    def free(self) -> int:
        return self._limit - len(self._held)

    @property
    def waiting(self) -> int:
        """Number of streams that wait for a permit."""
        return len(self._waiting)

    async def acquire(
        self, *, peer: str, namespace: str, recall: Callable[[], None]
    ) -> Permit:
        """Waits for a permit and returns it; the caller must release it.

        Args:
            recall: Called at most once, when other streams wait and the client of this
                stream is slow. It must get the permit released without waiting for
                the client.
        """
        clock = asyncio.get_running_loop().time
        limits = self.limits
        permit = Permit(peer, namespace, recall, limits=limits, now=clock())
        self._waiting.append(permit)
        try:
            self._grant()
            while not permit.granted.done():
                if clock() - permit.since >= limits.wait_seconds:
                    raise LimitExceededError(
                        f"expected at most {self._limit} batches of chunks in flight, "
                        f"and none ended within {limits.wait_seconds:.0f} s; send the "
                        "chunks again later",
                        retry_seconds=RETRY_SECONDS,
                        limit=str(self._limit),
                    )
                await asyncio.wait({permit.granted}, timeout=_TICK_SECONDS)
                self._recall_slow(clock())
        except BaseException:
            self.release(permit)
            raise
        return permit

    def release(self, permit: Permit) -> None:
        """Releases a permit, or stops waiting for it; a second call does nothing."""
        if permit in self._held:
            self._held.remove(permit)
            self._grant()
        elif permit in self._waiting:
            self._waiting.remove(permit)

    def _grant(self) -> None:
        while self._waiting and self.free > 0:
            permit = min(
                self._waiting,
                key=lambda p: (
                    self._served.get((p.peer,), 0),
                    self._served.get((p.peer, p.namespace), 0),
                    p.since,
                ),
            )
            self._waiting.remove(permit)
            self._held.add(permit)
            permit.granted.set_result(None)
            turn = next(self._turns)
            self._served[(permit.peer,)] = turn
            self._served[permit.peer, permit.namespace] = turn
        # Forget peers without a stream, so that the table stays small.
        present = {(p.peer,) for p in (*self._waiting, *self._held)}
        self._served = {k: v for k, v in self._served.items() if k[:1] in present}

    def _recall_slow(self, now: float) -> None:
        """Recalls one slow client's permit for each stream that waited too long."""
        patience_seconds = self.limits.patience_seconds
        late = sum(now - p.since >= patience_seconds for p in self._waiting)
        coming = sum(permit.is_recalled for permit in self._held)
        slow = [p for p in self._held if p.spare_seconds < 0 and not p.is_recalled]
        slow.sort(key=lambda permit: permit.spare_seconds)
        for permit in slow[: max(0, late - coming)]:
            permit.is_recalled = True
            permit.recall()


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
        return self.is_whole and self._is_full(now)

    def _is_full(self, now: float) -> bool:
        return (
            self.size_bytes >= BATCH_BYTES
            or len(self._rows) >= BATCH_CHUNKS
            or now - self.began >= BATCH_SECONDS
        )

    def split(self, received: Frame, *, now: float) -> tuple[Frame, Frame | None]:
        """Returns the part of a frame that belongs to this batch, and the rest: a full
        batch ends with its open chunk, even if each frame ends within the next one."""
        frame, data = received
        columns = frame.chunk, frame.offset, frame.length
        if self.is_whole or not self._is_full(now) or min(map(len, columns)) < 2:
            return received, None
        first, rest = (
            upload_api.ChunkFrame(
                chunk=frame.chunk[rows],
                offset=frame.offset[rows],
                length=frame.length[rows],
            )
            for rows in (slice(1), slice(1, None))
        )
        size = frame.length[0]
        return Frame(first, data[:size]), Frame(rest, data[size:])

    def check_progress(self, now: float) -> None:
        """Rejects a chunk that takes too long: other streams need the permit."""
        if self._open is not None and now - self._open.since > CHUNK_SECONDS:
            raise StalledError(
                f"{self._tree.describe_chunk(self._open.chunk)} was not complete "
                f"{CHUNK_SECONDS:.0f} s after its first byte; send it again"
            )

    def add_frame(self, received: Frame, *, now: float) -> None:
        """Adds a frame, whose bytes come next in the data file."""
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
        current = self._open or _OpenChunk(
            chunk, now, self.file_bytes, self._tree.lengths[chunk]
        )
        length = current.length
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


SMALL_BYTES: Final = 1 << 20
"""Maximum bytes of the chunks of a small upload, which arrive in one request."""

SMALL_CHUNKS: Final = 1_000
"""Maximum leaves, and maximum chunks, of a small upload: all work on them takes a few
milliseconds."""


def check_small_chunks(tree: Tree, data: bytes) -> Batch:
    """Returns the chunks of a small upload, which arrive back to back.

    Raises:
        LimitExceededError: There are too many leaves or chunks.
        InvalidChunkError: The bytes are not as many as the leaf table has, or the
            checksum of a chunk does not match.
    """
    rows = max(tree.chunk_count, len(tree.leaves))
    if rows > SMALL_CHUNKS:
        raise LimitExceededError(
            f"expected at most {SMALL_CHUNKS} chunks and leaves, got {rows}; begin an "
            "upload"
        )
    batch, lengths = Batch(tree, now=0.0), tree.lengths.all().tolist()
    columns = upload_api.ChunkFrame(
        chunk=range(len(lengths)), offset=[0] * len(lengths), length=lengths
    )
    if lengths or data:
        batch.add_frame(Frame(columns, memoryview(data)), now=0.0)
    return batch
