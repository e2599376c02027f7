"""Opens arrays that TensorStore reads, many at a time: zarr 2 and 3, in OCDBT or as
files.

All share one context: the concurrency of buckets as for a store, and a cache for the
nodes of OCDBT databases. Chunks are never cached.

Stored chunks are bounded before TensorStore reads and decodes them. It takes memory for
what is stored, and compares it with the chunk afterwards: a sparse file of 20 GiB ends
the process. So one byte is requested first of what is behind the most bytes that a
chunk can be stored as, in any storage; where there is one, the chunk is rejected. Of a
shard with several chunks, the lengths in its index are compared, too.

TensorStore stops zstd, gzip, zlib and bz2 at the size of the chunk, but gives blosc as
much memory as the header of the stored bytes states: up to 2 GiB for some kilobytes. So
that header is compared with the size of the chunk. No writer of a format that is read
here uses blosc by default.
"""

import json
import math
import mmap
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import Region, part, shape_problem
from storesvc.storage.location import CONCURRENCY
from storesvc_client._foreign.foreign_step import (
    ForeignArray,
    Reading,
    Together,
    Wanted,
)
from storesvc_client._foreign.locations import Location
from storesvc_client._foreign.raw_chunks import (
    MIN_CHUNK_BYTES,
    NODE,
    FolderPlaces,
    OcdbtPlaces,
    Places,
    RawChunks,
    chunk_keys,
    chunk_regions,
    raw_form,
    reading_threads,
)
from storesvc_client._foreign.steps import Row, array_row, folders_in, join, place
from storesvc_client.errors import (
    DataLossError,
    InvalidRequestError,
    LimitError,
    PreconditionError,
    StoreError,
    UnavailableError,
)

if TYPE_CHECKING:
    import tensorstore as ts

MAX_CHUNK_BYTES: Final = 32 << 30
"""Maximum bytes of a chunk. TensorStore allocates a chunk before it compares the size
with the stored bytes."""

_LARGE_CHUNK_BYTES: Final = 256 << 20
"""Chunks from this size are read only if there is memory for one: TensorStore ends the
process if there is not."""

_RETRIES: Final = {"max_retries": 6, "initial_delay": "100ms", "max_delay": "3s"}
"""TensorStore's own 32 outlast every deadline."""

_NODE_CACHE_BYTES: Final = 64 << 20
"""Memory for the nodes of OCDBT databases."""

_NODE_CACHE: Final = "cache_pool#ocdbt"

_UNAVAILABLE: Final = re.compile(
    r"ABORTED|CANCELLED|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|UNAVAILABLE|UNKNOWN"
    r"|.*(CURL error|Connection|Timeout)"
)
_REDIRECT: Final = re.compile(r"\[HTTP code 30[1278]\]")
_DENIED: Final = re.compile(r"PERMISSION_DENIED|UNAUTHENTICATED|.*Permission denied")
"""Messages of TensorStore, which begin with a status code."""


_ERRORS: Final = (ValueError, RuntimeError, KeyError, OSError, NotImplementedError)
"""Errors that TensorStore raises."""


_ADVICE: Final = "use another checkpoint"

_BLOSC: Final = "blosc"
_SHARDS: Final = "sharding_indexed"

_BLOSC_SIZE: Final = slice(4, 8)
"""Bytes of the header of blosc that state the size after decoding."""

_CHECKSUM_BYTES: Final = 4
"""Bytes that the codec crc32c adds."""

_SLACK_BYTES: Final = 1 << 20
"""Bytes by which a compressor may make a small chunk larger, and the index of a shard:
far more than any does, and far less than harms."""

_ENTRY_BYTES: Final = 16
"""Bytes of a chunk in the index of a shard: its offset and its length."""

_ABSENT_ENTRY: Final = 2**64 - 1

MAX_INDEX_BYTES: Final = 64 << 20
"""Maximum bytes of the index of a shard."""

_REMEMBERED_SHARDS: Final = 10_000
"""Maximum shards that are remembered."""

_PLAIN_INDEX: Final = [{"name": "bytes", "configuration": {"endian": "little"}}]
"""Codecs of an index, before its checksum."""


def longest_stored(chunk_bytes: int) -> int:
    """Returns the most bytes that a chunk can be stored as: compressors add less than
    an eighth."""
    return chunk_bytes + chunk_bytes // 8 + _SLACK_BYTES


def check_stored(
    values: "ts.KvStore", keys: Sequence[str], most: int, *, what: Callable[[str], str]
) -> None:
    """Rejects stored values that are longer than their maximum; reads none of them.

    What is absent or cannot be read is left to the read.
    """
    beyond = slice(most, most + 1)
    # what was opened a moment ago need not be asked for its newest version
    any_age = -math.inf
    reads = [
        values.read(key, byte_range=beyond, staleness_bound=any_age) for key in keys
    ]
    for key, read in zip(keys, reads, strict=True):
        try:
            is_longer = read.result().state == "value"
        except ValueError as e:
            if "ignored by server" in str(e):
                raise PreconditionError(
                    f"{what(key)}: expected a server of ranges, got one that sends "
                    "whole files; copy the checkpoint to a disk or a bucket"
                ) from e
            continue
        if is_longer:
            raise DataLossError(
                f"{what(key)}: expected at most {most} stored bytes, got more; "
                f"{_ADVICE}"
            )


class ChunkBounds:
    """The bounds of the chunks of an array."""

    def __init__(self, store: "ts.TensorStore", *, row: str) -> None:
        """Reads no chunk yet.

        Raises:
            PreconditionError: Its chunks are compressed or in shards in a way whose
                memory cannot be bounded.
        """
        self.codec: dict[str, Any] = {}
        """Its codec, as TensorStore describes it."""
        if store.codec is not None:
            self.codec = store.codec.to_json()
        assert store.kvstore is not None  # zarr has one
        self._values = store.kvstore
        self._store = store
        self._row = row
        self._is_blosc = is_blosc(self.codec, row=row)
        layout, itemsize = store.chunk_layout, DTYPES[store.dtype.name].itemsize
        self.shape = _chunk_sizes(layout.read_chunk.shape, store.shape)
        """Shape of what is read as a whole."""
        self.stored_shape = _chunk_sizes(layout.write_chunk.shape, store.shape)
        """Shape of what has a key: a shard, or a chunk."""
        self.chunk_bytes: int = math.prod(self.shape) * itemsize
        """Bytes of a chunk after decoding."""
        self.longest = longest_stored(math.prod(self.stored_shape) * itemsize)
        """Maximum bytes of a stored value."""
        count = math.prod(self.stored_shape) // math.prod(self.shape)
        self._index = None
        if count > 1:
            self._index = _index_range(self.codec, count, row=row)
        self._checked: set[str] = set()
        """Shards that are within their bounds; each is read several times."""

    @property
    def is_alone(self) -> bool:
        """True if a stored value is one chunk, which its size alone bounds."""
        return self._index is None and not self._is_blosc

    def check(self, region: Region) -> None:
        """Rejects a region if a chunk of it is stored as more bytes than a chunk has,
        or would be decoded to more.

        Raises:
            DataLossError: A chunk is, or would be.
            ValueError: Its header or index is not there; also other errors of
                TensorStore.
        """
        found = chunk_keys(self.metadata, self.stored_shape, region)
        keys = [key for key in found if key not in self._checked]
        check_stored(self._values, keys, self.longest, what=self._name)
        if self._is_blosc:
            most = self.chunk_bytes + _CHECKSUM_BYTES
            for key, size in self._parts(keys, _BLOSC_SIZE):
                self._check(key, int.from_bytes(size, "little"), most, "after decoding")
        if self._index is not None:
            most = longest_stored(self.chunk_bytes)
            for key, data in self._parts(keys, self._index):
                entries = np.frombuffer(data, "<u8", len(data) // _ENTRY_BYTES * 2)
                sizes = entries[1::2]
                longest = int(max(sizes[sizes != _ABSENT_ENTRY], default=0))
                self._check(key, longest, most, "in a shard")
            if len(self._checked) > _REMEMBERED_SHARDS:
                self._checked.clear()
            self._checked.update(keys)

    def _check(self, key: str, size: int, most: int, where: str) -> None:
        if size > most:
            raise DataLossError(
                f"{self._name(key)}: expected at most {most} bytes {where}, got {size} "
                f"by its header or index; {_ADVICE}"
            )

    def _parts(self, keys: Sequence[str], part: slice) -> Iterator[tuple[str, bytes]]:
        """Yields a part of each value that is there; of others, the read decides."""
        reads = [self._values.read(key, byte_range=part) for key in keys]
        for key, read in zip(keys, reads, strict=True):
            if (found := read.result()).state == "value":
                yield key, found.value

    def _name(self, key: str) -> str:
        return f"{self._row}, chunk {key!r}"

    @cached_property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata of zarr, as TensorStore describes it."""
        found: Mapping[str, Any] = self._store.spec().to_json()["metadata"]
        return found


def is_blosc(codec: Mapping[str, Any], *, row: str) -> bool:
    """Returns whether blosc compressed the chunks of an array.

    >>> is_blosc({"compressor": {"id": "blosc"}}, row="array 'w'")
    True

    Raises:
        PreconditionError: Blosc compressed what the header of a stored value does not
            describe: chunks in shards, or before another codec.
    """
    if (codec.get("compressor") or {}).get("id") == _BLOSC:  # zarr 2
        return True
    names = list(_codec_names(codec.get("codecs", [])))
    if _BLOSC not in names:
        return False
    while names[-1] == "crc32c":
        names.pop()
    if names.count(_BLOSC) > 1 or names[-1] != _BLOSC or _SHARDS in names:
        raise PreconditionError(
            f"{row}: expected blosc as the only compressor, without shards, got the "
            f"codecs {', '.join(names)}; write it again with zstd"
        )
    return True


def _index_range(codec: Mapping[str, Any], count: int, *, row: str) -> slice:
    """Returns where the index is in a shard of several chunks; rejects an index in
    another form or too large, and shards in shards."""
    codecs = codec.get("codecs", [])
    shard = codecs[0].get("configuration", {}) if codecs else {}
    index = shard.get("index_codecs", [])
    size = count * _ENTRY_BYTES + _CHECKSUM_BYTES * (len(index) - 1)
    if (
        list(_codec_names(codecs)).count(_SHARDS) != 1
        or codecs[0].get("name") != _SHARDS
        or index not in (_PLAIN_INDEX, [*_PLAIN_INDEX, {"name": "crc32c"}])
        or size > MAX_INDEX_BYTES
    ):
        raise PreconditionError(
            f"{row}: expected shards with a plain index of at most {MAX_INDEX_BYTES} "
            f"bytes, got one of {count} chunks, with the codecs "
            f"{', '.join(_codec_names(codecs))}; write it again with one chunk in each "
            "shard"
        )
    is_first = shard.get("index_location") == "start"
    return slice(0, size) if is_first else slice(-size, None)


def _chunk_sizes(chunk: Any, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of a chunk as TensorStore states it; 0 or None: all."""
    return tuple(max(1, n or m) for n, m in zip(chunk or shape, shape, strict=True))


def _codec_names(codecs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the names of codecs of zarr 3, also of those within shards."""
    for codec in codecs:
        yield codec.get("name", "")
        inner = codec.get("configuration", {})
        yield from _codec_names(inner.get("codecs", []))
        yield from _codec_names(inner.get("index_codecs", []))


class StoredIn(NamedTuple):
    """The places of the values of an array."""

    places: Places
    prefix: str
    """Beginning of the keys of its chunks."""


class SmallChunks(Together):
    """Small chunks of arrays in one database that are encoded alike.

    TensorStore decodes them as the chunks of one long array in memory: to read each by
    itself takes fifteen times as long.
    """

    def __init__(self, places: OcdbtPlaces, driver: str, bounds: ChunkBounds) -> None:
        """Takes the bounds of any of the arrays."""
        self._places = places
        self._driver = driver
        self._bounds = bounds

    def read(self, wanted: Sequence[Wanted]) -> bool:
        """See ``Together``."""
        numbers: dict[str, int] = {}
        metadata, shape = self._bounds.metadata, self._bounds.stored_shape
        copies = []
        for array, region, into in wanted:
            assert isinstance(array, TensorStoreArray)
            regions = chunk_regions(shape, region)
            keys = chunk_keys(metadata, shape, region)
            for key, (chunk, within) in zip(keys, regions, strict=True):
                number = numbers.setdefault(array.stored_key(key), len(numbers))
                copies.append((number, within, part(into, region, chunk)))
        try:
            values = self._places.read(numbers, most=self._bounds.longest)
            if values is None:
                return False
            decoded = self._decode(values)
        except (StoreError, *_ERRORS):
            return False
        for number, within, target in copies:
            index: Any = (number, *(slice(start, stop) for start, stop in within))
            target[...] = decoded[index]
        return True

    def _decode(self, values: Sequence[bytes]) -> NDArray[Any]:
        """Returns chunks, decoded; the first dimension is their number."""
        import tensorstore as ts

        first, *others = self._bounds.stored_shape
        shape = [len(values) * first, *others]
        metadata = {**self._bounds.metadata, "shape": shape}
        whole = tuple((0, n) for n in shape)
        keys = chunk_keys(metadata, self._bounds.stored_shape, whole)
        shared = ts.Context()  # of its own: a store in memory is a part of it
        memory = ts.KvStore.open("memory://", context=shared).result()
        for write in [*map(memory.write, keys, values)]:
            write.result()
        spec = {"driver": self._driver, "metadata": metadata}
        opening = ts.open(
            spec, kvstore=memory, open=True, read=True, assume_metadata=True
        )
        found: NDArray[Any] = opening.result().read().result()
        return found.reshape(len(values), first, *others)


class TensorStoreArray(ForeignArray):
    """An opened TensorStore."""

    def __init__(
        self, store: "ts.TensorStore", *, row: str, stored: StoredIn | None = None
    ) -> None:
        """Checks that a checkpoint can hold the array.

        Args:
            store: The array, opened for reading, with the origin 0.
            row: Name of the row for messages, such as "leaf 'params/w'".
            stored: Where its values are stored, if that can be known.

        Raises:
            PreconditionError: Its dtype, rank or size is none of a checkpoint.
        """
        self._row = row
        self._stored = stored
        self.dtype = str(store.dtype.name)
        """Name of the dtype in ``storesvc.format.dtypes``."""
        self.shape = tuple(store.shape)
        if self.dtype not in DTYPES:
            raise PreconditionError(
                f"{row}: expected the dtype of an array of numbers, got {self.dtype}; "
                "leave it out with select="
            )
        if problem := shape_problem(self.shape):
            raise PreconditionError(f"{row}: {problem}; leave it out with select=")
        self.bounds = ChunkBounds(store, row=row)
        """Bounds of its chunks; arrays that are alike share them."""
        self._opened: tuple[ts.TensorStore, ChunkBounds] | None = store, self.bounds
        self._spec: Mapping[str, Any] = {}
        chunk = self.bounds.shape
        self.chunk_shape = tuple(
            max(1, min(n, size)) for n, size in zip(chunk, self.shape, strict=True)
        )
        """Shape of the pieces that are read as a whole, clipped to the array."""
        self._chunk_bytes = self.bounds.chunk_bytes
        if self._chunk_bytes > MAX_CHUNK_BYTES:
            raise PreconditionError(
                f"{row}: expected chunks of at most {MAX_CHUNK_BYTES} bytes, got "
                f"{self.shape} {self.dtype} in chunks of {chunk}; write it again in "
                "smaller chunks"
            )

    def alike(self, place: "ArrayPlace", stored: StoredIn | None) -> "TensorStoreArray":
        """Returns an array with the same metadata, opened when TensorStore reads it."""
        found = copy(self)
        vars(found).pop("_raw_chunks", None)
        spec = {**place.spec, "metadata": self.bounds.metadata}
        vars(found).update(_row=place.name, _stored=stored, _opened=None, _spec=spec)
        return found

    def stored_key(self, key: str) -> str:
        """Returns the key of a chunk in the database."""
        assert self._stored is not None
        return f"{self._stored.prefix}{key}"

    @property
    def has_checksums(self) -> bool:
        """True if each chunk is stored with a checksum, which reading compares."""
        return _is_checked(self.bounds.codec.get("codecs", []))

    def row(
        self, parts: Sequence[str], *, name: str, path_kinds: str | None = None
    ) -> Row:
        """Returns the row of the array; see ``array_row``."""
        return array_row(
            parts,
            self,
            name=name,
            dtype=self.dtype,
            shape=self.shape,
            chunk_shape=self.chunk_shape,
            path_kinds=path_kinds,
        )

    def check_form(
        self, name: str, shape: tuple[int, ...], dtype: str, source: str = ""
    ) -> None:
        """Rejects an array of another form than the step states."""
        if (shape, dtype) != (self.shape, self.dtype):
            raise DataLossError(
                f"array {name!r}: expected {shape} {dtype}{source}, got {self.shape} "
                f"{self.dtype}; another save may have overwritten it"
            )

    def read(self, region: Region, into: NDArray[Any]) -> Reading:
        if self._chunk_bytes >= MIN_CHUNK_BYTES and self._raw_chunks is not None:
            return reading_threads().submit(
                self._read_raw, self._raw_chunks, region, into
            )
        return self._read(region, into)

    def _read_raw(self, chunks: RawChunks, region: Region, into: NDArray[Any]) -> None:
        """Reads a region from files, or else by TensorStore, which explains errors."""
        try:
            if chunks.read(region, into):
                return
        except (StoreError, *_ERRORS):
            pass
        self._read(region, into).result()

    @cached_property
    def _raw_chunks(self) -> RawChunks | None:
        """Chunks that are plain elements in files of this machine; None if they are
        not."""
        if self._stored is None:
            return None
        form = raw_form(self.bounds.metadata, self.dtype)
        if form is None:
            return None
        return RawChunks(
            form,
            self.bounds.metadata,
            self._stored.places,
            prefix=self._stored.prefix,
            dtype=self.dtype,
            row=self._row,
        )

    def _read(self, region: Region, into: NDArray[Any]) -> "TensorStoreRead":
        import tensorstore as ts

        if self._chunk_bytes >= _LARGE_CHUNK_BYTES:
            try:
                mmap.mmap(-1, self._chunk_bytes).close()  # untouched pages cost nothing
            except (OSError, ValueError, OverflowError) as e:
                raise LimitError(
                    f"{self._row}: expected memory for a chunk of {self._chunk_bytes} "
                    f"bytes, got none ({e}); read it on a larger machine"
                ) from e
        index: tuple[Any, ...] = tuple(slice(start, stop) for start, stop in region)
        with translate_errors(self._row):
            if self._opened is None:
                how: Any = {"open": True, "read": True, "context": context()}
                store = ts.open(self._spec, assume_metadata=True, **how).result()
                self._opened = store, ChunkBounds(store, row=self._row)
            store, bounds = self._opened
            bounds.check(region)
            source = store[(*index, ...)]
            if region:
                source = source[ts.d[:].translate_to[0]]
            # TensorStore copies memory that is not aligned, and would write to the copy
            target = into if into.flags.aligned else np.empty(into.shape, into.dtype)
            future = ts.array(target).write(source)
        return TensorStoreRead(future, target=target, into=into, row=self._row)


@dataclass(eq=False, repr=False)
class TensorStoreRead(Reading):
    """A read of TensorStore."""

    future: "ts.WriteFutures"
    """A read that has been started."""
    target: NDArray[Any]
    """Memory that TensorStore writes."""
    into: NDArray[Any]
    """Memory that receives the elements in the end; may be the same."""
    row: str

    def result(self, timeout: float | None = None) -> None:
        with translate_errors(self.row):
            self.future.result(timeout)
        if self.target is not self.into:
            self.into[...] = self.target

    def cancel(self) -> None:
        self.future.cancel()


def ocdbt(base: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Returns the spec of the keys of an OCDBT database that begin with a path."""
    shared = {"driver": "ocdbt", "cache_pool": _NODE_CACHE}
    return {**shared, "base": dict(base), "path": path}


def list_keys(kvstore: Mapping[str, Any], *, what: str) -> list[str]:
    """Returns all keys of a key-value store, such as an OCDBT database, sorted."""
    shared = context()
    import tensorstore as ts

    with translate_errors(what):
        store = ts.KvStore.open(dict(kvstore), context=shared).result()
        keys = store.list().result()
        try:
            return sorted(key.decode() for key in keys)
        except UnicodeDecodeError as e:
            raise DataLossError(f"{what}: expected keys in UTF-8, got {e}") from e


@contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Translates errors of TensorStore that are raised inside.

    Raises:
        DataLossError: Stored bytes are missing or damaged.
        PreconditionError: The storage denies access, or redirects.
        StoreError: The location failed that ``loopback`` serves.
        UnavailableError: The storage does not answer.
    """
    try:
        yield
    except (StoreError, TimeoutError):
        raise
    except _ERRORS as e:
        from storesvc_client._foreign import loopback

        if (error := loopback.error_in(str(e))) is not None:
            raise error from e
        text = loopback.with_urls(" ".join(str(e).split()))
        reason = text.partition(" [")[0][:400]
        if _UNAVAILABLE.match(text):
            raise UnavailableError(f"{what}: {reason}; try again") from e
        if _DENIED.match(text):
            raise PreconditionError(
                f"{what}: the storage denies access ({reason}); let this user read it",
                reason="STORAGE_DENIED",
            ) from e
        if _REDIRECT.search(text):
            raise PreconditionError(
                f"{what}: expected a server that sends the bytes, got a redirect to "
                "another address, which TensorStore does not follow; copy the "
                "checkpoint to a disk or a bucket"
            ) from e
        raise DataLossError(
            f"{what}: its stored bytes are missing or damaged ({reason}); use another "
            "checkpoint"
        ) from e


def _is_checked(codecs: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether codecs of zarr 3 store a checksum of the elements: outside of
    shards, or of each chunk in them; that of the index of a shard does not count.

    >>> _is_checked([{"name": "bytes"}, {"name": "crc32c"}])
    True
    """
    return any(
        codec.get("name") == "crc32c"
        or _is_checked(codec.get("configuration", {}).get("codecs", []))
        for codec in codecs
    )


@lru_cache(maxsize=1)
def context() -> "ts.Context":
    """Returns the context of all arrays."""
    try:
        import tensorstore as ts
    except ImportError as e:
        raise InvalidRequestError(
            "reading arrays of this format needs tensorstore; pip install "
            "'storesvc[interop]'"
        ) from e
    resources: dict[str, Any] = {_NODE_CACHE: {"total_bytes_limit": _NODE_CACHE_BYTES}}
    for kind in ("gcs", "s3", "http"):
        resources[f"{kind}_request_concurrency"] = {"limit": CONCURRENCY}
        resources[f"{kind}_request_retries"] = _RETRIES
    return ts.Context(resources)


MAX_METADATA_BYTES: Final = 256 << 10
"""Maximum bytes of the metadata of an array, which real ones are far below."""

MANIFEST: Final = "manifest.ocdbt"
MAX_MANIFEST_BYTES: Final = 64 << 20

MAX_NODE_BYTES: Final = 256 << 20
"""Maximum stored bytes of a node; Orbax writes up to 100 MB."""

MAX_NODES: Final = 100_000

_METADATA_KEYS: Final = {"zarr": ".zarray", "zarr3": "zarr.json"}
"""Name of the metadata of an array of each driver."""

_OPENING_AT_ONCE: Final = 512
"""Arrays that are being opened at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlace:
    """The place of an array in storage."""

    name: str
    """Its name in messages."""
    driver: str
    """"zarr" or "zarr3"."""
    kvstore: dict[str, Any]
    is_whole: bool
    """True if each chunk must be stored; else an absent one has the fill value."""

    @property
    def spec(self) -> dict[str, Any]:
        """Spec of TensorStore."""
        how = {"driver": self.driver, "fill_missing_data_reads": not self.is_whole}
        return {**how, "kvstore": self.kvstore}


def database_base(location: Location, folder: str) -> dict[str, Any]:
    """Returns the spec of the folder of a database, ``Location.kvstore``, whose
    manifest and nodes can be read in bounded memory; what is absent is left to the
    read.
    """
    what, shared = join(location.url, folder), context()
    import tensorstore as ts

    spec = location.kvstore(folder)
    files = location.stamps(folder)
    for name, stamp in files.items():
        if name.startswith("manifest.") and int(stamp.split()[0]) > MAX_MANIFEST_BYTES:
            raise DataLossError(
                f"{what}/{name}: expected at most {MAX_MANIFEST_BYTES} bytes, got "
                f"{stamp.split()[0]}; use another checkpoint"
            )
    if MANIFEST not in files:
        return spec
    with location.opening(), translate_errors(what):
        base = ts.KvStore.open(spec, context=shared).result()
        newest = ts.ocdbt.dump(base).result()["versions"][-1:]
        left = [(each["root"].get("location"), each["root_height"]) for each in newest]
        for count, (node, height) in enumerate(left):
            found = NODE.fullmatch(node or "")
            if count > MAX_NODES or (found and int(found[1]) > MAX_NODE_BYTES):
                raise DataLossError(
                    f"{what}: expected at most {MAX_NODES} nodes of at most "
                    f"{MAX_NODE_BYTES} bytes, got more; use another checkpoint"
                )
            if found and height:
                below = ts.ocdbt.dump(base, node).result()["entries"]
                left += [(each.get("location"), height - 1) for each in below]
    return spec


def open_arrays(
    location: Location, places: Iterable[ArrayPlace]
) -> Iterator[TensorStoreArray]:
    """Yields the arrays of places, in order; their metadata is read, no elements.

    Of arrays with the same metadata in a database of this machine, one is opened.
    """
    shared = context()
    import tensorstore as ts

    stored, alike = _StoredPlaces(location), dict[Any, TensorStoreArray]()
    left = iter(places)
    while batch := list(islice(left, _OPENING_AT_ONCE)):
        found = [(array, *stored.find(array)) for array in batch]
        first = {form: array for array, _, form in reversed(found)}
        opening: dict[Any, Any] = {}
        _check_metadata(location, [v for k, v in first.items() if k not in alike])
        for form, array in first.items():
            if form not in alike:
                with location.opening(), translate_errors(array.name):
                    how: Any = {"open": True, "read": True, "context": shared}
                    opening[form] = ts.open(array.spec, **how)
        for array, at, form in found:
            if form in opening:
                with translate_errors(array.name):
                    store = opening.pop(form).result()
                    alike[form] = TensorStoreArray(store, row=array.name, stored=at)
                    if isinstance(form, tuple):  # its values are known
                        alike[form].together = stored.together(alike[form], *form[:2])
                yield alike[form]
            else:
                yield alike[form].alike(array, at)


class _StoredPlaces:
    """Finds where arrays on this machine are stored; arrays share a database."""

    def __init__(self, location: Location) -> None:
        self._is_local = location.is_local
        self._databases: dict[str, OcdbtPlaces] = {}
        self._together: dict[tuple[OcdbtPlaces, str], SmallChunks] = {}

    def find(self, array: ArrayPlace) -> tuple[StoredIn | None, object]:
        """Returns where the values of an array are stored, None if elsewhere; and what
        is equal for arrays with the same metadata."""
        kvstore = array.kvstore
        if not self._is_local:
            return None, object()
        if kvstore["driver"] == "file":
            return StoredIn(FolderPlaces(kvstore["path"]), ""), object()
        folder = kvstore["base"]["path"]
        if folder not in self._databases:  # to find the folder takes system calls
            self._databases[folder] = OcdbtPlaces(folder)
        places, prefix = self._databases[folder], kvstore["path"]
        key, metadata = f"{prefix}{_METADATA_KEYS[array.driver]}", None
        with suppress(StoreError, *_ERRORS):  # TensorStore explains them
            metadata = places.read([key], most=MAX_METADATA_BYTES)
        if metadata is None:
            return StoredIn(places, prefix), object()
        form = (places, array.driver, array.is_whole, metadata[0])
        return StoredIn(places, prefix), form

    def together(
        self, array: TensorStoreArray, places: OcdbtPlaces, driver: str
    ) -> SmallChunks | None:
        """Returns the reader of small chunks that an array shares with others."""
        bounds = array.bounds
        is_small = 0 < bounds.chunk_bytes < MIN_CHUNK_BYTES
        if not (is_small and bounds.is_alone and array.shape):
            return None
        encoding = json.dumps({**bounds.metadata, "shape": 0}, sort_keys=True)
        chunks = SmallChunks(places, driver, bounds)
        return self._together.setdefault((places, encoding), chunks)


def _check_metadata(location: Location, places: Sequence[ArrayPlace]) -> None:
    """Rejects metadata of an array that is too large, of which TensorStore takes 72
    bytes of memory for each byte; what is absent is left to it."""
    if not places:
        return
    shared = context()
    import tensorstore as ts

    names = {
        f"{place.kvstore['path']}{_METADATA_KEYS[place.driver]}": place.name
        for place in places
    }
    spec = {**places[0].kvstore, "path": ""}  # all are in one bucket or database
    with location.opening(), translate_errors(places[0].name):
        values = ts.KvStore.open(spec, context=shared).result()
        check_stored(
            values,
            [*names],
            MAX_METADATA_BYTES,
            what=lambda key: f"{names[key]}, {key.rpartition('/')[2]}",
        )


MAX_DEPTH: Final = 64
"""Maximum folders above an array."""


def find_arrays(location: Location, folder: str) -> list[str]:
    """Returns the paths of all zarr arrays below a folder, relative to it; lists each
    folder above them once.
    """
    found: list[str] = []
    left: list[tuple[str, int]] = [("", 0)]
    while left:
        path, depth = left.pop()
        names = location.names(join(folder, path))
        if _METADATA_KEYS["zarr"] in names:
            found.append(path)
            continue
        if depth == MAX_DEPTH:
            raise PreconditionError(
                f"{place(location, folder)}: expected at most {MAX_DEPTH} nested "
                "folders"
            )
        left += [(join(path, name), depth + 1) for name in folders_in(names)]
    return sorted(found)


def open_folders(
    location: Location, folder: str, paths: Sequence[str]
) -> list[TensorStoreArray]:
    """Opens the arrays at paths below a folder.

    The writers store all chunks of an array, also of zeros too, so an absent one is
    damage; TensorStore would return zeros by itself.
    """
    places = [
        ArrayPlace(
            name=f"array {path!r}",
            driver="zarr",
            kvstore=location.kvstore(join(folder, path)),
            is_whole=True,
        )
        for path in paths
    ]
    return list(open_arrays(location, places))


def open_keys(
    location: Location, base: Mapping[str, Any], names: Iterable[tuple[str, str]]
) -> list[TensorStoreArray]:
    """Opens the arrays of a database, each with its name in messages and the path of
    its keys; chunks of zeros are not stored.
    """
    places = [
        ArrayPlace(
            name=f"array {name!r}",
            driver="zarr3",
            kvstore=ocdbt(base, f"{path}/" if path else ""),
            is_whole=False,
        )
        for name, path in names
    ]
    return list(open_arrays(location, places))
