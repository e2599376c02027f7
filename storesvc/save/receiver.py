"""Receiving chunks: from frames of a stream to data files.

A frame is checked and written while the next one comes, and a batch of them is made
durable while the next one is filled. ``BatchPlaces`` bounds the batches of all streams
of the process: that is the bound on the memory that uploads take on storages without
files, and on the open files elsewhere. A writer that reaches the storage itself puts
data files into the pool, and sends only their tables.

A call can be cancelled at each ``await``. So what a stream holds is given back by
functions without one; while a thread writes to a batch, the batch belongs to it.
"""

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from storesvc.call_timer import Stopwatch
from storesvc.errors import (
    ChunksIncompleteError,
    CorruptDataError,
    InvalidChunkError,
    LimitExceededError,
    StorageUnavailableError,
    StoreError,
)
from storesvc.failpoints import Failpoint, reach
from storesvc.format.chunks import I64, Places, Sums, merge
from storesvc.format.seal import seal
from storesvc.format.wire import Frame
from storesvc.save.batch_admission import (
    LEAST_BYTES_PER_SECOND,
    RETRY_SECONDS,
    BatchPlaces,
    Place,
)
from storesvc.save.batches import Batch
from storesvc.save.direct_chunks import check_placed
from storesvc.save.reuse import Claims, Reuse, claimed_places, find_claims
from storesvc.save.staging_tables import Table, pack_table, stage, staged
from storesvc.save.uploads import OpenUpload, Uploads
from storesvc.storage.new_object import NewObject
from storesvc.storage.tensorstore_bucket import KvBucket
from storesvc_proto.v1 import tree_pb2

MAX_BATCHES: Final = 4
"""Batches in memory, over all streams of a process; those that are being made durable,
on files too; and those of one stream, and its tables."""

MAX_FILES: Final = 64
"""Batches that are written to files, over all streams of a process."""

TICK_SECONDS: Final = 1.0
"""How often a stream looks at its batch while no frame comes."""

_SHOWN: Final = 5


class Receiver:
    """Takes the chunks and the receipts of all writers."""

    def __init__(self, bucket: KvBucket, uploads: Uploads, reuse: Reuse) -> None:
        self._bucket = bucket
        self._uploads = uploads
        self._reuse = reuse
        self.places = BatchPlaces(MAX_FILES if bucket.has_files else MAX_BATCHES)
        """Those of batches."""
        self._stores = asyncio.Semaphore(MAX_BATCHES)
        # a slow disk must not take the threads that small calls need
        self._adds = asyncio.Semaphore(MAX_BATCHES)
        self._discarding: set[asyncio.Future[None]] = set()

    async def write(
        self,
        upload: OpenUpload,
        writer: int,
        parts: AsyncIterator[Frame | tree_pb2.ChunkTable],
        watch: Stopwatch | None = None,
        *,
        storing: Callable[[], None] = lambda: None,
        peer: str = "",
    ) -> AsyncGenerator[int]:
        """Stores the chunks of frames, and writes down those that tables say the
        writer stored; yields how many are durable, each time that some have become so.

        Args:
            upload: Whose they are.
            writer: Which of its writers sends them.
            parts: What comes.
            watch: Times it; None: nobody asks.
            storing: Called now and then, while something of it is made durable.
            peer: The host that sends them.

        Raises:
            InvalidChunkError: A frame or a table does not fit the tree.
            LimitExceededError: Too many others send chunks; or they do, and this
                stream sends too slowly.
            StalledError: A chunk took too long.
        """
        stream = _Stream(self, upload, writer, watch or Stopwatch(), peer)
        coming = asyncio.ensure_future(anext(parts, None))
        durable = 0
        try:
            while True:
                await stream.wait(coming)
                if stream.writing:
                    storing()
                if stream.writing and stream.writing[0].done():
                    durable += stream.writing.popleft().result()
                    await self._uploads.renew(upload)
                    with stream.awaiting_client():
                        yield durable
                if coming.done() and not stream.is_full:
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
            stream.drop()
            coming.cancel()
            coming.add_done_callback(_retrieve)
            # Where the stream failed, no write outlives it, unless this is cancelled:
            # they end by themselves. gather would cancel them.
            await asyncio.wait({coming, *stream.writing})

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
            claims += [Claims(c.source, left[c.rows], c.found) for c in more]
        places = await asyncio.to_thread(_places_of, upload, sums, claims, stored)
        receipt = await asyncio.to_thread(pack_table, sums, places)
        await reach(Failpoint.FINISH_BEFORE_RECEIPT)
        place = upload.places.receipt(upload.name.upload, writer)
        await self._bucket.write(place, seal(receipt, place=place))
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
                    f"{file}, but it is missing or shorter, or no regular file; send "
                    "its chunks again"
                ) from e
            await self._bucket.adopt(place)
        await stage(self._bucket, upload.name, writer, sums, places)
        await reach(Failpoint.WRITE_BEFORE_REPLY)
        return len(sums)

    async def store(self, upload: OpenUpload, writer: int, filling: "_Filling") -> int:
        """Makes a batch durable, and returns how many chunks it completed."""
        await reach(Failpoint.WRITE_BEFORE_BATCH)
        with filling.watch.phase("storage"):
            async with self._stores:
                await self._bucket.keep(filling.new)
            sums, places = await asyncio.to_thread(filling.batch.table, filling.file)
            await stage(self._bucket, upload.name, writer, sums, places)
        await reach(Failpoint.WRITE_BEFORE_REPLY)
        return filling.batch.completed

    async def begin(
        self, upload: OpenUpload, place: Place, *, watch: Stopwatch
    ) -> "_Filling":
        """Returns a new batch in a place, which is given back where this fails."""
        try:
            file = upload.places.data_prefix(upload.name.upload) + uuid.uuid4().hex
            new = await self._bucket.create(upload.places.data_file(file))
        except BaseException:
            self.places.give_back(place)
            raise
        now = asyncio.get_running_loop().time()
        return _Filling(file, new, Batch(upload.tree, now=now), place, watch)

    async def add(self, filling: "_Filling", frame: Frame, *, now: float) -> None:
        """Checks a frame, and writes it."""
        async with self._adds:
            await self._bucket.fill(filling.new, partial(filling.add, frame, now))

    def drop(self, filling: "_Filling") -> None:
        """Discards a batch that nothing writes to, and gives its place back."""
        if filling.new.file is None:  # it is kept, or never was a file
            self.places.give_back(filling.place)
            return
        # a thread: to delete a file may take long
        discarding = asyncio.ensure_future(self._bucket.discard(filling.new))
        self._discarding.add(discarding)  # asyncio itself keeps no task alive
        discarding.add_done_callback(self._discarding.discard)
        discarding.add_done_callback(_retrieve)
        discarding.add_done_callback(lambda _: self.places.give_back(filling.place))


@dataclass(frozen=True, slots=True, eq=False)
class _Filling:
    """A batch, and the data file that its bytes are written to."""

    file: str
    """Its name, relative to the pool."""
    new: NewObject
    batch: Batch
    place: Place
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
        self._adding: asyncio.Future[None] | None = None
        self._cut: asyncio.Future[StoreError] = self._loop.create_future()
        """Why the stream must end, once others need its place."""
        self.filling: _Filling | None = None
        self.writing: deque[asyncio.Task[int]] = deque()
        """What is being made durable, in the order in which it came."""

    @property
    def is_full(self) -> bool:
        """Whether it takes nothing before something is durable: tables take memory,
        too."""
        return len(self.writing) >= MAX_BATCHES

    async def wait(self, coming: asyncio.Future[Any]) -> None:
        """Waits for the next part, or for the first write to end; not for long, while
        there is a batch.

        Raises:
            LimitExceededError: Others need the place of the batch.
        """
        waits: set[asyncio.Future[Any]] = {self._cut, *islice(self.writing, 1)}
        if not self.is_full:
            waits.add(coming)
        with nullcontext() if self.is_full else self.awaiting_client():
            await asyncio.wait(
                waits,
                timeout=TICK_SECONDS if self.filling or self.writing else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
        if self._cut.done():
            raise self._cut.result()

    def awaiting_client(self) -> AbstractContextManager[None]:
        """Counts the time of a context as that of the client."""
        if self.filling is None:
            return nullcontext()
        return self.filling.place.awaiting_client()

    async def take(self, part: Frame | tree_pb2.ChunkTable) -> None:
        """Takes what came next."""
        if isinstance(part, tree_pb2.ChunkTable):
            self.end()
            self.writing.append(asyncio.create_task(self._adopt(part)))
            return
        if self.filling is None:
            place = await self._receiver.places.take(
                peer=self._peer,
                namespace=self._upload.name.run.namespace,
                recall=self._recalled,
            )
            self.filling = await self._receiver.begin(
                self._upload, place, watch=self._watch
            )
        self._adding = asyncio.ensure_future(
            self._receiver.add(self.filling, part, now=self._loop.time())
        )
        self._adding.add_done_callback(_retrieve)
        # its thread goes on where this is cancelled
        await asyncio.shield(self._adding)
        self.filling.place.count(len(part.data))

    async def _adopt(self, table: tree_pb2.ChunkTable) -> int:
        with self._watch.phase("storage"):
            count = await self._receiver.adopt(self._upload, self._writer, table)
        self._watch.size_bytes += sum(table.length)
        return count

    def start_ripe(self) -> None:
        """Ends the batch, if it is time to."""
        if self.filling is not None:
            self.filling.batch.check_progress(self._loop.time())
            if self.filling.batch.is_ripe(self._loop.time()):
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

    def drop(self) -> None:
        """Discards the batch that is being filled, once no thread writes to it."""
        filling, self.filling = self.filling, None
        if filling is None:
            return
        if self._adding is None or self._adding.done():
            self._receiver.drop(filling)
        else:
            self._adding.add_done_callback(lambda _: self._receiver.drop(filling))

    def _recalled(self) -> None:
        """Ends the batch, as others need its place and the client is slow; and the
        stream, where that is within a chunk."""
        if self.filling is None:
            return
        if self.filling.batch.is_whole:
            self._start(self.filling)
            return
        self.drop()
        if not self._cut.done():
            self._cut.set_result(
                LimitExceededError(
                    f"{self._upload.name}: others wait to send chunks, and this stream "
                    f"sent less than {LEAST_BYTES_PER_SECOND >> 10} KiB a second "
                    "within a chunk, or kept the server waiting for too long; send "
                    "what was not acknowledged in a new one",
                    retry_seconds=RETRY_SECONDS,
                )
            )

    def _start(self, filling: _Filling) -> None:
        """Begins to make a batch durable, which gives its place back when it has ended,
        also where it never began or nobody waits for it any more."""
        self.filling = None
        stored = self._receiver.store(self._upload, self._writer, filling)
        task = asyncio.create_task(stored)
        task.add_done_callback(_retrieve)
        task.add_done_callback(lambda _: self._receiver.drop(filling))
        self.writing.append(task)


def _retrieve(ended: "asyncio.Future[Any]") -> None:
    """Takes the error of a future that nobody may await: asyncio would log it."""
    if not ended.cancelled():
        ended.exception()


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
