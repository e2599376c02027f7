"""Deadlines: how long a storage on the network may keep us waiting."""

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

from storesvc.storages import Storage

ANSWER_SECONDS: Final = 60.0
"""How long a storage on the network may take to answer, retries included ..."""

LEAST_BYTES_PER_SECOND: Final = 1 << 20
"""... and how slowly bytes may come and go meanwhile."""

T = TypeVar("T")


def seconds_of(storage: Storage, *, size_bytes: int = 0) -> float | None:
    """Returns how long an answer may take; None: as long as it wants, since it is a
    disk of this machine.

    Args:
        storage: Which is asked.
        size_bytes: What comes or goes.
    """
    if not storage.is_remote:
        return None
    return ANSWER_SECONDS + size_bytes / LEAST_BYTES_PER_SECOND


async def answer(storage: Storage, asked: Awaitable[T], *, size_bytes: int = 0) -> T:
    """Returns what a storage answers; the arguments are those of ``seconds_of``.

    Raises:
        TimeoutError: It takes longer than it may.
    """
    seconds = seconds_of(storage, size_bytes=size_bytes)
    if seconds is None:
        return await asked
    async with asyncio.timeout(seconds):
        return await asked
