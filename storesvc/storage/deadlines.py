"""Deadlines: how long a storage may take to answer."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from storesvc.storage.location import MEMORY_DRIVER, Storage
from storesvc.storage.log_throttle import Sparing

ANSWER_SECONDS: Final = 60.0
"""How long a storage may take to answer, retries included ..."""

LEAST_BYTES_PER_SECOND: Final = 1 << 20
"""... and how slowly bytes may come and go meanwhile."""

DISK_SECONDS: Final = 30.0
"""How long a read from a disk of this machine may take, beside the time that its bytes
take: so that its error, which names the file, comes before that of the call."""

LATE_SECONDS: Final = 15.0
"""After which the log tells, where nothing comes nor goes."""

T = TypeVar("T")

_log = logging.getLogger(__name__)
_lines = Sparing()


def seconds_of(storage: Storage, *, size_bytes: int = 0) -> float | None:
    """Returns how long an answer may take; None: any time, since it is memory. A disk
    of this machine has a deadline too: it may be a network's, which hangs.

    Args:
        storage: Which is asked.
        size_bytes: What comes or goes.
    """
    if storage.spec["driver"] == MEMORY_DRIVER:
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
    late_seconds = seconds - ANSWER_SECONDS + LATE_SECONDS
    loop = asyncio.get_running_loop()
    late = loop.call_later(late_seconds, _tell_late, storage, late_seconds, loop.time)
    try:
        async with asyncio.timeout(seconds):
            return await asked
    finally:
        late.cancel()


def _tell_late(storage: Storage, seconds: float, clock: Callable[[], float]) -> None:
    if _lines.admits(storage.name, now=clock()):
        _log.warning("%s has not answered for %.0f s", storage.name, seconds)
