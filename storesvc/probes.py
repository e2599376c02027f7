"""Probes: whether a storage heeds the conditions of writes and deletions.

They are the only arbiter that there is, and not all that speaks the API of S3 heeds
them: where one is passed over, checkpoints are lost, silently.
"""

import uuid
from collections.abc import Awaitable
from contextlib import suppress

from storesvc.bucket import (
    IF_ABSENT,
    Bucket,
    Generation,
    PreconditionError,
    WriteCondition,
)
from storesvc.errors import InvalidFieldError, StorageUnavailableError
from storesvc.format import layout


async def check_conditions(bucket: Bucket) -> None:
    """Refuses a storage that passes over a condition.

    Raises:
        InvalidFieldError: It does.
        StorageUnavailableError: It does not answer.
    """
    place = f"{layout.PROBES}{uuid.uuid4().hex}"
    first = await _written(bucket, place, b"1", IF_ABSENT)
    second = await _written(bucket, place, b"2", first)
    await _broken(bucket.write(place, b"3", condition=IF_ABSENT), "creation")
    await _broken(bucket.write(place, b"4", condition=first), "overwriting")
    await _broken(bucket.delete(place, generation=first), "deletion")
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


async def _broken(change: Awaitable[object], what: str) -> None:
    with suppress(PreconditionError):
        await change
        raise InvalidFieldError(
            f"the storage passes over the condition of a {what}: a store in it would "
            "lose checkpoints; take one that heeds If-Match and If-None-Match"
        )
