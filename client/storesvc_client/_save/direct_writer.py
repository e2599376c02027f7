"""Writes chunks directly to the pool of a run, without sending them to the server.

Each thread takes slabs, computes the checksums of their chunks and appends them to data
files of its own. The server checks only that a file exists, so the order makes a chunk
that it knows a chunk that a power cut cannot take away:

1. Append the chunks of some slabs to a new file.
2. Make the file durable; the server makes its directory entry durable.
3. Queue its chunk table, which then goes to the server.
"""

import threading
import uuid
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from storesvc.format.chunks import (
    MAX_PART_ROWS,
    ChunkLocations,
    Sums,
    merge,
    pack_placed,
)
from storesvc.storage.threads import Threads
from storesvc_client._chunks.slabs import PIECE_BYTES, FilledSlab, SumsInProgress
from storesvc_client._rpc.retry import clear_variables
from storesvc_client._save.data_files import (
    BucketPool,
    FilePool,
    NewFile,
    Pool,
    StoppedError,
)
from storesvc_client._save.slab_queue import SlabQueue, WantedSlabs
from storesvc_client._storage.bucket import BucketRoot
from storesvc_client._values.progress import Meter
from storesvc_proto.v1 import tree_pb2


class DirectWriter:
    """Writes the slabs of one save to data files."""

    def __init__(
        self,
        root: Path | BucketRoot,
        pool: str,
        prefix: str,
        slab_queue: SlabQueue,
        wanted: WantedSlabs,
        sums: SumsInProgress,
        meter: Meter,
        *,
        largest_slab_bytes: int,
    ) -> None:
        """Creates a writer; entering its context starts the threads.

        Args:
            root: Root of the store.
            pool: Prefix of the run's data files.
            prefix: Name prefix of this upload's data files, relative to `pool`.
            slab_queue: Queue that takes the memory of written slabs back.
            wanted: Slabs to write.
            sums: Checksums of all chunks, filled in here.
            meter: Counts the bytes written.
            largest_slab_bytes: Stored bytes of the largest slab.
        """
        self._meter = meter
        self._prefix = prefix
        self._slab_queue = slab_queue
        self._wanted = wanted
        self._sums = sums
        self._placed = _PlacedChunks(is_merged=not isinstance(root, Path))
        self._stopped = threading.Event()
        self._pool: Pool = (
            FilePool(root, pool)
            if isinstance(root, Path)
            else BucketPool(root, pool, self._stopped, largest_slab_bytes)
        )
        self._threads = Threads(self._pool.threads + 1, "storesvc-place")

    def __enter__(self) -> Self:
        count = self._pool.threads
        workers = [self._threads.submit(self._work) for _ in range(count)]
        self._threads.submit(self._end, workers)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopped.set()
        if error is not None:
            self._slab_queue.cancel()
        self._threads.shutdown()

    def take(self) -> tree_pb2.ChunkTable | None:
        """Returns a table of the next durable files; None after the last ones.

        Raises:
            LimitError: The storage is full.
            InvalidRequestError: The files may not be written.
            UnavailableError: The storage failed.
        """
        return self._placed.take()

    def _end(self, workers: "Sequence[Future[None]]") -> None:
        """Waits for the worker threads, then ends the queue of tables."""
        errors = [e for worker in workers if (e := worker.exception()) is not None]
        for error in errors[1:]:  # raised nowhere
            clear_variables(error)
        self._placed.end(errors[0] if errors else None)

    def _work(self) -> None:
        try:
            has_more = True
            while has_more and not self._stopped.is_set():
                with self._pool.begin():
                    has_more = self._write_file()
        except StoppedError:
            return
        except BaseException:
            self._stopped.set()
            self._slab_queue.cancel()
            raise

    def _write_file(self) -> bool:
        """Writes one data file; returns whether more may follow."""
        filled = self._wanted.take()
        if filled is None:
            return False
        try:
            name = f"{self._prefix}{uuid.uuid4().hex}"
            rows: list[tuple[int, int, int]] = []
            # 1. Append. 2. The file is durable when this context has ended, or removed.
            with self._meter.part(name), self._new_file(name) as file:
                while filled is not None and file.size_bytes < self._pool.file_bytes:
                    if self._stopped.is_set():
                        raise StoppedError  # removes the file
                    self._append(file, filled, rows)
                    # before the sync: the snapshot may be waiting for memory
                    self._slab_queue.give_back(filled)
                    filled = None
                    if file.size_bytes < self._pool.file_bytes:
                        filled = self._wanted.take()
        finally:
            if filled is not None:
                self._slab_queue.give_back(filled)
        # 3. Publish the chunks, only now.
        self._publish(name, sorted(rows))
        return file.size_bytes >= self._pool.file_bytes

    @contextmanager
    def _new_file(self, name: str) -> Generator[NewFile]:
        """Returns a context that makes the file durable on a normal exit."""
        with ExitStack() as synced, self._pool.create(name) as file:
            yield file
            # exits after the file does, so that it times the file's sync
            synced.enter_context(self._meter.phase("sync"))

    def _append(
        self, file: NewFile, filled: FilledSlab, rows: list[tuple[int, int, int]]
    ) -> None:
        at, size, parts = file.size_bytes, 0, list[memoryview]()

        def write() -> None:
            with self._meter.phase("write"):
                self._pool.append(file, parts, is_kept=filled.is_kept)
            self._meter.add(size)

        for ordinal, length, stored in filled.stored(self._sums, self._meter):
            rows.append((ordinal, at, length))
            at += length
            for part in stored:
                parts.append(part)
                size += len(part)
                if size >= PIECE_BYTES:  # while the parts are in the CPU cache
                    write()
                    size, parts = 0, []
        write()

    def _publish(self, name: str, rows: list[tuple[int, int, int]]) -> None:
        """Queues the chunks of a durable file."""
        ordinals = np.array([ordinal for ordinal, _, _ in rows], np.int64)
        places = ChunkLocations(
            files=(name,),
            file=np.zeros(len(rows), np.int64),
            offset=np.array([offset for _, offset, _ in rows], np.int64),
            length=np.array([length for _, _, length in rows], np.int64),
        )
        self._placed.put(self._sums.result(ordinals), places)


class _PlacedChunks:
    """The chunks of durable files, on their way to the server. Thread-safe."""

    def __init__(self, *, is_merged: bool) -> None:
        """Creates an empty queue.

        Args:
            is_merged: Whether one table may have the chunks of several files. On a
                bucket, each table takes a request; in a directory, the server syncs the
                files of one table one after another.
        """
        self._is_merged = is_merged
        self._changed = threading.Condition()
        self._parts: deque[tuple[Sums, ChunkLocations]] = deque()
        """Parts of files, none with more rows than a table may have."""
        self._has_ended = False
        self._error: BaseException | None = None

    def put(self, sums: Sums, places: ChunkLocations) -> None:
        """Appends the chunks of a file, ascending by ordinal."""
        starts = range(0, len(sums), MAX_PART_ROWS)
        rows = [np.arange(at, min(at + MAX_PART_ROWS, len(sums))) for at in starts]
        with self._changed:
            self._parts += ((sums.take(each), places.take(each)) for each in rows)
            self._changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        """Marks the end of the queue.

        Args:
            error: Raised after the last table; None: no error.
        """
        with self._changed:
            self._error = error
            self._has_ended = True
            self._changed.notify_all()

    def take(self) -> tree_pb2.ChunkTable | None:
        """Waits for chunks and returns their table; None after the last one.

        Raises:
            BaseException: The error of ``end``.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._parts or self._has_ended)
            parts = self._next_parts()
        if parts:
            (table,) = pack_placed(*merge(parts), with_ordinals=True)
            return table
        if self._error is not None:
            raise self._error
        return None

    def _next_parts(self) -> list[tuple[Sums, ChunkLocations]]:
        """Takes as many parts as one table may have."""
        found: list[tuple[Sums, ChunkLocations]] = []
        rows = 0
        while self._parts and rows + len(self._parts[0][0]) <= MAX_PART_ROWS:
            found.append(self._parts.popleft())
            rows += len(found[-1][0])
            if not self._is_merged:
                break
        return found
