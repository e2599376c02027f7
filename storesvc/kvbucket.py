"""A bucket, and the OCDBT key spaces in it, over TensorStore.

Roots: ``file:///path``, ``memory://``, ``gs://bucket/prefix``. One
``ts.Context`` serves a root: OCDBT merges key spaces only where their base is
the very same driver object.
"""

import asyncio
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

import tensorstore as ts

from storesvc.bucket import (
    ALWAYS,
    Condition,
    Generation,
    PreconditionError,
    Stored,
    WriteCondition,
)
from storesvc.errors import (
    CorruptDataError,
    InvalidFieldError,
    StorageFullError,
    StorageUnavailableError,
    StoreError,
)

DATA_FILE_BYTES: Final = 64 << 20
"""Where OCDBT begins the next data file."""

_FAILED: Final = b""  # the generation that a write with a failed condition returns
_ABSENT: Final = b"\x02"  # TensorStore's StorageGeneration::NoValue()


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

    async def write(
        self, place: str, data: bytes, *, condition: WriteCondition = ALWAYS
    ) -> Generation:
        with _translated(place):
            stamp = await self._root.write(place, data, if_equal=_if_equal(condition))
        if stamp.generation == _FAILED:
            raise PreconditionError(place)
        return Generation(stamp.generation)

    async def delete(self, place: str, *, generation: Generation | None = None) -> None:
        with _translated(place):
            stamp = await self._root.write(place, None, if_equal=generation)
        if stamp.generation == _FAILED:
            raise PreconditionError(place)

    async def delete_below(self, prefix: str) -> None:
        with _translated(prefix):
            await self._root.delete_range(_below(prefix))

    async def list(self, prefix: str) -> list[str]:
        with _translated(prefix):
            keys = await self._root.list(_below(prefix))
        return sorted(key.decode() for key in keys)

    def key_space(self, *, place: str, pool: str) -> "KeySpace":
        """Returns the key space whose root lies at ``place``."""
        return KeySpace(self._root, self._context, place=place, pool=pool)


class KeySpace:
    """An OCDBT database: its root at one place, its data files in a pool.

    Other databases may share the pool. Data files are never changed.
    """

    def __init__(
        self, root: "ts.KvStore", context: "ts.Context", *, place: str, pool: str
    ) -> None:
        self._manifest = root / place
        self._pool = root / pool
        self._context = context
        self._place = place

    async def write(self, values: Mapping[str, bytes]) -> None:
        """Writes values in one atomic commit; durable when it returns."""
        await self.take_over((), values)

    async def take_over(
        self, sources: Sequence["KeySpace"], values: Mapping[str, bytes]
    ) -> None:
        """Adds all keys of the sources, sharing their values, and further values,
        in one atomic commit; durable when it returns."""
        # A thread, as all below: 10,000 values take longer than a ping may wait.
        await asyncio.to_thread(self._take_over, sources, values)

    async def places(self) -> dict[str, Place]:
        """Returns where the value of each key lies."""
        if not await self.exists():
            return {}
        return await asyncio.to_thread(lambda: dict(self._places()))

    async def exists(self) -> bool:
        """Returns whether anything was ever written."""
        with _translated(self._place):
            result = await self._manifest.read("manifest.ocdbt")
        return result.state == "value"

    def _take_over(
        self, sources: Sequence["KeySpace"], values: Mapping[str, bytes]
    ) -> None:
        with _translated(self._place):
            transaction = ts.Transaction()
            target = self.opened().with_transaction(transaction)
            for source in sources:
                source.opened().experimental_copy_range_to(target).result()
            # all under way before the first is waited for: a wait costs 50 us
            for write in [target.write(key, value) for key, value in values.items()]:
                write.result()
            transaction.commit_sync()

    def _places(self) -> Iterator[tuple[str, Place]]:
        with _translated(self._place):
            manifest = ts.ocdbt.dump(self._manifest, context=self._context).result()
            location = manifest["versions"][-1]["root"].get("location")
            if location is not None:
                yield from self._values(location, b"")

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
            # every value in a data file: a value inside a node has no place
            "config": {"max_inline_value_bytes": 0},
            "target_data_file_size": DATA_FILE_BYTES,
        }
        return ts.KvStore.open(spec, context=self._context).result()


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


def _below(prefix: str) -> "ts.KvStore.KeyRange":
    return ts.KvStore.KeyRange(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1))


def _parse_place(value: str) -> Place:
    """Parses ``value:<base>:<file>:<offset>:<length>``."""
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
        if text.startswith(("DATA_LOSS", "OUT_OF_RANGE")):
            raise CorruptDataError(
                f"{place} is damaged or cut off ({text.partition(' [')[0]}); use "
                "another checkpoint"
            ) from e
        raise StorageUnavailableError(
            f"{place}: the storage failed: {text.partition(' [')[0]}"
        ) from e
