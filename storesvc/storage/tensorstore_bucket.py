"""Implements `Bucket` over TensorStore, in a directory, in memory, on GCS or on S3.

`TensorStoreBucket` checks paths and translates errors; one of the backends makes the
calls.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Self, TypeAlias, TypeVar

from storesvc.format.checksums import Buffer
from storesvc.format.wire import Part
from storesvc.storage.bucket import (
    ALWAYS,
    Generation,
    PreconditionError,
    Stored,
    WriteCondition,
)
from storesvc.storage.errors import translated
from storesvc.storage.file_backend import FileBackend
from storesvc.storage.gcs import GcsLists, endpoint_of
from storesvc.storage.location import FILE_DRIVER
from storesvc.storage.new_object import NewObject
from storesvc.storage.object_backends import GcsBackend, MemoryBackend, S3Backend
from storesvc.storage.ocdbt_reader import KeySpace
from storesvc.storage.opened_storage import OpenedStorage, open_storage
from storesvc.storage.s3 import S3Deletes
from storesvc.telemetry.events import (
    Operation,
    Span,
    StorageRequested,
    is_observed,
    publish,
)

T = TypeVar("T")

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
        return endpoint_of(self._storage) is None

    @property
    def has_files(self) -> bool:
        """True if its objects are files of this machine."""
        return bool(self._storage.spec["driver"] == FILE_DRIVER)

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

    async def create(self, path: str) -> NewObject:
        """Creates an object of unique name that is written piece by piece."""
        with translated(self._storage, path):
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
        with translated(self._storage, ""):
            return await self._backend.first_names(limit)

    async def list(self, prefix: str, *, after: str = "") -> list[str]:
        with self._request(prefix, "list"):
            return await self._backend.list_paths(prefix, after)

    async def sizes(self, folder: str) -> dict[str, int]:
        """Returns the bytes of each object below a folder, by path.

        Args:
            folder: The common beginning of the paths; ends with a slash.
        """
        with self._request(folder, "list"):
            return await self._backend.sizes(folder)

    def key_space(self, *, path: str, pool: str) -> KeySpace:
        """Returns the OCDBT key space at a path.

        Args:
            path: Prefix of its manifest.
            pool: Prefix of its data files.
        """
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
            with translated(self._storage, path):
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
        case None if opened.storage.spec["driver"] == FILE_DRIVER:
            return FileBackend(opened)
        case None:
            return MemoryBackend(opened)
