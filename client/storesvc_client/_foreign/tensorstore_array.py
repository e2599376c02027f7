"""Arrays of foreign checkpoints that TensorStore reads: zarr and OCDBT.

``zarr_arrays.py`` opens them. All share one context: the concurrency of buckets as for
a store, and a cache for the nodes of OCDBT databases. Chunks are never cached.
"""

import mmap
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import Region, shape_problem
from storesvc.storage.location import CONCURRENCY, RETRIES
from storesvc_client._foreign.chunk_bounds import ChunkBounds
from storesvc_client._foreign.foreign_step import Reading
from storesvc_client._foreign.plain_array import reading_threads
from storesvc_client._foreign.raw_chunks import (
    MIN_CHUNK_BYTES,
    Places,
    RawChunks,
    raw_form,
)
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


class StoredIn(NamedTuple):
    """The places of the values of an array."""

    places: Places
    prefix: str
    """Beginning of the keys of its chunks."""


class TensorStoreArray:
    """A ``ForeignArray`` over an opened TensorStore."""

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
        self._store = store
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
        self._bounds = ChunkBounds(store, row=row)
        chunk = self._bounds.shape
        self.chunk_shape = tuple(
            max(1, min(n, size)) for n, size in zip(chunk, self.shape, strict=True)
        )
        """Shape of the pieces that are read as a whole, clipped to the array."""
        self._chunk_bytes = self._bounds.chunk_bytes
        if self._chunk_bytes > MAX_CHUNK_BYTES:
            raise PreconditionError(
                f"{row}: expected chunks of at most {MAX_CHUNK_BYTES} bytes, got "
                f"{self.shape} {self.dtype} in chunks of {chunk}; write it again in "
                "smaller chunks"
            )

    @property
    def has_checksums(self) -> bool:
        """True if each chunk is stored with a checksum, which reading compares."""
        codec = self._store.codec
        return codec is not None and _is_checked(codec.to_json().get("codecs", []))

    def read(self, region: Region, into: NDArray[Any]) -> Reading:
        """Starts to read a region; see ``ForeignArray``."""
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
        metadata = self._store.spec().to_json()["metadata"]
        form = raw_form(metadata, self.dtype)
        if form is None:
            return None
        return RawChunks(
            form,
            metadata,
            self._stored.places,
            prefix=self._stored.prefix,
            dtype=self.dtype,
            row=self._row,
        )

    def _read(self, region: Region, into: NDArray[Any]) -> "TensorStoreRead":
        import tensorstore as ts

        if self._chunk_bytes >= _LARGE_CHUNK_BYTES:
            _check_memory(self._chunk_bytes, self._row)
        index: tuple[Any, ...] = tuple(slice(start, stop) for start, stop in region)
        with translated(self._row):
            self._bounds.check(region)
            source = self._store[(*index, ...)]
            if region:
                source = source[ts.d[:].translate_to[0]]
            # TensorStore copies memory that is not aligned, and would write to the copy
            target = into if into.flags.aligned else np.empty(into.shape, into.dtype)
            future = ts.array(target).write(source)
        return TensorStoreRead(future, target=target, into=into, row=self._row)


class TensorStoreRead:
    """A read in progress."""

    def __init__(
        self,
        future: "ts.WriteFutures",
        *,
        target: NDArray[Any],
        into: NDArray[Any],
        row: str,
    ) -> None:
        """Takes a read that has been started.

        Args:
            future: Its future.
            target: Memory that TensorStore writes.
            into: Memory that receives the elements in the end; may be `target`.
            row: Name of the row for messages.
        """
        self._future = future
        self._target = target
        self._into = into
        self._row = row

    def result(self, timeout: float | None = None) -> None:
        """Waits for the read; see ``Reading``."""
        with translated(self._row):
            self._future.result(timeout)
        if self._target is not self._into:
            self._into[...] = self._target

    def cancel(self) -> None:
        """See ``Reading``."""
        self._future.cancel()


def ocdbt(base: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Returns the spec of the keys of an OCDBT database that begin with a path.

    Args:
        base: Spec of the folder of the database, ``Location.kvstore``.
        path: Prefix of the keys.
    """
    return {
        "driver": "ocdbt",
        "base": dict(base),
        "path": path,
        "cache_pool": _NODE_CACHE,
    }


def list_keys(kvstore: Mapping[str, Any], *, what: str) -> list[str]:
    """Returns all keys of a key-value store, such as an OCDBT database, sorted.

    Args:
        kvstore: Its spec.
        what: Its name in messages.

    Raises:
        DataLossError: It is damaged, or a key is no text.
        UnavailableError: The storage does not answer.
    """
    shared = context()
    import tensorstore as ts

    with translated(what):
        store = ts.KvStore.open(dict(kvstore), context=shared).result()
        keys = store.list().result()
        try:
            return sorted(key.decode() for key in keys)
        except UnicodeDecodeError as e:
            raise DataLossError(f"{what}: expected keys in UTF-8, got {e}") from e


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Translates errors of TensorStore that are raised inside.

    Args:
        what: Row or file for messages.

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


def _check_memory(size: int, row: str) -> None:
    """Rejects a read for whose chunks there is no memory."""
    try:
        mmap.mmap(-1, size).close()  # untouched pages cost nothing
    except (OSError, ValueError, OverflowError) as e:
        raise LimitError(
            f"{row}: expected memory for a chunk of {size} bytes, got none ({e}); read "
            "it on a larger machine"
        ) from e


@lru_cache(maxsize=1)
def context() -> "ts.Context":
    """Returns the context of all arrays.

    Raises:
        InvalidRequestError: TensorStore is not installed.
    """
    try:
        import tensorstore as ts
    except ImportError as e:
        raise InvalidRequestError(
            "reading arrays of this format needs tensorstore; pip install "
            "'storesvc[interop]'"
        ) from e
    return ts.Context(
        {
            _NODE_CACHE: {"total_bytes_limit": _NODE_CACHE_BYTES},
            "gcs_request_concurrency": {"limit": CONCURRENCY},
            "gcs_request_retries": dict(RETRIES),
            "s3_request_concurrency": {"limit": CONCURRENCY},
            "s3_request_retries": dict(RETRIES),
            "http_request_concurrency": {"limit": CONCURRENCY},
            "http_request_retries": dict(RETRIES),
        }
    )
