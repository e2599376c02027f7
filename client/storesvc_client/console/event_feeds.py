"""Feeds of events: one watch for all pages that show the same namespace or run.

A feed watches in a thread of its own from the first page that asks for it until the
console ends, and keeps the last events, so that a page without JavaScript shows them
too.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from functools import partial
from itertools import count
from typing import Final

from storesvc_client import Client, Event, LimitError, StoreError

_KEPT: Final = 300
"""Events that a feed keeps."""

_MOST: Final = 32
"""Feeds that run at a time."""

_FIRST_SECONDS: Final = 0.5
"""Maximum wait of a page for the first event."""


class EventFeed:
    """The events of a namespace or a run since the feed began."""

    def __init__(
        self,
        watch: Callable[[], Generator[Event]],
        parent: str,
        numbers: Iterator[int],
    ) -> None:
        """Begins to watch.

        Args:
            watch: Returns the events.
            parent: Namespace or run that is watched.
            numbers: Numbers for the events: of all feeds, because a browser continues
                after the last number that it has seen, also if its feed began again.
        """
        self._numbers = numbers
        self._events: deque[tuple[int, Event]] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()
        self._begun = threading.Event()
        self.problem: StoreError | None = None
        """Error that has ended the feed; None while it runs."""
        self._thread = threading.Thread(
            target=self._watch, args=(watch,), name=f"events of {parent}", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits a moment for the first event: a namespace may have many runs.

        Raises:
            StoreError: The store rejects the watch.
        """
        self._begun.wait(_FIRST_SECONDS)
        if self.problem is not None and not self.after(0):
            raise self.problem

    def after(self, number: int) -> list[tuple[int, Event]]:
        """Returns the kept events with higher numbers, the oldest first."""
        with self._lock:
            return [entry for entry in self._events if entry[0] > number]

    def _watch(self, watch: Callable[[], Generator[Event]]) -> None:
        try:
            for event in watch():
                with self._lock:
                    self._events.append((next(self._numbers), event))
                self._begun.set()
        except StoreError as e:  # rejected, or the server is gone
            self.problem = e
        finally:
            self._begun.set()


class EventFeeds:
    """The feeds of a console, by namespace or run; threads may share them."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._feeds: dict[str, EventFeed] = {}
        self._numbers = count(1)

    def of(self, parent: str) -> EventFeed:
        """Returns the feed of a namespace or a run, and starts it if necessary.

        Raises:
            LimitError: Too many feeds run.
            StoreError: As for ``Client.watch``.
        """
        with self._lock:
            feed = self._feeds.get(parent)
            if feed is not None and feed.problem is None:
                return feed
            self._feeds = {p: f for p, f in self._feeds.items() if f.problem is None}
            if len(self._feeds) >= _MOST:
                raise LimitError(
                    f"events of {parent}: expected at most {_MOST} namespaces and runs "
                    "that are watched, got one more; start another console"
                )
            feed = EventFeed(partial(self._watch, parent), parent, self._numbers)
            self._feeds[parent] = feed
        feed.wait()
        return feed

    def _watch(self, parent: str) -> Generator[Event]:
        if "/" in parent:
            return self._client.run(parent).watch("latest")
        return self._client.watch(parent, "latest")
