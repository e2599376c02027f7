"""Time, as the service asks for it: given from outside, so that tests can turn it."""

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Two clocks: one for people, one to measure with."""

    def now(self) -> datetime:
        """Returns the time of day, in UTC. It may jump, and differ between machines:
        nothing that must hold may depend on it."""

    def elapsed(self) -> float:
        """Returns seconds since a moment of this process; never goes back."""


class SystemClock:
    """The clocks of this machine."""

    def now(self) -> datetime:
        """Returns the time of day."""
        return datetime.now(UTC)

    def elapsed(self) -> float:
        """Returns seconds that never go back."""
        return time.monotonic()
