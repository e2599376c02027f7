"""Implements `Bucket` over TensorStore, in a directory, in memory, on GCS or on S3.

`TensorStoreBucket` checks paths and translates errors; one of the backends makes the
calls. Except on files, each object is written by one request. On the network, calls
that may be repeated are hedged and retried; see `hedging.py`.
"""

import asyncio
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import starmap
from typing import Any, Final, Self, TypeAlias, TypeVar

import tensorstore as ts

from storesvc.errors import CorruptDataError
from storesvc.format.checksums import Buffer
from storesvc.format.layout import ROOT
from storesvc.format.ocdbt import ValueLocation
from storesvc.format.wire import Part, cut
from storesvc.storage import hedging, kvstore
from storesvc.storage.bucket import (
    ALWAYS,
    UNLISTED,
    Condition,
    Generation,
    PreconditionError,
    Stored,
    WriteCondition,
    translate_errors,
)
from storesvc.storage.file_bucket import FileBackend, NewObject
from storesvc.storage.kvstore import OpenedStorage, open_storage
from storesvc.storage.location import CONCURRENCY, MEMORY_DRIVER
from storesvc.storage.remote import (
    GcsLists,
    S3Deletes,
    endpoint_in_environment,
    find_endpoint,
)
from storesvc.storage.requests import (
    HedgedSender,
    answer,
    await_future,
    gather_each,
    run_all,
    shared_window,
)
from storesvc.telemetry.events import (
    Operation,
    Span,
    StorageRequested,
    is_observed,
    publish,
)

T = TypeVar("T")


class MemoryBackend:
    """Objects in the memory of this process; methods as of `TensorStoreBucket`.

    The base of the backends of buckets. `write` deletes the object if `data` is None.
    """

    def __init__(self, opened: OpenedStorage) -> None:
        self._storage = opened.storage
        self._root = opened.root

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
        await self._replace(path, data)

    async def _replace(self, path: str, data: bytes) -> None:
        await await_future(self._root.write(path, data))

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

    async def list_paths(
        self, prefix: str, after: str, limit: int | None = None
    ) -> list[str]:
        del limit  # one response has all paths
        return await kvstore.names(self._root, prefix, after)

    async def sizes(self, folder: str) -> dict[str, int]:
        paths = await self.list_paths(folder, "")
        found = await gather_each(self.read, paths)
        held = zip(paths, found, strict=True)
        return {path: len(one.data) for path, one in held if one is not None}

    async def first_names(self, limit: int) -> list[str]:
        del limit
        return []


class RemoteBackend(MemoryBackend):
    """Objects in a bucket on the network."""

    def __init__(self, opened: OpenedStorage, lists: GcsLists | None = None) -> None:
        super().__init__(opened)
        sender = partial(
            HedgedSender,
            window=shared_window(opened.storage),
            probe=None if lists is None else lists.probe,
        )
        self._reads = sender(hedging.READS, "read")
        self._writes = sender(hedging.WRITES, "write")
        self._changes = sender(hedging.CHANGES, "change")

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

    async def _replace(self, path: str, data: bytes) -> None:
        await self._writes.answer(
            partial(super()._replace, path, data),
            size_bytes=len(data),
            name=self._storage.describe(path),
        )

    async def write(
        self, path: str, data: bytes | None, condition: WriteCondition
    ) -> Generation:
        size_bytes = len(data or b"")
        ask = partial(kvstore.write, self._root, path, data, condition)
        # 1. A creation, or a write without a condition, is sent once: a late duplicate
        #    would restore what was deleted in the meantime.
        if isinstance(condition, Condition):
            sent = self._changes.send(ask, size_bytes=size_bytes)
            return await answer(self._storage, sent, size_bytes=size_bytes)
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
            with translate_errors(self._storage, path):
                await self.delete(path, None)

        await gather_each(
            delete, await self.list_paths(prefix, ""), at_once=CONCURRENCY
        )

    async def list_paths(
        self, prefix: str, after: str, limit: int | None = None
    ) -> list[str]:
        return [*await self.list_versions(prefix, after, limit)]

    async def list_versions(
        self, prefix: str, after: str, limit: int | None
    ) -> dict[str, Generation]:
        listed = await self._versions(prefix, after, limit)
        # Some servers of the API ignore the prefix or the offset of a list: then the
        # first names are others than those that the caller needs.
        names = [name for name in listed if name.startswith(prefix) and name > after]
        if limit is not None and len(names) < len(listed):
            return await self.list_versions(prefix, after, None)
        return {name: listed[name] for name in names}

    async def _versions(
        self, prefix: str, after: str, limit: int | None
    ) -> dict[str, Generation]:
        del limit
        listing = partial(kvstore.names, self._root, prefix, after)
        found = await answer(self._storage, self._reads.send(listing))
        return dict.fromkeys(found, UNLISTED)


class GcsBackend(RemoteBackend):
    """Objects in a bucket on Google Cloud Storage, whose own client lists them."""

    def __init__(self, opened: OpenedStorage, lists: GcsLists) -> None:
        super().__init__(opened, lists)
        self._lists = lists

    async def first_names(self, limit: int) -> list[str]:
        return await self._lists.first_names(limit)

    async def _versions(
        self, prefix: str, after: str, limit: int | None
    ) -> dict[str, Generation]:
        return await self._lists.versions(prefix, after, limit)

    async def sizes(self, folder: str) -> dict[str, int]:
        return await self._lists.sizes(folder)


class S3Backend(RemoteBackend):
    """Objects in a bucket on S3; obstore signs their conditional deletions, and makes
    lists that begin in the middle, or end there: TensorStore reads all pages."""

    def __init__(self, opened: OpenedStorage, deletes: S3Deletes) -> None:
        super().__init__(opened)
        self._deletes = deletes

    async def delete(self, path: str, generation: Generation | None) -> None:
        if generation is None:
            await super().delete(path, None)
        else:
            await self._deletes.delete(path, generation)

    async def _versions(
        self, prefix: str, after: str, limit: int | None
    ) -> dict[str, Generation]:
        if not prefix.endswith("/") or (not after and limit is None):
            return await super()._versions(prefix, after, limit)
        return await self._deletes.versions(prefix, after, limit)

    async def sizes(self, folder: str) -> dict[str, int]:
        return await self._deletes.sizes(folder)


def _present(path: str, data: bytes | None) -> bytes:
    if data is None:
        raise CorruptDataError(f"data file {path} is missing; use another checkpoint")
    return data


Backend: TypeAlias = FileBackend | MemoryBackend


class TensorStoreBucket:
    """A ``Bucket`` over one open storage, and the writes of data files."""

    def __init__(self, opened: OpenedStorage) -> None:
        self.opened = opened
        self._storage = opened.storage
        self._backend = _backend(opened)

    @classmethod
    async def open(cls, root: str) -> Self:
        """Opens the bucket at a root.

        Raises:
            InvalidFieldError: The root is not a URI of a known storage, or its bucket
                does not exist.
            StorageDeniedError: The storage rejects the credentials.
            StorageUnavailableError: The storage does not answer.
        """
        return cls(await open_storage(root))

    @property
    def name(self) -> str:
        """Root without options, for messages."""
        return self._storage.name

    @property
    def is_first_party(self) -> bool:
        """True if the provider of the API serves it; others may ignore conditions."""
        return find_endpoint(self._storage) is None

    @property
    def has_files(self) -> bool:
        """True if its objects are files of this machine."""
        return self._storage.is_files

    async def read(self, path: str) -> Stored | None:
        with self._at(path, "read"):
            return await self._backend.read(path)

    async def read_range(self, path: str, start: int, stop: int) -> bytes:
        with self._at(path, "read"):
            return await self._backend.read_range(path, start, stop)

    async def read_parts(
        self, path: str, start: int, stop: int, parts: Iterable[Part]
    ) -> list[bytes]:
        """Returns messages whose data are consecutive ranges of a data file.

        Raises:
            CorruptDataError: The data file is missing or shorter.
        """
        with self._at(path, "read"):
            return await self._backend.read_parts(path, start, stop, parts)

    async def write(
        self, path: str, data: bytes, *, condition: WriteCondition = ALWAYS
    ) -> Generation:
        with self._at(path, "write"):
            return await self._backend.write(path, data, condition)

    async def write_new(self, path: str, parts: Sequence[Buffer]) -> None:
        """Writes an object of unique name, as the concatenation of its parts; durable
        when it returns. An error may leave a part of it."""
        with self._at(path, "write"):
            await self._backend.write_new(path, parts)

    async def write_all(self, objects: Mapping[str, Sequence[Buffer]]) -> None:
        """Writes objects at the same time, as ``write_new``; those outside the pool may
        be there already, with the same contents."""
        if not isinstance(self._backend, FileBackend):
            await run_all(*starmap(self.write_new, objects.items()))
            return
        with ExitStack() as requests:
            for path in objects:
                requests.enter_context(self._at(path, "write"))
            await self._backend.write_all(objects)

    async def create(self, path: str) -> NewObject:
        """Creates an object of unique name that is written piece by piece."""
        with translate_errors(self._storage, path):
            return await self._backend.create(path)

    async def fill(self, new: NewObject, fill: Callable[[], T]) -> T:
        """Runs a function that appends to a new object, in a thread; returns its
        result."""
        return await self._backend.fill(new, fill)

    async def discard(self, new: NewObject) -> None:
        """Ends a new object, and removes what was written."""
        await self.fill(new, new.discard)

    async def keep(self, new: NewObject) -> None:
        """Ends a new object; durable when it returns."""
        with self._at(new.path, "write"):
            await self._backend.keep(new)

    async def adopt(self, path: str) -> None:
        """Makes durable that another process has written an object."""
        with self._at(path, "sync"):
            await self._backend.adopt(path)

    async def settle(self, path: str) -> None:
        with self._at(path, "sync"):
            await self._backend.settle(path)

    async def delete(self, path: str, *, generation: Generation | None = None) -> None:
        try:
            with self._at(path, "delete"):
                await self._backend.delete(path, generation)
        except PreconditionError:
            # If the response was lost, the retry of our own deletion finds no object.
            if await self.read(path) is not None:
                raise

    async def delete_below(self, prefix: str) -> None:
        with self._request(prefix, "delete"):
            await self._backend.delete_below(prefix)

    async def first_names(self, limit: int) -> list[str]:
        """Returns up to `limit` names of entries at the root; none where a storage
        cannot list them cheaply.

        A name is the name of an object or of a directory. On files nothing deeper is
        read, because there may be many files.
        """
        with translate_errors(self._storage, ""):
            return await self._backend.first_names(limit)

    async def list(
        self, prefix: str, *, after: str = "", limit: int | None = None
    ) -> list[str]:
        with self._request(prefix, "list"):
            return await self._backend.list_paths(prefix, after, limit)

    async def list_versions(
        self, prefix: str, *, after: str = "", limit: int | None = None
    ) -> dict[str, Generation]:
        if not isinstance(self._backend, RemoteBackend):
            found = await self.list(prefix, after=after, limit=limit)
            return dict.fromkeys(found, UNLISTED)
        with self._request(prefix, "list"):
            return await self._backend.list_versions(prefix, after, limit)

    @property
    def lists_pages(self) -> bool:
        return isinstance(self._backend, RemoteBackend)

    async def sizes(self, folder: str) -> dict[str, int]:
        """Returns the bytes of each object below a folder, by path."""
        with self._request(folder, "list"):
            return await self._backend.sizes(folder)

    def key_space(self, *, path: str, pool: str) -> "KeySpace":
        return KeySpace(self, path=path, pool=pool)

    @contextmanager
    def _at(self, path: str, operation: Operation) -> Generator[None]:
        """Rejects an invalid path; a request for a valid one runs inside."""
        self._storage.check(path)
        with self._request(path, operation):
            yield

    @contextmanager
    def _request(self, path: str, operation: Operation) -> Generator[None]:
        """Translates the errors of a request, and publishes its end."""
        span = Span()
        try:
            with translate_errors(self._storage, path):
                yield
        except BaseException as e:
            span.error = type(e).__name__
            raise
        finally:
            if is_observed():
                publish(
                    StorageRequested(
                        storage=self._storage.spec["driver"],
                        operation=operation,
                        path=path,
                        error=span.error,
                        start=span.start,
                        seconds=span.seconds,
                    )
                )


def _backend(opened: OpenedStorage) -> Backend:
    match opened.extra:
        case GcsLists() as lists:
            return GcsBackend(opened, lists)
        case S3Deletes() as deletes:
            return S3Backend(opened, deletes)
        case None if opened.storage.is_files:
            return FileBackend(opened)
        case None:
            return MemoryBackend(opened)


_NODE: Final = "node"
"""Name of a node's object in the memory that TensorStore decodes it from."""


class KeySpace:
    """An OCDBT database whose data files are in a pool.

    ``storesvc.format.ocdbt`` writes it; TensorStore decodes it here. TensorStore is
    given bytes that the bucket has read, and opens no file itself.
    """

    def __init__(self, bucket: TensorStoreBucket, *, path: str, pool: str) -> None:
        self._bucket = bucket
        self._storage = bucket.opened.storage
        self._path = path
        self._pool = pool

    async def places(self) -> dict[str, ValueLocation] | None:
        """Returns the range of each key's value; None if there is no key space."""
        stored = await self._bucket.read(self._path + ROOT)
        if stored is None:
            return None
        manifest = await self._decode_node(ROOT, stored.data, None)
        root = manifest["versions"][-1]["root"].get("location")
        found: dict[str, ValueLocation] = {}
        nodes = [] if root is None else [(root, b"")]
        seen: set[str] = set()
        while nodes:  # of the B-tree, depth first
            location, prefix = nodes.pop()
            if location in seen:
                raise CorruptDataError(
                    f"{self._path}: expected a tree of nodes, got one that refers to "
                    f"the node {location} twice"
                )
            seen.add(location)
            node = await self._node(location)
            with translate_errors(self._storage, self._path):
                below = await asyncio.to_thread(_add_values, node, prefix, found)
            nodes += reversed(below)
        return found

    async def _node(self, location: str) -> Any:
        with translate_errors(self._storage, self._path):
            file, offset, length = _parse_location(location)
        path = f"{self._pool}{file}"
        data = await self._bucket.read_range(path, offset, offset + length)
        return await self._decode_node(_NODE, data, f"btreenode::{_NODE}:0:{length}")

    async def _decode_node(self, name: str, data: bytes, location: str | None) -> Any:
        context = ts.Context()
        with translate_errors(self._storage, self._path):
            opening = ts.KvStore.open({"driver": MEMORY_DRIVER}, context=context)
            memory = await await_future(opening)
            await await_future(memory.write(name, data))
            return await await_future(ts.ocdbt.dump(memory, location, context=context))

    def opened(self) -> ts.KvStore:
        """Opens the key space with TensorStore's own driver."""
        _, root, context, _ = self._bucket.opened
        spec = {
            "driver": "ocdbt",
            "base": (root / self._pool).spec().to_json(),
            "manifest": (root / self._path).spec().to_json(),
        }
        with endpoint_in_environment(self._storage):
            return ts.KvStore.open(spec, context=context).result()


def _add_values(
    node: Any, prefix: bytes, found: dict[str, ValueLocation]
) -> list[tuple[str, bytes]]:
    """Adds the values of a node; returns its children with the prefix of their keys."""
    below = []
    for entry in node["entries"]:
        if "location" in entry:
            shared = prefix + entry.get("subtree_common_prefix", b"")
            below.append((entry["location"], shared))
        else:
            key = (prefix + entry["key"]).decode()
            found[key] = _parse_location(entry["indirect_value"])
    return below


def _parse_location(value: str) -> ValueLocation:
    """Parses ``<kind>:<base>:<file>:<offset>:<length>``."""
    _, _, file, offset, length = value.split(":")
    return ValueLocation(file, int(offset), int(length))
