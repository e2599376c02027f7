"""Bounds how long a storage may take to answer."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from storesvc.storage.location import MEMORY_DRIVER, Storage
from storesvc.storage.log_throttle import LogThrottle
from storesvc.telemetry.events import Stalled, publish

ANSWER_SECONDS: Final = 60.0
"""Maximum time of a response, retries included, before the time for its bytes."""

LEAST_BYTES_PER_SECOND: Final = 1 << 20
"""Throughput by which the size of a request or response extends its deadline."""

DISK_SECONDS: Final = 30.0
"""Maximum time of a read from a local disk, before the time for its bytes. Shorter than
the deadline of the call, so that the error that names the file comes first."""

LATE_SECONDS: Final = 15.0
"""Time after which a warning is logged, before the time for the bytes."""

T = TypeVar("T")

_log = logging.getLogger(__name__)
_throttle = LogThrottle()


def seconds_of(storage: Storage, *, size_bytes: int = 0) -> float | None:
    """Returns the deadline of a call in seconds; None for a bucket in memory.

    A local disk has a deadline too: it may be a network file system that hangs.

    Args:
        storage: The storage to be called.
        size_bytes: Size of the request or of the response.
    """
    if storage.spec["driver"] == MEMORY_DRIVER:
        return None
    return ANSWER_SECONDS + size_bytes / LEAST_BYTES_PER_SECOND


async def answer(storage: Storage, asked: Awaitable[T], *, size_bytes: int = 0) -> T:
    """Awaits a call of a storage within its deadline; arguments as of ``seconds_of``.

    Raises:
        TimeoutError: The deadline has passed.
    """
    seconds = seconds_of(storage, size_bytes=size_bytes)
    if seconds is None:
        return await asked
    late_seconds = seconds - ANSWER_SECONDS + LATE_SECONDS
    loop = asyncio.get_running_loop()
    late = loop.call_later(late_seconds, _log_late, storage, late_seconds, loop.time)
    try:
        async with asyncio.timeout(seconds):
            return await asked
    finally:
        late.cancel()


def _log_late(storage: Storage, seconds: float, clock: Callable[[], float]) -> None:
    publish(Stalled(storage=storage.spec["driver"]))
    if _throttle.admits(storage.name, now=clock()):
        _log.warning("%s has not answered for %.0f s", storage.name, seconds)
