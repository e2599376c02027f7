"""Ticks of an axis of time, at round hours, days and months of this machine's zone."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final

from storesvc_client._values.axes import Place, Ticks

_TICKS: Final = 7
"""Maximum number of intervals between ticks."""

_DAY: Final = 86_400
_STEPS: Final = (
    *(1, 2, 5, 10, 30, 60, 120, 300, 600, 1800),
    *(3600, 2 * 3600, 3 * 3600, 6 * 3600, 12 * 3600),
    *(days * _DAY for days in (1, 2, 5, 10, 30, 60, 120, 365, 730, 3650, 36_500)),
)
"""Seconds between ticks."""


def time_scale(times: list[float], start: float, end: float) -> tuple[Place, Ticks]:
    """Returns the place of a time on an axis, and the ticks with their texts.

    Args:
        times: Times in seconds since 1970, at least one.
        start: Place of the earliest.
        end: Place of the latest.
    """
    low, high = min(times), max(times)
    if low == high:  # one time: in the middle
        low, high = low - 60, high + 60

    def place(time: float) -> float:
        return start + (end - start) * (time - low) / (high - low)

    step = next((s for s in _STEPS if s * _TICKS >= high - low), _STEPS[-1])
    form = "%Y-%m-%d" if step >= _DAY else "%m-%d %H:%M"
    form = "%H:%M:%S" if step < 60 else form
    found = _round_times(low, high, step)
    return place, [(each.timestamp(), each.strftime(form)) for each in found]


def _round_times(low: float, high: float, step: int) -> Iterator[datetime]:
    """Yields the times between two at multiples of a step since a local midnight."""
    first = datetime.fromtimestamp(low).astimezone()
    time = first.replace(hour=0, minute=0, second=0, microsecond=0)
    while time.timestamp() <= high:
        if time.timestamp() >= low:
            yield time
        time += timedelta(seconds=step)
