"""Opens TensorStore's key-value store, and calls it in the terms of a `Bucket`.

The calls raise the builtin exceptions of TensorStore.
"""

from typing import Final, NamedTuple, assert_never

import tensorstore as ts

from storesvc.storage.bucket import (
    Condition,
    Generation,
    PreconditionError,
    Stored,
    WriteCondition,
    no_bucket,
    translate_errors,
)
from storesvc.storage.location import Storage, storage_at
from storesvc.storage.remote import GcsLists, S3Deletes, endpoint_in_environment
from storesvc.storage.requests import answer, await_future

_NOWHERE: Final = "nowhere/"
"""A prefix of no path: its list is one page."""


class OpenedStorage(NamedTuple):
    storage: Storage
    root: ts.KvStore
    context: ts.Context
    extra: GcsLists | S3Deletes | None
    """Calls of a bucket that TensorStore cannot make."""


async def open_storage(root: str) -> OpenedStorage:
    """Opens the storage at a root.

    Raises:
        InvalidFieldError: The root is not a URI of a known storage, or its bucket does
            not exist.
        StorageDeniedError: The storage rejects the credentials.
        StorageUnavailableError: The storage does not answer.
    """
    storage = storage_at(root)
    extra: GcsLists | S3Deletes | None = None
    # 1. Google's client first: TensorStore ends the process where gcs_grpc finds no
    #    credentials (seen in 0.1.86).
    if storage.is_gcs:
        extra = await GcsLists.for_storage(storage)
        await extra.check_bucket()
    # 2. TensorStore's own store.
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}, **storage.context})
    with translate_errors(storage, ""):
        with endpoint_in_environment(storage):
            opening = ts.KvStore.open(dict(storage.spec), context=context)
        store = await answer(storage, await_future(opening))
    # 3. Credentials and bucket of S3: reads from one that does not exist would find
    #    nothing.
    if storage.is_s3:
        extra = await S3Deletes.for_storage(storage)
        with translate_errors(storage, ""):
            try:
                await answer(storage, names(store, _NOWHERE))
            except ValueError as e:
                if not str(e).startswith("NOT_FOUND"):
                    raise
                raise no_bucket(storage) from e
    return OpenedStorage(storage, store, context, extra)


_CONFLICT: Final = b""
"""Generation that a write returns whose condition failed."""

_ABSENT: Final = b"\x02"
"""TensorStore's StorageGeneration::NoValue()."""


async def read(root: ts.KvStore, path: str) -> Stored | None:
    """Returns an object; None if it does not exist."""
    result = await await_future(root.read(path))
    if result.state != "value":
        return None
    return Stored(result.value, Generation(result.stamp.generation))


async def read_range(
    root: ts.KvStore, path: str, start: int, stop: int
) -> bytes | None:
    """Returns the bytes of an object from ``start`` up to ``stop``; None where there is
    no object."""
    result = await await_future(root.read(path, byte_range=slice(start, stop)))
    return result.value if result.state == "value" else None


async def write(
    root: ts.KvStore, path: str, data: bytes | None, condition: WriteCondition
) -> Generation:
    """Writes an object, or deletes it where `data` is None.

    Raises:
        PreconditionError: The condition did not hold.
    """
    stamp = await await_future(root.write(path, data, if_equal=_if_equal(condition)))
    return _written(path, stamp)


def write_blocking(
    root: ts.KvStore, path: str, data: bytes | None, condition: WriteCondition
) -> Generation:
    """As ``write``, for a thread that may block."""
    writing = root.write(path, data, if_equal=_if_equal(condition))
    return _written(path, writing.result())


async def names(root: ts.KvStore, prefix: str, after: str = "") -> list[str]:
    """Returns the paths that begin with a prefix, ascending; only those after
    `after`."""
    keys = await await_future(root.list(key_range(prefix, after)))
    return sorted(key.decode() for key in keys)


def key_range(prefix: str, after: str = "") -> ts.KvStore.KeyRange:
    first = f"{after}\0" if after else prefix
    stop = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""
    return ts.KvStore.KeyRange(first, stop)


def _written(path: str, stamp: ts.KvStore.TimestampedStorageGeneration) -> Generation:
    """Returns the generation that a write made, if its condition held."""
    if stamp.generation == _CONFLICT:
        raise PreconditionError(path)
    return Generation(stamp.generation)


def _if_equal(condition: WriteCondition) -> bytes | None:
    """A condition in TensorStore's terms."""
    match condition:
        case Condition.ALWAYS:
            return None
        case Condition.IF_ABSENT:
            return _ABSENT
        case bytes():
            return condition
        case other:
            assert_never(other)
