"""When a lease is over: by what this process saw, not by the clocks of others.

A lease is a record that its holder changes before its length has passed. It is over
once this process has seen it unchanged for its whole length, measured by a clock of
its own that never goes back. The times in the record are those of other machines,
whose clocks may be days off: they count only when a lease is first seen, and only
where they lie further back than any clock is wrong. So a lease that changes in time
is never over, and one that does not is over at the latest after its length.
"""

from collections.abc import Container
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

MARGIN: Final = timedelta(days=2)
"""How far the clocks of two machines may differ."""


@dataclass(frozen=True, slots=True)
class _Sight:
    """What a lease was, and since when it has been so."""

    seen: bytes
    since: float
    was_over: bool
    """Whether it was long over when it was first seen."""


class Observations:
    """The leases that a process has seen."""

    def __init__(self) -> None:
        self._sights: dict[str, _Sight] = {}

    def is_over(
        self,
        key: str,
        seen: bytes,
        *,
        length: timedelta,
        renew_time: datetime,
        clock_now: datetime,
        elapsed: float,
    ) -> bool:
        """Returns whether a lease is over; remembers that it was seen.

        Args:
            key: Which lease.
            seen: What it holds; differs after each renewal.
            length: How long it lasts after a renewal.
            renew_time: When it was renewed, by the clock of whoever did.
            clock_now: The time of day, taken after it was read.
            elapsed: Seconds that never go back, taken after it was read.
        """
        sight = self._sights.get(key)
        if sight is None:
            was_over = clock_now - renew_time > length + MARGIN
            sight = self._sights[key] = _Sight(seen, elapsed, was_over)
        elif sight.seen != seen:
            sight = self._sights[key] = _Sight(seen, elapsed, was_over=False)
        return sight.was_over or elapsed - sight.since >= length.total_seconds()

    def forget(self, prefix: str, *, but: Container[str]) -> None:
        """Forgets the leases whose keys begin with a prefix, but for those that are
        still there."""
        for key in [k for k in self._sights if k.startswith(prefix) and k not in but]:
            del self._sights[key]
