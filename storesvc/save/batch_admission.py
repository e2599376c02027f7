"""Places of batches: which streams may fill a batch at the same time.

A batch takes memory or an open file, so a process has few places for them. A place is
given to a stream that has bytes to write, and these rules keep true that no stream
waits for the client of another:

- Where a stream has waited for ``PATIENCE_SECONDS``, the place of the slowest client is
  recalled, if that client is slower than ``LEAST_BYTES_PER_SECOND``, or has kept its
  place waiting for ``CLIENT_SECONDS`` in all. The server's own time does not count.
- A free place goes to the peer that was served the longest ago, of its streams to the
  namespace that was served the longest ago, and then to the stream that came first.
- A stream that finds no place within ``WAIT_SECONDS`` is rejected, and may retry.
- Places are given back without an ``await``: a call can be cancelled at any of those.

Example::

    place = await places.take(peer="10.0.0.7", namespace="prod", recall=end_batch)
    try:
        with place.awaiting_client():
            frame = await anext(frames)
        place.count(len(frame))
    finally:
        places.give_back(place)
"""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import count
from typing import Final

from storesvc.errors import LimitExceededError

PATIENCE_SECONDS: Final = 1.0
"""How long a stream waits before the place of another one is recalled for it."""

LEAST_BYTES_PER_SECOND: Final = 64 << 10
"""A client that is slower loses its place where others wait: a modem would be faster,
and a chunk of the usual 4 MiB would take more than a minute."""

CREDIT_SECONDS: Final = 2.0
"""How long a client may send nothing, whatever it sent before: the rate is that of the
last few seconds, so that a burst at the start buys no long pause."""

FIRST_SECONDS: Final = 0.5
"""How long it may send nothing at first: a frame within a large chunk, of 2 MiB, earns
all of the above, and one byte nothing."""

CLIENT_SECONDS: Final = 15.0
"""How long a place may wait for its client in all where others wait. A batch ends with
a chunk once it is 5 s old: this leaves 10 s for the largest chunk, of 32 MiB."""

WAIT_SECONDS: Final = 20.0
"""How long a stream waits for a place: less than the deadlines of calls."""

RETRY_SECONDS: Final = 1
"""After how long to retry without a place: others have waited, and are first."""

_TICK_SECONDS: Final = 0.25


class Place:
    """The right of a stream to fill one batch; or its wait for that."""

    def __init__(
        self, peer: str, namespace: str, recall: Callable[[], None], *, now: float
    ) -> None:
        self.peer = peer
        self.namespace = namespace
        self.recall = recall
        self.is_recalled = False
        self.since = now
        """When it was asked for."""
        self.granted: asyncio.Future[None] = asyncio.Future()
        self._clock = self.granted.get_loop().time
        self._credit = FIRST_SECONDS
        self._client_seconds = CLIENT_SECONDS
        self._awaits_since: float | None = None

    @contextmanager
    def awaiting_client(self) -> Generator[None]:
        """Counts the time of a context as that of the client."""
        self._awaits_since = began = self._clock()
        try:
            yield
        finally:
            self._awaits_since = None
            waited = self._clock() - began
            self._credit -= waited
            self._client_seconds -= waited

    def count(self, size_bytes: int) -> None:
        """Counts bytes that the client sent."""
        earned = max(0.0, self._credit) + size_bytes / LEAST_BYTES_PER_SECOND
        self._credit = min(CREDIT_SECONDS, earned)

    @property
    def spare_seconds(self) -> float:
        """How much longer its client may keep it waiting; infinite where the server
        does not wait for the client."""
        if self._awaits_since is None:
            return float("inf")
        waited = self._clock() - self._awaits_since
        return min(self._credit, self._client_seconds) - waited


class BatchPlaces:
    """The places of a process; of one event loop."""

    def __init__(self, limit: int) -> None:
        """Begins with all of them free.

        Args:
            limit: How many there are.
        """
        self._limit = limit
        self._waiting: list[Place] = []
        self._held: set[Place] = set()
        self._turns = count(1)
        self._served: dict[tuple[str, ...], int] = {}
        """The last turn of each peer, and of each namespace of a peer."""

    @property
    def free(self) -> int:
        """How many places are free."""
        return self._limit - len(self._held)

    @property
    def waiting(self) -> int:
        """How many streams wait for a place."""
        return len(self._waiting)

    async def take(
        self, *, peer: str, namespace: str, recall: Callable[[], None]
    ) -> Place:
        """Returns a place, once there is one; it must be given back.

        Args:
            peer: The host that asks.
            namespace: That it writes to.
            recall: Called, at most once, where others wait and the client of this
                stream is slow; must see to it that the place is given back without
                waiting for the client.

        Raises:
            LimitExceededError: None became free in time.
        """
        clock = asyncio.get_running_loop().time
        place = Place(peer, namespace, recall, now=clock())
        self._waiting.append(place)
        try:
            self._grant()
            while not place.granted.done():
                if clock() - place.since >= WAIT_SECONDS:
                    raise self._crowded()
                await asyncio.wait({place.granted}, timeout=_TICK_SECONDS)
                self._recall_slow(clock())
        except BaseException:
            self.give_back(place)
            raise
        return place

    def give_back(self, place: Place) -> None:
        """Gives a place back, or ends the wait for it; once more does nothing."""
        if place in self._held:
            self._held.remove(place)
            self._grant()
        elif place in self._waiting:
            self._waiting.remove(place)

    def _grant(self) -> None:
        while self._waiting and self.free > 0:
            place = min(self._waiting, key=self._rank)
            self._waiting.remove(place)
            self._held.add(place)
            place.granted.set_result(None)
            turn = next(self._turns)
            self._served[(place.peer,)] = turn
            self._served[place.peer, place.namespace] = turn
        # it need not be known of peers without a stream
        present = {(p.peer,) for p in (*self._waiting, *self._held)}
        self._served = {k: v for k, v in self._served.items() if k[:1] in present}

    def _rank(self, place: Place) -> tuple[int, int, float]:
        return (
            self._served.get((place.peer,), 0),
            self._served.get((place.peer, place.namespace), 0),
            place.since,
        )

    def _recall_slow(self, now: float) -> None:
        """Recalls as many places of slow clients as streams have waited too long."""
        late = sum(now - p.since >= PATIENCE_SECONDS for p in self._waiting)
        coming = sum(place.is_recalled for place in self._held)
        slow = [p for p in self._held if p.spare_seconds < 0 and not p.is_recalled]
        slow.sort(key=lambda place: place.spare_seconds)
        for place in slow[: max(0, late - coming)]:
            place.is_recalled = True
            place.recall()

    def _crowded(self) -> LimitExceededError:
        return LimitExceededError(
            f"the server takes {self._limit} batches of chunks at a time, and none "
            f"ended within {WAIT_SECONDS:.0f} s; send the chunks again in a moment",
            retry_seconds=RETRY_SECONDS,
            limit=str(self._limit),
        )
