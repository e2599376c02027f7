"""Decides how many requests a bucket has in flight, and when to send after a rejection.

All transfers of a process share the window of a bucket. It begins at its ceiling,
``?concurrency=``; it halves when the storage rejects a request because of load (429,
5xx), shrinks when responses become slow, and grows by one for each window of requests
that are answered.

After a rejection one request is sent after each pause, until one is answered. The pause
doubles with each rejection in a row, or is as long as the storage asks for
(``Retry-After``). So a process sends less than a request a second
to a storage that rejects everything, however much it has to transfer. A probe that is
answered lets the next request pass, and ends nothing: its kind may still be rejected.

This module decides only: times are seconds of any monotonic clock. Thread-safe.

Example:
    >>> window = Window(64)
    >>> window.admit(now=0)
    0.0
    >>> window.release(Outcome.OVERLOADED, began=0, now=1)
    >>> window.limit, [window.admit(now=now) for now in (1, 1.25, 1.25, 1.5)]
    (32.0, [0.25, 0.0, 0.25, 0.0])
"""

import re
import threading
from collections import defaultdict, deque
from contextlib import suppress
from enum import Enum
from typing import Final

from storesvc.storage.hedging import size_class

OUTAGE_SECONDS: Final = 900.0
"""Time for which a transfer, and a call of a save, is repeated while a bucket fails."""

FIRST_PAUSE_SECONDS: Final = 0.25
"""Pause after the first rejection."""

MAX_PAUSE_SECONDS: Final = 8.0
"""Maximum pause, unless the storage asks for a longer one."""

MAX_RETRY_AFTER_SECONDS: Final = 60.0
"""Maximum pause that a storage may ask for."""

FULL_SECONDS: Final = 0.02
"""Time after which to ask again if the window is full."""

STALLED_SECONDS: Final = 15.0
"""Time after which a request without an answer no longer fills the window: it may have
stalled, and must not hold up its own retry."""

SLOW_FACTOR: Final = 4.0
"""Factor on the shortest recent latency above which responses are slow."""

SLOW_SECONDS: Final = 1.0
"""Latency up to which they are not."""

SLOW_LIMIT: Final = 16.0
"""Window that slow responses do not shrink: a slow network needs as many requests."""

_SMOOTHING: Final = 0.1
_FORGETTING: Final = 1.002
"""Growth of the shortest latency with each response, so that it is forgotten."""


class Outcome(Enum):
    """The end of a request."""

    ANSWERED = 1
    """The storage did, or rejected for good, what was requested."""
    OVERLOADED = 2
    """It rejected the request because of load."""
    BROKEN = 3
    """The request failed in another way that may pass."""
    DROPPED = 4
    """The caller no longer waits for the response."""
    PROBED = 5
    """The storage answered a probe: another kind of request may still be rejected."""

    @property
    def is_transient(self) -> bool:
        """True if the same request may succeed soon."""
        return self in (Outcome.OVERLOADED, Outcome.BROKEN)


_OVERLOADED: Final = re.compile(
    r"(http_response_code='|status code: |HTTP Error |^|: )(429|5\d\d)\b"
    r"|RESOURCE_EXHAUSTED"
)
_BROKEN: Final = re.compile(
    r"^(ABORTED: All|UNAVAILABLE|DEADLINE_EXCEEDED|Timeout of )|HTTP error"
    r"|(status code:|HTTP Error) (408|409)"
)
_ONE_OBJECT: Final = "object mutation"
"""Part of Google's message about too many changes of one object."""


_UNSATISFIED: Final = re.compile(
    r"OUT_OF_RANGE: Requested byte range \[\d+, (\d+)\) .* total size (\d+)"
)


def ended_early(text: str) -> bool:
    """Returns whether an error is about a range that the object has, of which the
    response had a part: its stream broke."""
    found = _UNSATISFIED.match(text)
    return found is not None and int(found[1]) <= int(found[2])


def classify(error: BaseException | None) -> Outcome:
    """Returns the outcome of a request by its error: one of TensorStore, of obstore or
    of Google's client, or ours with one of these as its cause."""
    if error is None:
        return Outcome.ANSWERED
    # The other lines of obstore's have times, which may look like a status.
    text = str(error.__cause__ or error).partition("\n")[0]
    if _OVERLOADED.search(text) and _ONE_OBJECT not in text:
        return Outcome.OVERLOADED
    is_broken = _BROKEN.search(text) or ended_early(text)
    return Outcome.BROKEN if is_broken else Outcome.ANSWERED


class Window:
    """The requests in flight to one bucket."""

    def __init__(self, ceiling: int) -> None:
        self._ceiling = ceiling
        self._lock = threading.Lock()
        self.limit = float(ceiling)
        """Maximum requests in flight."""
        self._threshold = float(ceiling)
        """Window up to which each answered request admits one more."""
        self._in_flight: deque[float] = deque()
        """When the requests in flight began, except those that may have stalled."""
        self._rejected = 0
        """Rejections in a row; all of one window are one."""
        self.rejection_count = 0
        """All rejections."""
        self._cut_at = self._open_at = -1.0
        """When the window shrank last, and when the next request may be sent."""
        self._pause_seconds = 0.0
        self._latencies: defaultdict[int, list[float]] = defaultdict(list)
        """The shortest and the smoothed latency, by size class."""

    @property
    def is_rejecting(self) -> bool:
        """True from a rejection until a request that was sent after it is answered."""
        return self._rejected > 0

    def admit(self, *, now: float) -> float:
        """Admits a request and returns 0, or returns after how many seconds to ask
        again. A request that is admitted must be released."""
        with self._lock:
            if now < self._open_at:
                return self._open_at - now
            while self._in_flight and self._in_flight[0] <= now - STALLED_SECONDS:
                self._in_flight.popleft()
            if len(self._in_flight) >= int(self.limit):
                return FULL_SECONDS
            if self._rejected:
                self._open_at = now + self._pause_seconds
            self._in_flight.append(now)
            return 0.0

    def release(
        self,
        outcome: Outcome,
        *,
        began: float,
        now: float,
        size_bytes: int = 0,
        retry_after_seconds: float = 0.0,
    ) -> None:
        """Records the end of a request that was admitted at the time `began`."""
        with self._lock:
            with suppress(ValueError):
                self._in_flight.remove(began)
            if outcome is Outcome.OVERLOADED:
                self._reject(began, now, retry_after_seconds)
            elif outcome is Outcome.PROBED:
                self._open_at = now
            elif outcome is Outcome.ANSWERED:
                if self._rejected and began >= self._cut_at:
                    self._rejected, self._open_at = 0, now
                step = 1.0 if self.limit < self._threshold else 1 / self.limit
                self.limit = min(self._ceiling, self.limit + step)
                if self._is_slow(size_class(size_bytes), now - began):
                    self._shrink(began, now, max(self.limit / 2, SLOW_LIMIT))

    def _reject(self, began: float, now: float, retry_after_seconds: float) -> None:
        self.rejection_count += 1
        if began >= self._cut_at:  # all of one window are one rejection
            self._rejected += 1
            if self._rejected == 1:  # what an outage rejects says nothing about load
                self._threshold = max(1.0, self.limit / 2)
            self._shrink(began, now, max(1.0, self.limit / 2))
            pause = FIRST_PAUSE_SECONDS * 2.0 ** min(self._rejected - 1, 16)
            self._pause_seconds = min(pause, MAX_PAUSE_SECONDS)
            self._open_at = now + self._pause_seconds
        asked = min(retry_after_seconds, MAX_RETRY_AFTER_SECONDS)
        self._open_at = max(self._open_at, now + asked)

    def _shrink(self, began: float, now: float, limit: float) -> None:
        """Shrinks the window, once for all requests that were in flight then."""
        if began >= self._cut_at:
            self.limit = min(self.limit, limit)
            self._cut_at = now

    def _is_slow(self, kind: int, seconds: float) -> bool:
        least, usual = self._latencies[kind] or (seconds, seconds)
        least = min(least * _FORGETTING, seconds)
        usual += _SMOOTHING * (seconds - usual)
        self._latencies[kind] = [least, usual]
        return usual > max(SLOW_FACTOR * least, SLOW_SECONDS)
