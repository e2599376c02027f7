"""A budget of memory for what clients send slowly, or take slowly.

A stream gathers its request, or keeps its response, without a place of the server: it
holds bytes of a budget. These rules keep true that no client keeps memory from others:

- Where the budget is short, the slowest clients are cut, of the peer that holds most
  first, if they are slower than ``LEAST_BYTES_PER_SECOND``.
- A peer leaves a part of the budget to others.
- A stream that finds no room within ``WAIT_SECONDS`` is rejected, and may retry; where
  all wait for each other, the one that holds least is rejected at once.

Example::

    with budget.share(peer) as share:
        async for part in parts:
            await share.take(len(part))
            share.count(len(part))
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from storesvc.errors import LimitExceededError

LEAST_BYTES_PER_SECOND: Final = 64 << 10
"""A client that is slower is cut where others wait: a modem would be faster, and a part
of a table, of 2 MiB, would take more than half a minute."""

CREDIT_SECONDS: Final = 2.0
"""How long a client may do nothing before its rate counts."""

WAIT_SECONDS: Final = 20.0
"""How long a stream waits for room: less than the deadlines of calls."""

RETRY_SECONDS: Final = 1
"""After how long to retry without room."""

_TICK_SECONDS: Final = 0.1

_LEAST_BYTES: Final = 16 << 10
"""What a stream counts for at least: its own objects."""


class Share:
    """What one stream holds of a budget."""

    def __init__(self, budget: "MemoryBudget", peer: str, *, now: float) -> None:
        self._budget = budget
        self.peer = peer
        self.is_cut = False
        """Whether the client was slow, and others waited."""
        self._limit: asyncio.Timeout | None = None
        self.waits = False
        """Whether it waits for room; then it is not its client that is slow."""
        self.size_bytes = _LEAST_BYTES
        self._moved_bytes = 0
        self._client_seconds = -CREDIT_SECONDS
        self._awaits_since: float | None = now

    async def take(self, size_bytes: int) -> None:
        """Adds bytes to what the stream holds, once there is room.

        Raises:
            LimitExceededError: There was none in time.
        """
        await self._budget.take(self, size_bytes)

    def give_back(self, size_bytes: int) -> None:
        """Takes bytes off what the stream holds."""
        self.size_bytes -= size_bytes

    def count(self, size_bytes: int) -> None:
        """Counts bytes that the client sent, or took."""
        self._moved_bytes += size_bytes

    @asynccontextmanager
    async def awaiting_client(self, seconds: float) -> AsyncIterator[None]:
        """Counts the time of a context as that of the client.

        Raises:
            TimeoutError: It took longer than the seconds, or was cut.
        """
        clock = asyncio.get_running_loop().time
        self._awaits_since = clock()
        try:
            async with asyncio.timeout(0 if self.is_cut else seconds) as self._limit:
                yield
        finally:
            self._limit = None
            self._client_seconds += clock() - self._awaits_since
            self._awaits_since = None

    def cut(self) -> None:
        """Ends the wait for the client."""
        self.is_cut = True
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    def spare_seconds(self, now: float) -> float:
        """Returns how much longer its client may take; negative: it is slow."""
        seconds = self._client_seconds
        if self._awaits_since is not None:
            seconds += now - self._awaits_since
        return self._moved_bytes / LEAST_BYTES_PER_SECOND - seconds


class MemoryBudget:
    """The budget of a process; of one event loop."""

    def __init__(self, limit_bytes: int, peer_bytes: int, *, purpose: str) -> None:
        """Begins with all of it free.

        Args:
            limit_bytes: Of all streams.
            peer_bytes: Of the streams of one peer.
            purpose: What the bytes are for, as errors say it.
        """
        self._limit_bytes = limit_bytes
        self._peer_bytes = peer_bytes
        self._purpose = purpose
        self._shares: set[Share] = set()

    @property
    def held_bytes(self) -> int:
        """Bytes that all streams hold."""
        return sum(share.size_bytes for share in self._shares)

    @contextmanager
    def share(self, peer: str) -> Iterator[Share]:
        """Yields the share of a stream, which ends with the context.

        Args:
            peer: The host of its client.
        """
        share = Share(self, peer, now=asyncio.get_running_loop().time())
        self._shares.add(share)
        try:
            yield share
        finally:
            self._shares.discard(share)

    async def take(self, share: Share, size_bytes: int) -> None:
        """Adds bytes to a share, once there is room.

        Raises:
            LimitExceededError: There was none in time.
        """
        clock = asyncio.get_running_loop().time
        until = clock() + WAIT_SECONDS
        # what is larger than all the room has it alone
        size_bytes = min(size_bytes, self._peer_bytes - share.size_bytes)
        share.waits = True
        try:
            while (short := self._short_bytes(share, size_bytes)) > 0:
                self._cut_slow(short, clock())
                if clock() >= until or self._is_stuck(share):
                    raise self._exceeded()
                await asyncio.sleep(_TICK_SECONDS)
        finally:
            share.waits = False
        share.size_bytes += size_bytes

    def _short_bytes(self, share: Share, size_bytes: int) -> int:
        """How many bytes are missing; 0 or less: none."""
        of_peer = self._held_by_peer(share.peer)
        return max(
            self.held_bytes + size_bytes - self._limit_bytes,
            of_peer + size_bytes - self._peer_bytes,
        )

    def _held_by_peer(self, peer: str) -> int:
        return sum(s.size_bytes for s in self._shares if s.peer == peer)

    def _cut_slow(self, short_bytes: int, now: float) -> None:
        """Cuts so many slow streams that enough becomes free."""
        coming = sum(s.size_bytes for s in self._shares if s.is_cut)
        slow = [
            s
            for s in self._shares
            if not (s.is_cut or s.waits) and s.spare_seconds(now) < 0
        ]
        slow.sort(key=lambda s: (-self._held_by_peer(s.peer), s.spare_seconds(now)))
        for share in slow:
            if coming >= short_bytes:
                return
            coming += share.size_bytes
            share.cut()

    def _is_stuck(self, share: Share) -> bool:
        """Whether all streams wait for each other, and this one holds least."""
        return all(s.waits for s in self._shares) and share == min(
            self._shares, key=lambda s: (s.size_bytes, id(s))
        )

    def _exceeded(self) -> LimitExceededError:
        return LimitExceededError(
            f"the server keeps {self._limit_bytes} bytes of {self._purpose} in memory, "
            "and other clients have all of them; try again in a moment",
            retry_seconds=RETRY_SECONDS,
        )
