"""The clocks of the service, injected so that tests can control time."""

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """A wall clock for time stamps and a monotonic clock for durations."""

    def now(self) -> datetime:
        """Returns the wall-clock time in UTC.

        It may jump, and it differs between machines: safety must not depend on it.
        """

    def elapsed(self) -> float:
        """Returns monotonic seconds since an arbitrary start in this process."""


class SystemClock:
    """The clocks of this machine."""

    def now(self) -> datetime:
        """Returns the wall-clock time in UTC."""
        return datetime.now(UTC)

    def elapsed(self) -> float:
        """Returns monotonic seconds."""
        return time.monotonic()
