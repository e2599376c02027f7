"""Calls of TensorStore's key-value store, in the terms of a `Bucket`.

They raise the builtin exceptions of TensorStore.
"""

from typing import Final, assert_never

import tensorstore as ts

from storesvc.storage.bucket import (
    Condition,
    Generation,
    PreconditionError,
    Stored,
    WriteCondition,
)
from storesvc.storage.requests import await_future

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
    """Returns the range of the paths that begin with a prefix."""
    first = f"{after}\0" if after else prefix
    stop = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""
    return ts.KvStore.KeyRange(first, stop)


def _written(path: str, stamp: ts.KvStore.TimestampedStorageGeneration) -> Generation:
    """Returns the generation that a write made.

    Raises:
        PreconditionError: The condition did not hold.
    """
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
