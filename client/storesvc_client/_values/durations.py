"""Lengths of time: as the contract has them, and as people write them: "3 days",
"90m", "0.5 seconds".

>>> duration_text(parse_duration("36h"))
'36 hours'
"""

import math
import re
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Self

from google.protobuf.duration_pb2 import Duration

from storesvc_client.errors import InvalidRequestError

MAX_DURATION: Final = timedelta(days=3_652_500)
"""The most that the contract can say."""

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
    """By when something must be done."""

    seconds: float
    """How long it may take, from its beginning."""
    end: float
    """When that is over, of ``time.monotonic()``."""

    @classmethod
    def after(cls, seconds: float) -> Self:
        """Returns the deadline of what begins now."""
        return cls(seconds, time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds that are left; below 0 where it is over."""
        return self.end - time.monotonic()


NEVER: Final = Deadline(math.inf, math.inf)


def is_duration(value: object) -> bool:
    """Returns whether something is a length of time that can be sent."""
    return isinstance(value, timedelta) and abs(value) <= MAX_DURATION


def checked_length(
    what: str, length: timedelta, *, most: timedelta = MAX_DURATION
) -> timedelta:
    """Returns a length of time, above 0.

    Args:
        what: What it is, for people: "lease= of prod/llama-8b".
        length: How long.
        most: The longest that it may be.

    Raises:
        InvalidRequestError: It is something else.
    """
    if not is_duration(length) or not timedelta(0) < length <= most:
        raise InvalidRequestError(
            f"{what} expected a timedelta above 0, of at most {most.days} days, got "
            f"{length!r}"
        )
    return length


def duration_message(length: timedelta, what: str) -> Duration:
    """Returns the message of a length of time.

    Args:
        length: How long.
        what: What it is, for people: "purge_delay= of prod/llama-8b".

    Raises:
        InvalidRequestError: It is something else.
    """
    if not is_duration(length):
        raise InvalidRequestError(
            f"{what}: expected a timedelta of at most {MAX_DURATION.days} days, got "
            f"{length!r}"
        )
    message = Duration()
    message.FromTimedelta(length)
    return message


def duration_text(length: timedelta) -> str:
    """Returns the text of a duration, in the largest unit that makes it whole."""
    count = length // timedelta(microseconds=1)
    for unit, size in _MICROSECONDS.items():
        if count % size == 0:
            return f"{count // size} {unit if count == size else f'{unit}s'}"
    whole, parts = divmod(abs(count), _MICROSECONDS["second"])
    sign = "-" if count < 0 else ""
    return f"{sign}{whole}.{parts:06d}".rstrip("0") + " seconds"


def parse_duration(text: str) -> timedelta:
    """Returns the duration of a text: a number and a unit, days to seconds, of which
    the first letter will do.

    Raises:
        InvalidRequestError: It is something else, or finer than a microsecond.
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
