"""When a storage is asked again for a read, or a write, and when that is given up.

Of many answers over a network a few take ten times as long as the others, and some
never come. So a read that takes longer than nearly all of its size did lately is asked
a second time beside the first, and the first answer counts. A storage that has too much
to do is slow with all of them: what is asked twice is a small share of what is asked
once, and whoever has no share left waits.

Past a deadline all that was asked for a read is given up, and it is asked anew; a few
times, then the read has failed. The deadline allows for what is under way beside it: on
a slow network many reads take long together, and none of them stalls.

So it is with writes of what nobody else writes, which may as well be written twice, and
with changes of which only the first can take place.

Decides only: moments are seconds of any clock that never goes back. Threads may share
it.

Example:
    >>> reads = Hedging(Limits(answer_seconds=10, tries=2))
    >>> read = reads.begin(1 << 20, now=0)
    >>> read.due
    2.0
    >>> read.step(now=2), read.step(now=11), read.step(now=22)
    (<Step.BESIDE: 1>, <Step.ANEW: 2>, <Step.FAIL: 3>)
"""

import math
import threading
from collections import defaultdict, deque
from dataclasses import dataclass
from enum import Enum
from typing import Final

QUANTILE: Final = 0.95
SLOW: Final = 2.0
"""A read is slow that takes so many times as long as that share of the others."""

RECENT: Final = 128
"""Reads of about a size that others are compared with."""

LEAST_RECENT: Final = 16
"""With fewer, nobody knows what is slow."""

SHARE: Final = 0.05
"""Of reads that are asked a second time beside the first ..."""

SPARE: Final = 4.0
"""... and how many of them may be before, or after, many were not."""

_UNIT: Final = 1 << 20


class Step(Enum):
    """What to do about a read that was not answered when it was due."""

    BESIDE = 1
    """Ask it a second time."""
    ANEW = 2
    """Give up what was asked, and ask again."""
    FAIL = 3
    """Give it up."""
    WAIT = 4
    """Nothing, until it is due again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a storage may take."""

    floor_seconds: float = 0.5
    """No read is slow before ..."""
    unknown_seconds: float = 2.0
    """... and where nobody knows what is slow, this is."""
    answer_seconds: float = 15.0
    """Within which a read is answered that is asked once, or beside itself ..."""
    least_bytes_per_second: float = 8 << 20
    """... and how slowly the bytes of all that are under way may come meanwhile."""
    tries: int = 3
    """How often a read is asked before it has failed."""


READS: Final = Limits()

WRITES: Final = Limits(
    floor_seconds=2.0,
    # to write all of the first ones twice would cost more than to wait
    unknown_seconds=math.inf,
    answer_seconds=30.0,
    least_bytes_per_second=4 << 20,
    tries=3,
)

CHANGES: Final = Limits(floor_seconds=1.0, answer_seconds=10.0, tries=6)


class Hedging:
    """The reads, or the writes, of one storage."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._recent: defaultdict[int, deque[float]] = defaultdict(
            lambda: deque(maxlen=RECENT)
        )
        """Seconds that reads took, by a power of two of their size."""
        self._spare = SPARE
        self._bytes = 0

    def begin(self, size_bytes: int, *, now: float) -> "Asked":
        """Returns a read that is asked now."""
        with self._lock:
            self._bytes += size_bytes
            self._spare = min(SPARE, self._spare + SHARE)
        return Asked(self, size_bytes, now)

    def slow_seconds(self, size_bytes: int) -> float:
        """Returns after how long a read of a size is slow."""
        with self._lock:
            took = sorted(self._recent[_size_class(size_bytes)])
        if len(took) < LEAST_RECENT:
            return max(self._limits.unknown_seconds, self._limits.floor_seconds)
        usual = took[math.ceil(QUANTILE * len(took)) - 1]
        return max(SLOW * usual, self._limits.floor_seconds)

    @property
    def deadline_seconds(self) -> float:
        """Within how long what is asked now is to be answered."""
        allowed = self._bytes / self._limits.least_bytes_per_second
        return self._limits.answer_seconds + allowed

    @property
    def tries(self) -> int:
        """How often a read is asked before it has failed."""
        return self._limits.tries

    def spend(self) -> bool:
        """Takes the share of one that is asked a second time; False: none is left."""
        with self._lock:
            if self._spare < 1:
                return False
            self._spare -= 1
            return True

    def end(self, size_bytes: int, seconds: float | None) -> None:
        """Takes note of the end of a read.

        Args:
            size_bytes: Of the read.
            seconds: That it took; None: it was not answered.
        """
        with self._lock:
            self._bytes -= size_bytes
            if seconds is not None:
                self._recent[_size_class(size_bytes)].append(seconds)


class Asked:
    """A read that was asked and is not answered."""

    def __init__(self, reads: Hedging, size_bytes: int, now: float) -> None:
        self._reads = reads
        self._size_bytes = size_bytes
        self.began = now
        self._tries = 0
        self._asked_at = self._slow_at = self._late_at = now
        self._ask(now)

    @property
    def due(self) -> float:
        """The moment of the next step, unless it is answered before."""
        return min(self._slow_at, self._late_at)

    def step(self, *, now: float) -> Step:
        """Returns what to do about it now."""
        if now >= self._late_at:  # and what began since counts, too
            self._late_at = max(
                self._late_at, self._asked_at + self._reads.deadline_seconds
            )
        if now >= self._late_at:
            if self._tries >= self._reads.tries:
                return Step.FAIL
            self._ask(now)
            return Step.ANEW
        if now < self._slow_at:
            return Step.WAIT
        if self._reads.spend():
            self._slow_at = math.inf
            return Step.BESIDE
        # those that are answered meanwhile leave a share
        self._slow_at = now + (now - self._asked_at)
        return Step.WAIT

    def answered(self, *, now: float) -> None:
        """Takes note of the answer."""
        self._reads.end(self._size_bytes, now - self._asked_at)

    def given_up(self) -> None:
        """Takes note that none is awaited any more."""
        self._reads.end(self._size_bytes, None)

    def _ask(self, now: float) -> None:
        self._tries += 1
        self._asked_at = now
        self._slow_at = now + self._reads.slow_seconds(self._size_bytes)
        self._late_at = now + self._reads.deadline_seconds


def _size_class(size_bytes: int) -> int:
    return (size_bytes // _UNIT).bit_length()
