"""A semaphore with weights, whose waiters are served in turn.

It bounds the memory of work that the server does for its clients. Free room goes to the
peer that was served the longest ago, and of its calls to the one that came first; no
other call passes one that waits for more room. A call that waits too long is rejected,
and may retry. It is held for work of the server only, never while a call waits for its
client.

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

WAIT_SECONDS: Final = 20.0
"""How long a call waits for its turn: less than the deadlines of calls."""

RETRY_SECONDS: Final = 1
"""After how long to retry: others have waited, and are first."""


@dataclass(eq=False)
class _Waiter:
    """A call that waits."""

    peer: str
    weight: int
    number: int
    granted: "asyncio.Future[None]" = field(default_factory=asyncio.Future)


class FairSemaphore:
    """A semaphore of one event loop."""

    def __init__(self, capacity: int, *, purpose: str) -> None:
        """Begins with all of it free.

        Args:
            capacity: What all calls that hold it may weigh; a call that weighs more
                holds it alone.
            purpose: What the calls do, as errors say it: "reads manifests".
        """
        self._capacity = capacity
        self._free = capacity
        self._purpose = purpose
        self._waiting: list[_Waiter] = []
        self._numbers = count(1)
        self._served: dict[str, int] = {}
        """The last turn of each peer."""

    @asynccontextmanager
    async def held(self, peer: str, *, weight: int = 1) -> AsyncIterator[None]:
        """Holds the semaphore while the context lasts.

        Args:
            peer: The host that asks, or the namespace that it asks for.
            weight: What the work takes.

        Raises:
            LimitExceededError: It did not become free in time.
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
            await asyncio.wait({waiter.granted}, timeout=WAIT_SECONDS)
        if not waiter.granted.done():
            raise LimitExceededError(
                f"the server {self._purpose} for as many other calls as it can, and "
                f"none ended within {WAIT_SECONDS:.0f} s; try again in a moment",
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
            self._served.clear()  # nobody works or waits: all are equal again

    def _rank(self, waiter: _Waiter) -> tuple[int, int]:
        return self._served.get(waiter.peer, 0), waiter.number
