"""Writes chunks directly to the pool of a run, without sending them to the server.

Each thread takes slabs, computes the checksums of their chunks and appends them to data
files of its own. The server checks only that a file exists, so the order makes a chunk
that it knows a chunk that a power cut cannot take away:

1. Append the chunks of some slabs to a new file.
2. Make the file durable; the server makes its directory entry durable.
3. Queue its chunk table, which then goes to the server, together with the tables of
   other files of the next two seconds; the last ones with the commit.

In a directory, parts are written to a file as they come. Large chunks begin at
multiples of a cache line, as they do in memory: otherwise some processors take three
times as long to copy them (``rep movsb`` in the kernel). A bucket writes an object as a
whole, so each object is first assembled: it refers to its slabs, which return to the
staging pool once it is stored, and has a copy of small parts. So objects need little
memory of their own, whatever their size, which grows with the save.
"""

import errno
import math
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any, Final, Protocol, Self

import numpy as np

from storesvc.format.checksums import Buffer
from storesvc.format.chunks import (
    MAX_PART_ROWS,
    ChunkLocations,
    Sums,
    merge,
    pack_placed,
)
from storesvc.storage import rooted_files
from storesvc.storage.threads import Threads
from storesvc_client._chunks.memory import ALIGNMENT
from storesvc_client._chunks.slabs import (
    PIECE_BYTES,
    SLAB_BYTES,
    FilledSlab,
    Slab,
    SumsInProgress,
)
from storesvc_client._rpc.retry import clear_variables
from storesvc_client._save.snapshot import SlabQueue, StarvedError, WantedSlabs
from storesvc_client._storage.bucket import POLL_SECONDS, BucketRoot
from storesvc_client._telemetry.progress import Meter
from storesvc_client.errors import (
    DataLossError,
    InvalidRequestError,
    LimitError,
    StoreError,
    UnavailableError,
)
from storesvc_proto.v1 import tree_pb2

FILE_THREADS: Final = min(os.cpu_count() or 1, 8)
"""Data files in a directory that are written at a time, and objects of a bucket that
are assembled at a time."""

FILE_BYTES: Final = 128 << 20
"""File size at which a thread starts its next data file; an interrupted save loses at
most one such file per thread."""


class StoppedError(Exception):
    """The save has stopped, so the file is not needed."""


class NewFile(Protocol):
    """A data file that is being written."""

    @property
    def size_bytes(self) -> int:
        """Bytes appended so far."""

    def append(self, parts: Sequence[memoryview]) -> None:
        """Appends parts."""


class Pool(Protocol):
    """Creates the data files of a run."""

    @property
    def threads(self) -> int:
        """Number of files to write at a time."""

    @property
    def refers(self) -> bool:
        """True if a file refers to the memory of its parts until ``create`` exits."""

    @property
    def is_idle(self) -> bool:
        """True if no file is on its way whose slabs will be given back."""

    @property
    def alignment(self) -> int:
        """Large chunks begin at multiples of so many bytes in a file."""

    def is_full(self, file: Any) -> bool:
        """Returns whether a file has the size at which the next one starts."""

    def begin(self) -> AbstractContextManager[None]:
        """Returns a context for one file; it waits until the file may begin.

        The thread must not have a slab then: what it waits for may need its memory.

        Raises:
            StoppedError: The save has stopped.
        """

    def create(self, name: str) -> AbstractContextManager[NewFile]:
        """Returns a context that creates a file: durable after a normal exit, removed
        after an error.

        Raises:
            LimitError: The storage is full.
            InvalidRequestError: Writing is not permitted.
            UnavailableError: The storage failed.
            StoppedError: The save has stopped.
        """


class FilePool:
    """Creates data files in a directory."""

    threads = FILE_THREADS
    refers = False
    is_idle = True
    alignment = ALIGNMENT

    def __init__(self, root: Path, pool: str) -> None:
        """Creates a pool below a root, whose data files begin with `pool`."""
        self._root = root
        self._pool = pool

    def begin(self) -> AbstractContextManager[None]:
        """See ``Pool.begin``; files are written part by part, and need no memory."""
        return nullcontext()

    @contextmanager
    def create(self, name: str) -> Generator[NewFile]:
        place = f"{self._pool}{name}"
        try:
            rooted_files.make_directories(self._root, place)
            with rooted_files.NewFile(self._root, place) as file:
                yield file
        except StoreError:  # some classes are OSErrors too
            raise
        except OSError as e:
            raise _translate_error(e, self._root / self._pool) from e

    def is_full(self, file: Any) -> bool:
        return bool(file.size_bytes >= FILE_BYTES)


def _translate_error(e: OSError, pool: Path) -> StoreError:
    if e.errno == errno.ENOSPC:
        return LimitError(
            f"{pool}: the storage is full; {rooted_files.HOW_TO_FREE_SPACE}, then save "
            "again",
            reason="STORAGE_FULL",
        )
    if isinstance(e, rooted_files.IrregularFileError):
        return DataLossError(
            f"{pool}: {e}; storesvc does not write through links: remove it, or "
            "connect without direct=",
            reason="CORRUPT_DATA",
        )
    if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return InvalidRequestError(
            f"direct: expected to write below {pool}, got {e.strerror}; let this "
            "process write there, or connect without direct="
        )
    return UnavailableError(
        f"{pool}: the storage failed: {e.strerror}; save again",
        reason="STORAGE_UNAVAILABLE",
    )


OBJECT_BYTES: Final = 8 << 20
"""Least size at which the next object starts: its transfer at 50 MB/s takes six times
as long as a round trip of 30 ms, and a connection is not faster than that."""

MAX_OBJECT_BYTES: Final = 128 << 20
"""Largest such size: each object costs a request, of which one in 64 is little, and a
failed one is sent again as a whole."""

OBJECTS_A_SAVE: Final = 64
"""Objects of a save from which they grow with it."""

OBJECTS_A_PROCESS: Final = 8
"""Objects into which a process cuts its part at least, to use several connections."""

OBJECT_THREADS: Final = 64
"""Maximum objects in flight; staging memory that they refer to may allow fewer."""

REFERRED_BYTES: Final = 64 << 10
"""Size from which a part of an object is referred to: a request takes longer with many
small ones than with their copy."""

IN_FLIGHT_BYTES: Final = 192 << 20
"""Maximum bytes that the objects in flight copy."""

COPIED_IN_FLIGHT_BYTES: Final = 120 << 20
"""The same where TensorStore writes them, which copies each of them twice more."""


def object_bytes(save_bytes: int, own_bytes: int, budget_bytes: int) -> int:
    """Returns the size at which the next object of a save starts.

    Args:
        save_bytes: Stored bytes of the whole save.
        own_bytes: The part of them that this process stores.
        budget_bytes: Memory limit of the slabs that the objects refer to. Those that
            are assembled at a time have half of it, so that others are in flight.
    """
    size = min(
        save_bytes // OBJECTS_A_SAVE,
        own_bytes // OBJECTS_A_PROCESS,
        budget_bytes // (2 * FILE_THREADS),
        MAX_OBJECT_BYTES,
    )
    return max(size, OBJECT_BYTES)


class _ReferringObject:
    """An object that refers to memory that stays unchanged until it is sent, and copies
    small parts."""

    def __init__(self) -> None:
        self._parts: list[Buffer] = []
        self._few = bytearray()
        """Small parts between two large ones."""
        self.size_bytes = 0
        """Bytes appended so far."""
        self.copied_bytes = 0
        """The part of these bytes that is in memory of the object itself."""

    def append(self, parts: Sequence[memoryview]) -> None:
        for part in parts:
            self.size_bytes += len(part)
            if len(part) < REFERRED_BYTES:
                self._few += part
                self.copied_bytes += len(part)
            else:
                self._end_few()
                self._parts.append(part)

    def data(self) -> Sequence[Buffer]:
        """Returns the parts of the whole object, without a copy."""
        self._end_few()
        return self._parts

    def _end_few(self) -> None:
        if self._few:
            self._parts.append(self._few)
            self._few = bytearray()


class _GrowingObject:
    """The same in memory of its own, for TensorStore, which takes only such."""

    def __init__(self) -> None:
        self._data = BytesIO()
        self.size_bytes = 0

    @property
    def copied_bytes(self) -> int:
        return self.size_bytes

    def append(self, parts: Sequence[memoryview]) -> None:
        for part in parts:
            self.size_bytes += self._data.write(part)

    def data(self) -> Sequence[Buffer]:
        return [self._data.getvalue()]


class _InFlightBudget:
    """Limits the bytes of the objects in flight, and the objects that are assembled at
    a time; each thread has one object.

    If more objects were assembled than there are processors, all would be complete at
    the same late time, and the link would be idle until then.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._assembling: set[int] = set()
        """Threads whose object is not complete yet."""
        self._taken: dict[int, int] = {}
        """Bytes of each thread."""
        self._changed = threading.Condition()

    def take(self, size_bytes: int, *, check: Callable[[], None]) -> None:
        """Waits until this thread may assemble an object, and so many bytes are free,
        or all are; calls `check`, which may raise an error, at intervals."""
        with self._changed:
            while not self._is_free(size_bytes):
                check()
                self._changed.wait(POLL_SECONDS)
            self._taken[threading.get_ident()] = size_bytes
            self._assembling.add(threading.get_ident())

    def send(self, size_bytes: int) -> None:
        """Ends the assembly of this thread's object, and gives back what it has taken
        beyond some bytes."""
        with self._changed:
            self._taken[threading.get_ident()] = size_bytes
            self._assembling.discard(threading.get_ident())
            self._changed.notify_all()

    def end(self) -> None:
        """Gives back what this thread's object has taken."""
        with self._changed:
            self._taken.pop(threading.get_ident(), None)
            self._assembling.discard(threading.get_ident())
            self._changed.notify_all()

    @property
    def is_idle(self) -> bool:
        """True if no object is being sent."""
        with self._changed:
            return len(self._taken) == len(self._assembling)

    def _is_free(self, size_bytes: int) -> bool:
        if len(self._assembling) >= FILE_THREADS:
            return False
        used_bytes = sum(self._taken.values())
        return not used_bytes or used_bytes + size_bytes <= self._limit_bytes


class BucketPool:
    """The data files of a run in a bucket; see ``Pool``."""

    alignment = 1

    def __init__(
        self,
        root: BucketRoot,
        pool: str,
        stopped: threading.Event,
        *,
        file_bytes: int,
        largest_slab_bytes: int,
    ) -> None:
        """Creates a pool below a root, whose data files begin with `pool`; `stopped` is
        set when the save no longer needs them."""
        self.threads = min(OBJECT_THREADS, root.storage.concurrency)
        self._root = root
        self._pool = pool
        self._stopped = stopped
        self.refers = not root.copies_writes
        limit = IN_FLIGHT_BYTES if self.refers else COPIED_IN_FLIGHT_BYTES
        self._budget = _InFlightBudget(limit)
        # A write takes a whole object: where it is copied, the memory for it bounds it.
        self.file_bytes = file_bytes if self.refers else OBJECT_BYTES
        # An object ends with the slab that brings it to its size.
        last = SLAB_BYTES if self.refers else largest_slab_bytes
        self._most_bytes = OBJECT_BYTES + last

    @contextmanager
    def begin(self) -> Generator[None]:
        self._budget.take(self._most_bytes, check=self._check)
        try:
            yield
        finally:
            self._budget.end()

    @contextmanager
    def create(self, name: str) -> Generator[NewFile]:
        new = _ReferringObject() if self.refers else _GrowingObject()
        yield new
        data = new.data()
        self._budget.send(new.copied_bytes)
        # Only after a normal exit. Readers see the whole object or none, and it is
        # durable when the storage has acknowledged it.
        self._root.write(
            f"{self._pool}{name}",
            data,
            what=f"save: data file {name}",
            check=self._check,
        )

    def is_full(self, file: Any) -> bool:
        # Copies are bounded, whatever the size.
        has_copied = self.refers and file.copied_bytes >= OBJECT_BYTES
        return bool(has_copied or file.size_bytes >= self.file_bytes)

    @property
    def is_idle(self) -> bool:
        return self._budget.is_idle

    def _check(self) -> None:
        if self._stopped.is_set():
            raise StoppedError


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
        slabs: Sequence[Slab],
        save_bytes: int,
    ) -> None:
        """Creates a writer of slabs, for a save of `save_bytes`; entering its context
        starts the threads. Names of the data files begin with `pool` in the run, then
        with `prefix` in this upload."""
        self._meter = meter
        self._prefix = prefix
        self._slab_queue = slab_queue
        self._wanted = wanted
        self._sums = sums
        self._placed = _PlacedChunks()
        self._stopped = threading.Event()
        sizes = [slab.stored_bytes for slab in slabs]
        self._pool: Pool = (
            FilePool(root, pool)
            if isinstance(root, Path)
            else BucketPool(
                root,
                pool,
                self._stopped,
                file_bytes=object_bytes(
                    save_bytes, sum(sizes), slab_queue.budget_bytes
                ),
                largest_slab_bytes=max(sizes, default=0),
            )
        )
        # One thread for each slab is enough: a small save has a single one.
        self._count = max(1, min(self._pool.threads, len(slabs)))
        self._threads = Threads(self._count + 1, "storesvc-place")

    def __enter__(self) -> Self:
        workers = [self._threads.submit(self._work) for _ in range(self._count)]
        self._threads.submit(self._end, workers)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
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

    def take_rest(self) -> tree_pb2.ChunkTable | None:
        """Returns the table of the last files, once ``take`` has returned None; None if
        it has returned all."""
        return self._placed.take_rest()

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
        filled, has_more = self._wanted.take(), True
        if filled is None:
            return False
        held: list[FilledSlab] = []
        """Slabs that the file refers to."""
        try:
            name = f"{self._prefix}{uuid.uuid4().hex}"
            rows: list[tuple[int, int, int]] = []
            # 1. Append. 2. The file is durable when this context has ended, or removed.
            with (
                self._meter.part(name),
                ExitStack() as synced,
                self._pool.create(name) as file,
            ):
                while filled is not None:
                    if self._stopped.is_set():
                        raise StoppedError  # removes the file
                    self._append(file, filled, rows)
                    held.append(filled)
                    filled = None
                    if not self._pool.refers:
                        # before the sync: the snapshot may be waiting for memory
                        self._slab_queue.give_back(held.pop())
                    if not self._pool.is_full(file):
                        filled, has_more = self._take_next()
                # exits after the file does, so that it times the file's sync
                synced.enter_context(self._meter.phase("sync"))
        finally:
            for one in [*held, filled]:
                if one is not None:
                    self._slab_queue.give_back(one)
        # 3. Publish the chunks, only now.
        rows.sort()
        places = ChunkLocations(
            files=(name,),
            file=np.zeros(len(rows), np.int64),
            offset=np.array([offset for _, offset, _ in rows], np.int64),
            length=np.array([length for _, _, length in rows], np.int64),
        )
        ordinals = np.array([ordinal for ordinal, _, _ in rows], np.int64)
        self._placed.put(self._sums.result(ordinals), places)
        return has_more

    def _take_next(self) -> tuple[FilledSlab | None, bool]:
        """Waits for the next slab of a file that has some; returns it, or None if the
        file ends before it, and whether more may follow."""
        while True:
            try:
                filled = self._wanted.take(
                    starved=-1 if self._pool.refers else math.inf
                )
            except StarvedError:
                # The source may wait for the memory that this file refers to, and while
                # no file is on its way, nothing else gives any back.
                if self._pool.is_idle:
                    return None, True
            else:
                return filled, filled is not None

    def _append(
        self, file: NewFile, filled: FilledSlab, rows: list[tuple[int, int, int]]
    ) -> None:
        at, size, parts = file.size_bytes, 0, list[memoryview]()

        def write() -> None:
            with self._meter.phase("write"):
                file.append(parts)
            self._meter.add(size)

        for ordinal, length, stored in filled.stored(self._sums, self._meter):
            if length >= REFERRED_BYTES:
                parts.append(memoryview(bytes(-at % self._pool.alignment)))
                at += len(parts[-1])
            rows.append((ordinal, at, length))
            at += length
            for part in stored:
                parts.append(part)
                size += len(part)
                if size >= PIECE_BYTES:  # while the parts are in the CPU cache
                    write()
                    size, parts = 0, []
        write()


TABLE_SECONDS: Final = 2.0
"""Time for which durable chunks wait for a table with others: so much of an interrupted
save is stored again, and as rarely a save writes a table."""


class _PlacedChunks:
    """The chunks of durable files, on their way to the server. Thread-safe."""

    def __init__(self) -> None:
        """Creates an empty queue."""
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

    @property
    def _rows(self) -> int:
        return sum(len(sums) for sums, _ in self._parts)

    @property
    def _is_full(self) -> bool:
        """True if no part can be added to the next table."""
        return self._has_ended or self._rows >= MAX_PART_ROWS

    @property
    def _is_one_table(self) -> bool:
        return self._rows <= MAX_PART_ROWS

    def take_rest(self) -> tree_pb2.ChunkTable | None:
        """See ``DirectWriter.take_rest``."""
        with self._changed:
            parts, self._parts = list(self._parts), deque()
        return next(pack_placed(*merge(parts), with_ordinals=True)) if parts else None

    def end(self, error: BaseException | None) -> None:
        """Marks the end of the queue; an error is raised after the last table."""
        with self._changed:
            self._error = error
            self._has_ended = True
            self._changed.notify_all()

    def take(self) -> tree_pb2.ChunkTable | None:
        """Waits for chunks and returns their table; None before the last one, which
        ``take_rest`` returns.

        Raises:
            BaseException: The error of ``end``.
        """
        parts: list[tuple[Sums, ChunkLocations]] = []
        rows = 0
        with self._changed:
            self._changed.wait_for(lambda: self._parts or self._has_ended)
            self._changed.wait_for(lambda: self._is_full, TABLE_SECONDS)
            if self._has_ended and self._error is None and self._is_one_table:
                return None
            # as many parts as one table may have
            while self._parts and rows + len(self._parts[0][0]) <= MAX_PART_ROWS:
                parts.append(self._parts.popleft())
                rows += len(parts[-1][0])
        if parts:
            (table,) = pack_placed(*merge(parts), with_ordinals=True)
            return table
        if self._error is not None:
            raise self._error
        return None
