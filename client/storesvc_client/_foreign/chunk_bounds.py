"""Bounds the stored chunks of zarr arrays before TensorStore reads and decodes them.

TensorStore takes memory for what is stored, and compares it with the chunk afterwards:
a sparse file of 20 GiB ends the process. So one byte is requested first of what is
behind the most bytes that a chunk can be stored as, in any storage; where there is one,
the chunk is rejected. Of a shard with several chunks, the lengths in its index are
compared, too.

TensorStore stops zstd, gzip, zlib and bz2 at the size of the chunk, but gives blosc as
much memory as the header of the stored bytes states: up to 2 GiB for some kilobytes. So
that header is compared with the size of the chunk. No writer of a format that is read
here uses blosc by default.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import Region
from storesvc_client._foreign.raw_chunks import chunk_keys
from storesvc_client.errors import DataLossError, PreconditionError

if TYPE_CHECKING:
    import tensorstore as ts

_ADVICE: Final = "use another checkpoint"

_BLOSC: Final = "blosc"
_SHARDS: Final = "sharding_indexed"

_SIZE: Final = slice(4, 8)
"""Bytes of the header of blosc that state the size after decoding."""

_CHECKSUM_BYTES: Final = 4
"""Bytes that the codec crc32c adds."""

_SLACK_BYTES: Final = 1 << 20
"""Bytes by which a compressor may make a small chunk larger, and the index of a shard:
far more than any does, and far less than harms."""

_ENTRY_BYTES: Final = 16
"""Bytes of a chunk in the index of a shard: its offset and its length."""

_ABSENT: Final = 2**64 - 1

MAX_INDEX_BYTES: Final = 64 << 20
"""Maximum bytes of the index of a shard."""

_REMEMBERED: Final = 10_000
"""Maximum shards that are remembered."""

_PLAIN: Final = [{"name": "bytes", "configuration": {"endian": "little"}}]
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

    Args:
        values: Key-value store of TensorStore.
        keys: Their keys.
        most: Maximum bytes of each.
        what: Returns the name of a value for messages.

    Raises:
        DataLossError: A value is longer.
        PreconditionError: The storage serves no ranges.
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

        Args:
            store: The array.
            row: Name of the array for messages.

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
        self.shape = _sizes(layout.read_chunk.shape, store.shape)
        """Shape of what is read as a whole."""
        self._stored = _sizes(layout.write_chunk.shape, store.shape)
        """Shape of what has a key: a shard, or a chunk."""
        self.chunk_bytes: int = math.prod(self.shape) * itemsize
        """Bytes of a chunk after decoding."""
        self._longest = longest_stored(math.prod(self._stored) * itemsize)
        count = math.prod(self._stored) // math.prod(self.shape)
        self._index = None
        if count > 1:
            self._index = _index_range(self.codec, count, row=row)
        self._checked: set[str] = set()
        """Shards that are within their bounds; each is read several times."""

    def check(self, region: Region) -> None:
        """Rejects a region if a chunk of it is stored as more bytes than a chunk has,
        or would be decoded to more.

        Raises:
            DataLossError: A chunk is, or would be.
            ValueError: Its header or index is not there; also other errors of
                TensorStore.
        """
        found = chunk_keys(self.metadata, self._stored, region)
        keys = [key for key in found if key not in self._checked]
        check_stored(self._values, keys, self._longest, what=self._name)
        if self._is_blosc:
            most = self.chunk_bytes + _CHECKSUM_BYTES
            for key, size in self._parts(keys, _SIZE):
                self._check(key, int.from_bytes(size, "little"), most, "after decoding")
        if self._index is not None:
            most = longest_stored(self.chunk_bytes)
            for key, data in self._parts(keys, self._index):
                entries = np.frombuffer(data, "<u8", len(data) // _ENTRY_BYTES * 2)
                sizes = entries[1::2]
                longest = int(max(sizes[sizes != _ABSENT], default=0))
                self._check(key, longest, most, "in a shard")
            if len(self._checked) > _REMEMBERED:
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

    Args:
        codec: The codec of the array, as TensorStore describes it.
        row: Name of the array for messages.

    Raises:
        PreconditionError: Blosc compressed what the header of a stored value does not
            describe: chunks in shards, or before another codec.
    """
    if (codec.get("compressor") or {}).get("id") == _BLOSC:  # zarr 2
        return True
    names = list(_names(codec.get("codecs", [])))
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
        list(_names(codecs)).count(_SHARDS) != 1
        or codecs[0].get("name") != _SHARDS
        or index not in (_PLAIN, [*_PLAIN, {"name": "crc32c"}])
        or size > MAX_INDEX_BYTES
    ):
        raise PreconditionError(
            f"{row}: expected shards with a plain index of at most {MAX_INDEX_BYTES} "
            f"bytes, got one of {count} chunks, with the codecs "
            f"{', '.join(_names(codecs))}; write it again with one chunk in each shard"
        )
    is_first = shard.get("index_location") == "start"
    return slice(0, size) if is_first else slice(-size, None)


def _sizes(chunk: Any, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of a chunk as TensorStore states it; 0 or None: all."""
    return tuple(max(1, n or m) for n, m in zip(chunk or shape, shape, strict=True))


def _names(codecs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the names of codecs of zarr 3, also of those within shards."""
    for codec in codecs:
        yield codec.get("name", "")
        inner = codec.get("configuration", {})
        yield from _names(inner.get("codecs", []))
        yield from _names(inner.get("index_codecs", []))
