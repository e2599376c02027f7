"""A weighted semaphore that serves its peers in turn.

It bounds the memory that the server uses for the work of its clients. Free capacity
goes to the peer that was served least recently, and among that peer's calls to the
oldest; no call overtakes one that waits for more capacity. A call that waits too long
fails with an error that permits a retry. The semaphore is held only for work of the
server, never while a call waits for its client.

Example::

    async with semaphore.held(peer, weight=len(table)):
        await asyncio.to_thread(unpack, table)
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from storesvc.errors import LimitExceededError
from storesvc.telemetry.events import Span, Waited, publish

WAIT_SECONDS: Final = 20.0
"""Maximum wait of a call for its turn: below the deadlines of calls."""

RETRY_SECONDS: Final = 1
"""Retry delay: calls that waited longer are served first."""


@dataclass(eq=False)
class _Waiter:
    """A waiting call."""

    peer: str
    weight: int
    number: int
    granted: "asyncio.Future[None]" = field(default_factory=asyncio.Future)


class FairSemaphore:
    """A weighted semaphore for one event loop."""

    def __init__(self, capacity: int, *, purpose: str) -> None:
        """Creates a semaphore with all of its capacity free.

        Args:
            capacity: Maximum total weight of the calls that hold it. A call with a
                higher weight holds it alone.
            purpose: The work of the calls, for error messages: "reads manifests".
        """
        self._capacity = capacity
        self._free = capacity
        self._purpose = purpose
        self._waiting: list[_Waiter] = []
        self._numbers = count(1)
        self._served: dict[str, int] = {}
        """Sequence number of the last turn of each peer."""

    @asynccontextmanager
    async def held(self, peer: str, *, weight: int = 1) -> AsyncIterator[None]:
        """Holds the semaphore while the context lasts.

        Args:
            peer: Host of the client, or the namespace of the request.
            weight: Weight of the work.

        Raises:
            LimitExceededError: No capacity became free in time.
        """
        weight = min(weight, self._capacity)
        waiter = _Waiter(peer, weight, next(self._numbers))
        self._waiting.append(waiter)
        self._grant()
        try:
            await self._granted(waiter)
            yield
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:
                self._free += weight
            self._grant()

    async def _granted(self, waiter: _Waiter) -> None:
        if not waiter.granted.done():
            span = Span()
            await asyncio.wait({waiter.granted}, timeout=WAIT_SECONDS)
            publish(Waited(purpose=self._purpose, seconds=span.seconds))
        if not waiter.granted.done():
            raise LimitExceededError(
                f"the server {self._purpose} for its maximum of concurrent calls, and "
                f"none ended within {WAIT_SECONDS:.0f} s; retry in a moment",
                retry_seconds=RETRY_SECONDS,
            )

    def _grant(self) -> None:
        while self._waiting:
            first = min(self._waiting, key=self._rank)
            if first.weight > self._free:
                return
            self._waiting.remove(first)
            self._free -= first.weight
            self._served[first.peer] = next(self._numbers)
            first.granted.set_result(None)
        if self._free == self._capacity:
            self._served.clear()  # idle: all peers are equal again

    def _rank(self, waiter: _Waiter) -> tuple[int, int]:
        return self._served.get(waiter.peer, 0), waiter.number
