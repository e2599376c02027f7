"""Sending chunks: stored bytes as they lie, to many readers at once.

Chunks that lie next to each other in a data file are read together, in the order
of the file. Reads are counted over all streams of the process: that is the bound
on the memory that downloads take.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from storesvc.bucket import Bucket
from storesvc.errors import CorruptDataError, InvalidFieldError
from storesvc.format.chunks import I64, Places
from storesvc.format.layout import RunPlaces
from storesvc.format.manifests import Manifest
from storesvc.format.names import RunName
from storesvc.receiving import FRAME_BYTES
from storesvc_proto.v1 import upload_service_pb2 as api

READ_BYTES: Final = 16 << 20
"""Neighbouring chunks are read together up to so much."""

READS_AHEAD: Final = 2
"""Reads that a stream has under way beyond the one it sends."""

MAX_READS: Final = 12
"""Reads in memory, over all streams of a process."""

_SHOWN: Final = 3

MAX_CHUNKS: Final = 65536
"""Chunks of one stream."""


@dataclass(frozen=True, slots=True)
class Read:
    """A range of a data file that holds whole chunks, back to back."""

    file: str
    start: int
    stop: int
    chunks: tuple[int, ...]
    lengths: tuple[int, ...]


class Sender:
    """Reads chunks for all streams of a process."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._reads = asyncio.Semaphore(MAX_READS)

    async def send(
        self, run: RunName, manifest: Manifest, chunks: Sequence[int]
    ) -> AsyncGenerator[api.ChunkFrame]:
        """Yields the stored bytes of chunks, each once, in frames.

        Raises:
            InvalidFieldError: The ordinals are not strictly ascending, are too
                many, or are not the manifest's.
            CorruptDataError: Stored bytes are missing or short.
        """
        wanted = check_ordinals(chunks, manifest.tree.chunk_count)
        pool = RunPlaces(run).pool
        under_way: deque[tuple[Read, asyncio.Task[bytes]]] = deque()
        try:
            for read in plan_reads(manifest.places, wanted):
                # A stream waits for a place only while it holds none: otherwise
                # streams could wait for each other in a ring.
                while under_way and (
                    len(under_way) > READS_AHEAD or self._reads.locked()
                ):
                    async for frame in self._frames(manifest, under_way):
                        yield frame
                await self._reads.acquire()
                task = asyncio.create_task(
                    self._bucket.read_range(pool + read.file, read.start, read.stop)
                )
                under_way.append((read, task))
            while under_way:
                async for frame in self._frames(manifest, under_way):
                    yield frame
        finally:
            for _, task in under_way:
                task.cancel()
                self._reads.release()
            # also takes the errors of those that nobody will wait for
            await asyncio.gather(*(t for _, t in under_way), return_exceptions=True)

    async def _frames(
        self,
        manifest: Manifest,
        under_way: deque[tuple[Read, asyncio.Task[bytes]]],
    ) -> AsyncGenerator[api.ChunkFrame]:
        """Yields the frames of the oldest read, and gives its place back."""
        read, task = under_way[0]
        try:
            data = await task
        except CorruptDataError as e:
            named = ", ".join(map(manifest.tree.describe_chunk, read.chunks[:_SHOWN]))
            raise CorruptDataError(f"{named}: {e}", **e.metadata) from e
        for frame in frames_of(read, data):
            yield frame
        under_way.popleft()
        self._reads.release()


def check_ordinals(chunks: Sequence[int], count: int) -> I64:
    """Returns the ordinals of a request.

    Raises:
        InvalidFieldError: They break a rule of ``ReadChunksRequest.chunk``.
    """
    wanted = np.array(chunks, np.uint64)
    if len(wanted) > MAX_CHUNKS:
        raise InvalidFieldError(
            f"chunk: expected at most {MAX_CHUNKS} ordinals, got {len(wanted)}; "
            "ask in several calls"
        )
    if np.any(wanted[1:] <= wanted[:-1]):
        raise InvalidFieldError("chunk: expected strictly ascending ordinals")
    if len(wanted) and wanted[-1] >= count:
        raise InvalidFieldError(
            f"chunk: the checkpoint has {count} chunks, got {wanted[-1]}"
        )
    return wanted.astype(np.int64)


def plan_reads(places: Places, chunks: I64) -> Iterator[Read]:
    """Yields the reads that fetch chunks, in the order in which they lie."""
    file, offset, length = (
        column[chunks] for column in (places.file, places.offset, places.length)
    )
    order = np.lexsort((offset, file))
    at = 0
    while at < len(order):
        first = order[at]
        to, stop = at + 1, int(offset[first] + length[first])
        while (
            to < len(order)
            and file[order[to]] == file[first]
            and offset[order[to]] == stop
            and stop + length[order[to]] - offset[first] <= READ_BYTES
        ):
            stop += int(length[order[to]])
            to += 1
        rows = order[at:to]
        yield Read(
            places.files[file[first]],
            int(offset[first]),
            stop,
            tuple(chunks[rows].tolist()),
            tuple(length[rows].tolist()),
        )
        at = to


def frames_of(read: Read, data: bytes) -> Iterator[api.ChunkFrame]:
    """Yields the frames that carry what a read returned."""
    view = memoryview(data)
    frame = api.ChunkFrame()
    begin = at = 0
    for chunk, length in zip(read.chunks, read.lengths, strict=True):
        offset = 0
        while offset < length:
            piece = min(length - offset, FRAME_BYTES - (at - begin))
            frame.chunk.append(chunk)
            frame.offset.append(offset)
            frame.length.append(piece)
            offset += piece
            at += piece
            if at - begin == FRAME_BYTES:
                frame.data = bytes(view[begin:at])
                yield frame
                frame, begin = api.ChunkFrame(), at
    if at > begin:
        frame.data = bytes(view[begin:at])
        yield frame
