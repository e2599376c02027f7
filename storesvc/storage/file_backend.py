"""Stores the objects of a bucket as files of this machine.

TensorStore makes the conditional writes. All other calls use the operating system:
TensorStore would follow links, and a file that hangs would block its few threads
forever.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from storesvc.format.checksums import Buffer
from storesvc.format.layout import is_pooled
from storesvc.format.wire import Part
from storesvc.storage import deadlines, kvstore
from storesvc.storage.bucket import (
    ALWAYS,
    Condition,
    Generation,
    Stored,
    WriteCondition,
)
from storesvc.storage.errors import translated
from storesvc.storage.local_files import LocalFiles
from storesvc.storage.new_object import NewObject
from storesvc.storage.opened_storage import OpenedStorage

T = TypeVar("T")

_DELETE_TRIES: Final = 3


class FileBackend:
    """Objects in the files below one directory; methods as of `TensorStoreBucket`."""

    def __init__(self, opened: OpenedStorage) -> None:
        self._storage = opened.storage
        self._root = opened.root
        self._files = LocalFiles(opened.storage)
        self._makes_generations = False
        """True if ``LocalFiles`` encodes generations as this TensorStore does, which a
        read by both has shown."""

    async def read(self, path: str) -> Stored | None:
        read = await self._files.read_all(path)
        if read is None:
            return None
        found = Stored(read[0], Generation(read[1]))
        if self._makes_generations:
            return found
        reading = kvstore.read(self._root, path)
        stored = await deadlines.answer(self._storage, reading)
        if stored is not None:
            self._makes_generations = stored == found
        return stored

    async def read_range(self, path: str, start: int, stop: int) -> bytes:
        return await self._files.read_range(path, start, stop)

    async def read_parts(
        self, path: str, start: int, stop: int, parts: Iterable[Part]
    ) -> list[bytes]:
        return await self._files.read_parts(path, parts, size_bytes=stop - start)

    async def write(
        self, path: str, data: bytes, condition: WriteCondition
    ) -> Generation:
        return await self._files.replace(
            path,
            partial(kvstore.write_blocking, self._root, path, data, condition),
            is_conditional=not isinstance(condition, Condition),
            size_bytes=len(data),
        )

    async def write_new(self, path: str, parts: Sequence[Buffer]) -> None:
        await self._files.write_new(path, parts)

    async def create(self, path: str) -> NewObject:
        return NewObject(path, await self._files.create(path), self._storage)

    async def fill(self, new: NewObject, fill: Callable[[], T]) -> T:
        with translated(self._storage, new.path):
            return await self._files.work(new.path, fill)

    async def keep(self, new: NewObject) -> None:
        assert new.file is not None, f"{new.path}: it has ended"
        file, new.file = new.file, None
        keeping = asyncio.ensure_future(self._files.keep(new.path, file))
        try:
            await asyncio.shield(keeping)
        except asyncio.CancelledError:
            # Its thread continues, and closes the file. A call that was cancelled
            # before it began would leave the file open.
            keeping.add_done_callback(_retrieve)
            raise

    async def adopt(self, path: str) -> None:
        await self._files.adopt(path)

    async def settle(self, path: str) -> None:
        await self._files.sync(path)

    async def delete(self, path: str, generation: Generation | None) -> None:
        if is_pooled(path):  # a direct writer may have put a link there
            await self._files.remove(path)
            return
        await self._files.check(path)
        condition = ALWAYS if generation is None else generation
        # TensorStore's driver fails if two calls remove the lock file of one path.
        for _ in range(_DELETE_TRIES):
            with suppress(OSError, ValueError):
                await self._delete(path, condition)
                return
        await self._delete(path, condition)

    async def delete_below(self, prefix: str) -> None:
        await self._files.remove_below(prefix)

    async def list_paths(self, prefix: str, after: str) -> list[str]:
        listing = kvstore.names(self._root, prefix, after)
        return await deadlines.answer(self._storage, listing)

    async def sizes(self, folder: str) -> dict[str, int]:
        return await self._files.sizes(folder)

    async def first_names(self, limit: int) -> list[str]:
        return await self._files.first_names(limit)

    async def _delete(self, path: str, condition: WriteCondition) -> None:
        deleting = kvstore.write(self._root, path, None, condition)
        await deadlines.answer(self._storage, deleting)


def _retrieve(ended: "asyncio.Future[None]") -> None:
    """Takes the error of a future that no task awaits: asyncio would log it."""
    if not ended.cancelled():
        ended.exception()
