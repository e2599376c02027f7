"""Batch admission: limits how many streams fill a batch at the same time.

A batch takes memory or an open file, so a process has a fixed number of permits for
them. A stream asks for a permit once it has bytes to write. No stream waits for the
client of another stream, because:

- When a stream has waited for ``PATIENCE_SECONDS``, the permit of the slowest client is
  recalled, if that client is slower than ``LEAST_BYTES_PER_SECOND`` or has kept its
  permit waiting for ``CLIENT_SECONDS`` in total. The server's own time does not count.
- A free permit goes to the peer that was served least recently; among its streams, to
  the namespace that was served least recently; then to the stream that asked first.
- A stream that gets no permit within ``WAIT_SECONDS`` is rejected, and may retry.
- A permit is released without an ``await``, because a call can be cancelled at any
  ``await``.

Example::

    permit = await admission.acquire(peer="10.0.0.7", namespace="prod", recall=end)
    try:
        with permit.awaiting_client():
            frame = await anext(frames)
        permit.count(len(frame))
    finally:
        admission.release(permit)
"""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import count
from typing import Final

from storesvc.errors import LimitExceededError

PATIENCE_SECONDS: Final = 1.0
"""Time a stream waits before the permit of another stream is recalled for it."""

LEAST_BYTES_PER_SECOND: Final = 64 << 10
"""Rate below which a client may lose its permit. A modem is faster; at this rate a
chunk of the usual 4 MiB takes more than a minute."""

CREDIT_SECONDS: Final = 2.0
"""Longest pause of a client, whatever it sent before: the rate counts over the last few
seconds, so a burst at the start does not allow a long pause later."""

FIRST_SECONDS: Final = 0.5
"""Pause that a new client may make: a 2 MiB frame of a large chunk earns the whole
credit above, a single byte earns almost nothing."""

CLIENT_SECONDS: Final = 15.0
"""Total time that a permit may wait for its client while other streams wait. A batch
that is 5 s old ends with its current chunk: 10 s remain for the largest, of 32 MiB."""

WAIT_SECONDS: Final = 20.0
"""Longest wait for a permit: shorter than the deadlines of calls."""

RETRY_SECONDS: Final = 1
"""Delay before a rejected stream may retry; streams that wait already come first."""

_TICK_SECONDS: Final = 0.25


class Permit:
    """Permission for one stream to fill one batch, requested or granted."""

    def __init__(
        self, peer: str, namespace: str, recall: Callable[[], None], *, now: float
    ) -> None:
        self.peer = peer
        self.namespace = namespace
        self.recall = recall
        self.is_recalled = False
        self.since = now
        """Time of the request, by the clock of the event loop."""
        self.granted: asyncio.Future[None] = asyncio.Future()
        self._clock = self.granted.get_loop().time
        self._credit = FIRST_SECONDS
        self._client_seconds = CLIENT_SECONDS
        self._awaits_since: float | None = None

    @contextmanager
    def awaiting_client(self) -> Generator[None]:
        """Counts the time spent in the context as the client's."""
        self._awaits_since = began = self._clock()
        try:
            yield
        finally:
            self._awaits_since = None
            waited = self._clock() - began
            self._credit -= waited
            self._client_seconds -= waited

    def count(self, size_bytes: int) -> None:
        """Credits the client with bytes that it sent."""
        earned = max(0.0, self._credit) + size_bytes / LEAST_BYTES_PER_SECOND
        self._credit = min(CREDIT_SECONDS, earned)

    @property
    def spare_seconds(self) -> float:
        """Time for which the client may still keep it waiting; infinite while the
        server does not wait for the client."""
        if self._awaits_since is None:
            return float("inf")
        waited = self._clock() - self._awaits_since
        return min(self._credit, self._client_seconds) - waited


class BatchAdmission:
    """Grants the batch permits of one process, in one event loop."""

    def __init__(self, limit: int) -> None:
        """Creates the permits, all free.

        Args:
            limit: Number of permits.
        """
        self._limit = limit
        self._waiting: list[Permit] = []
        self._held: set[Permit] = set()
        self._turns = count(1)
        self._served: dict[tuple[str, ...], int] = {}
        """Last turn of each peer, and of each namespace of a peer."""

    @property
    def free(self) -> int:
        """Number of free permits."""
        return self._limit - len(self._held)

    @property
    def waiting(self) -> int:
        """Number of streams that wait for a permit."""
        return len(self._waiting)

    async def acquire(
        self, *, peer: str, namespace: str, recall: Callable[[], None]
    ) -> Permit:
        """Waits for a permit and returns it; the caller must release it.

        Args:
            peer: Host of the client.
            namespace: Namespace that the stream writes to.
            recall: Called at most once, when other streams wait and the client of this
                stream is slow. It must get the permit released without waiting for
                the client.

        Raises:
            LimitExceededError: No permit became free in time.
        """
        clock = asyncio.get_running_loop().time
        permit = Permit(peer, namespace, recall, now=clock())
        self._waiting.append(permit)
        try:
            self._grant()
            while not permit.granted.done():
                if clock() - permit.since >= WAIT_SECONDS:
                    raise self._crowded()
                await asyncio.wait({permit.granted}, timeout=_TICK_SECONDS)
                self._recall_slow(clock())
        except BaseException:
            self.release(permit)
            raise
        return permit

    def release(self, permit: Permit) -> None:
        """Releases a permit, or stops waiting for it; a second call does nothing."""
        if permit in self._held:
            self._held.remove(permit)
            self._grant()
        elif permit in self._waiting:
            self._waiting.remove(permit)

    def _grant(self) -> None:
        while self._waiting and self.free > 0:
            permit = min(self._waiting, key=self._rank)
            self._waiting.remove(permit)
            self._held.add(permit)
            permit.granted.set_result(None)
            turn = next(self._turns)
            self._served[(permit.peer,)] = turn
            self._served[permit.peer, permit.namespace] = turn
        # Forget peers without a stream, so that the table stays small.
        present = {(p.peer,) for p in (*self._waiting, *self._held)}
        self._served = {k: v for k, v in self._served.items() if k[:1] in present}

    def _rank(self, permit: Permit) -> tuple[int, int, float]:
        return (
            self._served.get((permit.peer,), 0),
            self._served.get((permit.peer, permit.namespace), 0),
            permit.since,
        )

    def _recall_slow(self, now: float) -> None:
        """Recalls one slow client's permit for each stream that waited too long."""
        late = sum(now - p.since >= PATIENCE_SECONDS for p in self._waiting)
        coming = sum(permit.is_recalled for permit in self._held)
        slow = [p for p in self._held if p.spare_seconds < 0 and not p.is_recalled]
        slow.sort(key=lambda permit: permit.spare_seconds)
        for permit in slow[: max(0, late - coming)]:
            permit.is_recalled = True
            permit.recall()

    def _crowded(self) -> LimitExceededError:
        return LimitExceededError(
            f"expected at most {self._limit} batches of chunks in flight, and none "
            f"ended within {WAIT_SECONDS:.0f} s; send the chunks again later",
            retry_seconds=RETRY_SECONDS,
            limit=str(self._limit),
        )
