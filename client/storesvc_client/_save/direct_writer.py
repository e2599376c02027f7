"""Chunks that a client puts into the pool of a run by itself.

Threads take slabs, make their sums, and append them to data files of their own; what
lies in a file that is durable is told to the server. No byte of it goes through the
server, which only looks whether the files are there.
"""

import queue
import threading
import uuid
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from storesvc.format.chunks import Places, pack_placed
from storesvc_client._chunks.chunk_checksums import SumsInProgress
from storesvc_client._chunks.slabs import PIECE_BYTES, Filled
from storesvc_client._save.bucket_data_files import BucketPool
from storesvc_client._save.data_files import FilePool, NewFile, Pool, StoppedError
from storesvc_client._save.slab_queue import Outbox, Wanted
from storesvc_client._storage.bucket import BucketRoot
from storesvc_client._values.progress import Meter
from storesvc_proto.v1 import tree_pb2


class Placing:
    """Writes the slabs of one save."""

    def __init__(
        self,
        root: Path | BucketRoot,
        pool: str,
        prefix: str,
        outbox: Outbox,
        wanted: Wanted,
        sums: SumsInProgress,
        meter: Meter,
    ) -> None:
        """Prepares to write.

        Args:
            root: Of the store.
            pool: What the data files lie below.
            prefix: What the names of those of this upload begin with, below it.
            outbox: Where the memory of slabs goes back to.
            wanted: The slabs.
            sums: Of their chunks, filled in.
            meter: Takes note of what is written.
        """
        self._meter = meter
        self._prefix = prefix
        self._outbox = outbox
        self._wanted = wanted
        self._sums = sums
        self._placed: queue.SimpleQueue[tree_pb2.ChunkTable | BaseException | None] = (
            queue.SimpleQueue()
        )
        self._stopped = threading.Event()
        self._pool: Pool = (
            FilePool(root, pool)
            if isinstance(root, Path)
            else BucketPool(root, pool, self._stopped)
        )
        self._threads = ThreadPoolExecutor(self._pool.threads + 1, "storesvc-place")

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
            self._outbox.give_up()
        self._threads.shutdown()

    def take(self) -> tree_pb2.ChunkTable | None:
        """Returns the next table of what is durable; None: there is none.

        Raises:
            LimitError: The storage is full.
            InvalidRequestError: The files may not be written.
            UnavailableError: The storage failed.
        """
        found = self._placed.get()
        if not isinstance(found, tree_pb2.ChunkTable):
            self._placed.put(found)  # for whoever asks next
        if isinstance(found, BaseException):
            raise found
        return found

    def _end(self, workers: "Sequence[Future[None]]") -> None:
        """Waits for the threads, and ends the tables."""
        errors = [e for worker in workers if (e := worker.exception()) is not None]
        self._placed.put(errors[0] if errors else None)

    def _work(self) -> None:
        try:
            while not self._stopped.is_set() and self._write_file():
                pass
        except StoppedError:
            return
        except BaseException:
            self._stopped.set()
            self._outbox.give_up()
            raise

    def _write_file(self) -> bool:
        """Writes one data file; returns whether there may be more to write."""
        filled = self._wanted.take()
        if filled is None:
            return False
        try:
            name = f"{self._prefix}{uuid.uuid4().hex}"
            rows: list[tuple[int, int, int]] = []
            with self._meter.part(name), self._new_file(name) as file:
                while filled is not None and file.size_bytes < self._pool.file_bytes:
                    if self._stopped.is_set():
                        raise StoppedError  # the file shall not stay
                    self._append(file, filled, rows)
                    self._outbox.give_back(filled)
                    filled = None
                    if file.size_bytes < self._pool.file_bytes:
                        filled = self._wanted.take()
        finally:
            if filled is not None:
                self._outbox.give_back(filled)
        self._tell(name, sorted(rows))
        return file.size_bytes >= self._pool.file_bytes

    @contextmanager
    def _new_file(self, name: str) -> Generator[NewFile]:
        """A file that is durable once the context has ended well."""
        with ExitStack() as synced, self._pool.create(name) as file:
            yield file
            # left after the file, whose own end this times
            synced.enter_context(self._meter.phase("sync"))

    def _append(
        self, file: NewFile, filled: Filled, rows: list[tuple[int, int, int]]
    ) -> None:
        at, size, parts = file.size_bytes, 0, list[memoryview]()

        def write() -> None:
            with self._meter.phase("write"):
                file.append(parts)
            self._meter.add(size)

        for ordinal, length, stored in filled.stored(self._sums, self._meter):
            rows.append((ordinal, at, length))
            at += length
            for part in stored:
                parts.append(part)
                size += len(part)
                if size >= PIECE_BYTES:  # while they are in the cache
                    write()
                    size, parts = 0, []
        write()

    def _tell(self, name: str, rows: list[tuple[int, int, int]]) -> None:
        ordinals = np.array([ordinal for ordinal, _, _ in rows], np.int64)
        places = Places(
            files=(name,),
            file=np.zeros(len(rows), np.int64),
            offset=np.array([offset for _, offset, _ in rows], np.int64),
            length=np.array([length for _, _, length in rows], np.int64),
        )
        sums = self._sums.result(ordinals)
        for table in pack_placed(sums, places, with_ordinals=True):
            table.files[:] = [name]  # each stands for itself
            self._placed.put(table)
