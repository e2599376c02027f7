"""Reads chunks of zarr arrays that are stored as plain elements on this machine.

TensorStore reads such a chunk into memory of its own and copies it from there. Here it
is read from its file into its place, which halves the processor time of reading. That
is possible for an array without compression, filters and checksums, in a folder or in
OCDBT; with zarr 3, also in shards of one chunk each, as Orbax writes them: the
elements, then an index of one entry.

Only what is stored as expected is read here. All else is left to TensorStore, which
reads it or reports the damage.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from numpy.typing import NDArray

from storesvc.format.checksums import crc32c
from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import Region, part
from storesvc_client._foreign.chunk_keys import chunk_keys, chunk_regions
from storesvc_client._foreign.local_location import LocalLocation
from storesvc_client._foreign.ocdbt_places import StoredRange
from storesvc_client._foreign.plain_array import PlainArray

MIN_CHUNK_BYTES: Final = 256 << 10
"""Smaller chunks are left to TensorStore: to find one costs more than to copy it."""

_INDEX_BYTES: Final = 20
"""Bytes of the index of a shard of one chunk: offset, size, checksum."""


class Places(Protocol):
    """Finds the stored bytes of chunks."""

    @property
    def location(self) -> LocalLocation:
        """Location of the files."""

    def find(self, key: str) -> StoredRange | None:
        """Returns the range of a chunk's bytes; None if it is not known."""


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

    Args:
        metadata: Metadata of zarr 2 or 3, as TensorStore describes it.
        dtype: Name of the dtype.
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
        """Reads nothing yet.

        Args:
            form: Form of the chunks.
            metadata: Metadata of the array, which states the keys of its chunks.
            places: Finds their bytes.
            prefix: Beginning of the keys.
            dtype: Name of the dtype.
            row: Name of the array for messages.
        """
        self._form = form
        self._metadata = metadata
        self._places = places
        self._prefix = prefix
        self._dtype = dtype
        self._row = row
        itemsize = DTYPES[dtype].itemsize
        self._chunk_bytes = math.prod(form.chunk_shape) * itemsize

    def read(self, region: Region, into: NDArray[Any]) -> bool:
        """Reads a region; returns False if a chunk of it is not stored as expected.

        Args:
            region: The region.
            into: Receives the elements.

        Raises:
            DataLossError: A file has become shorter.
            UnavailableError: The storage does not answer.
        """
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
        if place is None:
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
