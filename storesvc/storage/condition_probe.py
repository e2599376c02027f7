"""Probes a storage for conditional writes, conditional deletions and complete lists.

Conditional writes and deletions are the only arbiter of a store, and a complete list
decides what is garbage. Some storages that speak the API of Google Cloud Storage or of
S3, emulators above all, accept conditions and ignore them. A store there would lose
checkpoints without an error, so no store is created or opened there.
"""

import uuid
from collections.abc import Awaitable
from contextlib import suppress

from storesvc.errors import InvalidFieldError, StorageUnavailableError, StoreError
from storesvc.format import layout
from storesvc.storage.bucket import (
    IF_ABSENT,
    Bucket,
    Generation,
    PreconditionError,
    WriteCondition,
)


async def check_conditions(bucket: Bucket) -> None:
    """Rejects a storage that ignores a condition, or whose list lacks an object.

    Writes, lists and deletes one object of its own.

    Raises:
        InvalidFieldError: The storage fails a probe.
        StorageDeniedError: The storage does not let this process write.
        StorageUnavailableError: The storage does not answer.
    """
    path = f"{layout.PROBES}{uuid.uuid4().hex}"
    first = await _written(bucket, path, b"1", IF_ABSENT)
    try:
        second = await _written(bucket, path, b"2", first)
        await _violated(
            bucket.write(path, b"3", condition=IF_ABSENT),
            "the creation of an object (ifGenerationMatch=0, If-None-Match)",
        )
        await _violated(
            bucket.write(path, b"4", condition=first),
            "the overwriting of an object (ifGenerationMatch, If-Match)",
        )
        await _violated(
            bucket.delete(path, generation=first),
            "the deletion of an object (ifGenerationMatch, If-Match)",
        )
        if path not in await bucket.list(layout.PROBES):
            raise InvalidFieldError(
                f"{path}: expected a list of the storage to have an object that was "
                "just written, got none; storesvc requires complete lists: use another "
                "storage"
            )
    except BaseException:
        with suppress(StoreError):
            await bucket.delete(path)
        raise
    await bucket.delete(path, generation=second)


async def _written(
    bucket: Bucket, path: str, data: bytes, condition: WriteCondition
) -> Generation:
    """Writes an object, and returns its generation. A conflict may be with our own
    write, if its response was lost."""
    try:
        return await bucket.write(path, data, condition=condition)
    except PreconditionError as e:
        stored = await bucket.read(path)
        if stored is None or stored.data != data:
            raise StorageUnavailableError(
                f"{path}: expected the storage to accept a write whose condition "
                "holds, got a conflict; try again"
            ) from e
        return stored.generation


async def _violated(change: Awaitable[object], what: str) -> None:
    """Rejects a storage that makes a change whose condition does not hold."""
    with suppress(PreconditionError):
        await change
        raise InvalidFieldError(
            f"the storage ignores the condition on {what}: a store in it would lose "
            "checkpoints; storesvc requires conditional writes: use a storage that "
            "checks them"
        )
