"""The files of a root on this machine: whatever blocks, in threads with a deadline."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from storesvc.format.checksums import Buffer
from storesvc.format.frames import Part
from storesvc.storage import deadlines, mtime_guard, rooted_files, temporary_files
from storesvc.storage.data_file import NewFile
from storesvc.storage.directories import Directories
from storesvc.storage.file_threads import FileThreads
from storesvc.storage.local_reads import LocalReads
from storesvc.storage.location import FILE_DRIVER, Storage

T = TypeVar("T")


class LocalFiles:
    """Reads and writes files below one root; follows no link.

    Every method raises ``OSError`` where the disk fails, ``TimeoutError`` where it
    does not answer in time, and ``StorageUnavailableError`` where an earlier call for
    the place has not returned.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._root = Path(storage.spec["path"])
        self._reads = LocalReads(self._root)
        self._directories = Directories(self._root)
        self._threads = FileThreads(storage.name)

    @classmethod
    def of(cls, storage: Storage) -> Self | None:
        """Returns those of a storage, if it is a directory."""
        return cls(storage) if storage.spec["driver"] == FILE_DRIVER else None

    async def read_parts(
        self, place: str, parts: Iterable[Part], *, size_bytes: int
    ) -> list[bytes]:
        """See ``LocalReads.read``."""
        return await self._read(
            place, partial(self._reads.read, place, parts), size_bytes=size_bytes
        )

    async def read_range(self, place: str, start: int, stop: int) -> bytes:
        """See ``LocalReads.read_range``."""
        read = partial(self._reads.read_range, place, start, stop)
        return await self._read(place, read, size_bytes=stop - start)

    async def read_all(self, place: str) -> tuple[bytes, bytes] | None:
        """See ``LocalReads.read_all``."""
        read = partial(self._reads.read_all, place)
        return await self._read(place, read, size_bytes=0)

    async def check(self, place: str) -> None:
        """Refuses what a storage driver must not open: see
        ``rooted_files.check_file``."""
        await self._run(place, partial(rooted_files.check_file, self._root, place))

    async def first_names(self, limit: int) -> list[str]:
        """Returns the names of up to so many entries of the root itself."""
        return await self._run("", partial(self._directories.first_names, limit))

    async def prepare(self, place: str, *, is_conditional: bool) -> None:
        """Prepares a place for a write by a storage driver: its directories are there
        and durable, nothing of a killed write is left, and the time stamp of a
        conditional write will be another than that of the one before."""
        seconds = await self._run(place, partial(self._prepare, place))
        if is_conditional and seconds:
            await asyncio.sleep(seconds)

    def _prepare(self, place: str) -> float:
        self._directories.make(place)
        rooted_files.check_file(self._root, place)
        temporary_files.clear(self._root / place)
        return mtime_guard.seconds_until_next(self._root / place)

    async def write_new(self, place: str, parts: Sequence[Buffer]) -> None:
        """Writes a file that nobody else names; durable when it returns."""
        size_bytes = sum(memoryview(part).nbytes for part in parts)
        write = partial(self._write_new, place, parts)
        await self._run(place, write, size_bytes=size_bytes)

    def _write_new(self, place: str, parts: Sequence[Buffer]) -> None:
        self._directories.make(place)
        with NewFile(self._root, place) as file:
            file.append(parts)
        self._directories.sync(place)

    async def create(self, place: str) -> NewFile:
        """Returns a file that nobody else names, to be written bit by bit."""
        create = partial(self._create, place)
        return await self._run(place, create, discard=NewFile.discard)

    def _create(self, place: str) -> NewFile:
        self._directories.make(place)
        return NewFile(self._root, place)

    async def keep(self, place: str, file: NewFile) -> None:
        """Ends what was written bit by bit; durable when it returns."""
        keep = partial(self._keep, place, file)
        await self._run(place, keep, size_bytes=file.size_bytes, instead=file.discard)

    def _keep(self, place: str, file: NewFile) -> None:
        file.keep()
        self._directories.sync(place)

    async def adopt(self, place: str) -> None:
        """Makes durable that a place is there which another process has written."""
        await self._run(place, partial(self._adopt, place))

    def _adopt(self, place: str) -> None:
        self._directories.make(place)
        self._directories.sync(place)

    async def sync(self, place: str) -> None:
        """Makes durable that a place is there, or is not."""
        await self._run(place, partial(self._directories.sync, place))

    async def remove(self, place: str) -> None:
        """Removes a file, durably; none there is no error."""
        await self._run(place, partial(self._remove, place))

    def _remove(self, place: str) -> None:
        rooted_files.remove_file(self._root, place)
        try:
            self._directories.sync(place)
        except FileNotFoundError:  # so nothing is there
            return

    async def remove_below(self, prefix: str) -> None:
        """Removes everything whose place begins with a prefix, and its directories."""
        # as long as it takes: there may be very many of them
        remove = partial(self._directories.remove_below, prefix)
        await self._threads.run(prefix, remove, seconds=None)

    async def work(self, place: str, function: Callable[[], T]) -> T:
        """Returns what a function returns that writes to a new file as it goes. It has
        no deadline: the file is still written to while the function runs."""
        return await self._threads.run(place, function, seconds=None)

    async def _read(self, place: str, read: Callable[[], T], *, size_bytes: int) -> T:
        seconds = deadlines.DISK_SECONDS + size_bytes / deadlines.LEAST_BYTES_PER_SECOND
        return await self._threads.run(place, read, seconds=seconds)

    async def _run(
        self,
        place: str,
        function: Callable[[], T],
        *,
        size_bytes: int = 0,
        discard: Callable[[T], object] | None = None,
        instead: Callable[[], object] | None = None,
    ) -> T:
        seconds = deadlines.seconds_of(self._storage, size_bytes=size_bytes)
        return await self._threads.run(
            place, function, seconds=seconds, discard=discard, instead=instead
        )
