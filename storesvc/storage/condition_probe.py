"""Probes: whether a storage keeps the promises that a store rests on.

Conditional writes and deletions are the only arbiter of a store, and a complete list
decides what is garbage. Not all that speaks the API of Google Cloud Storage or of S3
honours the conditions: emulators accept and ignore them. A store there would lose
checkpoints without an error, so none is made and none is opened there.
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
    """Refuses a storage that ignores a condition, or whose list lacks an object.

    Writes, lists and deletes one object of its own.

    Raises:
        InvalidFieldError: The storage does so.
        StorageDeniedError: It does not let this process write.
        StorageUnavailableError: It does not answer.
    """
    place = f"{layout.PROBES}{uuid.uuid4().hex}"
    first = await _written(bucket, place, b"1", IF_ABSENT)
    try:
        second = await _written(bucket, place, b"2", first)
        await _violated(
            bucket.write(place, b"3", condition=IF_ABSENT),
            "the creation of an object (ifGenerationMatch=0, If-None-Match)",
        )
        await _violated(
            bucket.write(place, b"4", condition=first),
            "the overwriting of an object (ifGenerationMatch, If-Match)",
        )
        await _violated(
            bucket.delete(place, generation=first),
            "the deletion of an object (ifGenerationMatch, If-Match)",
        )
        if place not in await bucket.list(layout.PROBES):
            raise InvalidFieldError(
                f"{place}: expected a list of the storage to have an object that was "
                "just written, got none; storesvc requires lists that are complete: "
                "use another storage"
            )
    except BaseException:
        with suppress(StoreError):
            await bucket.delete(place)
        raise
    await bucket.delete(place, generation=second)


async def _written(
    bucket: Bucket, place: str, data: bytes, condition: WriteCondition
) -> Generation:
    """Writes, and returns the generation; a conflict may be with our own write, where
    its answer was lost."""
    try:
        return await bucket.write(place, data, condition=condition)
    except PreconditionError as e:
        stored = await bucket.read(place)
        if stored is None or stored.data != data:
            raise StorageUnavailableError(
                f"{place}: expected the storage to write on a condition that holds, "
                "got a conflict; try again"
            ) from e
        return stored.generation


async def _violated(change: Awaitable[object], what: str) -> None:
    """Refuses a storage that makes a change whose condition does not hold."""
    with suppress(PreconditionError):
        await change
        raise InvalidFieldError(
            f"the storage ignores the condition of {what}: a store in it would lose "
            "checkpoints; storesvc requires conditional writes: use a storage that "
            "honours them"
        )
