"""Receives chunks: writes the frames of a stream to data files in the pool.

A frame is checked and written while the next frame arrives, and a batch is made durable
while the next batch fills. ``BatchAdmission`` bounds the batches of all streams of the
process: on storages without files it bounds the memory of uploads, on file systems the
number of open files. A direct writer puts data files into the pool itself and sends
only their tables.

A chunk is acknowledged in this order, so that an acknowledged chunk is never lost (a
direct writer's object in a bucket is durable before its table arrives, so there step 3
does not wait for the check of step 2):

1. Its bytes are written and checked against the checksum that it carries.
2. Its data file is made durable (``Receiver.store``, ``Receiver.adopt``).
3. A staging table that names the chunk is made durable.
4. The number of durable chunks is sent to the client.

A call can be cancelled at each ``await``. Therefore the resources of a stream are
released by functions without one. While a thread writes to a batch, the thread owns the
batch: it is discarded only after the thread has ended.

The table of a direct writer is accepted only if its chunks belong to the leaf table,
have the length that their leaf gives them, are in data files of this upload, and do not
overlap.
"""

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final

import numpy as np

from storesvc.concurrency import offload
from storesvc.errors import (
    CorruptDataError,
    InvalidChunkError,
    LimitExceededError,
    StoreError,
)
from storesvc.failpoints import Failpoint, reach
from storesvc.format.chunks import (
    ChunkLocations,
    InvalidChunksError,
    Sums,
    unpack_places,
    unpack_sums,
)
from storesvc.format.wire import Frame
from storesvc.save.batches import (
    LEAST_BYTES_PER_SECOND,
    RETRY_SECONDS,
    Batch,
    BatchAdmission,
    Permit,
)
from storesvc.save.staging_tables import NewTable, OwnTables
from storesvc.save.uploads import OpenUpload, Uploads
from storesvc.storage.file_bucket import NewObject
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.storage.requests import background_task, retrieve_error
from storesvc.telemetry.events import ChunksMoved, Path, Stopwatch, publish
from storesvc_proto.v1 import tree_pb2


def check_direct_chunks(
    upload: OpenUpload, table: tree_pb2.ChunkTable
) -> tuple[Sums, ChunkLocations]:
    """Returns the checksums and the locations of the chunks of a table."""
    try:
        sums, places = unpack_sums(table), unpack_places(table)
    except InvalidChunksError as e:
        raise InvalidChunkError(f"placed: {e}") from e
    tree = upload.tree
    if len(sums) and sums.ordinal[-1] >= tree.chunk_count:
        raise InvalidChunkError(
            f"placed: the tree has {tree.chunk_count} chunks, got {sums.ordinal[-1]}"
        )
    prefix = upload.places.data_prefix(upload.name.upload)
    for file in places.files:
        if not file.startswith(prefix):
            raise InvalidChunkError(
                f"placed: expected data files of this upload, called {prefix}ID, got "
                f"{file!r}"
            )
    wrong = np.flatnonzero(places.length != tree.lengths[sums.ordinal])
    if len(wrong):
        row = int(wrong[0])
        chunk = int(sums.ordinal[row])
        raise InvalidChunkError(
            f"placed: {tree.describe_chunk(chunk)}: expected "
            f"{tree.lengths[chunk]} bytes, got {places.length[row]}"
        )
    _check_overlaps(places)
    return sums, places


def _check_overlaps(places: ChunkLocations) -> None:
    """Rejects chunks that overlap, and files without any chunk."""
    order = np.lexsort((places.offset, places.file))
    file, offset = places.file[order], places.offset[order]
    stop = offset + places.length[order]
    over = (file[1:] == file[:-1]) & (offset[1:] < stop[:-1])
    if over.any():
        at = int(np.flatnonzero(over)[0])
        raise InvalidChunkError(
            f"placed: two chunks overlap at byte {offset[at + 1]} of "
            f"{places.files[int(file[at])]}"
        )
    if len(np.unique(file)) != len(places.files):
        raise InvalidChunkError("placed: a data file is listed that holds no chunk")


MAX_BATCHES: Final = 4
"""Maximum batches in memory, over all streams of a process. It is also the maximum of
batches that are being made durable at once, of threads that write frames, and of the
batches of one stream in flight."""

MAX_TABLES: Final = 32
"""Maximum tables of one stream in flight on a bucket, where each takes a round trip.
A direct writer completes an object of 8 MiB in much less; four at once would be slower
than its data. On files, each may take one of the threads that short calls need, so
there are as many as batches."""

CHECKED_AT_ONCE: Final = 64
"""Objects of one table that are checked concurrently."""

MAX_TABLE_BYTES: Final = 4 << 20
"""Size of the largest table; one that is as large counts as much as a batch."""

MAX_FILES: Final = 64
"""Maximum batches that are written to files, over all streams of a process."""

PARTS_AHEAD: Final = 2
"""Maximum parts of a stream that arrive while others are written: one thread writes all
frames that have arrived, because to wake it costs a fifth as much as to write one."""

TICK_SECONDS: Final = 1.0
"""Interval at which a stream checks the age of its batch while no frame arrives."""


class Receiver:
    """Stores the chunks that the writers of uploads send."""

    def __init__(
        self, bucket: TensorStoreBucket, uploads: Uploads, tables: OwnTables
    ) -> None:
        self._bucket = bucket
        self._tables = tables
        self.uploads = uploads
        self.admission = BatchAdmission(MAX_FILES if bucket.has_files else MAX_BATCHES)
        """Permits for batches."""
        self._stores = asyncio.Semaphore(MAX_BATCHES)
        self.max_tables = MAX_BATCHES if bucket.has_files else MAX_TABLES
        """Maximum tables of one stream in flight."""
        self.trusts_writers = False
        """True if each direct writer is this process: an object that it names exists,
        because the bucket has acknowledged it."""
        # A slow disk must not occupy the threads that short calls need.
        self._adds = asyncio.Semaphore(MAX_BATCHES)
        self._discarding: set[asyncio.Future[None]] = set()

    def write(
        self,
        upload: OpenUpload,
        writer: int,
        parts: AsyncIterator[Frame | tree_pb2.ChunkTable],
        watch: Stopwatch | None = None,
        *,
        storing: Callable[[], None] = lambda: None,
        peer: str = "",
    ) -> AsyncGenerator[int]:
        """Stores the chunks of frames, and records the chunks that tables name.

        The iterator that it returns yields the number of durable chunks of this call
        each time it has grown.

        Args:
            parts: Frames, and tables of chunks that the writer put into the pool.
            watch: Measures the phases of the call; None: not measured.
            storing: Called at intervals while something is being made durable.

        Raises:
            InvalidChunkError: A frame or a table does not fit the leaf table.
            LimitExceededError: Too many streams send chunks, or other streams wait
                and this one sends too slowly.
            StalledError: A chunk took too long.
        """
        stream = _Stream(self, upload, writer, watch or Stopwatch(), peer)
        return stream.store(parts, storing)

    async def adopt(
        self, upload: OpenUpload, writer: int, table: tree_pb2.ChunkTable
    ) -> int:
        """Records chunks that the writer put into the pool itself, and returns their
        number."""
        # 1. Validate what the writer reports: it is not trusted. A file of another
        #    upload, which may be deleted before this one, must not get into a table.
        sums, places = await offload(
            len(table.crc32c), check_direct_chunks, upload, table
        )
        new = self._tables.new(upload.name, writer, (sums, places))
        if self._bucket.has_files:
            # 2. Make each data file durable.
            await self.adopt_files(upload, places)
            # 3. Record the chunks, now that they are durable: after a crash of the
            #    machine a commit would otherwise claim files that lost their contents.
            await self._tables.write(self._bucket, new)
        else:
            # 2. and 3. at the same time, because an object that exists is durable. If
            #    one is missing, the table is deleted, and the chunks are not
            #    acknowledged; who reads the table in the meantime, checks its objects.
            async with background_task(
                self._tables.write(self._bucket, new)
            ) as writing:
                try:
                    await self.adopt_files(upload, places)
                except InvalidChunkError:
                    await self._withdraw(new, writing)
                    raise
                await writing
        self._tables.keep(new)
        publish(_make_chunks_moved("direct", places))
        await reach(Failpoint.WRITE_BEFORE_REPLY)
        return len(sums)

    async def adopt_files(self, upload: OpenUpload, places: ChunkLocations) -> None:
        """Makes the data files of a direct writer durable; raises the error of the
        first one that is not complete."""
        ends = list(zip(places.files, places.ends.tolist(), strict=True))
        if self.trusts_writers and not self._bucket.has_files:
            return
        for at in range(0, len(ends), CHECKED_AT_ONCE):
            some = ends[at : at + CHECKED_AT_ONCE]
            checks = (self._adopt_file(upload, file, end) for file, end in some)
            # No check outlives a rejected table: a writer could start any number.
            for error in await asyncio.gather(*checks, return_exceptions=True):
                if error is not None:
                    raise error

    async def _withdraw(self, new: NewTable, writing: Awaitable[None]) -> None:
        """Deletes a table that names a missing object: FinishWriter would take its
        chunks for chunks that were stored with other bytes.

        If that fails, the table is deleted together with the upload.
        """
        with suppress(StoreError):
            await writing
        with suppress(StoreError):
            await self._bucket.delete(new.place)

    async def _adopt_file(self, upload: OpenUpload, file: str, end: int) -> None:
        """Makes a data file durable, after a check that it is complete: in a file that
        ends early, the last byte cannot be read."""
        place = upload.places.data_file(file)
        try:
            await self._bucket.read_range(place, end - 1, end)
        except CorruptDataError as e:
            raise InvalidChunkError(
                f"{upload.name}: expected {end} bytes or more in the data file "
                f"{file}, but it is missing or shorter, or no regular file; send "
                "its chunks again"
            ) from e
        await self._bucket.adopt(place)

    async def store(
        self, upload: OpenUpload, writer: int, batch_file: "_BatchFile"
    ) -> int:
        """Makes a batch durable, and returns the number of its completed chunks."""
        await reach(Failpoint.WRITE_BEFORE_BATCH)
        with batch_file.watch.phase("storage"):
            # 1. Make the data file durable.
            async with self._stores:
                await self._bucket.keep(batch_file.new)
            # 2. Record its chunks only then. The receipt trusts staging tables: one
            #    that is durable before its data file would, after a crash of the
            #    machine, put missing chunks into a checkpoint.
            sums, places = await offload(
                batch_file.batch.completed, batch_file.batch.table, batch_file.file
            )
            table = self._tables.new(upload.name, writer, (sums, places))
            await self._tables.write(self._bucket, table)
            self._tables.keep(table)
        publish(_make_chunks_moved("stream", places))
        await reach(Failpoint.WRITE_BEFORE_REPLY)
        return batch_file.batch.completed

    async def begin(
        self, upload: OpenUpload, permit: Permit, *, watch: Stopwatch
    ) -> "_BatchFile":
        """Returns a new batch; on an error it releases the permit."""
        try:
            file = upload.places.data_prefix(upload.name.upload) + uuid.uuid4().hex
            new = await self._bucket.create(upload.places.data_file(file))
        except BaseException:
            self.admission.release(permit)
            raise
        now = asyncio.get_running_loop().time()
        return _BatchFile(file, new, Batch(upload.tree, now=now), permit, watch)

    async def add(
        self, batch_file: "_BatchFile", frames: Sequence[Frame], *, now: float
    ) -> list[Frame]:
        """Checks and writes frames until the batch is full, in a thread; returns the
        rest."""
        async with self._adds:
            add = partial(batch_file.add, frames, now)
            return await self._bucket.fill(batch_file.new, add)

    def drop(self, batch_file: "_BatchFile") -> None:
        """Releases the permit of a batch, and deletes its file unless it was stored.

        No thread may be writing to the batch.
        """
        if batch_file.new.file is None:  # stored already, or never in a file
            self.admission.release(batch_file.permit)
            return
        # A thread, because deleting a file may take long.
        discarding = asyncio.ensure_future(self._bucket.discard(batch_file.new))
        self._discarding.add(discarding)  # asyncio keeps only weak references to tasks
        discarding.add_done_callback(self._discarding.discard)
        discarding.add_done_callback(retrieve_error)
        discarding.add_done_callback(
            lambda _: self.admission.release(batch_file.permit)
        )


def _make_chunks_moved(path: Path, places: ChunkLocations) -> ChunksMoved:
    return ChunksMoved(direction="in", path=path, size_bytes=int(places.length.sum()))


@dataclass(frozen=True, slots=True, eq=False)
class _BatchFile:
    """A batch that is being filled or stored, and its data file."""

    file: str
    """Name of the data file, relative to the pool."""
    new: NewObject
    batch: Batch
    permit: Permit
    watch: Stopwatch

    def add(self, frames: Sequence[Frame], now: float) -> list[Frame]:
        """Checks each frame, and writes it while it is still in the processor's cache,
        until the batch is full; returns the rest."""
        left = list(reversed(frames))
        while left and not self.batch.is_due(now):
            frame, rest = self.batch.split(left.pop(), now=now)
            if rest is not None:
                left.append(rest)
            with self.watch.phase("sums"):
                self.batch.add_frame(frame, now=now)
            with self.watch.phase("storage"):
                self.new.append(frame.data)
            self.watch.size_bytes += len(frame.data)
        return left[::-1]


class _Stream:
    """The state of one WriteChunks call: its open batch, and its writes in flight."""

    def __init__(
        self,
        receiver: Receiver,
        upload: OpenUpload,
        writer: int,
        watch: Stopwatch,
        peer: str,
    ) -> None:
        self._watch = watch
        self._receiver = receiver
        self._upload = upload
        self._writer = writer
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._coming: deque[Frame | tree_pb2.ChunkTable] = deque()
        """Parts that have arrived and are not taken yet, ``PARTS_AHEAD`` at most."""
        self._arrived = self._loop.create_future()
        """Done if a part has arrived since the stream began to wait for one."""
        self._has_room = asyncio.Event()
        self._adding: asyncio.Future[list[Frame]] | None = None
        self._cut: asyncio.Future[StoreError] = self._loop.create_future()
        """Error that ends the stream, because other streams need its permit."""
        self._batch_file: _BatchFile | None = None
        self._writing: deque[asyncio.Task[int]] = deque()
        """Batches and tables that are being made durable, in the order of arrival."""
        self._weights: deque[float] = deque()
        """Memory that each of them takes, in batches."""

    async def store(
        self,
        parts: AsyncIterator[Frame | tree_pb2.ChunkTable],
        storing: Callable[[], None],
    ) -> AsyncGenerator[int]:
        """Stores the parts; see ``Receiver.write``."""
        reading = asyncio.ensure_future(self._read(parts))
        # A stream is a sign of life. At once, so that the first acknowledgement, which
        # renews the lease before it is sent, does not wait for this.
        renewing = asyncio.ensure_future(self._receiver.uploads.renew(self._upload))
        renewing.add_done_callback(retrieve_error)
        durable = 0
        try:
            while True:
                await self._wait(reading)
                if self._writing:
                    storing()
                # Acknowledge in the order of arrival: the client discards as many of
                # its oldest chunks, which must be the durable ones. Renew the lease
                # first, because the client may take long to read the number.
                if self._writing and self._writing[0].done():
                    durable += self._written().result()
                    await self._receiver.uploads.renew(self._upload)
                    with self._awaiting_client():
                        yield durable
                if self._coming and not self._is_full:
                    await self._take()
                elif reading.done() and not self._coming:
                    reading.result()
                    break
                if self._batch_file is not None:
                    # Store the open batch if it is full or old enough.
                    self._batch_file.batch.check_progress(self._loop.time())
                    if self._batch_file.batch.is_due(self._loop.time()):
                        self._start(self._batch_file)
            self._end()
            while self._writing:
                durable += await asyncio.shield(self._writing[0])
                self._written()
                await self._receiver.uploads.renew(self._upload)
                yield durable
        finally:
            # Before any await, which a cancelled call may not get past: the permit
            # would be lost to all streams of the process.
            self._drop()
            reading.cancel()
            reading.add_done_callback(retrieve_error)
            # Wait for writes that still run: they end by themselves, and must not
            # outlive a failed call. gather would cancel them.
            await asyncio.wait({reading, renewing, *self._writing})

    async def _read(self, parts: AsyncIterator[Frame | tree_pb2.ChunkTable]) -> None:
        """Receives parts while others are written."""
        async for part in parts:
            self._coming.append(part)
            del part  # it would stay in memory until the next one arrives
            if not self._arrived.done():
                self._arrived.set_result(None)
            if len(self._coming) >= PARTS_AHEAD:
                self._has_room.clear()
                await self._has_room.wait()

    @property
    def _is_full(self) -> bool:
        """True if the stream must wait for a write to end before it takes the next
        part; tables count too, because they take memory."""
        return sum(self._weights) >= MAX_BATCHES

    def _add(self, writing: asyncio.Task[int], weight: float) -> None:
        writing.add_done_callback(retrieve_error)  # an earlier one may end the stream
        self._writing.append(writing)
        self._weights.append(weight)

    def _written(self) -> asyncio.Task[int]:
        """Removes and returns the oldest write."""
        self._weights.popleft()
        return self._writing.popleft()

    async def _wait(self, reading: asyncio.Future[None]) -> None:
        """Waits until a part has arrived or the oldest write has ended; while there is
        a batch or a write, for ``TICK_SECONDS`` at most."""
        if not self._coming or self._is_full:
            waits: set[asyncio.Future[Any]] = {self._cut, *islice(self._writing, 1)}
            if not self._is_full:
                self._arrived = self._loop.create_future()
                waits |= {self._arrived, reading}
            with nullcontext() if self._is_full else self._awaiting_client():
                await asyncio.wait(
                    waits,
                    timeout=TICK_SECONDS if self._batch_file or self._writing else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
        if self._cut.done():
            raise self._cut.result()

    def _awaiting_client(self) -> AbstractContextManager[None]:
        """Counts the time spent in the context as the client's."""
        if self._batch_file is None:
            return nullcontext()
        return self._batch_file.permit.awaiting_client()

    async def _take(self) -> None:
        """Starts to store a table, or writes the frames that have arrived to the open
        batch."""
        first = self._coming[0]
        if isinstance(first, tree_pb2.ChunkTable):
            self._coming.popleft()
            self._has_room.set()
            self._end()
            least = MAX_BATCHES / self._receiver.max_tables
            weight = max(least, first.ByteSize() / MAX_TABLE_BYTES)
            self._add(asyncio.create_task(self._adopt(first)), weight)
            return
        if self._batch_file is None:
            permit = await self._receiver.admission.acquire(
                peer=self._peer,
                namespace=self._upload.name.run.namespace,
                recall=self._on_recall,
            )
            self._batch_file = await self._receiver.begin(
                self._upload, permit, watch=self._watch
            )
        frames = []
        while self._coming and isinstance(first := self._coming[0], Frame):
            frames.append(first)
            self._coming.popleft()
        del first
        self._has_room.set()
        batch_file, now = self._batch_file, self._loop.time()
        self._adding = asyncio.ensure_future(
            self._receiver.add(batch_file, frames, now=now)
        )
        self._adding.add_done_callback(retrieve_error)
        # The thread goes on if this call is cancelled.
        left = await asyncio.shield(self._adding)
        batch_file.permit.count(sum(len(f.data) for f in frames))
        self._coming.extendleft(reversed(left))

    async def _adopt(self, table: tree_pb2.ChunkTable) -> int:
        with self._watch.phase("storage"):
            count = await self._receiver.adopt(self._upload, self._writer, table)
        self._watch.size_bytes += sum(table.length)
        return count

    def _end(self) -> None:
        """Starts to store the open batch, if there is one; its last chunk must be
        complete."""
        if self._batch_file is None:
            return
        if not self._batch_file.batch.is_whole:
            raise InvalidChunkError(
                f"{self._upload.name}: the stream ended within a chunk"
            )
        self._start(self._batch_file)

    def _drop(self) -> None:
        """Discards the open batch, after the thread that writes to it has ended."""
        batch_file, self._batch_file = self._batch_file, None
        if batch_file is None:
            return
        if self._adding is None or self._adding.done():
            self._receiver.drop(batch_file)
        else:
            self._adding.add_done_callback(lambda _: self._receiver.drop(batch_file))

    def _on_recall(self) -> None:
        """Ends the open batch, because other streams need its permit and this client
        is slow; ends the stream too if a chunk is incomplete."""
        if self._batch_file is None:
            return
        if self._batch_file.batch.is_whole:
            self._start(self._batch_file)
            return
        self._drop()
        if not self._cut.done():
            self._cut.set_result(
                LimitExceededError(
                    f"{self._upload.name}: other streams wait to send chunks, and this "
                    f"one sent less than {LEAST_BYTES_PER_SECOND >> 10} KiB/s within "
                    "a chunk, or kept the server waiting for too long; send the "
                    "chunks that were not acknowledged in a new stream",
                    retry_seconds=RETRY_SECONDS,
                )
            )

    def _start(self, batch_file: _BatchFile) -> None:
        """Starts to store a batch. Its permit is released when that ends, even if it
        never began or the call was cancelled."""
        self._batch_file = None
        stored = self._receiver.store(self._upload, self._writer, batch_file)
        task = asyncio.create_task(stored)
        # Callbacks, not a ``finally`` inside the task: a task that is cancelled before
        # its first step runs none of its code, and the permit would never come back.
        task.add_done_callback(lambda _: self._receiver.drop(batch_file))
        self._add(task, 1)
