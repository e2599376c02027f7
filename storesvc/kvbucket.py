"""A bucket, and the OCDBT key spaces in it, over TensorStore.

Roots: ``file:///path``, ``memory://``, ``gs://bucket/prefix``. One
``ts.Context`` serves a root: OCDBT merges key spaces only where their base is
the very same driver object.
"""

import asyncio
from collections.abc import Generator, Iterator, Mapping, Sequence
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
from storesvc.directories import Directories
from storesvc.errors import (
    CorruptDataError,
    InvalidFieldError,
    StorageFullError,
    StorageUnavailableError,
    StoreError,
)
from storesvc.ticks import Ticks

DATA_FILE_BYTES: Final = 64 << 20
"""Where OCDBT begins the next data file."""

NODE_CACHE_BYTES: Final = 64 << 20
"""Nodes of a key space that are kept in memory while it is read or written."""

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


class Contents(NamedTuple):
    """What a key space holds."""

    places: dict[str, Place]
    """Where the value of each key lies."""
    node_files: frozenset[str]
    """Files of the nodes that lead to them."""


class Share(NamedTuple):
    """Keys that one key space takes over from another."""

    source: "KeySpace"
    ranges: Sequence[tuple[str, str]]
    """First and last key of each range; a last key of "" is the end."""


ASIDE: Final = "\0"
"""What keys begin with that no leaf can have."""

FIRST_KEY: Final = "\x01"
"""Where the others begin."""

EVERYTHING: Final = ((FIRST_KEY, ""),)
"""The range of all of those."""


class KvBucket:
    """A ``Bucket`` over one ``ts.KvStore``."""

    def __init__(self, root: "ts.KvStore", context: "ts.Context") -> None:
        self._root = root
        self._context = context
        self._directories = Directories.of(root)
        self._ticks = Ticks.of(root)

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
            await self._directories.make(place)
            self._directories.clear(place)
            if condition not in (ALWAYS, IF_ABSENT):
                await self._ticks.pass_since(place)
            stamp = await self._root.write(place, data, if_equal=_if_equal(condition))
        if stamp.generation == _FAILED:
            raise PreconditionError(place)
        return Generation(stamp.generation)

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

    def key_space(self, *, place: str, pool: str, prefix: str = "d/") -> "KeySpace":
        """Returns the key space whose root lies at ``place``.

        Args:
            place: Of its root.
            pool: What its data files lie below.
            prefix: What the names of data files begin with that are written by it.
        """
        return KeySpace(
            self._root, self._context, place=place, pool=pool, prefix=prefix
        )


class KeySpace:
    """An OCDBT database: its root at one place, its data files in a pool.

    Other databases may share the pool. Data files are never changed. Keys that begin
    with ``ASIDE`` hold what goes with the values, and are not taken over.
    """

    def __init__(
        self,
        root: "ts.KvStore",
        context: "ts.Context",
        *,
        place: str,
        pool: str,
        prefix: str,
    ) -> None:
        self._manifest = root / place
        self._pool = root / pool
        self._directories = Directories.of(root)
        self._pool_place = pool
        self._context = context
        self._place = place
        self._prefix = prefix

    async def write(self, values: Mapping[str, bytes]) -> None:
        """Writes values in one atomic commit; durable when it returns."""
        await self.take_over((), values)

    async def take_over(
        self, shares: Sequence["Share"], values: Mapping[str, bytes]
    ) -> None:
        """Adds keys of other key spaces, sharing their values, and further values, in
        one atomic commit; durable when it returns."""
        with _translated(self._place):
            await self._directories.make(self._place, self._pool_place + self._prefix)
            self._directories.clear(f"{self._place}manifest.ocdbt")
        # A thread, as all below: 10,000 values take longer than a ping may wait.
        await asyncio.to_thread(self._take_over, shares, values)

    async def contents(self) -> "Contents":
        """Returns what it holds."""
        if not await self.exists():
            return Contents({}, frozenset())
        return await asyncio.to_thread(self._contents)

    async def places(self) -> dict[str, Place]:
        """Returns where the value of each key lies."""
        return (await self.contents()).places

    async def read_aside(self) -> list[bytes]:
        """Returns what goes with the values, in no order."""
        if not await self.exists():
            return []
        return await asyncio.to_thread(self._read_aside)

    async def exists(self) -> bool:
        """Returns whether anything was ever written."""
        with _translated(self._place):
            result = await self._manifest.read("manifest.ocdbt")
        return result.state == "value"

    def _take_over(
        self, shares: Sequence["Share"], values: Mapping[str, bytes]
    ) -> None:
        with _translated(self._place):
            transaction = ts.Transaction()
            target = self.opened().with_transaction(transaction)
            # All of a kind are under way before the first is waited for: a wait costs
            # 50 us. Not of two kinds: what overlaps a copy under way is written wrong.
            for share in shares:
                for copy in list(_copies(share, target)):
                    copy.result()
            for write in [target.write(key, value) for key, value in values.items()]:
                write.result()
            transaction.commit_sync()

    def _contents(self) -> "Contents":
        places: dict[str, Place] = {}
        node_files: set[str] = set()
        with _translated(self._place):
            manifest = ts.ocdbt.dump(self._manifest, context=self._context).result()
            location = manifest["versions"][-1]["root"].get("location")
            if location is not None:
                places.update(self._values(location, b"", node_files))
        return Contents(places, frozenset(node_files))

    def _values(
        self, location: str, prefix: bytes, node_files: set[str]
    ) -> Iterator[tuple[str, Place]]:
        """Walks the B-tree below a node."""
        node_files.add(_parse_place(location).file)
        node = ts.ocdbt.dump(self._pool, location, context=self._context).result()
        for entry in node["entries"]:
            if "location" in entry:
                below = prefix + entry.get("subtree_common_prefix", b"")
                yield from self._values(entry["location"], below, node_files)
            else:
                key = (prefix + entry["key"]).decode()
                if not key.startswith(ASIDE):
                    yield key, _parse_place(entry["indirect_value"])

    def _read_aside(self) -> list[bytes]:
        with _translated(self._place):
            opened = self.opened()
            keys = opened.list(ts.KvStore.KeyRange(ASIDE, FIRST_KEY)).result()
            reads = [opened.read(key) for key in keys]
            return [read.result().value for read in reads]

    def opened(self) -> "ts.KvStore":
        """Returns TensorStore's view of it."""
        spec = {
            "driver": "ocdbt",
            "base": self._pool.spec().to_json(),
            "manifest": self._manifest.spec().to_json(),
            # every value in a data file: a value inside a node has no place
            "config": {"max_inline_value_bytes": 0},
            "target_data_file_size": DATA_FILE_BYTES,
            "value_data_prefix": self._prefix,
            "btree_node_data_prefix": self._prefix,
            "version_tree_node_data_prefix": self._prefix,
            # or each of 10,000 ranges would read its nodes from the root on
            "cache_pool": {"total_bytes_limit": NODE_CACHE_BYTES},
        }
        return ts.KvStore.open(spec, context=self._context).result()


def _copies(share: Share, target: "ts.KvStore") -> Iterator["ts.Future[None]"]:
    """Begins to copy the ranges of a share."""
    source = share.source.opened()
    for first, last in share.ranges:
        keys = ts.KvStore.KeyRange(first, last and last + "\0")
        yield source.experimental_copy_range_to(target, source_range=keys)


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
