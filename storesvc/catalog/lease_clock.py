"""Decides when a lease has expired, by observation rather than by other clocks; pure.

A lease is a record that its holder changes before its duration has passed. It has
expired once this process has seen it unchanged for its whole duration, measured by a
monotonic clock. The times in the record come from other machines, whose clocks may be
wrong by days: they count only when a lease is first seen, and only if they are older
than any clock error. So a lease that is renewed in time never expires, and any other
expires at the latest after its duration.
"""

from collections.abc import Container
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

MARGIN: Final = timedelta(days=2)
"""Maximum difference of the clocks of two machines."""


@dataclass(frozen=True, slots=True)
class _Observation:
    """The contents of a lease, and the time since when they have not changed."""

    seen: bytes
    since: float
    was_over: bool
    """True if it was long expired by its own time when it was first seen."""


class Observations:
    """The leases that this process has seen."""

    def __init__(self) -> None:
        self._leases: dict[str, _Observation] = {}

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
        """Returns whether a lease has expired, and records the observation.

        Args:
            key: Name of the lease.
            seen: Its contents, which differ after each renewal.
            length: Its duration after a renewal.
            renew_time: Time of its renewal, by the clock of its holder.
            clock_now: Wall-clock time, taken after the lease was read.
            elapsed: Seconds of a monotonic clock, taken after the lease was read.
        """
        lease = self._leases.get(key)
        if lease is None:
            was_over = clock_now - renew_time > length + MARGIN
            lease = self._leases[key] = _Observation(seen, elapsed, was_over)
        elif lease.seen != seen:
            lease = self._leases[key] = _Observation(seen, elapsed, was_over=False)
        return lease.was_over or elapsed - lease.since >= length.total_seconds()

    def forget(self, prefix: str, *, but: Container[str]) -> None:
        """Forgets the leases whose keys begin with a prefix, except those in `but`."""
        for key in [k for k in self._leases if k.startswith(prefix) and k not in but]:
            del self._leases[key]
