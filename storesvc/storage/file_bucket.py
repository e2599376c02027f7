"""Stores the objects of a bucket as files of this machine.

TensorStore makes the conditional writes. All other calls use the operating system:
TensorStore would follow links, and a file that hangs would block its few threads
forever.

All blocking calls run in daemon threads with deadlines. ``asyncio.to_thread`` shares
its threads with all other work, and the interpreter joins them at exit. Here a file
system that hangs occupies few threads and delays no exit:

1. A call that exceeds its deadline fails. Its thread cannot be stopped, so it is
   abandoned, and a new thread replaces it.
2. Until an abandoned call returns, further calls for its path fail at once.
3. Before the deadline, few calls for one path run concurrently.
4. The number of abandoned threads is bounded, and all threads are daemons.

A range of a file is read into a message behind a header of its own: the kernel copies
it to its final position, without the interpreter lock; Python copies no data.

TensorStore's file driver identifies a version of a file by its inode and mtime. Kernels
reuse inodes and stamp mtimes at a coarse tick (10 ms on Linux), so two writes within
one tick can produce the same version, and a conditional write based on the first could
overwrite the second. A conditional write therefore waits until the previous version of
the file is at least one tick old; no version then repeats.
"""

import asyncio
import logging
import os
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import chain, filterfalse
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from storesvc.errors import CorruptDataError, StorageUnavailableError
from storesvc.format.checksums import Buffer
from storesvc.format.layout import is_pooled
from storesvc.format.wire import Part
from storesvc.storage import kvstore, requests, rooted_files
from storesvc.storage.bucket import (
    ALWAYS,
    Condition,
    Generation,
    Stored,
    WriteCondition,
    translate_errors,
)
from storesvc.storage.kvstore import OpenedStorage
from storesvc.storage.location import Storage
from storesvc.storage.requests import answer, retrieve_error
from storesvc.storage.rooted_files import Directories, NewFile, clear_interrupted_write

T = TypeVar("T")

THREADS: Final = 32
"""Maximum concurrent calls. Others are queued, which counts towards their deadline."""

CALLS_PER_PATH: Final = 4
"""Maximum concurrent calls for one path."""

MAX_ABANDONED: Final = 64
"""Maximum threads of calls past their deadline; at this number every call fails."""

IDLE_SECONDS: Final = 10.0
"""Time after which an idle thread ends."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Call(Generic[T]):
    """A call for a path; the arguments of ``FileThreads.run``."""

    path: str
    function: Callable[[], T]
    discard: Callable[[T], object] | None
    instead: Callable[[], object] | None
    loop: asyncio.AbstractEventLoop
    result: "asyncio.Future[T]"
    deadline: asyncio.TimerHandle | None = None
    is_running: bool = False
    is_abandoned: bool = False


class FileThreads:
    """Runs the blocking calls of one storage."""

    def __init__(
        self,
        name: str,
        *,
        max_abandoned: int = MAX_ABANDONED,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        """Creates no thread yet.

        Args:
            name: The storage's name in errors.
            max_abandoned: Maximum threads of calls past their deadline.
            idle_seconds: Time after which an idle thread ends.
        """
        self._name = name
        self._max_abandoned = max_abandoned
        self._idle_seconds = idle_seconds
        self._queue: deque[_Call[Any]] = deque()
        self._changed = threading.Condition()
        self._threads = 0
        """Number of threads, without the abandoned ones."""
        self._idle = 0
        self._running: Counter[str] = Counter()
        """Running calls by path, abandoned ones included."""
        self._abandoned: Counter[str] = Counter()
        """Abandoned calls by path."""

    async def run(
        self,
        path: str,
        function: Callable[[], T],
        *,
        seconds: float | None,
        discard: Callable[[T], object] | None = None,
        instead: Callable[[], object] | None = None,
    ) -> T:
        """Runs a blocking function, and returns its result.

        Args:
            path: The path that the function reads or writes.
            seconds: Deadline, time in the queue included; None for no deadline.
            discard: Called with the result, in a new thread, if the caller no longer
                waits for it.
            instead: Called, in a new thread, if the caller stops waiting before the
                function begins.

        Raises:
            StorageUnavailableError: An earlier call for the path has not returned, or
                too many calls for other paths have not.
            TimeoutError: The deadline has passed.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        call = _Call(path, function, discard, instead, loop, result)
        try:
            self._submit(call)
        except StorageUnavailableError:
            _skip(call)
            raise
        if seconds is not None:
            call.deadline = loop.call_later(seconds, self._expire, call)
        try:
            return await result
        except asyncio.CancelledError:
            # The result may have come in the same turn of the loop as the cancellation.
            if not result.cancelled() and result.exception() is None:
                _discard(call, result.result())
            raise
        finally:
            with self._changed:
                if call.deadline is not None and not call.is_running:
                    call.deadline.cancel()

    def _submit(self, call: _Call[Any]) -> None:
        with self._changed:
            if call.path in self._abandoned:
                raise StorageUnavailableError(
                    f"{call.path}: an earlier call for this file has not returned; "
                    "check the disk or the network that holds it, and try again",
                    storage=self._name,
                )
            if self._abandoned.total() >= self._max_abandoned:
                raise StorageUnavailableError(
                    f"{call.path}: {self._max_abandoned} calls for other files have "
                    "not returned; check the disk or the network that holds the store",
                    storage=self._name,
                )
            self._queue.append(call)
            if len(self._queue) > self._idle and self._threads < THREADS:
                self._start()
            else:
                self._changed.notify()

    def _start(self) -> None:
        self._threads += 1
        threading.Thread(target=self._work, name="storesvc-file", daemon=True).start()

    def _expire(self, call: _Call[Any]) -> None:
        """Fails a call at its deadline, and replaces its thread."""
        with self._changed:
            if call.is_running:
                call.is_abandoned = True
                self._abandoned[call.path] += 1
                self._threads -= 1
                if self._queue:
                    self._start()
                _log.warning("%s: a call for this file does not return", call.path)
        if not call.result.done():
            call.result.set_exception(TimeoutError())

    def _work(self) -> None:
        while (call := self._next()) is not None:
            result, error = None, None
            try:
                result = call.function()
            except BaseException as e:  # noqa: BLE001 - the awaiting caller raises it
                error = e
            with self._changed:
                call.is_running = False
                _subtract(self._running, call.path)
                if call.is_abandoned:
                    _subtract(self._abandoned, call.path)
                    if self._queue and self._threads < THREADS:
                        self._start()  # for queued calls of this path
            with suppress(RuntimeError):  # the loop is closed
                call.loop.call_soon_threadsafe(_end, call, result, error)
            if call.is_abandoned:
                return
            del call, result, error  # an idle thread must not keep them alive

    def _next(self) -> _Call[Any] | None:
        """Waits for the next call to run; None ends the thread."""
        with self._changed:
            while (call := self._dequeue()) is None:
                self._idle += 1
                is_awake = self._changed.wait(self._idle_seconds)
                self._idle -= 1
                if not is_awake and not self._queue:
                    self._threads -= 1
                    return None
            call.is_running = True
            self._running[call.path] += 1
            return call

    def _dequeue(self) -> _Call[Any] | None:
        """Removes and returns the first call of the queue that may run."""
        while self._queue and self._queue[0].result.done():
            _skip(self._queue.popleft())  # its caller no longer waits
        for at, call in enumerate(self._queue):
            if not call.result.done() and self._running[call.path] < CALLS_PER_PATH:
                del self._queue[at]
                return call
        return None


def _skip(call: _Call[Any]) -> None:
    """Ends a call whose function was never called."""
    if call.instead is not None:
        threading.Thread(target=call.instead, daemon=True).start()


def _subtract(counter: Counter[str], path: str) -> None:
    counter[path] -= 1
    if not counter[path]:
        del counter[path]  # keeps the counter as small as the number of threads


def _end(call: _Call[Any], result: Any, error: BaseException | None) -> None:
    """Sets the result of a call; runs in the thread of its event loop."""
    if call.deadline is not None:
        call.deadline.cancel()
    if not call.result.done():
        if error is None:
            call.result.set_result(result)
        else:
            call.result.set_exception(error)
    elif error is None:
        _discard(call, result)


def _discard(call: _Call[T], result: T) -> None:
    """Ends a result that the caller no longer waits for."""
    if call.discard is not None:
        threading.Thread(target=call.discard, args=(result,), daemon=True).start()


def _read_parts(root: Path, path: str, parts: Iterable[Part]) -> list[bytes]:
    """Returns one message for each part of a file."""
    # Not kept open: opening it costs a thousandth of the reads, and the space of a
    # deleted file is free at once.
    try:
        descriptor = rooted_files.open_file(root, path)
    except FileNotFoundError as e:
        raise CorruptDataError(
            f"data file {path} is missing; use another checkpoint"
        ) from e
    try:
        return [_read(descriptor, path, part) for part in parts]
    finally:
        os.close(descriptor)


def _read_all(root: Path, path: str) -> Stored | None:
    """Returns the contents of a file and its generation; None if there is no file."""
    try:
        descriptor = rooted_files.open_file(root, path)
    except FileNotFoundError:
        return None
    try:
        # Both are of one version: a write replaces the file by a rename.
        found = os.fstat(descriptor)
        data = _read(descriptor, path, Part(b"", 0, found.st_size))
    finally:
        os.close(descriptor)
    # In TensorStore's encoding (0.1.86).
    generation = (found.st_dev, found.st_ino, found.st_mtime_ns)
    return Stored(data, Generation(b"\0" + struct.pack("<QQq", *generation)))


def _read(descriptor: int, path: str, part: Part) -> bytes:
    head, at, stop = part
    size, found = len(head) + stop - at, b""
    if at >= len(head):
        # With the bytes before it, which the header replaces: the memory that a read
        # allocates itself is not cleared first.
        found = os.pread(descriptor, size, stop - size)
    is_complete = len(found) == size
    # BytesIO can be written to, and becomes bytes without a copy.
    message = BytesIO(found if is_complete else bytes(size))
    del found  # or the next line would copy it
    message.write(head)
    if is_complete:
        return message.getvalue()
    with message.getbuffer() as whole:
        while at < stop:
            count = os.preadv(descriptor, [whole[at - stop :]], at)
            if count == 0:
                raise CorruptDataError(
                    f"{path} is damaged or truncated: expected {stop} bytes, got {at}; "
                    "use another checkpoint"
                )
            at += count
    return message.getvalue()


TICK_SECONDS: Final = 0.011
"""Upper bound of a kernel's timestamp granularity (Linux: 10 ms), plus a margin."""


def _seconds_until_next_mtime(path: Path) -> float:
    """Returns the seconds until a new write of a file gets a different mtime."""
    try:
        written = path.stat(follow_symlinks=False).st_mtime_ns
    except FileNotFoundError:  # there is no previous version to confuse
        return 0.0
    age = (time.time_ns() - written) / 1e9
    return TICK_SECONDS - max(0.0, age) if age < TICK_SECONDS else 0.0


class NewObject:
    """An object that is being written.

    On files each piece is written at once; elsewhere all of them at the end.
    """

    def __init__(self, path: str, file: NewFile | None, storage: Storage) -> None:
        self.path = path
        self.file = file
        self._storage = storage
        self.parts: list[Buffer] = []

    def append(self, data: Buffer) -> None:
        """Appends a piece; blocks on the storage.

        Raises:
            StorageFullError: The storage is full.
            StorageUnavailableError: The storage failed.
        """
        if self.file is None:
            self.parts.append(data)
            return
        with translate_errors(self._storage, self.path):
            self.file.append([data])

    def discard(self) -> None:
        """Ends the object, and removes what was written."""
        if self.file is not None:
            file, self.file = self.file, None
            file.discard()


_DELETE_TRIES: Final = 3


class FileBackend:
    """Objects in the files below one directory; methods as of `TensorStoreBucket`.

    It follows no link. Every method raises ``OSError`` if the disk fails,
    ``TimeoutError`` at its deadline, and ``StorageUnavailableError`` while an earlier
    call for the path has not returned.
    """

    def __init__(self, opened: OpenedStorage) -> None:
        self._storage = opened.storage
        self._root = opened.root
        self._folder = Path(opened.storage.spec["path"])
        self._directories = Directories(self._folder)
        self._threads = FileThreads(opened.storage.name)
        self._makes_generations = False
        """True if ``_read_all`` encodes generations as this TensorStore does, which a
        read by both has shown."""

    async def read(self, path: str) -> Stored | None:
        found = await self._read(path, partial(_read_all, self._folder, path))
        if found is None or self._makes_generations:
            return found
        reading = kvstore.read(self._root, path)
        stored = await answer(self._storage, reading)
        if stored is not None:
            self._makes_generations = stored == found
        return stored

    async def read_range(self, path: str, start: int, stop: int) -> bytes:
        (data,) = await self.read_parts(path, start, stop, [Part(b"", start, stop)])
        return data

    async def read_parts(
        self, path: str, start: int, stop: int, parts: Iterable[Part]
    ) -> list[bytes]:
        read = partial(_read_parts, self._folder, path, parts)
        return await self._read(path, read, size_bytes=stop - start)

    async def write(
        self, path: str, data: bytes, condition: WriteCondition
    ) -> Generation:
        write = partial(self._write, path, data, condition)
        return await self._run(path, write, size_bytes=len(data))

    def _write(self, path: str, data: bytes, condition: WriteCondition) -> Generation:
        # 1. First: a crash loses a durable file if the entry of its directory is not.
        self._directories.make(path)
        # 2. The driver would follow a link out of the root, and block on a FIFO.
        rooted_files.check_file(self._folder, path)
        # 3. Otherwise a shorter write would end in bytes of the killed one.
        clear_interrupted_write(self._folder / path)
        # 4. Last, because the other steps take a part of the wait.
        if not isinstance(condition, Condition):
            time.sleep(_seconds_until_next_mtime(self._folder / path))
        return kvstore.write_blocking(self._root, path, data, condition)

    async def write_new(self, path: str, parts: Sequence[Buffer]) -> None:
        write = partial(self._write_new, path, parts)
        size_bytes = sum(memoryview(part).nbytes for part in parts)
        await self._run(path, write, size_bytes=size_bytes)

    def _write_new(self, path: str, parts: Sequence[Buffer]) -> None:
        self._directories.make(path)
        with NewFile(self._folder, path) as file:
            file.append(parts)
        self._directories.sync(path)

    async def write_all(self, objects: Mapping[str, Sequence[Buffer]]) -> None:
        """In one thread, and all syncs at the same time. Objects outside the pool are
        there whole or not at all: a collection reads them."""

        def write() -> None:
            with ExitStack() as writing:
                for path in filterfalse(is_pooled, objects):
                    self._directories.make(path)
                    rooted_files.check_file(self._folder, path)
                    begun = self._root.write(path, b"".join(objects[path]))
                    writing.callback(begun.result)
                for path in filter(is_pooled, objects):
                    self._write_new(path, objects[path])

        first, *_ = objects
        size_bytes = sum(memoryview(p).nbytes for p in chain(*objects.values()))
        await self._run(first, write, size_bytes=size_bytes)

    async def create(self, path: str) -> NewObject:
        def create() -> NewFile:
            self._directories.make(path)
            return NewFile(self._folder, path)

        file = await self._run(path, create, discard=NewFile.discard)
        return NewObject(path, file, self._storage)

    async def fill(self, new: NewObject, fill: Callable[[], T]) -> T:
        with translate_errors(self._storage, new.path):
            # No deadline: the function would go on writing to the file after it.
            return await self._threads.run(new.path, fill, seconds=None)

    async def keep(self, new: NewObject) -> None:
        assert new.file is not None, f"{new.path}: it has ended"
        file, new.file = new.file, None

        def keep() -> None:
            file.keep()
            self._directories.sync(new.path)

        keeping = asyncio.ensure_future(
            self._run(new.path, keep, size_bytes=file.size_bytes, instead=file.discard)
        )
        try:
            await asyncio.shield(keeping)
        except asyncio.CancelledError:
            # Its thread continues, and closes the file. A call that was cancelled
            # before it began would leave the file open.
            keeping.add_done_callback(retrieve_error)
            raise

    async def adopt(self, path: str) -> None:
        def adopt() -> None:
            self._directories.make(path)
            self._directories.sync(path)

        await self._run(path, adopt)

    async def settle(self, path: str) -> None:
        await self._run(path, partial(self._directories.sync, path))

    async def delete(self, path: str, generation: Generation | None) -> None:
        def remove() -> None:
            rooted_files.remove_file(self._folder, path)
            # If the directory is absent, so is the file.
            with suppress(FileNotFoundError):
                self._directories.sync(path)

        if is_pooled(path):  # a direct writer may have put a link there
            await self._run(path, remove)
            return
        await self._run(path, partial(rooted_files.check_file, self._folder, path))
        condition = ALWAYS if generation is None else generation
        # TensorStore's driver fails if two calls remove the lock file of one path.
        for _ in range(_DELETE_TRIES):
            with suppress(OSError, ValueError):
                await self._delete(path, condition)
                return
        await self._delete(path, condition)

    async def _delete(self, path: str, condition: WriteCondition) -> None:
        deleting = kvstore.write(self._root, path, None, condition)
        await answer(self._storage, deleting)

    async def delete_below(self, prefix: str) -> None:
        # No deadline: there may be very many files.
        remove = partial(self._directories.remove_below, prefix)
        await self._threads.run(prefix, remove, seconds=None)

    async def list_paths(
        self, prefix: str, after: str, limit: int | None = None
    ) -> list[str]:
        del limit  # a directory is read whole
        listing = kvstore.names(self._root, prefix, after)
        return await answer(self._storage, listing)

    async def sizes(self, folder: str) -> dict[str, int]:
        # No deadline: there may be very many files.
        look = partial(rooted_files.sizes_below, self._folder, folder)
        return await self._threads.run(folder, look, seconds=None)

    async def first_names(self, limit: int) -> list[str]:
        return await self._run("", partial(self._directories.first_names, limit))

    async def _read(
        self, path: str, read: Callable[[], T], *, size_bytes: int = 0
    ) -> T:
        seconds = requests.DISK_SECONDS + size_bytes / requests.LEAST_BYTES_PER_SECOND
        return await self._threads.run(path, read, seconds=seconds)

    async def _run(
        self,
        path: str,
        function: Callable[[], T],
        *,
        size_bytes: int = 0,
        discard: Callable[[T], object] | None = None,
        instead: Callable[[], object] | None = None,
    ) -> T:
        seconds = requests.call_seconds(self._storage, size_bytes=size_bytes)
        return await self._threads.run(
            path, function, seconds=seconds, discard=discard, instead=instead
        )
