"""Receiving chunks: from frames of a stream to data files.

A frame is checked and written while the next one comes, and a batch of them is made
durable while the next one is filled. Batches are counted over all streams of the
process: that is the bound on the memory that uploads take, on storages without files.
A writer that reaches the storage itself puts data files into the pool, and only tells
of them.
"""

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from storesvc.batches import Batch
from storesvc.errors import (
    ChunksIncompleteError,
    CorruptDataError,
    InvalidChunkError,
    StorageUnavailableError,
)
from storesvc.failpoints import Failpoint, reach
from storesvc.format.chunks import I64, Places, Sums, merge
from storesvc.format.seal import seal
from storesvc.format.wire import Frame
from storesvc.kvbucket import KvBucket, NewObject
from storesvc.placed import check_placed
from storesvc.reuse import Claims, Reuse, claimed_places, find_claims
from storesvc.staging import Table, pack_table, stage, staged
from storesvc.stopwatch import Stopwatch
from storesvc.uploads import OpenUpload, Uploads
from storesvc_proto.v1 import tree_pb2

MAX_BATCHES: Final = 4
"""Batches in memory, over all streams of a process."""

TICK_SECONDS: Final = 1.0
"""How often a stream looks at its batch while no frame comes."""

_SHOWN: Final = 5


class Receiver:
    """Takes the chunks and the receipts of all writers."""

    def __init__(self, bucket: KvBucket, uploads: Uploads, reuse: Reuse) -> None:
        self._bucket = bucket
        self._uploads = uploads
        self._reuse = reuse
        self.batches = asyncio.Semaphore(MAX_BATCHES)
        """Those in memory."""

    async def write(
        self,
        upload: OpenUpload,
        writer: int,
        parts: AsyncIterator[Frame | tree_pb2.ChunkTable],
        watch: Stopwatch | None = None,
        storing: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[int]:
        """Stores the chunks of frames, and writes down those that tables say the
        writer stored; yields how many are durable, each time that some have become so.

        Args:
            upload: Whose they are.
            writer: Which of its writers sends them.
            parts: What comes.
            watch: Times it; None: nobody asks.
            storing: Called now and then, while something of it is made durable.

        Raises:
            InvalidChunkError: A frame or a table does not fit the tree.
        """
        stream = _Stream(self, upload, writer, watch or Stopwatch())
        coming = asyncio.ensure_future(anext(parts, None))
        durable = 0
        try:
            while True:
                await asyncio.wait(
                    {coming, *islice(stream.writing, 1)},
                    timeout=TICK_SECONDS if stream.filling or stream.writing else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if stream.writing:
                    storing()
                if stream.writing and stream.writing[0].done():
                    durable += stream.writing.popleft().result()
                    await self._uploads.renew(upload)
                    yield durable
                if coming.done():
                    part = coming.result()
                    if part is None:
                        break
                    # the next one comes while this one is written
                    coming = asyncio.ensure_future(anext(parts, None))
                    await stream.take(part)
                stream.start_ripe()
            stream.end()
            while stream.writing:
                durable += await asyncio.shield(stream.writing[0])
                stream.writing.popleft()
                await self._uploads.renew(upload)
                yield durable
        finally:
            coming.cancel()
            await stream.drop()
            # where the stream failed, let no write outlive it
            await asyncio.gather(coming, *stream.writing, return_exceptions=True)

    async def finish(self, upload: OpenUpload, writer: int, sums: Sums) -> Places:
        """Records what a writer stored, and returns where it lies.

        Raises:
            InvalidChunkError: The receipt names a chunk that the tree does not
                have, or other bytes than were stored, or leaves a chunk out.
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
        count = upload.tree.chunk_count
        own = await staged(self._bucket, upload.name, writer, chunk_count=count)
        sources = await self._reuse.sources_of(upload, own)
        # Threads: 100,000 chunks take longer than a ping may wait.
        claims = await asyncio.to_thread(find_claims, upload.tree, sums, sources)
        stored = await asyncio.to_thread(_stored, upload, writer, sums, own)
        left = _unclaimed(sums, claims)
        if len(left):
            others = await self._reuse.sources(upload)
            more = await asyncio.to_thread(
                find_claims, upload.tree, sums.take(left), others
            )
            claims += [Claims(c.source, left[c.rows], c.chunks) for c in more]
        places = await asyncio.to_thread(_places_of, upload, sums, claims, stored)
        receipt = await asyncio.to_thread(pack_table, sums, places)
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

    async def adopt(
        self, upload: OpenUpload, writer: int, table: tree_pb2.ChunkTable
    ) -> int:
        """Writes down chunks that the writer put into the pool itself; returns how
        many they are."""
        sums, places = await asyncio.to_thread(check_placed, upload, table)
        for file, end in zip(places.files, places.ends.tolist(), strict=True):
            place = upload.places.data_file(file)
            try:
                await self._bucket.read_range(place, end - 1, end)
            except CorruptDataError as e:
                raise InvalidChunkError(
                    f"{upload.name}: expected {end} bytes or more in the data file "
                    f"{file}, but it is missing or shorter; send its chunks again"
                ) from e
            await self._bucket.adopt(place)
        await stage(self._bucket, upload.name, writer, sums, places)
        await reach(Failpoint.WRITE_BEFORE_REPLY)
        return len(sums)

    async def store(self, upload: OpenUpload, writer: int, filling: "_Filling") -> int:
        """Makes a batch durable, and returns how many chunks it completed."""
        await reach(Failpoint.WRITE_BEFORE_BATCH)
        with filling.watch.phase("storage"):
            await self._bucket.keep(filling.new)
            sums, places = await asyncio.to_thread(filling.batch.table, filling.file)
            await stage(self._bucket, upload.name, writer, sums, places)
        await reach(Failpoint.WRITE_BEFORE_REPLY)
        return filling.batch.completed

    async def begin(
        self, upload: OpenUpload, *, now: float, watch: Stopwatch
    ) -> "_Filling":
        """Returns a new batch, once there is a place for it."""
        await self.batches.acquire()
        try:
            file = upload.places.data_prefix(upload.name.upload) + uuid.uuid4().hex
            new = await self._bucket.create(upload.places.data_file(file))
        except BaseException:
            self.batches.release()
            raise
        return _Filling(file, new, Batch(upload.tree, now=now), watch)


@dataclass(frozen=True, slots=True, eq=False)
class _Filling:
    """A batch, and the data file that its bytes are written to."""

    file: str
    """Its name, relative to the pool."""
    new: NewObject
    batch: Batch
    watch: Stopwatch

    def add(self, frame: Frame, now: float) -> None:
        """Checks a frame, and writes it while it is in the processor's cache."""
        with self.watch.phase("sums"):
            self.batch.add_frame(frame, now=now)
        with self.watch.phase("storage"):
            self.new.append(frame.data)
        self.watch.size_bytes += len(frame.data)


class _Stream:
    """What one stream has brought, and what of it is being written."""

    def __init__(
        self, receiver: Receiver, upload: OpenUpload, writer: int, watch: Stopwatch
    ) -> None:
        self._watch = watch
        self._receiver = receiver
        self._upload = upload
        self._writer = writer
        self._clock = asyncio.get_running_loop().time
        self._adding: asyncio.Future[None] | None = None
        self.filling: _Filling | None = None
        self.writing: deque[asyncio.Task[int]] = deque()
        """What is being made durable, in the order in which it came."""

    async def take(self, part: Frame | tree_pb2.ChunkTable) -> None:
        """Takes what came next."""
        if isinstance(part, tree_pb2.ChunkTable):
            self.end()
            if len(self.writing) >= MAX_BATCHES:  # tables take memory, too
                await asyncio.wait({self.writing[0]})
            self.writing.append(asyncio.create_task(self._adopt(part)))
            return
        if self.filling is None:
            now = self._clock()
            self.filling = await self._receiver.begin(
                self._upload, now=now, watch=self._watch
            )
        add = asyncio.to_thread(self.filling.add, part, self._clock())
        self._adding = asyncio.ensure_future(add)
        # its thread goes on, whoever gives up
        await asyncio.shield(self._adding)

    async def _adopt(self, table: tree_pb2.ChunkTable) -> int:
        with self._watch.phase("storage"):
            count = await self._receiver.adopt(self._upload, self._writer, table)
        self._watch.size_bytes += sum(table.length)
        return count

    def start_ripe(self) -> None:
        """Ends the batch, if it is time to."""
        if self.filling is not None:
            self.filling.batch.check_progress(self._clock())
            if self.filling.batch.is_ripe(self._clock()):
                self._start(self.filling)

    def end(self) -> None:
        """Ends the batch, if there is one.

        Raises:
            InvalidChunkError: A chunk is not complete.
        """
        if self.filling is None:
            return
        if not self.filling.batch.is_whole:
            raise InvalidChunkError(
                f"{self._upload.name}: the stream ended within a chunk"
            )
        self._start(self.filling)

    async def drop(self) -> None:
        """Gives up what is not being made durable."""
        if self._adding is not None:
            await asyncio.gather(self._adding, return_exceptions=True)
        if self.filling is not None:
            filling, self.filling = self.filling, None
            self._receiver.batches.release()
            await asyncio.to_thread(filling.new.discard)

    def _start(self, filling: _Filling) -> None:
        """Begins to make a batch durable, which gives its place back when it has ended,
        also where it never began or nobody waits for it any more."""
        self.filling = None
        stored = self._receiver.store(self._upload, self._writer, filling)
        task = asyncio.create_task(stored)
        task.add_done_callback(lambda _: self._end(filling))
        self.writing.append(task)

    def _end(self, filling: _Filling) -> None:
        self._receiver.batches.release()
        filling.new.discard()  # where it was not kept


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


def _stored(
    upload: OpenUpload, writer: int, sums: Sums, own: Table
) -> NDArray[np.bool_]:
    """For each chunk of the tree, whether the writer stored it, in whatever version.

    Raises:
        InvalidChunkError: The receipt leaves one out that it did.
    """
    stored = np.zeros(upload.tree.chunk_count, np.bool_)
    stored[own[0].ordinal] = True
    if np.count_nonzero(stored) > np.count_nonzero(stored[sums.ordinal]):
        raise InvalidChunkError(
            f"{upload.name}: writer {writer} stored {np.count_nonzero(stored)} chunks, "
            f"got a receipt for {len(sums)}; finish with all of them"
        )
    return stored


def _unclaimed(sums: Sums, claims: Sequence[Claims]) -> I64:
    """The rows of a receipt that nothing was found for."""
    left = np.ones(len(sums), np.bool_)
    for one in claims:
        left[one.rows] = False
    return np.flatnonzero(left)


def _places_of(
    upload: OpenUpload,
    sums: Sums,
    claims: Sequence[Claims],
    stored: NDArray[np.bool_],
) -> Places:
    """Where the chunks of a receipt lie.

    Raises:
        InvalidChunkError: The writer stored only other bytes of one.
        ChunksIncompleteError: One lies nowhere.
    """
    left = sums.ordinal[_unclaimed(sums, claims)]
    others, missing = left[stored[left]].tolist(), left.tolist()
    if others:
        raise InvalidChunkError(
            f"{upload.tree.describe_chunk(others[0])}: expected the bytes that the "
            "receipt tells of, but others are stored; send it again, then finish"
        )
    if missing:
        shown = ", ".join(map(upload.tree.describe_chunk, missing[:_SHOWN]))
        raise ChunksIncompleteError(
            f"{upload.name}: {len(missing)} chunks of the receipt are not stored "
            f"({shown}); send them, then finish again",
            missing=str(len(missing)),
        )
    return merge([(sums.take(c.rows), claimed_places(c)) for c in claims])[1]
