"""Receiving chunks: from frames of a stream to durable values of a key space.

A stream fills one batch while the batch before it is written, so network and
storage work at the same time. Batches are counted over all streams of the
process: that is the bound on the memory that uploads take.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from itertools import islice
from typing import Final

import numpy as np

from storesvc.errors import (
    ChunksIncompleteError,
    CorruptDataError,
    InvalidChunkError,
    StalledError,
    StorageUnavailableError,
)
from storesvc.failpoints import Failpoint, reach
from storesvc.format.checksums import crc32c, digest
from storesvc.format.chunks import I64, Places, Sums, pack_placed, same_sums
from storesvc.format.seal import seal
from storesvc.format.trees import Tree
from storesvc.format.zarr import CHECKSUM_BYTES
from storesvc.kvbucket import KeySpace, KvBucket, Place
from storesvc.received import Recorded, sums_entry, sums_of
from storesvc.reuse import Reuse, Source, claimed_places, find_claims
from storesvc.uploads import OpenUpload, Uploads
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import upload_service_pb2 as api

BATCH_BYTES: Final = 64 << 20
"""A batch is written once it holds so much; it exceeds it by a chunk at most."""

MAX_BATCHES: Final = 4
"""Batches in memory, over all streams of a process."""

BATCH_SECONDS: Final = 5.0
"""A batch is written when it is so old, so that a slow client is acknowledged and
holds its place no longer than others do."""

CHUNK_SECONDS: Final = 60.0
"""A chunk must be complete so long after its first byte."""

TICK_SECONDS: Final = 1.0
"""How often a stream looks at its batch while no frame comes."""

CHUNK_OVERHEAD_BYTES: Final = 200
"""What a chunk takes in memory beside its bytes, about."""

FRAME_BYTES: Final = 2 << 20
"""Bytes of data in a frame."""

_SHOWN: Final = 5


class Batch:
    """Chunks on their way to one commit of a key space."""

    def __init__(self, tree: Tree, *, now: float) -> None:
        self._tree = tree
        self._chunks: dict[int, bytes | bytearray] = {}
        self._open: int | None = None
        self._open_since = 0.0
        self.began = now
        self.size_bytes = 0
        """What it takes in memory, about."""
        self.completed = 0
        """Chunks completed; the same one twice is two."""

    @property
    def is_whole(self) -> bool:
        """Whether no chunk is open."""
        return self._open is None

    def is_ripe(self, now: float) -> bool:
        """Whether to write it without waiting for more."""
        return self.is_whole and (
            self.size_bytes >= BATCH_BYTES or now - self.began >= BATCH_SECONDS
        )

    def check_progress(self, now: float) -> None:
        """Refuses a chunk that takes too long: others wait for its place.

        Raises:
            StalledError: It does.
        """
        if self._open is not None and now - self._open_since > CHUNK_SECONDS:
            raise StalledError(
                f"{self._tree.describe_chunk(self._open)} was not complete "
                f"{CHUNK_SECONDS:.0f} s after its first byte; send it again"
            )

    def add_frame(self, frame: api.ChunkFrame, *, now: float) -> None:
        """Adds the pieces of a frame.

        Raises:
            InvalidChunkError: They do not fit the tree.
        """
        if not 0 < len(frame.chunk) == len(frame.offset) == len(frame.length):
            raise InvalidChunkError(
                f"frame: expected columns of one length, got {len(frame.chunk)}, "
                f"{len(frame.offset)} and {len(frame.length)}"
            )
        if not sum(frame.length) == len(frame.data) <= FRAME_BYTES:
            raise InvalidChunkError(
                f"frame: expected {sum(frame.length)} bytes, at most {FRAME_BYTES}, "
                f"got {len(frame.data)}"
            )
        data, at = memoryview(frame.data), 0
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
        if self._open is not None and chunk != self._open:
            raise InvalidChunkError(
                f"{self._tree.describe_chunk(chunk)}: expected the rest of "
                f"{self._tree.describe_chunk(self._open)} first"
            )
        held = 0 if self._open is None else len(self._chunks[chunk])
        length = int(self._tree.stored_lengths[chunk])
        if offset != held or not 0 < len(data) <= length - offset:
            raise InvalidChunkError(
                f"{self._tree.describe_chunk(chunk)}: expected bytes "
                f"{held} to {length}, got {offset} to {offset + len(data)}"
            )
        if held == 0:
            self._open, self._open_since = chunk, now
            whole = len(data) == length
            self._chunks[chunk] = bytes(data) if whole else bytearray(data)
            self.size_bytes += CHUNK_OVERHEAD_BYTES
        else:
            self._chunks[chunk] += data
        self.size_bytes += len(data)
        if held + len(data) == length:
            self._open = None
            self.completed += 1

    def values(self) -> dict[str, bytes]:
        """Returns the key and the bytes of each chunk, all of them checked, and their
        sums; the batch gives each up as it goes, so that none is held twice.

        Raises:
            InvalidChunkError: A checksum does not match.
        """
        found, sums = {}, []
        chunks = np.fromiter(self._chunks, np.int64, len(self._chunks))
        keys = self._tree.chunk_keys(chunks)
        while self._chunks:
            chunk, held = self._chunks.popitem()
            data = bytes(held)
            del held
            expected = int.from_bytes(data[-CHECKSUM_BYTES:], "little")
            actual = crc32c(memoryview(data)[:-CHECKSUM_BYTES])
            if actual != expected:
                raise InvalidChunkError(
                    f"{self._tree.describe_chunk(chunk)}: expected the checksum "
                    f"{expected:08x} that it carries, got {actual:08x}; it was damaged "
                    "on its way, send it again"
                )
            found[keys.pop()] = data
            elements = memoryview(data)[:-CHECKSUM_BYTES]
            sums.append((chunk, actual, digest(elements)))
        key, entry = sums_entry(Sums.of_rows(sorted(sums)))
        return {**found, key: entry}


class Receiver:
    """Takes the chunks and the receipts of all writers."""

    def __init__(self, bucket: KvBucket, uploads: Uploads, reuse: Reuse) -> None:
        self._bucket = bucket
        self._uploads = uploads
        self._reuse = reuse
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
        clock = asyncio.get_running_loop().time
        writing: deque[asyncio.Task[int]] = deque()
        coming = asyncio.ensure_future(anext(frames, None))
        batch: Batch | None = None
        durable = 0
        try:
            while True:
                await asyncio.wait(
                    {coming, *islice(writing, 1)},
                    timeout=TICK_SECONDS if batch else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if writing and writing[0].done():
                    durable += writing.popleft().result()
                    await self._uploads.renew(upload)
                    yield durable
                if coming.done():
                    frame = coming.result()
                    if frame is None:
                        break
                    if batch is None:
                        await self._batches.acquire()
                        batch = Batch(upload.tree, now=clock())
                    batch.add_frame(frame, now=clock())
                    coming = asyncio.ensure_future(anext(frames, None))
                if batch is not None:
                    batch.check_progress(clock())
                    if batch.is_ripe(clock()):
                        full, batch = batch, None
                        writing.append(self._start(space, full))
            if batch is not None:
                if not batch.is_whole:
                    raise InvalidChunkError(
                        f"{upload.name}: the stream ended within a chunk"
                    )
                full, batch = batch, None
                writing.append(self._start(space, full))
            while writing:
                durable += await asyncio.shield(writing[0])
                writing.popleft()
                await self._uploads.renew(upload)
                yield durable
        finally:
            coming.cancel()
            if batch is not None:
                self._batches.release()
            # where the stream failed, let no write outlive it
            await asyncio.gather(coming, *writing, return_exceptions=True)

    async def finish(self, upload: OpenUpload, writer: int, sums: Sums) -> Places:
        """Records what a writer stored, and returns where it lies.

        Raises:
            InvalidChunkError: The receipt names a chunk that the tree does not
                have, or one of another length.
            ChunksIncompleteError: A chunk is not stored.
            UploadNotFoundError: The upload was ended meanwhile.
            UploadSupersededError: It lost its step meanwhile.
        """
        try:
            return await self._finish(upload, writer, sums)
        except (CorruptDataError, StorageUnavailableError):
            # what is missing may be gone because the upload is
            await self._uploads.open(upload.name, upload.record.epoch)
            raise

    async def _finish(self, upload: OpenUpload, writer: int, sums: Sums) -> Places:
        check_ordinals(upload, sums)
        space = self._uploads.key_space(upload, writer)
        found = await space.places()
        if len(found) > len(sums):
            raise InvalidChunkError(
                f"{upload.name}: writer {writer} stored {len(found)} chunks, got a "
                f"receipt for {len(sums)}; finish with all of them"
            )
        recorded = await sums_of(space, upload.tree.chunk_count)
        # Threads: 100,000 chunks take longer than a ping may wait.
        rows = await asyncio.to_thread(stored_rows, upload, sums, found)
        await self._check_stored(upload, sums, recorded, rows)
        if None in rows:
            sources = await self._reuse.sources(upload)
            await asyncio.to_thread(claim_rows, upload, sums, sources, rows)
        places, receipt = await asyncio.to_thread(receipt_of, sums, rows)
        await reach(Failpoint.FINISH_BEFORE_RECEIPT)
        await self._bucket.write(
            upload.places.receipt(upload.name.upload, writer),
            seal(receipt),
        )
        await self._uploads.renew(upload)
        await reach(Failpoint.FINISH_BEFORE_REPLY)
        return places

    async def find(
        self, upload: OpenUpload, writer: int, parts: AsyncIterator[Sums]
    ) -> AsyncGenerator[I64]:
        """Yields, for the sums of each part, the ordinals of those chunks that the
        writer need not send."""
        own = await self._reuse.stored(upload, writer)
        sources = [*own, *await self._reuse.sources(upload)]
        async for sums in parts:
            check_ordinals(upload, sums)
            claims = await asyncio.to_thread(find_claims, upload.tree, sums, sources)
            rows = np.concatenate([np.empty(0, np.int64), *(c.rows for c in claims)])
            yield sums.ordinal[np.sort(rows)]

    async def _check_stored(
        self,
        upload: OpenUpload,
        sums: Sums,
        recorded: Recorded,
        rows: Sequence[Place | None],
    ) -> None:
        """Refuses a receipt for other bytes than those that arrived."""
        stored = np.array([row is not None for row in rows], np.bool_)
        same = same_sums(sums, recorded.sums, sums.ordinal)
        certain = recorded.certain[sums.ordinal]
        for row in np.flatnonzero(stored & ~(certain & same)).tolist():
            place, chunk = rows[row], int(sums.ordinal[row])
            assert place is not None
            if not certain[row]:  # sent several times: only the bytes tell
                data = await self._bucket.read_range(
                    upload.places.pool + place.file,
                    place.offset,
                    place.offset + place.length - CHECKSUM_BYTES,
                )
                if await asyncio.to_thread(digest, data) == sums.digests[row].tobytes():
                    continue
            raise InvalidChunkError(
                f"{upload.tree.describe_chunk(chunk)}: expected the bytes that the "
                "receipt tells of, but others are stored; send it again, then finish"
            )

    def _start(self, space: KeySpace, batch: Batch) -> "asyncio.Task[int]":
        """Begins to write a batch, which gives its place back when it has ended,
        also where it never began or nobody waits for it any more."""
        task = asyncio.create_task(_store(space, batch))
        task.add_done_callback(lambda _: self._batches.release())
        return task


async def _store(space: KeySpace, batch: Batch) -> int:
    await reach(Failpoint.WRITE_BEFORE_BATCH)
    await space.write(await asyncio.to_thread(batch.values))
    await reach(Failpoint.WRITE_BEFORE_REPLY)
    return batch.completed


def check_ordinals(upload: OpenUpload, sums: Sums) -> None:
    """Refuses sums of chunks that the tree does not have.

    Raises:
        InvalidChunkError: They are.
    """
    if len(sums) and sums.ordinal[-1] >= upload.tree.chunk_count:
        raise InvalidChunkError(
            f"{upload.name}: the tree has {upload.tree.chunk_count} chunks, got sums "
            f"of chunk {sums.ordinal[-1]}"
        )


def stored_rows(
    upload: OpenUpload, sums: Sums, found: Mapping[str, Place]
) -> list[Place | None]:
    """Returns where the chunks of a receipt lie, None for those not stored.

    Args:
        upload: The upload.
        sums: The receipt.
        found: What the writer's key space holds.

    Raises:
        InvalidChunkError: A chunk is stored with another length than the tree's.
    """
    tree = upload.tree
    rows = list(map(found.get, tree.chunk_keys(sums.ordinal)))
    lengths = tree.stored_lengths[sums.ordinal].tolist()
    for chunk, row, length in zip(sums.ordinal.tolist(), rows, lengths, strict=True):
        if row is not None and row.length != length:
            raise InvalidChunkError(
                f"{tree.describe_chunk(chunk)}: expected {length} stored bytes, got "
                f"{row.length}"
            )
    return rows


def receipt_of(sums: Sums, rows: Sequence[Place | None]) -> tuple[Places, pb.Receipt]:
    """Returns where the chunks of a writer lie, and its receipt."""
    places = Places.of_rows([row for row in rows if row is not None])
    parts = pack_placed(sums, places, with_ordinals=True)
    table = b"".join(part.SerializeToString() for part in parts)
    return places, pb.Receipt(chunks=table)


def claim_rows(
    upload: OpenUpload,
    sums: Sums,
    sources: Sequence[Source],
    rows: list[Place | None],
) -> None:
    """Fills in where those chunks lie that are claimed.

    Raises:
        ChunksIncompleteError: One can be claimed of no source.
    """
    open_rows = np.array([row is None for row in rows], np.bool_)
    wanted = np.flatnonzero(open_rows)
    for claims in find_claims(upload.tree, sums.take(wanted), sources):
        places = claimed_places(claims)
        for row, place in zip(wanted[claims.rows].tolist(), places.rows(), strict=True):
            rows[row] = Place(*place)
    missing = [int(sums.ordinal[row]) for row in wanted if rows[row] is None]
    if missing:
        shown = ", ".join(map(upload.tree.describe_chunk, missing[:_SHOWN]))
        raise ChunksIncompleteError(
            f"{upload.name}: {len(missing)} chunks of the receipt are not stored "
            f"({shown}); send them, then finish again",
            missing=str(len(missing)),
        )
