"""Durations: checked arguments, protobuf messages, deadlines, and texts ("90m").

Public functions take a duration as a ``timedelta`` or as a number of seconds;
``as_timedelta`` and ``checked_duration`` are the only code that reads either.

>>> duration_text(parse_duration("36h"))
'36 hours'
"""

import math
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from numbers import Real
from typing import Final, Self, TypeAlias

from google.protobuf.duration_pb2 import Duration

from storesvc_client.errors import InvalidRequestError

DurationLike: TypeAlias = timedelta | float
"""A duration as callers give it: a ``timedelta``, or seconds."""

MAX_DURATION: Final = timedelta(days=3_652_500)
"""Longest duration that a protobuf ``Duration`` can hold, about 10,000 years."""

_MICROSECONDS: Final = {
    "day": 86_400_000_000,
    "hour": 3_600_000_000,
    "minute": 60_000_000,
    "second": 1_000_000,
}
_NAMES: Final = {
    name: size
    for unit, size in _MICROSECONDS.items()
    for name in (unit, f"{unit}s", unit[0])
}
_DURATION: Final = re.compile(
    rf"(-?)([0-9]{{1,15}})(?:\.([0-9]{{1,15}}))?\s*({'|'.join(_NAMES)})"
)


@dataclass(frozen=True, slots=True)
class Deadline:
    """Point in time by which an operation must end."""

    seconds: float
    """Seconds that the operation may take in all."""
    end: float
    """Value of ``time.monotonic()`` at which it is exceeded."""

    @classmethod
    def after(cls, seconds: float) -> Self:
        """Returns the deadline of an operation that begins now."""
        return cls(seconds, time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds until the deadline; negative once it is exceeded."""
        return self.end - time.monotonic()


NEVER: Final = Deadline(math.inf, math.inf)


def as_timedelta(what: str, length: object) -> timedelta:
    """Returns a duration that the contract can hold, rounded to microseconds.

    Args:
        what: Name of the argument, for the message: "purge_delay= of prod/llama-8b".
        length: A ``timedelta``, or a number of seconds; may be 0 or negative.

    Raises:
        InvalidRequestError: It is neither, not finite, or longer than MAX_DURATION.
    """
    found = length if isinstance(length, timedelta) else None
    if isinstance(length, Real) and not isinstance(length, bool):
        with suppress(ValueError, OverflowError):  # NaN, infinite or too large
            found = timedelta(seconds=float(length))
    if found is None or abs(found) > MAX_DURATION:
        raise _unusable(what, f"of at most {MAX_DURATION.days} days", length)
    return found


def checked_duration(
    what: str, length: object, *, most: timedelta = MAX_DURATION
) -> timedelta:
    """Returns a duration above 0.

    Args:
        what: Name of the argument, for the message: "lease= of prod/llama-8b".
        length: A ``timedelta``, or a number of seconds.
        most: Maximum duration.

    Raises:
        InvalidRequestError: It is no duration, not above 0, or longer than ``most``.
    """
    found = as_timedelta(what, length)
    if not timedelta(0) < found <= most:
        raise _unusable(what, f"above 0, of at most {most.days} days", length)
    return found


def seconds_or_none(what: str, length: DurationLike | None) -> float | None:
    """Returns the seconds of a timeout; None, which waits without a limit, unchanged.

    Raises:
        InvalidRequestError: It is no duration.
    """
    return None if length is None else as_timedelta(what, length).total_seconds()


def _unusable(what: str, bounds: str, got: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"{what}: expected a timedelta or seconds {bounds}, got {got!r}"
    )


def duration_message(length: DurationLike, what: str) -> Duration:
    """Returns the protobuf message of a duration.

    Args:
        length: The duration.
        what: Name of the argument, for the message: "purge_delay= of prod/llama-8b".

    Raises:
        InvalidRequestError: It is no duration, or longer than MAX_DURATION.
    """
    message = Duration()
    message.FromTimedelta(as_timedelta(what, length))
    return message


def duration_text(length: timedelta) -> str:
    """Returns the text of a duration in the largest unit that divides it."""
    count = length // timedelta(microseconds=1)
    for unit, size in _MICROSECONDS.items():
        if count % size == 0:
            return f"{count // size} {unit if count == size else f'{unit}s'}"
    whole, parts = divmod(abs(count), _MICROSECONDS["second"])
    sign = "-" if count < 0 else ""
    return f"{sign}{whole}.{parts:06d}".rstrip("0") + " seconds"


def parse_past(text: str, now: datetime) -> datetime:
    """Returns the time of an age ("24h") or of a time in ISO 8601.

    A time without a zone is in the zone of this machine.

    Raises:
        InvalidRequestError: The text is neither.
    """
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(text.strip()).astimezone()
    try:
        return now - parse_duration(text)
    except (InvalidRequestError, OverflowError) as e:
        raise InvalidRequestError(
            f"time {text[:40]!r}: expected an age, such as 24h or 7 days, or a time, "
            "such as 2026-11-24T07:55Z"
        ) from e


def parse_duration(text: str) -> timedelta:
    """Returns the duration of a text: a number and a unit, days to seconds.

    The first letter of the unit is enough: "36h", "12 hours", "0.5 seconds".

    Raises:
        InvalidRequestError: The text is no duration, or finer than a microsecond.
    """
    found = _DURATION.fullmatch(text.strip())
    if found:
        sign, whole, decimals, unit = found.groups(default="")
        count = int(whole + decimals) * _NAMES[unit]
        microseconds, rest = divmod(count, 10 ** len(decimals))
        try:
            length = timedelta(microseconds=-microseconds if sign else microseconds)
        except OverflowError:
            rest = 1
        if not rest:
            return length
    raise InvalidRequestError(
        f"duration {text[:40]!r}: expected a number and a unit, such as 3d, 12 hours "
        "or 90 seconds"
    )
