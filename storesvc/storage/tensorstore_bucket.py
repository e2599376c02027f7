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
from typing import Any, Final, NamedTuple, TypeVar, assert_never

import tensorstore as ts

from storesvc.errors import CorruptDataError
from storesvc.format.checksums import Buffer
from storesvc.format.frames import Part, cut
from storesvc.format.layout import ROOT, is_pooled
from storesvc.storage import deadlines, hedging
from storesvc.storage.bounded_gather import each
from storesvc.storage.bucket import (
    ALWAYS,
    Condition,
    Generation,
    PreconditionError,
    Stored,
    WriteCondition,
)
from storesvc.storage.data_file import NewFile
from storesvc.storage.errors import no_bucket, translated
from storesvc.storage.futures import answered
from storesvc.storage.gcs_client import endpoint_in_environment, endpoint_of
from storesvc.storage.gcs_listing import GcsLists
from storesvc.storage.hedged_calls import HedgedCalls
from storesvc.storage.local_files import LocalFiles
from storesvc.storage.location import (
    CONCURRENCY,
    GCS_DRIVERS,
    MEMORY_DRIVER,
    S3_DRIVER,
    Storage,
    storage_at,
)
from storesvc.storage.s3 import S3Deletes

T = TypeVar("T")

_DELETE_TRIES: Final = 3
_NODE: Final = "node"
"""What a node is called where it is read from memory."""

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
        self._storage, self._root, _, self._lists, self._deletes = opened
        self._files = LocalFiles.of(self._storage)
        self._makes_generations = False
        """Whether the generations of ``LocalFiles`` are those of TensorStore, which
        makes the conditional writes: as was seen at a read by both."""
        self._reads = HedgedCalls(hedging.READS)
        self._writes = HedgedCalls(hedging.WRITES)
        self._changes = HedgedCalls(hedging.CHANGES)

    @property
    def name(self) -> str:
        """Its root, without options, for messages."""
        return self._storage.name

    @property
    def is_first_party(self) -> bool:
        """Whether the maker of its API serves it: others may ignore conditions."""
        return endpoint_of(self._storage) is None

    @property
    def has_files(self) -> bool:
        """Whether its objects are files of this machine."""
        return self._files is not None

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
                return await deadlines.answer(self._storage, answered(ask()))
            return await self._reads.answer(
                lambda: answered(ask()),
                size_bytes=size_bytes,
                name=self._storage.describe(place),
            )

    async def read(self, place: str) -> Stored | None:
        found: Stored | None = None
        if self._files is not None:
            # TensorStore would follow a link, and its threads, which are few, would
            # wait for ever for a file that hangs.
            with self._at(place):
                read = await self._files.read_all(place)
            if read is None:
                return None
            found = Stored(read[0], Generation(read[1]))
            if self._makes_generations:
                return found
        result = await self._read(place, lambda: self._root.read(place))
        if result.state != "value":
            return None
        stored = Stored(result.value, Generation(result.stamp.generation))
        self._makes_generations = stored == found
        return stored

    async def read_range(self, place: str, start: int, stop: int) -> bytes:
        if self._files is not None:
            with self._at(place):
                return await self._files.read_range(place, start, stop)
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
        if self._files is not None:
            with self._at(place):
                return await self._files.read_parts(
                    place, parts, size_bytes=stop - start
                )
        data = await self.read_range(place, start, stop)
        return await asyncio.to_thread(cut, data, start, parts)

    async def write(
        self, place: str, data: bytes, *, condition: WriteCondition = ALWAYS
    ) -> Generation:
        with self._at(place):
            if self._files is not None:
                is_conditional = not isinstance(condition, Condition)
                await self._files.prepare(place, is_conditional=is_conditional)
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
            if self._files is None:
                await self._put(place, parts)
            else:
                await self._files.write_new(place, parts)

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
            file = None if self._files is None else await self._files.create(place)
            return NewObject(place, file, self._storage)

    async def fill(self, new: "NewObject", fill: Callable[[], T]) -> T:
        """Returns what a function returns that appends to a new place, in a thread."""
        if self._files is None:
            return await asyncio.to_thread(fill)
        with translated(self._storage, new.place):
            return await self._files.work(new.place, fill)

    async def discard(self, new: "NewObject") -> None:
        """Ends a new place, and leaves nothing."""
        await self.fill(new, new.discard)

    async def keep(self, new: "NewObject") -> None:
        """Ends what was written bit by bit; durable when it returns."""
        with translated(self._storage, new.place):
            if self._files is None or new.file is None:
                await self._put(new.place, new.parts)
            else:
                file, new.file = new.file, None
                keeping = asyncio.ensure_future(self._files.keep(new.place, file))
                try:
                    await asyncio.shield(keeping)
                except asyncio.CancelledError:
                    # its thread goes on, and closes the file; one that was cancelled
                    # before it began would leave it open
                    keeping.add_done_callback(_retrieve)
                    raise

    async def adopt(self, place: str) -> None:
        """Makes durable that a place is there which another process has written."""
        if self._files is not None:
            with self._at(place):
                await self._files.adopt(place)

    async def settle(self, place: str) -> None:
        if self._files is not None:
            with self._at(place):
                await self._files.sync(place)

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
        if self._files is not None:
            if is_pooled(place):  # a link that was put there must not be followed
                await self._files.remove(place)
                return
            await self._files.check(place)
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
            if self._files is not None:
                await self._files.remove_below(prefix)
            else:
                await answered(self._root.delete_range(_below(prefix)))

    async def first_names(self, limit: int) -> list[str]:
        """Returns the names of up to so many entries at the root; of a storage that
        lists none of them cheaply, nothing.

        A name is that of an object or of a directory; what lies deeper is not looked at
        on files, which may be many.
        """
        if self._lists is not None:
            return await self._lists.first_names(limit)
        return [] if self._files is None else await self._files.first_names(limit)

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
        return KeySpace(self, place=place, pool=pool)


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

    ``format.ocdbt`` writes it; TensorStore reads it here, as anyone may. It is handed
    bytes that the bucket has read, and opens no file itself.
    """

    def __init__(self, bucket: KvBucket, *, place: str, pool: str) -> None:
        self._bucket = bucket
        self._place = place
        self._pool = pool

    async def places(self) -> dict[str, Place] | None:
        """Returns where the value of each key lies; None: it is not there.

        Raises:
            CorruptDataError: A part of it is damaged or missing.
        """
        stored = await self._bucket.read(self._place + ROOT)
        if stored is None:
            return None
        manifest = await self._dumped(ROOT, stored.data, None)
        root = manifest["versions"][-1]["root"].get("location")
        found: dict[str, Place] = {}
        nodes = [] if root is None else [(root, b"")]
        seen: set[str] = set()
        while nodes:  # of the B-tree
            location, prefix = nodes.pop()
            if location in seen:
                raise CorruptDataError(
                    f"{self._place}: expected a tree of nodes, got one that refers to "
                    f"the node {location} twice"
                )
            seen.add(location)
            node = await self._node(location)
            with translated(self._bucket.opened.storage, self._place):
                below = await asyncio.to_thread(_take_node, node, prefix, found)
            nodes += reversed(below)
        return found

    async def _node(self, location: str) -> Any:
        with translated(self._bucket.opened.storage, self._place):
            file, offset, length = _parse_place(location)
        place = f"{self._pool}{file}"
        data = await self._bucket.read_range(place, offset, offset + length)
        return await self._dumped(_NODE, data, f"btreenode::{_NODE}:0:{length}")

    async def _dumped(self, name: str, data: bytes, location: str | None) -> Any:
        """The root, or a node, that bytes hold."""
        context = ts.Context()
        with translated(self._bucket.opened.storage, self._place):
            opening = ts.KvStore.open({"driver": MEMORY_DRIVER}, context=context)
            memory = await answered(opening)
            await answered(memory.write(name, data))
            return await answered(ts.ocdbt.dump(memory, location, context=context))

    def opened(self) -> "ts.KvStore":
        """Returns TensorStore's view of it."""
        opened = self._bucket.opened
        spec = {
            "driver": "ocdbt",
            "base": (opened.root / self._pool).spec().to_json(),
            "manifest": (opened.root / self._place).spec().to_json(),
        }
        with endpoint_in_environment(opened.storage):
            return ts.KvStore.open(spec, context=opened.context).result()


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
