"""What was sent and is not acknowledged yet, and is sent again where a stream breaks.

The thread that feeds a broken stream may wait for the next thing still, and take it
when it comes. So each stream counts by itself what it sent, and what any of them took
stays until a stream that sent it has it acknowledged.

A server acknowledges a batch at a time. Where nothing can follow before something is
acknowledged, a stream that has sent less than a batch ends, so that what it sent is.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar

from storesvc_client._chunks.slabs import SLAB_BYTES
from storesvc_client._chunks.staging_pool import BATCH_BYTES
from storesvc_client._rpc.connection import MAX_FRAME_BYTES
from storesvc_client._save.slab_queue import StarvedError

T = TypeVar("T")


class Acknowledging(Generic[T]):
    """Things that several chunks make up, on their way to the server."""

    def __init__(
        self,
        take: Callable[[], T | None],
        count: Callable[[T], int],
        done: Callable[[T], None],
        size_bytes: Callable[[T], int] = lambda _: 0,
    ) -> None:
        """Begins with nothing taken.

        Args:
            take: Returns the next thing; None: nothing follows. Several threads may
                wait in it.
            count: Returns how many chunks a thing has, at least 1.
            done: Called with each thing once it is durable.
            size_bytes: Returns those of a thing on their way, where what takes the next
                one may raise ``StarvedError``.
        """
        self._take = take
        self._count = count
        self._done = done
        self.size_bytes = size_bytes
        self._changed = threading.Condition()
        self._open: dict[int, T] = {}
        """By id: those that are taken and not durable, in the order of taking."""
        self._taking = 0
        """Threads that take the next one: of broken streams too."""
        self._has_ended = False
        self._is_dropped = False

    @property
    def is_done(self) -> bool:
        """Whether nothing follows, and all is durable."""
        with self._changed:
            return self._has_ended and not self._open and not self._taking

    def wait(self) -> bool:
        """Waits for something to send; returns whether there is any.

        A stream is opened only then: a server ends one that brings nothing for long.
        """
        with self._changed:
            is_idle = not self._open and not self._has_ended
        while is_idle:
            with suppress(StarvedError):
                self.next()
                is_idle = False
        with self._changed:
            # what a broken stream takes late is to be sent, too
            self._changed.wait_for(lambda: self._open or not self._taking)
            return bool(self._open)

    def stream(self) -> "Stream[T]":
        """Returns what a new stream sends: all that is not durable yet."""
        with self._changed:
            return Stream(self, list(self._open.values()))

    def next(self) -> T | None:
        """Returns the next thing that no stream has taken; None: nothing follows."""
        with self._changed:
            self._taking += 1
        found, has_ended = None, False
        try:
            found = self._take()
            has_ended = found is None
            return None if self._is_dropped else found
        finally:
            self._end_taking(found, has_ended=has_ended)

    def _end_taking(self, found: T | None, *, has_ended: bool) -> None:
        with self._changed:
            self._taking -= 1
            self._has_ended = self._has_ended or has_ended
            if found is not None:
                self._open[id(found)] = found
            is_late = self._is_dropped
            self._changed.notify_all()
        if found is not None and is_late:
            self.close(found)

    def count(self, thing: T) -> int:
        """Returns how many chunks a thing has."""
        return self._count(thing)

    def close(self, thing: T) -> None:
        """Takes note that a thing is durable."""
        with self._changed:
            was_open = self._open.pop(id(thing), None) is not None
        if was_open:
            self._done(thing)

    def drop(self) -> None:
        """Is done with all things, durable or not."""
        with self._changed:
            self._is_dropped = True
            left = list(self._open.values())
        for thing in left:
            self.close(thing)


class Stream(Generic[T]):
    """What one stream sends."""

    def __init__(self, things: Acknowledging[T], again: list[T]) -> None:
        self._things = things
        self._again = again
        self._sent: deque[T] = deque()
        self._durable = 0
        """Chunks of the first of those sent that are durable."""

    def __iter__(self) -> Iterator[T]:
        for thing in self._again:
            self._sent.append(thing)
            yield thing
        while True:
            try:
                found = self._things.next()
            except StarvedError:
                if self._is_held_back:
                    return
                continue
            if found is None:
                return
            self._sent.append(found)
            yield found

    @property
    def _is_held_back(self) -> bool:
        """Whether the server may have something of this stream that it waits for more
        with: of what was sent a frame may not be on its way, and of the first slab some
        may be durable."""
        sent = sum(map(self._things.size_bytes, list(self._sent)))
        return 0 < sent < BATCH_BYTES + SLAB_BYTES + MAX_FRAME_BYTES

    def acknowledge(self, chunks: int) -> None:
        """Takes note that so many more chunks are durable, in the order of sending."""
        self._durable += chunks
        while self._sent and self._durable >= self._things.count(self._sent[0]):
            thing = self._sent.popleft()
            self._durable -= self._things.count(thing)
            self._things.close(thing)
