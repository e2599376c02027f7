"""Receiving chunks: from frames of a stream to durable values of a key space.

A stream fills one batch while the batch before it is written, so network and
storage work at the same time. Batches are counted over all streams of the
process: that is the bound on the memory that uploads take.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Final

from storesvc.errors import ChunksIncompleteError, InvalidChunkError
from storesvc.format.checksums import crc32c
from storesvc.format.chunks import Places, Sums, pack_placed
from storesvc.format.seal import seal
from storesvc.format.trees import Tree
from storesvc.format.zarr import CHECKSUM_BYTES
from storesvc.kvbucket import KeySpace, KvBucket, Place
from storesvc.uploads import OpenUpload, Uploads
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import upload_service_pb2 as api

BATCH_BYTES: Final = 64 << 20
"""A batch is written once it holds so much; it exceeds it by a chunk at most."""

MAX_BATCHES: Final = 4
"""Batches in memory, over all streams of a process."""

_SHOWN: Final = 5


class Batch:
    """Chunks on their way to one commit of a key space."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._chunks: dict[int, list[bytes]] = {}
        self._open: int | None = None
        self._open_bytes = 0
        self.size_bytes = 0

    @property
    def is_whole(self) -> bool:
        """Whether the last chunk is complete."""
        return self._open is None

    @property
    def chunk_count(self) -> int:
        """Chunks begun."""
        return len(self._chunks)

    def add(self, chunk: int, offset: int, data: bytes) -> None:
        """Adds a piece of a chunk: the next of the open one, or the first.

        Raises:
            InvalidChunkError: It is neither, or lies outside of the tree.
        """
        if not 0 <= chunk < self._tree.chunk_count:
            raise InvalidChunkError(
                f"chunk {chunk}: the tree has {self._tree.chunk_count} chunks"
            )
        if chunk != self._open:
            if self._open is not None:
                raise InvalidChunkError(
                    f"{self._tree.describe_chunk(chunk)}: expected the rest of "
                    f"{self._tree.describe_chunk(self._open)} first"
                )
            self._open, self._open_bytes = chunk, 0
            self._chunks[chunk] = []
        length = int(self._tree.stored_lengths[chunk])
        if offset != self._open_bytes or not 0 < len(data) <= length - offset:
            raise InvalidChunkError(
                f"{self._tree.describe_chunk(chunk)}: expected bytes "
                f"{self._open_bytes} to {length}, got {offset} to {offset + len(data)}"
            )
        self._chunks[chunk].append(data)
        self._open_bytes += len(data)
        self.size_bytes += len(data)
        if self._open_bytes == length:
            self._open = None

    def values(self) -> dict[str, bytes]:
        """Returns the key and the bytes of each chunk, all of them checked.

        Raises:
            InvalidChunkError: A checksum does not match.
        """
        found = {}
        for chunk, pieces in self._chunks.items():
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            expected = int.from_bytes(data[-CHECKSUM_BYTES:], "little")
            actual = crc32c(memoryview(data)[:-CHECKSUM_BYTES])
            if actual != expected:
                raise InvalidChunkError(
                    f"{self._tree.describe_chunk(chunk)}: expected the checksum "
                    f"{expected:08x} that it carries, got {actual:08x}; it was damaged "
                    "on its way, send it again"
                )
            found[self._tree.chunk_key(chunk)] = data
        return found


class Receiver:
    """Takes the chunks and the receipts of all writers."""

    def __init__(self, bucket: KvBucket, uploads: Uploads) -> None:
        self._bucket = bucket
        self._uploads = uploads
        self._batches = asyncio.Semaphore(MAX_BATCHES)

    async def write(
        self,
        upload: OpenUpload,
        writer: int,
        frames: AsyncIterator[api.ChunkFrame],
    ) -> AsyncGenerator[int]:
        """Stores the chunks of frames; yields how many are durable, each time
        that some have become so.

        Raises:
            InvalidChunkError: A frame does not fit the tree.
        """
        space = self._uploads.key_space(upload, writer)
        durable = 0
        writing: deque[asyncio.Task[int]] = deque()
        try:
            async with aclosing(self._batched(upload, frames)) as batches:
                async for batch in batches:
                    writing.append(asyncio.create_task(self._store(space, batch)))
                    if len(writing) > 1:
                        durable += await writing.popleft()
                        yield durable
            while writing:
                durable += await writing.popleft()
                yield durable
        finally:
            if writing:  # the stream failed; let no write outlive it
                await asyncio.wait(writing)

    async def finish(self, upload: OpenUpload, writer: int, sums: Sums) -> Places:
        """Records what a writer stored, and returns where it lies.

        Raises:
            InvalidChunkError: The receipt names a chunk that the tree does not
                have, or one of another length.
            ChunksIncompleteError: A chunk is not stored.
        """
        if len(sums) and sums.ordinal[-1] >= upload.tree.chunk_count:
            raise InvalidChunkError(
                f"{upload.name}: the tree has {upload.tree.chunk_count} chunks, got a "
                f"receipt for chunk {sums.ordinal[-1]}"
            )
        space = self._uploads.key_space(upload, writer)
        found = await space.places() if await space.exists() else {}
        # A thread: 100,000 chunks take longer than a ping may wait.
        places = await asyncio.to_thread(locate, upload, sums, found)
        table = b"".join(
            part.SerializeToString()
            for part in pack_placed(sums, places, with_ordinals=True)
        )
        await self._bucket.write(
            upload.places.receipt(upload.name.upload, writer),
            seal(pb.Receipt(chunks=table)),
        )
        return places

    async def _batched(
        self, upload: OpenUpload, frames: AsyncIterator[api.ChunkFrame]
    ) -> AsyncGenerator[Batch]:
        """Cuts a stream into batches; each yielded one holds a place that
        ``_store`` gives back."""
        batch: Batch | None = None
        try:
            async for frame in frames:
                if batch is None:
                    await self._batches.acquire()
                    batch = Batch(upload.tree)
                _add_frame(batch, frame)
                if batch.size_bytes >= BATCH_BYTES and batch.is_whole:
                    full, batch = batch, None
                    yield full
            if batch is not None and not batch.is_whole:
                raise InvalidChunkError(
                    f"{upload.name}: the stream ended within a chunk"
                )
            if batch is not None:
                full, batch = batch, None
                yield full
        finally:
            if batch is not None:
                self._batches.release()

    async def _store(self, space: KeySpace, batch: Batch) -> int:
        try:
            await space.write(await asyncio.to_thread(batch.values))
            return batch.chunk_count
        finally:
            self._batches.release()


def locate(upload: OpenUpload, sums: Sums, found: Mapping[str, Place]) -> Places:
    """Returns where the chunks of a receipt lie.

    Args:
        upload: The upload.
        sums: The receipt.
        found: What the writer's key space holds.

    Raises:
        InvalidChunkError: A chunk is stored with another length than the tree's.
        ChunksIncompleteError: A chunk is not stored.
    """
    tree = upload.tree
    rows, missing = [], []
    for chunk in map(int, sums.ordinal):
        place = found.get(tree.chunk_key(chunk))
        if place is None:
            missing.append(chunk)
        elif place.length != tree.stored_lengths[chunk]:
            raise InvalidChunkError(
                f"{tree.describe_chunk(chunk)}: expected {tree.stored_lengths[chunk]} "
                f"stored bytes, got {place.length}"
            )
        else:
            rows.append(place)
    if missing:
        raise ChunksIncompleteError(
            f"{upload.name}: {len(missing)} chunks of the receipt are not stored "
            f"({', '.join(map(tree.describe_chunk, missing[:_SHOWN]))}); send them, "
            "then finish again",
            missing=str(len(missing)),
        )
    return Places.of_rows(rows)


def _add_frame(batch: Batch, frame: api.ChunkFrame) -> None:
    if not len(frame.chunk) == len(frame.offset) == len(frame.length):
        raise InvalidChunkError(
            f"frame: expected columns of one length, got {len(frame.chunk)}, "
            f"{len(frame.offset)} and {len(frame.length)}"
        )
    if sum(frame.length) != len(frame.data):
        raise InvalidChunkError(
            f"frame: expected {sum(frame.length)} bytes, got {len(frame.data)}"
        )
    data = frame.data
    if len(frame.chunk) == 1:  # large chunks: no copy
        batch.add(frame.chunk[0], frame.offset[0], data)
        return
    at = 0
    for chunk, offset, length in zip(
        frame.chunk, frame.offset, frame.length, strict=True
    ):
        batch.add(chunk, offset, data[at : at + length])
        at += length
