"""Probes: whether a storage heeds the conditions of writes and deletions.

They are the only arbiter that there is, and not all that speaks the API of S3 heeds
them: where one is passed over, checkpoints are lost, silently.
"""

import uuid
from collections.abc import Awaitable
from contextlib import suppress

from storesvc.bucket import IF_ABSENT, Bucket, PreconditionError
from storesvc.errors import InvalidFieldError
from storesvc.format import layout


async def check_conditions(bucket: Bucket) -> None:
    """Refuses a storage that passes over a condition.

    Raises:
        InvalidFieldError: It does.
        StorageUnavailableError: It does not answer.
    """
    place = f"{layout.PROBES}{uuid.uuid4().hex}"
    first = await bucket.write(place, b"1", condition=IF_ABSENT)
    second = await bucket.write(place, b"2", condition=first)
    await _broken(bucket.write(place, b"3", condition=IF_ABSENT), "creation")
    await _broken(bucket.write(place, b"4", condition=first), "overwriting")
    await _broken(bucket.delete(place, generation=first), "deletion")
    await bucket.delete(place, generation=second)


async def _broken(change: Awaitable[object], what: str) -> None:
    with suppress(PreconditionError):
        await change
        raise InvalidFieldError(
            f"the storage passes over the condition of a {what}: a store in it would "
            "lose checkpoints; take one that heeds If-Match and If-None-Match"
        )
