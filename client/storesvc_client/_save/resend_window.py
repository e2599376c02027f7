"""The items sent to the server and not yet acknowledged, resent after a stream breaks.

The thread that feeds a broken stream may still be waiting for its next item and take it
later. So each stream counts its own sent items, and an item stays in the window until a
stream that sent it has received its acknowledgement. No chunk is lost, and no memory is
reused while it may be sent again, because of the order:

1. An item enters the window before any stream can send it.
2. A stream counts an item as sent before it sends it.
3. An acknowledged item leaves the window, and then its memory is released.

A server acknowledges one batch at a time. When the snapshot needs memory back before it
can fill the next slab, a stream that has sent less than a batch ends, which makes the
server store and acknowledge what it has.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar

from storesvc_client._chunks.host_memory import BATCH_BYTES
from storesvc_client._chunks.slabs import SLAB_BYTES
from storesvc_client._rpc.connection import MAX_FRAME_BYTES
from storesvc_client._save.slab_queue import StarvedError

T = TypeVar("T")


class ResendWindow(Generic[T]):
    """Items of one or more chunks each on their way to the server."""

    def __init__(
        self,
        take: Callable[[], T | None],
        count: Callable[[T], int],
        done: Callable[[T], None],
        size_bytes: Callable[[T], int] = lambda _: 0,
    ) -> None:
        """Creates an empty window.

        Args:
            take: Returns the next item; None after the last. Several threads may wait
                in it.
            count: Returns the number of chunks of an item, at least 1.
            done: Called with each item once it is durable.
            size_bytes: Returns the bytes that an item adds to a stream; needed if
                ``take`` may raise ``StarvedError``.
        """
        self._take = take
        self._count = count
        self._done = done
        self.size_bytes = size_bytes
        self._changed = threading.Condition()
        self._open: dict[int, T] = {}
        """Items taken and not durable, by id, in the order of taking."""
        self._taking = 0
        """Threads waiting in ``take``, including threads of broken streams."""
        self._has_ended = False
        self._is_dropped = False

    @property
    def is_done(self) -> bool:
        """True if no item follows and all are durable."""
        with self._changed:
            return self._has_ended and not self._open and not self._taking

    def wait(self) -> bool:
        """Waits for an item to send; returns False if none follows.

        A stream is opened only then, because servers end streams that stay idle.
        """
        with self._changed:
            is_idle = not self._open and not self._has_ended
        while is_idle:
            with suppress(StarvedError):
                self.next()
                is_idle = False
        with self._changed:
            # items that the thread of a broken stream takes late must be sent, too
            self._changed.wait_for(lambda: self._open or not self._taking)
            return bool(self._open)

    def stream(self) -> "SendStream[T]":
        """Returns a new stream, which first resends all items that are not durable."""
        with self._changed:
            return SendStream(self, list(self._open.values()))

    def next(self) -> T | None:
        """Takes and returns the next new item; None after the last."""
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
            # 1. Under the lock that ends the taking: `wait` and `is_done` see either a
            # thread that takes or its item, so no item is overlooked.
            if found is not None:
                self._open[id(found)] = found
            is_late = self._is_dropped
            self._changed.notify_all()
        if found is not None and is_late:
            self.close(found)

    def count(self, item: T) -> int:
        """Returns the number of chunks of an item."""
        return self._count(item)

    def close(self, item: T) -> None:
        """Removes a durable item from the window."""
        with self._changed:
            was_open = self._open.pop(id(item), None) is not None
        # Once only: the second time its memory could belong to another slab already.
        if was_open:
            self._done(item)

    def drop(self) -> None:
        """Releases all items, durable or not."""
        with self._changed:
            # Set first: a thread that takes an item from now on releases it itself.
            self._is_dropped = True
            left = list(self._open.values())
        for item in left:
            self.close(item)


class SendStream(Generic[T]):
    """The items sent in one stream."""

    def __init__(self, window: ResendWindow[T], unacknowledged: list[T]) -> None:
        self._window = window
        self._unacknowledged = unacknowledged
        self._sent: deque[T] = deque()
        self._durable = 0
        """Durable chunks of the oldest item in ``_sent``."""

    def __iter__(self) -> Iterator[T]:
        for item in self._unacknowledged:
            self._sent.append(item)
            yield item
        while True:
            try:
                found = self._window.next()
            except StarvedError:
                if self._is_held_back:
                    return
                continue
            if found is None:
                return
            # 2. Counted first: another thread receives the acknowledgements, possibly
            # before this one continues after the yield.
            self._sent.append(found)
            yield found

    @property
    def _is_held_back(self) -> bool:
        """True if the server may be holding chunks of this stream back until a batch is
        full. A frame of the sent items may not have left yet, and part of the oldest
        slab may be durable, hence the margins."""
        sent = sum(map(self._window.size_bytes, list(self._sent)))
        return 0 < sent < BATCH_BYTES + SLAB_BYTES + MAX_FRAME_BYTES

    def acknowledge(self, chunks: int) -> None:
        """Records that `chunks` more chunks are durable, in the order of sending."""
        # 3. An item of several chunks is released when the last of them is durable.
        self._durable += chunks
        while self._sent and self._durable >= self._window.count(self._sent[0]):
            item = self._sent.popleft()
            self._durable -= self._window.count(item)
            self._window.close(item)
