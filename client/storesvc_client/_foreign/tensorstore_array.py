"""Arrays of foreign checkpoints that TensorStore reads: zarr and OCDBT.

``open_arrays`` opens them, many at a time. Nothing of an array is cached, as each chunk
is read once; of an OCDBT database only the nodes are, which all arrays share.
"""

import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import MAX_RANK, Region
from storesvc.format.trees import MAX_LEAF_BYTES
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

_OPENING: Final = 256
"""Arrays that are being opened at the same time."""

_UNAVAILABLE: Final = (
    *("ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"),
    *("UNAVAILABLE", "UNKNOWN"),
)
_DENIED: Final = ("PERMISSION_DENIED", "UNAUTHENTICATED")
"""Status codes, with which the messages of TensorStore begin."""


class TensorStoreArray:
    """A ``ForeignArray`` over an opened TensorStore."""

    def __init__(self, store: "ts.TensorStore", *, row: str) -> None:
        """Checks that a checkpoint can hold the array.

        Args:
            store: The array, opened for reading, with the origin 0.
            row: Name of the row for messages, such as "leaf 'params/w'".

        Raises:
            PreconditionError: Its dtype, rank or size is none of a checkpoint.
        """
        self._store = store
        self._row = row
        self.dtype = str(store.dtype.name)
        """Name of the dtype in ``storesvc.format.dtypes``."""
        self.shape = tuple(store.shape)
        chunk = store.chunk_layout.read_chunk.shape or self.shape
        self.chunk_shape = tuple(
            max(1, n or size) for n, size in zip(chunk, self.shape, strict=True)
        )
        """Shape of the pieces that TensorStore reads as a whole."""
        if self.dtype not in DTYPES:
            raise PreconditionError(
                f"{row}: expected the dtype of an array of numbers, got {self.dtype}; "
                "leave it out with select="
            )
        if len(self.shape) > MAX_RANK:
            raise PreconditionError(
                f"{row}: expected at most {MAX_RANK} dimensions, got {len(self.shape)}"
            )
        itemsize = DTYPES[self.dtype].itemsize
        leaf_bytes = math.prod(self.shape) * itemsize
        self._chunk_bytes = math.prod(self.chunk_shape) * itemsize
        if leaf_bytes > MAX_LEAF_BYTES or self._chunk_bytes > MAX_CHUNK_BYTES:
            raise PreconditionError(
                f"{row}: expected at most {MAX_LEAF_BYTES} bytes in chunks of at most "
                f"{MAX_CHUNK_BYTES}, got {self.shape} {self.dtype} in chunks of "
                f"{self.chunk_shape}; write it again in smaller chunks"
            )

    def read(self, region: Region, into: NDArray[Any]) -> "TensorStoreRead":
        """Starts to read a region; see ``ForeignArray``."""
        import tensorstore as ts

        if self._chunk_bytes >= _LARGE_CHUNK_BYTES:
            _check_memory(self._chunk_bytes, self._row)
        index: tuple[Any, ...] = tuple(slice(start, stop) for start, stop in region)
        with translated(self._row):
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


def open_arrays(
    specs: Sequence[Mapping[str, Any]], *, rows: Sequence[str]
) -> list[TensorStoreArray]:
    """Opens arrays.

    Args:
        specs: TensorStore's spec of each array.
        rows: Name of each array for messages, such as "leaf 'params/w'".

    Raises:
        DataLossError: The metadata of an array is missing or damaged.
        PreconditionError: A checkpoint cannot hold an array; or TensorStore is not
            installed, or the storage denies access.
        UnavailableError: The storage does not answer.
    """
    ts = _tensorstore()
    opened = []
    left = zip(specs, rows, strict=True)
    while batch := list(islice(left, _OPENING)):
        starting = []
        for spec, row in batch:
            with translated(row):
                opening = ts.open(dict(spec), open=True, read=True, context=_context())
                starting.append((opening, row))
        for opening, row in starting:
            with translated(row):
                opened.append(TensorStoreArray(opening.result(), row=row))
    return opened


def list_keys(kvstore: Mapping[str, Any], *, what: str) -> list[str]:
    """Returns all keys of a key-value store, such as an OCDBT database, sorted.

    Args:
        kvstore: Its spec.
        what: Its name in messages.

    Raises:
        DataLossError: It is damaged, or a key is no text.
        UnavailableError: The storage does not answer.
    """
    ts = _tensorstore()
    with translated(what):
        store = ts.KvStore.open(dict(kvstore), context=_context()).result()
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
        PreconditionError: The storage denies access.
        UnavailableError: The storage does not answer.
    """
    try:
        yield
    except (StoreError, TimeoutError):
        raise
    except (ValueError, RuntimeError, KeyError, OSError, NotImplementedError) as e:
        text = str(e)
        reason = text.partition(" [")[0][:400]
        if text.startswith(_UNAVAILABLE):
            raise UnavailableError(f"{what}: {reason}; try again") from e
        if text.startswith(_DENIED):
            raise PreconditionError(
                f"{what}: the storage denies access ({reason}); let this user read it",
                reason="STORAGE_DENIED",
            ) from e
        raise DataLossError(
            f"{what}: damaged or missing ({reason}); use another checkpoint"
        ) from e


def _check_memory(size: int, row: str) -> None:
    """Rejects a read for whose chunks there is no memory."""
    try:
        mmap.mmap(-1, size).close()  # untouched pages cost nothing
    except (OSError, ValueError, OverflowError) as e:
        raise LimitError(
            f"{row}: expected memory for a chunk of {size} bytes, got none ({e}); read "
            "it on a larger machine"
        ) from e


def _tensorstore() -> Any:
    try:
        import tensorstore as ts
    except ModuleNotFoundError as e:
        raise InvalidRequestError(
            f"reading arrays of this format needs {e.name}; pip install "
            "'storesvc[interop]'"
        ) from e
    return ts


@cache
def _context() -> "ts.Context":
    limits = {"cache_pool": 0, _NODE_CACHE: _NODE_CACHE_BYTES}
    spec = {name: {"total_bytes_limit": size} for name, size in limits.items()}
    context: ts.Context = _tensorstore().Context(spec)
    return context
