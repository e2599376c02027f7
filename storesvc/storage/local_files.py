"""Reads and writes the files of a root, in threads with a deadline.

TensorStore's file driver, which makes the conditional writes, identifies a version of a
file by its inode and mtime. Kernels reuse inodes and stamp mtimes at a coarse tick (10
ms on Linux), so two writes within one tick can produce the same version, and a
conditional write based on the first could overwrite the second. A conditional write
therefore waits until the previous version of the file is at least one tick old; no
version then repeats.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from storesvc.format.checksums import Buffer
from storesvc.format.wire import Part
from storesvc.storage import deadlines, rooted_files
from storesvc.storage.data_file import NewFile
from storesvc.storage.directories import Directories, clear_interrupted_write
from storesvc.storage.file_threads import FileThreads
from storesvc.storage.local_reads import LocalReads
from storesvc.storage.location import Storage

T = TypeVar("T")

TICK_SECONDS: Final = 0.011
"""Upper bound of a kernel's timestamp granularity (Linux: 10 ms), plus a margin."""


class LocalFiles:
    """Reads and writes files below one root; follows no link.

    Every method raises ``OSError`` if the disk fails, ``TimeoutError`` at its deadline,
    and ``StorageUnavailableError`` while an earlier call for the path has not returned.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._root = Path(storage.spec["path"])
        self._reads = LocalReads(self._root)
        self._directories = Directories(self._root)
        self._threads = FileThreads(storage.name)

    async def read_parts(
        self, path: str, parts: Iterable[Part], *, size_bytes: int
    ) -> list[bytes]:
        """See ``LocalReads.read``."""
        return await self._read(
            path, partial(self._reads.read, path, parts), size_bytes=size_bytes
        )

    async def read_range(self, path: str, start: int, stop: int) -> bytes:
        """See ``LocalReads.read_range``."""
        read = partial(self._reads.read_range, path, start, stop)
        return await self._read(path, read, size_bytes=stop - start)

    async def read_all(self, path: str) -> tuple[bytes, bytes] | None:
        """See ``LocalReads.read_all``."""
        read = partial(self._reads.read_all, path)
        return await self._read(path, read, size_bytes=0)

    async def check(self, path: str) -> None:
        """Rejects a path that a storage driver must not open; see
        ``rooted_files.check_file``."""
        await self._run(path, partial(rooted_files.check_file, self._root, path))

    async def first_names(self, limit: int) -> list[str]:
        """Returns up to `limit` names of entries of the root itself."""
        return await self._run("", partial(self._directories.first_names, limit))

    async def sizes(self, folder: str) -> dict[str, int]:
        """See ``rooted_files.sizes_below``."""
        # No deadline: there may be very many files.
        look = partial(rooted_files.sizes_below, self._root, folder)
        return await self._threads.run(folder, look, seconds=None)

    async def replace(
        self,
        path: str,
        write: Callable[[], T],
        *,
        is_conditional: bool,
        size_bytes: int,
    ) -> T:
        """Writes a file by a storage driver.

        Args:
            path: The file.
            write: Calls the driver.
            is_conditional: Whether the file must get a new mtime.
            size_bytes: Size of the new file.
        """
        replace = partial(self._replace, path, write, is_conditional=is_conditional)
        return await self._run(path, replace, size_bytes=size_bytes)

    def _replace(self, path: str, write: Callable[[], T], *, is_conditional: bool) -> T:
        # 1. First: a crash loses a durable file if the entry of its directory is not.
        self._directories.make(path)
        # 2. The driver would follow a link out of the root, and block on a FIFO.
        rooted_files.check_file(self._root, path)
        # 3. Otherwise a shorter write would end in bytes of the killed one.
        clear_interrupted_write(self._root / path)
        # 4. Last, because the other steps take a part of the wait.
        if is_conditional:
            time.sleep(_seconds_until_next_mtime(self._root / path))
        return write()

    async def write_new(self, path: str, parts: Sequence[Buffer]) -> None:
        """Writes a file of unique name; durable when it returns."""
        size_bytes = sum(memoryview(part).nbytes for part in parts)
        write = partial(self._write_new, path, parts)
        await self._run(path, write, size_bytes=size_bytes)

    def _write_new(self, path: str, parts: Sequence[Buffer]) -> None:
        self._directories.make(path)
        with NewFile(self._root, path) as file:
            file.append(parts)
        self._directories.sync(path)

    async def create(self, path: str) -> NewFile:
        """Creates a file of unique name that is written piece by piece."""
        create = partial(self._create, path)
        return await self._run(path, create, discard=NewFile.discard)

    def _create(self, path: str) -> NewFile:
        self._directories.make(path)
        return NewFile(self._root, path)

    async def keep(self, path: str, file: NewFile) -> None:
        """Ends a file that was written piece by piece; durable when it returns."""
        keep = partial(self._keep, path, file)
        await self._run(path, keep, size_bytes=file.size_bytes, instead=file.discard)

    def _keep(self, path: str, file: NewFile) -> None:
        file.keep()
        self._directories.sync(path)

    async def adopt(self, path: str) -> None:
        """Makes durable that another process has written a file."""
        await self._run(path, partial(self._adopt, path))

    def _adopt(self, path: str) -> None:
        self._directories.make(path)
        self._directories.sync(path)

    async def sync(self, path: str) -> None:
        """Makes the presence or absence of a path durable."""
        await self._run(path, partial(self._directories.sync, path))

    async def remove(self, path: str) -> None:
        """Removes a file durably; an absent one is no error."""
        await self._run(path, partial(self._remove, path))

    def _remove(self, path: str) -> None:
        rooted_files.remove_file(self._root, path)
        try:
            self._directories.sync(path)
        except FileNotFoundError:  # the directory is absent, and the file with it
            return

    async def remove_below(self, prefix: str) -> None:
        """Removes everything whose path begins with a prefix, directories included."""
        # No deadline: there may be very many files.
        remove = partial(self._directories.remove_below, prefix)
        await self._threads.run(prefix, remove, seconds=None)

    async def work(self, path: str, function: Callable[[], T]) -> T:
        """Runs a function that appends to a new file, and returns its result.

        No deadline: the function would go on writing to the file after it.
        """
        return await self._threads.run(path, function, seconds=None)

    async def _read(self, path: str, read: Callable[[], T], *, size_bytes: int) -> T:
        seconds = deadlines.DISK_SECONDS + size_bytes / deadlines.LEAST_BYTES_PER_SECOND
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
        seconds = deadlines.seconds_of(self._storage, size_bytes=size_bytes)
        return await self._threads.run(
            path, function, seconds=seconds, discard=discard, instead=instead
        )


def _seconds_until_next_mtime(path: Path) -> float:
    """Returns the seconds until a new write of a file gets a different mtime; 0 where
    it already does."""
    try:
        written = path.stat(follow_symlinks=False).st_mtime_ns
    except FileNotFoundError:  # there is no previous version to confuse
        return 0.0
    age = (time.time_ns() - written) / 1e9
    return TICK_SECONDS - max(0.0, age) if age < TICK_SECONDS else 0.0
