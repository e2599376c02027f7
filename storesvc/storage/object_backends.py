"""Stores the objects of a bucket in memory, on Google Cloud Storage or on S3.

Each object is written by one request. On the network, calls that may be repeated are
hedged and retried; see `hedging.py`.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from storesvc.errors import CorruptDataError
from storesvc.format.checksums import Buffer
from storesvc.format.wire import Part, cut
from storesvc.storage import deadlines, hedging, kvstore
from storesvc.storage.bounded_gather import each
from storesvc.storage.bucket import (
    ALWAYS,
    Condition,
    Generation,
    Stored,
    WriteCondition,
)
from storesvc.storage.errors import translated
from storesvc.storage.futures import await_future
from storesvc.storage.gcs import GcsLists
from storesvc.storage.hedged_calls import HedgedSender
from storesvc.storage.location import CONCURRENCY
from storesvc.storage.new_object import NewObject
from storesvc.storage.opened_storage import OpenedStorage
from storesvc.storage.s3 import S3Deletes

T = TypeVar("T")


class MemoryBackend:
    """Objects in the memory of this process; methods as of `TensorStoreBucket`.

    The base of the backends of buckets. `write` deletes the object if `data` is None.
    """

    def __init__(self, opened: OpenedStorage) -> None:
        self._storage = opened.storage
        self._root = opened.root
        self._writes = HedgedSender(hedging.WRITES, "write")

    async def read(self, path: str) -> Stored | None:
        return await kvstore.read(self._root, path)

    async def read_range(self, path: str, start: int, stop: int) -> bytes:
        data = await kvstore.read_range(self._root, path, start, stop)
        return _present(path, data)

    async def read_parts(
        self, path: str, start: int, stop: int, parts: Iterable[Part]
    ) -> list[bytes]:
        data = await self.read_range(path, start, stop)
        return await asyncio.to_thread(cut, data, start, parts)

    async def write(
        self, path: str, data: bytes | None, condition: WriteCondition
    ) -> Generation:
        return await kvstore.write(self._root, path, data, condition)

    async def write_new(self, path: str, parts: Sequence[Buffer]) -> None:
        data = await asyncio.to_thread(b"".join, parts)
        await self._writes.answer(
            lambda: await_future(self._root.write(path, data)),
            size_bytes=len(data),
            name=self._storage.describe(path),
        )

    async def create(self, path: str) -> NewObject:
        return NewObject(path, None, self._storage)

    async def fill(self, new: NewObject, fill: Callable[[], T]) -> T:
        del new
        return await asyncio.to_thread(fill)

    async def keep(self, new: NewObject) -> None:
        await self.write_new(new.path, new.parts)

    async def adopt(self, path: str) -> None:
        """Does nothing: a write is durable when it returns."""

    async def settle(self, path: str) -> None:
        """Does nothing: an object that can be read is durable."""

    async def delete(self, path: str, generation: Generation | None) -> None:
        await self.write(path, None, ALWAYS if generation is None else generation)

    async def delete_below(self, prefix: str) -> None:
        await await_future(self._root.delete_range(kvstore.key_range(prefix)))

    async def list_paths(self, prefix: str, after: str) -> list[str]:
        return await kvstore.names(self._root, prefix, after)

    async def sizes(self, folder: str) -> dict[str, int]:
        paths = await self.list_paths(folder, "")
        found = await each(self.read, paths)
        held = zip(paths, found, strict=True)
        return {path: len(one.data) for path, one in held if one is not None}

    async def first_names(self, limit: int) -> list[str]:
        del limit
        return []


class RemoteBackend(MemoryBackend):
    """Objects in a bucket on the network."""

    def __init__(self, opened: OpenedStorage) -> None:
        super().__init__(opened)
        self._reads = HedgedSender(hedging.READS, "read")
        self._changes = HedgedSender(hedging.CHANGES, "change")

    async def read(self, path: str) -> Stored | None:
        return await self._reads.answer(
            partial(kvstore.read, self._root, path),
            size_bytes=0,
            name=self._storage.describe(path),
        )

    async def read_range(self, path: str, start: int, stop: int) -> bytes:
        data = await self._reads.answer(
            partial(kvstore.read_range, self._root, path, start, stop),
            size_bytes=stop - start,
            name=self._storage.describe(path),
        )
        return _present(path, data)

    async def write(
        self, path: str, data: bytes | None, condition: WriteCondition
    ) -> Generation:
        ask = partial(kvstore.write, self._root, path, data, condition)
        size_bytes = len(data or b"")
        # 1. A creation, or a write without a condition, is sent once: a late duplicate
        #    would restore what was deleted in the meantime.
        if isinstance(condition, Condition):
            return await deadlines.answer(self._storage, ask(), size_bytes=size_bytes)
        # 2. A change of one generation may be repeated: no generation comes back, so a
        #    late duplicate changes nothing. A conflict is no response while another
        #    request is in flight, because that one may have made the change.
        return await self._changes.answer(
            ask, size_bytes=size_bytes, name=self._storage.describe(path)
        )

    async def delete_below(self, prefix: str) -> None:
        # TensorStore's own call has no deadline, and begins with a list of its own.
        async def delete(path: str) -> None:
            self._storage.check(path)
            with translated(self._storage, path):
                await self.delete(path, None)

        await each(delete, await self.list_paths(prefix, ""), at_once=CONCURRENCY)

    async def list_paths(self, prefix: str, after: str) -> list[str]:
        names = await self._names(prefix, after)
        # Some servers of the API ignore the prefix or the offset of a list.
        return [name for name in names if name.startswith(prefix) and name > after]

    async def _names(self, prefix: str, after: str) -> list[str]:
        listing = kvstore.names(self._root, prefix, after)
        return await deadlines.answer(self._storage, listing)


class GcsBackend(RemoteBackend):
    """Objects in a bucket on Google Cloud Storage, whose own client lists them."""

    def __init__(self, opened: OpenedStorage, lists: GcsLists) -> None:
        super().__init__(opened)
        self._lists = lists

    async def first_names(self, limit: int) -> list[str]:
        return await self._lists.first_names(limit)

    async def _names(self, prefix: str, after: str) -> list[str]:
        return await self._lists.names(prefix, after=after)

    async def sizes(self, folder: str) -> dict[str, int]:
        return await self._lists.sizes(folder)


class S3Backend(RemoteBackend):
    """Objects in a bucket on S3; obstore signs their conditional
    deletions, and reads their sizes."""

    def __init__(self, opened: OpenedStorage, deletes: S3Deletes) -> None:
        super().__init__(opened)
        self._deletes = deletes

    async def delete(self, path: str, generation: Generation | None) -> None:
        if generation is None:
            await super().delete(path, None)
        else:
            await self._deletes.delete(path, generation)

    async def sizes(self, folder: str) -> dict[str, int]:
        return await self._deletes.sizes(folder)


def _present(path: str, data: bytes | None) -> bytes:
    if data is None:
        raise CorruptDataError(f"data file {path} is missing; use another checkpoint")
    return data
