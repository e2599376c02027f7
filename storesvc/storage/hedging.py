"""Decides when a read or a write of a storage is hedged, retried and abandoned.

Of many responses over a network a few take ten times as long as the others, and some
never come. So a read that takes longer than nearly all recent reads of its size is
hedged: a second request is sent, and the first response counts. An overloaded storage
is slow with all requests; a token bucket keeps hedges to a small share of the requests,
and a read that finds it empty waits.

At its deadline all requests of a read are abandoned, and it is retried. The first
request of a write stays in flight, because it may be slow and not stalled. The deadline
doubles with each attempt, and after a number of attempts the read fails. It grows with
the bytes in flight: on a slow network many concurrent reads take long together, and
none of them has stalled. Once a response has shown how slow the network is, the
deadlines follow that.

The same holds for writes of objects with a single writer, which may be written twice,
and for conditional changes, of which only the first can take effect.

This module decides only: times are seconds of any monotonic clock. Thread-safe.

A storage in trouble fails hundreds of requests per second, all in the same way: the log
has one line per key every 10 seconds.

Example:
    >>> reads = Hedging(Limits(answer_seconds=10, tries=2))
    >>> read = reads.begin(1 << 20, now=0)
    >>> read.due
    2.0
    >>> read.step(now=2), read.step(now=11), read.step(now=31)
    (<Step.HEDGE: 1>, <Step.RETRY: 2>, <Step.FAIL: 3>)
    >>> throttle = LogThrottle()
    >>> [throttle.admits("late", now=now) for now in (0, 9, 10, 11)]
    [True, False, True, False]
"""

import math
import threading
from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Final

PAUSE_SECONDS: Final = 10.0
"""Minimum time between two lines of one key."""


class LogThrottle:
    """Decides which lines of one log are written. Thread-safe."""

    def __init__(self) -> None:
        self._admitted: dict[Hashable, float] = {}

    def admits(self, key: Hashable, *, now: float) -> bool:
        """Returns whether a line may be logged now; if so, the pause of its key begins.

        Args:
            key: Lines with an equal key are alike. Keys are kept: use few.
        """
        last = self._admitted.get(key)
        if last is not None and now - last < PAUSE_SECONDS:
            return False
        self._admitted[key] = now
        return True


QUANTILE: Final = 0.95
"""Quantile of recent latencies from which the threshold of a slow read is computed."""

SLOW: Final = 2.0
"""Factor on that quantile above which a read is slow."""

RECENT: Final = 128
"""Recent reads of each size class that the quantile is taken of."""

LEAST_RECENT: Final = 16
"""Reads below which the quantile is unknown."""

HEDGE_SHARE: Final = 0.05
"""Tokens that each read adds to the token bucket; a hedge takes one."""

HEDGE_BURST: Final = 4.0
"""Capacity of the token bucket, which is also its first filling."""

MOST_SLOWER: Final = 64.0
"""Maximum factor by which a network is taken for slower than assumed."""

_UNIT: Final = 1 << 20


class Step(Enum):
    """Actions for a read that has no response when it is due."""

    HEDGE = 1
    """Send a second request; keep the first."""
    RETRY = 2
    """Abandon all requests but those that are kept, and send another."""
    FAIL = 3
    """Abandon the read."""
    WAIT = 4
    """Do nothing until it is due again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of the calls of one storage."""

    floor_seconds: float = 0.5
    """Minimum latency of a slow read."""
    unknown_seconds: float = 2.0
    """Latency of a slow read while the quantile is unknown."""
    answer_seconds: float = 15.0
    """Deadline of the first attempt, before the time for the bytes in flight; that of
    each other one is twice as long as of the one before."""
    least_bytes_per_second: float = 8 << 20
    """Throughput by which the bytes of all reads in flight extend the deadline, unless
    a lower one was measured."""
    tries: int = 3
    """Maximum attempts of a read."""
    kept: int = 0
    """Requests, the oldest, that a retry does not abandon."""


READS: Final = Limits()

WRITES: Final = Limits(
    floor_seconds=2.0,
    # Hedging the first writes, before the quantile is known, would cost more than it
    # saves.
    unknown_seconds=math.inf,
    answer_seconds=30.0,
    least_bytes_per_second=2 << 20,
    tries=4,
    kept=1,
)

CHANGES: Final = Limits(floor_seconds=1.0, answer_seconds=10.0)


class Hedging:
    """The latencies and the token bucket of one storage's reads, or writes."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._lock = threading.Lock()
        self._recent: defaultdict[int, deque[float]] = defaultdict(
            lambda: deque(maxlen=RECENT)
        )
        """Latencies in seconds, by size class."""
        self._tokens = HEDGE_BURST
        self._bytes = 0
        """Bytes of all reads in flight."""
        self._bytes_per_second = limits.least_bytes_per_second

    def begin(self, size_bytes: int, *, now: float) -> "CallSchedule":
        """Returns the schedule of a read whose first request is sent now."""
        with self._lock:
            self._bytes += size_bytes
            self._tokens = min(HEDGE_BURST, self._tokens + HEDGE_SHARE)
        return CallSchedule(self, size_bytes, now)

    def slow_seconds(self, size_bytes: int) -> float:
        """Returns the latency above which a read of a size is slow."""
        with self._lock:
            took = sorted(self._recent[size_class(size_bytes)])
        if len(took) < LEAST_RECENT:
            return max(self.limits.unknown_seconds, self.limits.floor_seconds)
        usual = took[math.ceil(QUANTILE * len(took)) - 1]
        return max(SLOW * usual, self.limits.floor_seconds)

    @property
    def deadline_seconds(self) -> float:
        """Deadline of an attempt that begins now."""
        allowed = self._bytes / self._bytes_per_second
        return self.limits.answer_seconds + allowed

    def spend(self) -> bool:
        """Takes the token of one hedge; returns False where none is left."""
        with self._lock:
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True

    def end(self, size_bytes: int, seconds: float | None) -> None:
        """Records the end of a read.

        Args:
            seconds: Its latency; None if it got no response.
        """
        with self._lock:
            if seconds is not None:
                least = self.limits.least_bytes_per_second
                if seconds >= self.limits.answer_seconds:
                    measured = self._bytes / SLOW / seconds
                    least = min(least, max(measured, least / MOST_SLOWER))
                self._bytes_per_second = least
            self._bytes -= size_bytes
            if seconds is not None:
                self._recent[size_class(size_bytes)].append(seconds)


class CallSchedule:
    """The times of one read: when it is hedged, retried and abandoned."""

    def __init__(self, reads: Hedging, size_bytes: int, now: float) -> None:
        self._reads = reads
        self.size_bytes = size_bytes
        self.began = now
        self._tries = 0
        self._sent_at = self._asked_at = self._slow_at = self._late_at = now
        self._ask(now)

    @property
    def due(self) -> float:
        """Time of the next step, unless a response comes first."""
        return min(self._slow_at, self._late_at)

    @property
    def kept(self) -> int:
        """Requests, the oldest, that a retry does not abandon."""
        return self._reads.limits.kept

    def step(self, *, now: float) -> Step:
        """Returns the action to take now."""
        # Reads that began after the attempt extend its deadline, too.
        if now >= self._late_at:
            self._late_at = max(self._late_at, self._deadline())
        if now >= self._late_at:
            if self._tries >= self._reads.limits.tries:
                return Step.FAIL
            self._ask(now)
            return Step.RETRY
        if now < self._slow_at:
            return Step.WAIT
        if self._reads.spend():
            self._slow_at = math.inf
            return Step.HEDGE
        # Reads that begin in the meantime refill the token bucket: try again after as
        # long as this read has waited already.
        self._slow_at = now + (now - self._asked_at)
        return Step.WAIT

    def hold(self) -> None:
        """Records that the request of this attempt waits: its deadline begins when it
        is sent."""
        self._slow_at = self._late_at = math.inf

    def resume(self, *, now: float) -> None:
        self._tries -= 1
        self._ask(now)
        self._sent_at = now

    def record_answer(self, *, now: float) -> None:
        self._reads.end(self.size_bytes, now - self._sent_at)

    def record_abandonment(self) -> None:
        """Records that the caller no longer waits for a response."""
        self._reads.end(self.size_bytes, None)

    def _ask(self, now: float) -> None:
        self._tries += 1
        self._asked_at = now
        self._slow_at = now + self._reads.slow_seconds(self.size_bytes)
        self._late_at = self._deadline()

    def _deadline(self) -> float:
        seconds = self._reads.deadline_seconds * 2.0 ** (self._tries - 1)
        return self._asked_at + seconds


def size_class(size_bytes: int) -> int:
    """Returns the number of binary digits of a size in whole MiB."""
    return (size_bytes // _UNIT).bit_length()
