"""A bucket, and the OCDBT key spaces in it, over TensorStore."""

import asyncio
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Sequence,
)
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeVar, assert_never

import tensorstore as ts

from storesvc import deadlines, hedging
from storesvc.answers import answered
from storesvc.bucket import (
    ALWAYS,
    Condition,
    Generation,
    PreconditionError,
    Stored,
    WriteCondition,
)
from storesvc.datafiles import NewFile
from storesvc.directories import Directories
from storesvc.errors import CorruptDataError
from storesvc.format.checksums import Buffer
from storesvc.framing import Part, cut
from storesvc.gathering import each
from storesvc.gcs_client import endpoint_in_environment, endpoint_of
from storesvc.gcs_lists import GcsLists
from storesvc.hedged_calls import HedgedCalls
from storesvc.local_reads import LocalReads
from storesvc.s3_deletes import S3Deletes
from storesvc.storage_errors import no_bucket, translated
from storesvc.storages import (
    CONCURRENCY,
    GCS_DRIVERS,
    S3_DRIVER,
    Storage,
    storage_at,
)
from storesvc.ticks import Ticks

T = TypeVar("T")

_DELETE_TRIES: Final = 3
_NOWHERE: Final = "nowhere/"
"""What no place begins with: a list of one page."""

_FAILED: Final = b""  # the generation that a write with a failed condition returns
_ABSENT: Final = b"\x02"  # TensorStore's StorageGeneration::NoValue()


class Place(NamedTuple):
    """Where a value of a key space lies."""

    file: str
    """Relative to the pool."""
    offset: int
    length: int


class Opened(NamedTuple):
    """A storage that is open."""

    storage: Storage
    root: ts.KvStore
    context: ts.Context
    lists: GcsLists | None
    """None: TensorStore's own."""
    deletes: S3Deletes | None
    """None: TensorStore's own."""


class KvBucket:
    """A ``Bucket`` over one ``ts.KvStore``."""

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self._storage, root, self._context, self._lists, self._deletes = opened
        self._root = root
        self._directories = Directories.of(root)
        self._ticks = Ticks.of(root)
        self._local = LocalReads.of(root)
        self._reads = HedgedCalls(hedging.READS)
        self._writes = HedgedCalls(hedging.WRITES)
        self._changes = HedgedCalls(hedging.CHANGES)

    @property
    def is_first_party(self) -> bool:
        """Whether the maker of its API serves it: others may ignore conditions."""
        return endpoint_of(self._storage) is None

    @property
    def has_files(self) -> bool:
        """Whether its objects are files of this machine."""
        return self._directories.path("") is not None

    @classmethod
    async def open(cls, root: str) -> "KvBucket":
        """Returns the bucket at a root.

        Raises:
            InvalidFieldError: The root is not a URI of a storage we know, or of a
                bucket that is not there.
            StorageDeniedError: The storage lets us not in.
            StorageUnavailableError: It does not answer.
        """
        storage = storage_at(root)
        lists, deletes = None, None
        if storage.spec["driver"] in GCS_DRIVERS:
            # before TensorStore, which ends the process where gcs_grpc finds no
            # credentials (seen in 0.1.86)
            lists = await GcsLists.of(storage)
            await lists.check_bucket()
        context = ts.Context(
            {"cache_pool": {"total_bytes_limit": 0}, **storage.context}
        )
        with translated(storage, ""):
            with endpoint_in_environment(storage):
                opening = ts.KvStore.open(dict(storage.spec), context=context)
            store = await deadlines.answer(storage, answered(opening))
        if storage.spec["driver"] == S3_DRIVER:
            deletes = await S3Deletes.of(storage)
            await _check_bucket(storage, store)
        return cls(Opened(storage, store, context, lists, deletes))

    @contextmanager
    def _at(self, place: str) -> Generator[None]:
        """Raises our errors, and refuses a place that is none."""
        self._storage.check(place)
        with translated(self._storage, place):
            yield

    async def _read(
        self,
        place: str,
        ask: "Callable[[], ts.Future[T]]",
        *,
        size_bytes: int = 0,
    ) -> T:
        """Reads a place; again, where a storage on the network does not answer."""
        with self._at(place):
            if not self._storage.is_remote:
                return await answered(ask())
            return await self._reads.answer(
                lambda: answered(ask()),
                size_bytes=size_bytes,
                name=self._storage.describe(place),
            )

    async def read(self, place: str) -> Stored | None:
        result = await self._read(place, lambda: self._root.read(place))
        if result.state != "value":
            return None
        return Stored(result.value, Generation(result.stamp.generation))

    async def read_range(self, place: str, start: int, stop: int) -> bytes:
        span = slice(start, stop)
        result = await self._read(
            place,
            lambda: self._root.read(place, byte_range=span),
            size_bytes=stop - start,
        )
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
            with translated(self._storage, place):
                return await asyncio.to_thread(self._local.read, place, parts)
        data = await self.read_range(place, start, stop)
        return await asyncio.to_thread(cut, data, start, parts)

    async def write(
        self, place: str, data: bytes, *, condition: WriteCondition = ALWAYS
    ) -> Generation:
        with self._at(place):
            await self._directories.make(place)
            self._directories.clear(place)
            if not isinstance(condition, Condition):
                await self._ticks.pass_since(place)
            return await self._change(place, data, condition)

    async def _change(
        self, place: str, data: bytes | None, condition: WriteCondition
    ) -> Generation:
        """Writes a place, or empties it.

        Where a storage on the network does not answer, it is asked again for what is
        conditional on a generation, which does not come back: whichever comes late
        changes nothing. One that creates would bring back what was removed since.

        Raises:
            PreconditionError: The condition did not hold.
        """
        ask, size_bytes = partial(self._ask, place, data, condition), len(data or b"")
        if isinstance(condition, Condition) or not self._storage.is_remote:
            return await deadlines.answer(self._storage, ask(), size_bytes=size_bytes)
        # A conflict is no answer while another may have been done that is asked for:
        # what others change then would be taken for what kept this from changing it.
        return await self._changes.answer(
            ask, size_bytes=size_bytes, name=self._storage.describe(place)
        )

    async def _ask(
        self, place: str, data: bytes | None, condition: WriteCondition
    ) -> Generation:
        """Asks once for a change.

        Raises:
            PreconditionError: The condition did not hold.
        """
        asked = self._root.write(place, data, if_equal=_if_equal(condition))
        stamp = await answered(asked)
        if stamp.generation == _FAILED:
            raise PreconditionError(place)
        return Generation(stamp.generation)

    async def write_new(self, place: str, parts: Sequence[Buffer]) -> None:
        """Writes a place that nobody else names, from parts that lie one after
        another; durable when it returns. What fails may leave a part of it."""
        with self._at(place):
            path = self._directories.path(place)
            if path is None:
                await self._put(place, parts)
                return
            await self._directories.make(place)
            await asyncio.to_thread(_write_new, path, parts)
            await self._directories.sync(place)

    async def _put(self, place: str, parts: Sequence[Buffer]) -> None:
        data = await asyncio.to_thread(b"".join, parts)
        await self._writes.answer(
            lambda: answered(self._root.write(place, data)),
            size_bytes=len(data),
            name=self._storage.describe(place),
        )

    async def create(self, place: str) -> "NewObject":
        """Returns a place that nobody else names, to be written bit by bit."""
        with translated(self._storage, place):
            path = self._directories.path(place)
            if path is None:
                return NewObject(place, None, self._storage)
            await self._directories.make(place)
            making = asyncio.ensure_future(asyncio.to_thread(NewFile, path))
            try:
                return NewObject(place, await asyncio.shield(making), self._storage)
            except asyncio.CancelledError:
                making.add_done_callback(_discard)  # its thread goes on
                raise

    async def keep(self, new: "NewObject") -> None:
        """Ends what was written bit by bit; durable when it returns."""
        with translated(self._storage, new.place):
            if new.file is None:
                await self._put(new.place, new.parts)
            else:
                file, new.file = new.file, None
                keeping = asyncio.ensure_future(asyncio.to_thread(file.keep))
                try:
                    await asyncio.shield(keeping)
                except asyncio.CancelledError:
                    # its thread goes on, and closes the file; one that was cancelled
                    # before it began would leave it open
                    keeping.add_done_callback(_retrieve)
                    raise
                await self._directories.sync(new.place)

    async def adopt(self, place: str) -> None:
        """Makes durable that a place is there which another process has written."""
        with translated(self._storage, place):
            await self._directories.make(place)
            await self._directories.sync(place)

    async def settle(self, place: str) -> None:
        with translated(self._storage, place):
            await self._directories.sync(place)

    async def delete(self, place: str, *, generation: Generation | None = None) -> None:
        try:
            with self._at(place):
                await self._delete(place, generation)
        except PreconditionError:
            # where an answer was lost, the retry of our own deletion finds nothing
            if await self.read(place) is not None:
                raise

    async def _delete(self, place: str, generation: Generation | None) -> None:
        """Deletes; again where it ran into another: the file driver fails where two
        take the lock of one place away."""
        if self._deletes is not None and generation is not None:
            await self._deletes.delete(place, generation)
            return
        condition = ALWAYS if generation is None else generation
        for _ in range(0 if self._storage.is_remote else _DELETE_TRIES):
            with suppress(OSError, ValueError):
                await self._change(place, None, condition)
                return
        await self._change(place, None, condition)

    async def delete_below(self, prefix: str) -> None:
        if self._storage.is_remote:
            # TensorStore's own begins with one of its lists, and has no deadline
            names = await self.list(prefix)
            await each(self.delete, names, at_once=CONCURRENCY)
            return
        with translated(self._storage, prefix):
            await answered(self._root.delete_range(_below(prefix)))
            await self._directories.remove_empty(prefix)

    async def list(self, prefix: str, *, after: str = "") -> list[str]:
        if self._lists is not None:
            names = await self._lists.names(prefix, after=after)
        else:
            with translated(self._storage, prefix):
                listing = answered(self._root.list(_below(prefix, after)))
                keys = await deadlines.answer(self._storage, listing)
            names = sorted(key.decode() for key in keys)
        # Some that speak the API ignore where a list is to begin.
        return [name for name in names if name.startswith(prefix) and name > after]

    def key_space(self, *, place: str, pool: str) -> "KeySpace":
        """Returns the key space whose root lies at ``place``.

        Args:
            place: Of its root.
            pool: What its data files lie below.
        """
        return KeySpace(self.opened, self._read, place=place, pool=pool)


class _Read(Protocol):
    """Reads a place, as its bucket does."""

    async def __call__(self, place: str, ask: "Callable[[], ts.Future[T]]") -> T: ...


class NewObject:
    """A place that is being written; on storages without files, at the end."""

    def __init__(self, place: str, file: NewFile | None, storage: Storage) -> None:
        self.place = place
        self.file = file
        self._storage = storage
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
        with translated(self._storage, self.place):
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
        self,
        opened: Opened,
        read: "_Read",
        *,
        place: str,
        pool: str,
    ) -> None:
        self._storage, root, self._context = opened[:3]
        self._read = read
        self._manifest = root / place
        self._pool = root / pool
        self._place = place

    async def places(self) -> dict[str, Place] | None:
        """Returns where the value of each key lies; None: it is not there."""
        if not await self._exists():
            return None
        manifest = await self._dumped(self._manifest, None)
        root = manifest["versions"][-1]["root"].get("location")
        found: dict[str, Place] = {}
        nodes = [] if root is None else [(root, b"")]
        while nodes:  # of the B-tree
            location, prefix = nodes.pop()
            node = await self._dumped(self._pool, location)
            with translated(self._storage, self._place):
                below = await asyncio.to_thread(_take_node, node, prefix, found)
            nodes += reversed(below)
        return found

    async def _exists(self) -> bool:
        found = await self._read(
            self._place, lambda: self._manifest.read("manifest.ocdbt")
        )
        return found.state == "value"

    async def _dumped(self, base: "ts.KvStore", location: str | None) -> Any:
        """The root below a base, or one of its nodes."""
        return await self._read(
            self._place,
            lambda: ts.ocdbt.dump(base, location, context=self._context),
        )

    def opened(self) -> "ts.KvStore":
        """Returns TensorStore's view of it."""
        spec = {
            "driver": "ocdbt",
            "base": self._pool.spec().to_json(),
            "manifest": self._manifest.spec().to_json(),
        }
        with endpoint_in_environment(self._storage):
            return ts.KvStore.open(spec, context=self._context).result()


def _take_node(
    node: Any, prefix: bytes, found: dict[str, Place]
) -> list[tuple[str, bytes]]:
    """Takes the values of a node of a B-tree; returns the nodes below it, and what
    their keys begin with."""
    below = []
    for entry in node["entries"]:
        if "location" in entry:
            shared = prefix + entry.get("subtree_common_prefix", b"")
            below.append((entry["location"], shared))
        else:
            key = (prefix + entry["key"]).decode()
            found[key] = _parse_place(entry["indirect_value"])
    return below


async def _check_bucket(storage: Storage, root: "ts.KvStore") -> None:
    """Refuses a bucket that is not there: to read from it finds nothing.

    Raises:
        InvalidFieldError: It is not.
        StorageDeniedError: It lets us not in.
        StorageUnavailableError: It does not answer.
    """
    with translated(storage, ""):
        try:
            await deadlines.answer(storage, answered(root.list(_below(_NOWHERE))))
        except ValueError as e:
            if not str(e).startswith("NOT_FOUND"):
                raise
            raise no_bucket(storage) from e


def _retrieve(ended: "asyncio.Future[None]") -> None:
    """Takes the error of a future that nobody awaits: asyncio would log it."""
    if not ended.cancelled():
        ended.exception()


def _discard(making: "asyncio.Future[NewFile]") -> None:
    if not making.cancelled() and making.exception() is None:
        making.result().discard()


def _write_new(path: Path, parts: Sequence[Buffer]) -> None:
    with NewFile(path) as file:
        file.append(parts)


def _if_equal(condition: WriteCondition) -> bytes | None:
    """TensorStore's word for a condition."""
    match condition:
        case Condition.ALWAYS:
            return None
        case Condition.IF_ABSENT:
            return _ABSENT
        case bytes():
            return condition
        case other:
            assert_never(other)


def _below(prefix: str, after: str = "") -> "ts.KvStore.KeyRange":
    first = f"{after}\0" if after else prefix
    stop = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""
    return ts.KvStore.KeyRange(first, stop)


def _parse_place(value: str) -> Place:
    """Parses ``<kind>:<base>:<file>:<offset>:<length>``."""
    _, _, file, offset, length = value.split(":")
    return Place(file, int(offset), int(length))
