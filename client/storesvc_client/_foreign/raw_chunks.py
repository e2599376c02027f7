"""Reads chunks of zarr arrays that are stored as plain elements on this machine.

TensorStore reads such a chunk into memory of its own and copies it from there. Here it
is read from its file into its place, which halves the processor time of reading. That
is possible for an array without compression, filters and checksums, in a folder or in
OCDBT; with zarr 3, also in shards of one chunk each, as Orbax writes them: the
elements, then an index of one entry.

Only what is stored as expected is read here. All else is left to TensorStore, which
reads it or reports the damage. TensorStore does not say where a database stores its
values, but its dump of the nodes does: each value is a range of a data file, or in the
node itself if it is short. A dump costs memory for each key, so databases with very
many keys are not looked at.

A region of a row-major array is read in pieces. A piece is either a contiguous range,
or a range that covers parts with small gaps between them, which cost less to read than
a request for each.

>>> [(p.start, p.stop) for p in pieces((4, 8), ((1, 3), (0, 8)), itemsize=2)]
[(16, 48)]
"""

import math
import re
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, product
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from storesvc.format.checksums import crc32c
from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import Region, part
from storesvc.storage.threads import Threads
from storesvc_client._foreign.foreign_step import ForeignArray
from storesvc_client._foreign.locations import LocalLocation, Location
from storesvc_client.errors import DataLossError, NotFoundError, UnavailableError

MAX_PIECE_BYTES: Final = 16 << 20
"""Maximum bytes of a piece, so memory for a read is bounded."""

MAX_GAP_BYTES: Final = 256 << 10
"""Maximum bytes that are read and not needed, between two parts of a piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A range of bytes that holds a part of a region."""

    start: int
    """Offset in the array, in bytes."""
    stop: int
    region: Region
    """Part of the region that it holds."""
    is_contiguous: bool
    """True if the range holds nothing else."""


def pieces(shape: tuple[int, ...], region: Region, *, itemsize: int) -> Iterator[Piece]:
    """Yields the pieces of a region, ascending."""
    if any(start >= stop for start, stop in region):
        return
    strides = count_strides(shape, itemsize=itemsize)
    left = [region]
    while left:
        box = left.pop()
        piece = _piece(box, strides, itemsize)
        size = piece.stop - piece.start
        fits = size <= MAX_PIECE_BYTES or all(b - a == 1 for a, b in box)
        if fits and (
            piece.is_contiguous or _gap(box, strides, itemsize) <= MAX_GAP_BYTES
        ):
            yield piece
        else:
            first, second = _halves(box)
            left += [second, first]


def count_strides(shape: tuple[int, ...], *, itemsize: int) -> tuple[int, ...]:
    """Returns the bytes between neighbours along each dimension."""
    sizes = accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)
    return tuple(itemsize * n for n in reversed(list(sizes)))[: len(shape)]


def _piece(box: Region, strides: tuple[int, ...], itemsize: int) -> Piece:
    start = sum(a * n for (a, _), n in zip(box, strides, strict=True))
    last = sum((b - 1) * n for (_, b), n in zip(box, strides, strict=True))
    stop = last + itemsize
    needed = math.prod(b - a for a, b in box) * itemsize
    return Piece(
        start=start, stop=stop, region=box, is_contiguous=needed == stop - start
    )


def _gap(box: Region, strides: tuple[int, ...], itemsize: int) -> int:
    """Returns the largest number of bytes between two parts of a box."""
    below, largest = itemsize, 0
    for (start, stop), stride in zip(reversed(box), reversed(strides), strict=True):
        if stop - start > 1:
            largest = max(largest, stride - below)
        below += (stop - start - 1) * stride
    return largest


def _halves(box: Region) -> tuple[Region, Region]:
    """Divides a box along its first dimension that is longer than 1."""
    dim = next(d for d, (a, b) in enumerate(box) if b - a > 1)
    start, stop = box[dim]
    middle = (start + stop) // 2
    return (
        (*box[:dim], (start, middle), *box[dim + 1 :]),
        (*box[:dim], (middle, stop), *box[dim + 1 :]),
    )


def chunk_keys(
    metadata: Mapping[str, Any], chunk: Sequence[int], region: Region
) -> Iterator[str]:
    """Yields the keys of the chunks that overlap a region, in row-major order.

    >>> list(chunk_keys({"dimension_separator": "."}, (4, 4), ((0, 4), (2, 6))))
    ['0.0', '0.1']
    """
    encoding = metadata.get("chunk_key_encoding", {"name": "v2"})  # zarr 2 has none
    is_v2 = encoding["name"] == "v2"
    separator = encoding.get("configuration", {}).get("separator")
    separator = separator or metadata.get("dimension_separator")
    separator = separator or ("." if is_v2 else "/")
    for index in product(*_spans(chunk, region)):
        parts = [str(number) for number in index]
        yield separator.join(parts or ["0"] if is_v2 else ["c", *parts])


def chunk_regions(
    chunk: Sequence[int], region: Region
) -> Iterator[tuple[Region, Region]]:
    """Yields the part of a region in each chunk, in the order of ``chunk_keys``: within
    the array, and within the chunk.

    >>> list(chunk_regions((4,), ((2, 6),)))
    [(((2, 4),), ((2, 4),)), (((4, 6),), ((0, 2),))]
    """
    for index in product(*_spans(chunk, region)):
        inside = tuple(
            (max(start, at * n), min(stop, (at + 1) * n))
            for at, n, (start, stop) in zip(index, chunk, region, strict=True)
        )
        within = tuple(
            (start - at * n, stop - at * n)
            for at, n, (start, stop) in zip(index, chunk, inside, strict=True)
        )
        yield inside, within


def _spans(chunk: Sequence[int], region: Region) -> list[range]:
    """Returns the numbers of the chunks along each dimension."""
    return [
        range(start // size, -(-stop // size))
        for (start, stop), size in zip(region, chunk, strict=True)
    ]


MAX_KEYS: Final = 500_000
"""Maximum keys of a database that is looked at. Each takes 1 KiB in the dump of its
node, and 300 bytes afterwards."""

MAX_DUMPED_BYTES: Final = 32 << 20
"""Maximum stored bytes of a node whose keys are looked at; TensorStore rejects one of
more than a million keys."""

_VALUE: Final = re.compile(r"value:([^:%]*):([^:%]+):(\d{1,18}):(\d{1,18})")
NODE: Final = re.compile(r"btreenode:[^:]*:[^:]+:\d{1,18}:(\d{1,18})")
"""Place of a node in a dump, with its stored bytes."""


class StoredRange(NamedTuple):
    """A range of a file."""

    path: str
    """Relative to the location."""
    start: int
    size: int
    """Bytes of the range."""


Place: TypeAlias = StoredRange | bytes
"""Range of a stored value; or the value, if a node of a database holds it."""


_NEAR_BYTES: Final = 4 << 10
"""Maximum bytes between two values that are read together."""


class FolderPlaces:
    """The values of a folder: each is a file."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    @cached_property
    def location(self) -> LocalLocation:
        """The folder; a tree may have 100,000, of which few are read here."""
        return LocalLocation(Path(self._folder))

    def find(self, key: str) -> StoredRange | None:
        """Returns the range of a value; None if there is no such file."""
        size = self.location.size(key)
        return None if size is None else StoredRange(key, 0, size)


class OcdbtPlaces:
    """The values of an OCDBT database in a folder. Thread-safe."""

    def __init__(self, folder: str) -> None:
        """Reads nothing yet."""
        self.location = LocalLocation(Path(folder))
        self._lock = threading.Lock()
        self._found: Mapping[str, Place] | None = None

    def find(self, key: str) -> Place | None:
        """Returns the place of a value; None if it is not known, for example because
        the database has too many keys.

        Raises:
            ValueError: The database is damaged; also other errors of TensorStore.
        """
        with self._lock:
            if self._found is None:
                self._found = {}  # also after an error: it would only repeat
                self._found = dict(self._values())
        return self._found.get(key)

    def read(self, keys: Iterable[str], *, most: int) -> list[bytes] | None:
        """Returns values, those that are neighbours in a file by one read of it; None
        if one is not known, is longer than `most`, or all are too long together."""
        found = [self.find(key) for key in keys]
        values = [each if isinstance(each, bytes) else b"" for each in found]
        ranges = [
            (each.path, each.start, each.start + each.size, n)
            for n, each in enumerate(found)
            if isinstance(each, StoredRange)
        ]
        sizes = [*map(len, values), *(stop - start for _, start, stop, _ in ranges)]
        if None in found or max(sizes) > most or sum(sizes) > MAX_PIECE_BYTES:
            return None
        left = deque(sorted(ranges))
        while left:
            path, first, last, _ = left[0]
            run = []
            while left and left[0][0] == path and left[0][1] <= last + _NEAR_BYTES:
                run.append(left.popleft())
                last = max(last, run[-1][2])
            data = self.location.read_range(path, first, last)
            for _, start, stop, n in run:
                values[n] = data[start - first : stop - first]
        return values

    def _values(self) -> Iterator[tuple[str, Place]]:
        import tensorstore as ts

        base = ts.KvStore.open(self.location.kvstore()).result()
        manifest = ts.ocdbt.dump(base).result()
        if not manifest["versions"]:
            return
        newest = manifest["versions"][-1]
        root = newest["root"]
        if root["statistics"]["num_keys"] > MAX_KEYS or "location" not in root:
            return
        left = [(root["location"], b"", newest["root_height"])]
        seen = 0
        while left:
            at, prefix, height = left.pop()
            node = NODE.fullmatch(at)
            if node is None or int(node[1]) > MAX_DUMPED_BYTES:
                continue
            found = ts.ocdbt.dump(base, at).result()
            seen += len(found["entries"])
            if found["height"] != height or seen > 2 * MAX_KEYS:
                return
            for entry in found["entries"]:
                key = prefix + entry["key"]
                if height:
                    below = prefix + entry["subtree_common_prefix"]
                    left.append((entry["location"], below, height - 1))
                elif value := _VALUE.fullmatch(entry.get("indirect_value", "")):
                    path = sys.intern(value[1] + value[2])  # one for all its values
                    place = StoredRange(path, int(value[3]), int(value[4]))
                    yield key.decode(errors="replace"), place
                elif isinstance(inline := entry.get("inline_value"), bytes):
                    yield key.decode(errors="replace"), inline


_THREADS: Final = 16
"""Reads in progress at the same time."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PlainArray(ForeignArray):
    """A range of a file: C order, little-endian."""

    location: Location
    path: str
    start: int
    """Offset of the first element in the file, in bytes."""
    shape: tuple[int, ...]
    dtype: str
    row: str
    """Name of the row for messages, such as "leaf 'params/w'"."""

    def read(self, region: Region, into: NDArray[Any]) -> "Future[None]":
        return reading_threads().submit(self.fill, region, into)

    def fill(self, region: Region, into: NDArray[Any]) -> None:
        """Reads a region in this thread; raises what the result of ``read`` raises."""
        itemsize = DTYPES[self.dtype].itemsize
        try:
            for piece in pieces(self.shape, region, itemsize=itemsize):
                self._read_piece(piece, part(into, region, piece.region))
        except (DataLossError, NotFoundError) as e:
            raise DataLossError(f"{self.row}: {e}") from e
        except UnavailableError as e:
            raise UnavailableError(f"{self.row}: {e}") from e

    def _read_piece(self, piece: Piece, into: NDArray[Any]) -> None:
        start = self.start + piece.start
        if piece.is_contiguous and into.flags.c_contiguous:
            elements = into.reshape(-1).view(np.uint8)
            self.location.read_into(self.path, start, elements.data)
        else:
            covering = np.empty(piece.stop - piece.start, np.uint8)
            self.location.read_into(self.path, start, covering.data)
            strides = count_strides(self.shape, itemsize=into.itemsize)
            # The covering range ends with the last element of the view.
            into[...] = as_strided(covering.view(into.dtype), into.shape, strides)
        if self.dtype == "bool" and into.view(np.uint8).max() > 1:
            raise DataLossError(
                f"{self.path}: expected 0 or 1 in each byte of a BOOL, got "
                f"{into.view(np.uint8).max()}"
            )


@cache
def reading_threads() -> Threads:
    """Returns the threads that read files, for all arrays."""
    return Threads(_THREADS, "storesvc-file-read")


MIN_CHUNK_BYTES: Final = 256 << 10
"""Smaller chunks are left to TensorStore: to find one costs more than to copy it."""

_INDEX_BYTES: Final = 20
"""Bytes of the index of a shard of one chunk: offset, size, checksum."""


Places: TypeAlias = FolderPlaces | OcdbtPlaces
"""Finds the stored bytes of chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawForm:
    """Form of the stored chunks of an array that are plain elements."""

    chunk_shape: tuple[int, ...]
    is_shard: bool
    """True if an index follows the elements."""


def raw_form(metadata: Mapping[str, Any], dtype: str) -> RawForm | None:
    """Returns the form of an array's chunks; None if they are not plain elements.

    >>> raw_form({"chunks": [4], "compressor": None, "order": "C", "dtype": "<f4"},
    ...     "float32")
    RawForm(chunk_shape=(4,), is_shard=False)
    """
    if dtype == "bool":  # its bytes must be checked
        return None
    if "chunks" in metadata:  # zarr 2
        stored = metadata.get("dtype")  # a list: of records, whose fields have theirs
        is_plain = (
            metadata.get("compressor") is None
            and not metadata.get("filters")
            and metadata.get("order") == "C"
            and isinstance(stored, str)
            and not stored.startswith(">")
        )
        shape = tuple(metadata["chunks"])
        return RawForm(chunk_shape=shape, is_shard=False) if is_plain else None
    grid = metadata.get("chunk_grid", {})
    if grid.get("name") != "regular":
        return None
    shape = tuple(grid["configuration"]["chunk_shape"])
    codecs = metadata.get("codecs", ())
    if _is_plain(codecs, dtype):
        return RawForm(chunk_shape=shape, is_shard=False)
    if len(codecs) != 1 or codecs[0].get("name") != "sharding_indexed":
        return None
    shard = codecs[0].get("configuration", {})
    is_plain = (
        tuple(shard.get("chunk_shape", ())) == shape
        and _is_plain(shard.get("codecs", ()), dtype)
        and shard.get("index_location", "end") == "end"
        and [each.get("name") for each in shard.get("index_codecs", ())]
        == ["bytes", "crc32c"]
        and _is_plain(shard["index_codecs"][:1], "uint64")
    )
    return RawForm(chunk_shape=shape, is_shard=True) if is_plain else None


def _is_plain(codecs: Sequence[Mapping[str, Any]], dtype: str) -> bool:
    """Returns whether codecs of zarr 3 store elements in little endian."""
    if len(codecs) != 1 or codecs[0].get("name") != "bytes":
        return False
    endian = codecs[0].get("configuration", {}).get("endian")
    return endian == "little" or (endian is None and DTYPES[dtype].itemsize == 1)


class RawChunks:
    """The chunks of an array that are plain elements."""

    def __init__(
        self,
        form: RawForm,
        metadata: Mapping[str, Any],
        places: Places,
        *,
        prefix: str,
        dtype: str,
        row: str,
    ) -> None:
        """Reads nothing yet."""
        self._form = form
        self._metadata = metadata
        self._places = places
        self._prefix = prefix
        self._dtype = dtype
        self._row = row
        itemsize = DTYPES[dtype].itemsize
        self._chunk_bytes = math.prod(form.chunk_shape) * itemsize

    def read(self, region: Region, into: NDArray[Any]) -> bool:
        """Reads a region; returns False if a chunk of it is not stored as expected."""
        shape = self._form.chunk_shape
        keys = chunk_keys(self._metadata, shape, region)
        for key, (chunk, within) in zip(
            keys, chunk_regions(shape, region), strict=True
        ):
            place = self._elements(f"{self._prefix}{key}")
            if place is None:
                return False
            array = PlainArray(
                location=self._places.location,
                path=place.path,
                start=place.start,
                shape=shape,
                dtype=self._dtype,
                row=self._row,
            )
            array.fill(within, part(into, region, chunk))
        return True

    def _elements(self, key: str) -> StoredRange | None:
        """Returns the range of the elements of a chunk."""
        place = self._places.find(key)
        if not isinstance(place, StoredRange):
            return None
        if not self._form.is_shard:
            return place if place.size == self._chunk_bytes else None
        if place.size != self._chunk_bytes + _INDEX_BYTES:
            return None
        end = place.start + place.size
        index = self._places.location.read_range(place.path, end - _INDEX_BYTES, end)
        expected = bytes(8) + self._chunk_bytes.to_bytes(8, "little")
        if index != expected + crc32c(expected).to_bytes(4, "little"):
            return None
        return StoredRange(place.path, place.start, self._chunk_bytes)
