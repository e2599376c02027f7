"""Checks the chunks that blosc compressed before TensorStore decodes them.

TensorStore stops zstd, gzip, zlib and bz2 at the size of the chunk, but gives blosc as
much memory as the header of the stored bytes states: up to 2 GiB for some kilobytes. So
the header is compared with the size of the chunk first, for which the stored bytes are
read once more. No writer of a format that is read here uses blosc by default.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from storesvc.format.grids import Region
from storesvc_client._foreign.chunk_keys import chunk_keys
from storesvc_client.errors import DataLossError, PreconditionError

if TYPE_CHECKING:
    import tensorstore as ts

_BLOSC: Final = "blosc"

_SIZE: Final = slice(4, 8)
"""Bytes of the header that state the size after decoding, in little endian."""

_CHECKSUM_BYTES: Final = 4
"""Bytes that the codec crc32c adds to a chunk before blosc compresses it."""


class BloscChunks:
    """The chunks of an array that blosc compressed."""

    def __init__(
        self, store: "ts.TensorStore", *, chunk: Sequence[int], chunk_bytes: int
    ) -> None:
        """Reads no chunk yet.

        Args:
            store: The array.
            chunk: Shape of a chunk.
            chunk_bytes: Bytes of a chunk after decoding.
        """
        assert store.kvstore is not None  # zarr has one
        self._values = store.kvstore
        self._metadata = store.spec().to_json()["metadata"]
        self._chunk = chunk
        self._limit = chunk_bytes + _CHECKSUM_BYTES

    def check(self, region: Region) -> None:
        """Rejects a region if a chunk of it would be decoded to more than a chunk.

        Raises:
            DataLossError: The header of a chunk states more bytes.
        """
        keys = list(chunk_keys(self._metadata, self._chunk, region))
        reads = [self._values.read(key) for key in keys]
        for key, read in zip(keys, reads, strict=True):
            found = read.result()
            if found.state != "value":
                continue  # absent: the read of the array decides
            size = int.from_bytes(found.value[_SIZE], "little")
            if size > self._limit:
                raise DataLossError(
                    f"chunk {key!r}: expected at most {self._limit} bytes after "
                    f"decoding, got {size} in its header; use another checkpoint"
                )


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
    if names.count(_BLOSC) > 1 or names[-1] != _BLOSC or "sharding_indexed" in names:
        raise PreconditionError(
            f"{row}: expected blosc as the only compressor, without shards, got the "
            f"codecs {', '.join(names)}; write it again with zstd"
        )
    return True


def _names(codecs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the names of codecs of zarr 3, also of those within shards."""
    for codec in codecs:
        yield codec.get("name", "")
        inner = codec.get("configuration", {})
        yield from _names(inner.get("codecs", []))
        yield from _names(inner.get("index_codecs", []))
