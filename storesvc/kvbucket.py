"""A bucket, and the OCDBT key spaces in it, over TensorStore.

Roots: ``file:///path``, ``memory://``, ``gs://bucket/prefix``.
"""

import asyncio
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

import tensorstore as ts

from storesvc.bucket import (
    ALWAYS,
    IF_ABSENT,
    Condition,
    Generation,
    PreconditionError,
    Stored,
    WriteCondition,
)
from storesvc.datafiles import NewFile
from storesvc.directories import Directories
from storesvc.errors import (
    CorruptDataError,
    InvalidFieldError,
    StorageFullError,
    StorageUnavailableError,
    StoreError,
)
from storesvc.format.checksums import Buffer
from storesvc.framing import Part, cut
from storesvc.local_reads import LocalReads
from storesvc.ticks import Ticks

_DELETE_TRIES: Final = 3

_FAILED: Final = b""  # the generation that a write with a failed condition returns
_ABSENT: Final = b"\x02"  # TensorStore's StorageGeneration::NoValue()


_DAMAGE: Final = (
    "DATA_LOSS",
    "OUT_OF_RANGE",
    "Error decoding",
    "NOT_FOUND: Error reading",
)
"""What messages of TensorStore begin with that tell of damaged or missing bytes."""


class Place(NamedTuple):
    """Where a value of a key space lies."""

    file: str
    """Relative to the pool."""
    offset: int
    length: int


class KvBucket:
    """A ``Bucket`` over one ``ts.KvStore``."""

    def __init__(self, root: "ts.KvStore", context: "ts.Context") -> None:
        self._root = root
        self._context = context
        self._directories = Directories.of(root)
        self._ticks = Ticks.of(root)
        self._local = LocalReads.of(root)

    @classmethod
    async def open(cls, root: str) -> "KvBucket":
        """Returns the bucket at a root.

        Raises:
            InvalidFieldError: The root is not a URI of a storage we know.
            StorageUnavailableError: The storage does not answer.
        """
        context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
        with _translated(root):
            store = await ts.KvStore.open(root_spec(root), context=context)
        return cls(store, context)

    async def read(self, place: str) -> Stored | None:
        with _translated(place):
            result = await self._root.read(place)
        if result.state != "value":
            return None
        return Stored(result.value, Generation(result.stamp.generation))

    async def read_range(self, place: str, start: int, stop: int) -> bytes:
        with _translated(place):
            result = await self._root.read(place, byte_range=slice(start, stop))
        if result.state != "value":
            raise CorruptDataError(
                f"data file {place} is missing; use another checkpoint"
            )
        return result.value

    async def read_parts(
        self, place: str, start: int, stop: int, parts: Iterable[Part]
    ) -> list[bytes]:
        """Returns messages whose bytes are, one after another, a range of a data file.

        Raises:
            CorruptDataError: The place holds nothing, or less.
        """
        if self._local is not None:
            with _translated(place):
                return await asyncio.to_thread(self._local.read, place, parts)
        data = await self.read_range(place, start, stop)
        return await asyncio.to_thread(cut, data, start, parts)

    async def write(
        self, place: str, data: bytes, *, condition: WriteCondition = ALWAYS
    ) -> Generation:
        with _translated(place):
            await self._directories.make(place)
            self._directories.clear(place)
            if condition not in (ALWAYS, IF_ABSENT):
                await self._ticks.pass_since(place)
            stamp = await self._root.write(place, data, if_equal=_if_equal(condition))
        if stamp.generation == _FAILED:
            raise PreconditionError(place)
        return Generation(stamp.generation)

    async def write_new(self, place: str, parts: Sequence[Buffer]) -> None:
        """Writes a place that nobody else names, from parts that lie one after
        another; durable when it returns. What fails may leave a part of it."""
        with _translated(place):
            path = self._directories.path(place)
            if path is None:
                await self._root.write(place, b"".join(parts))
                return
            await self._directories.make(place)
            await asyncio.to_thread(_write_new, path, parts)
            await self._directories.sync(place)

    async def create(self, place: str) -> "NewObject":
        """Returns a place that nobody else names, to be written bit by bit."""
        with _translated(place):
            path = self._directories.path(place)
            if path is None:
                return NewObject(place, None)
            await self._directories.make(place)
            making = asyncio.ensure_future(asyncio.to_thread(NewFile, path))
            try:
                return NewObject(place, await asyncio.shield(making))
            except asyncio.CancelledError:
                making.add_done_callback(_discard)  # its thread goes on
                raise

    async def keep(self, new: "NewObject") -> None:
        """Ends what was written bit by bit; durable when it returns."""
        with _translated(new.place):
            if new.file is None:
                await self._root.write(new.place, b"".join(new.parts))
            else:
                file, new.file = new.file, None
                await asyncio.to_thread(file.keep)
                await self._directories.sync(new.place)

    async def adopt(self, place: str) -> None:
        """Makes durable that a place is there which another process has written."""
        with _translated(place):
            await self._directories.make(place)
            await self._directories.sync(place)

    async def settle(self, place: str) -> None:
        with _translated(place):
            await self._directories.sync(place)

    async def delete(self, place: str, *, generation: Generation | None = None) -> None:
        with _translated(place):
            stamp = await self._deleted(place, generation)
        if stamp.generation == _FAILED:
            raise PreconditionError(place)

    async def _deleted(self, place: str, generation: Generation | None) -> Any:
        """The stamp of a deletion, tried again where it ran into another: the file
        driver fails where two take the lock of one place away."""
        for _ in range(_DELETE_TRIES):
            with suppress(OSError, ValueError):
                return await self._root.write(place, None, if_equal=generation)
        return await self._root.write(place, None, if_equal=generation)

    async def delete_below(self, prefix: str) -> None:
        with _translated(prefix):
            await self._root.delete_range(_below(prefix))
            await self._directories.remove_empty(prefix)

    async def list(self, prefix: str, *, after: str = "") -> list[str]:
        with _translated(prefix):
            keys = await self._root.list(_below(prefix, after))
        return sorted(key.decode() for key in keys)

    def key_space(self, *, place: str, pool: str) -> "KeySpace":
        """Returns the key space whose root lies at ``place``.

        Args:
            place: Of its root.
            pool: What its data files lie below.
        """
        return KeySpace(self._root, self._context, place=place, pool=pool)


class NewObject:
    """A place that is being written; on storages without files, at the end."""

    def __init__(self, place: str, file: NewFile | None) -> None:
        self.place = place
        self.file = file
        self.parts: list[Buffer] = []

    def append(self, data: Buffer) -> None:
        """Writes bytes behind those before; waits for the storage.

        Raises:
            StorageFullError: The storage is full.
            StorageUnavailableError: It failed.
        """
        if self.file is None:
            self.parts.append(data)
            return
        with _translated(self.place):
            self.file.append([data])

    def discard(self) -> None:
        """Ends it, and leaves nothing."""
        if self.file is not None:
            file, self.file = self.file, None
            file.discard()


class KeySpace:
    """An OCDBT database: its root at one place, its data files in a pool.

    ``format.ocdbt`` writes it; TensorStore reads it here, as anyone may.
    """

    def __init__(
        self, root: "ts.KvStore", context: "ts.Context", *, place: str, pool: str
    ) -> None:
        self._manifest = root / place
        self._pool = root / pool
        self._context = context
        self._place = place

    async def places(self) -> dict[str, Place]:
        """Returns where the value of each key lies."""
        if not await self.exists():
            return {}
        return await asyncio.to_thread(self._places)

    async def exists(self) -> bool:
        """Returns whether it is there."""
        with _translated(self._place):
            result = await self._manifest.read("manifest.ocdbt")
        return result.state == "value"

    def _places(self) -> dict[str, Place]:
        with _translated(self._place):
            manifest = ts.ocdbt.dump(self._manifest, context=self._context).result()
            location = manifest["versions"][-1]["root"].get("location")
            return {} if location is None else dict(self._values(location, b""))

    def _values(self, location: str, prefix: bytes) -> Iterator[tuple[str, Place]]:
        """Walks the B-tree below a node."""
        node = ts.ocdbt.dump(self._pool, location, context=self._context).result()
        for entry in node["entries"]:
            if "location" in entry:
                below = prefix + entry.get("subtree_common_prefix", b"")
                yield from self._values(entry["location"], below)
            else:
                key = (prefix + entry["key"]).decode()
                yield key, _parse_place(entry["indirect_value"])

    def opened(self) -> "ts.KvStore":
        """Returns TensorStore's view of it."""
        spec = {
            "driver": "ocdbt",
            "base": self._pool.spec().to_json(),
            "manifest": self._manifest.spec().to_json(),
        }
        return ts.KvStore.open(spec, context=self._context).result()


def _discard(making: "asyncio.Future[NewFile]") -> None:
    if not making.cancelled() and making.exception() is None:
        making.result().discard()


def _write_new(path: Path, parts: Sequence[Buffer]) -> None:
    with NewFile(path) as file:
        file.append(parts)


def root_spec(root: str) -> dict[str, Any]:
    """Returns the TensorStore spec of a root.

    Raises:
        InvalidFieldError: The root is not a URI of a storage we know.
    """
    url = urlsplit(root)
    match url.scheme:
        case "file" if not url.netloc and url.path:
            path = Path(unquote(url.path)).as_posix()
            return {"driver": "file", "path": path.rstrip("/") + "/"}
        case "memory" if not url.netloc and not url.path:
            return {"driver": "memory"}
        case "gs" if url.netloc:
            path = unquote(url.path).strip("/")
            return {
                "driver": "gcs",
                "bucket": url.netloc,
                "path": f"{path}/" if path else "",
            }
    raise InvalidFieldError(
        f"root {root!r}: expected file:///PATH, memory:// or gs://BUCKET/PREFIX"
    )


def _if_equal(condition: WriteCondition) -> bytes | None:
    """TensorStore's word for a condition."""
    match condition:
        case Condition.ALWAYS:
            return None
        case Condition.IF_ABSENT:
            return _ABSENT
    return condition


def _below(prefix: str, after: str = "") -> "ts.KvStore.KeyRange":
    first = f"{after}\0" if after else prefix
    return ts.KvStore.KeyRange(first, prefix[:-1] + chr(ord(prefix[-1]) + 1))


def _parse_place(value: str) -> Place:
    """Parses ``<kind>:<base>:<file>:<offset>:<length>``."""
    _, _, file, offset, length = value.split(":")
    return Place(file, int(offset), int(length))


@contextmanager
def _translated(place: str) -> Generator[None]:
    """Raises our error for any that TensorStore raises inside.

    TensorStore raises builtin exceptions; the status code heads the message.
    """
    try:
        yield
    except StoreError:
        raise
    except (ValueError, RuntimeError, OSError, KeyError) as e:
        text = str(e)
        if text.startswith("RESOURCE_EXHAUSTED") or "No space left" in text:
            raise StorageFullError(
                f"{place}: the storage is full; free space and retry"
            ) from e
        if text.startswith(_DAMAGE):
            raise CorruptDataError(
                f"{place} is damaged or cut off ({text.partition(' [')[0]}); use "
                "another checkpoint"
            ) from e
        raise StorageUnavailableError(
            f"{place}: the storage failed: {text.partition(' [')[0]}"
        ) from e
