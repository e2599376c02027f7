"""Checks labels, metrics, names, durations and other arguments before a call is sent.

A check gets the place that its message begins with, such as "purge_delay= of
prod/llama-8b" or "restore of prod/llama-8b@500: select=", and what the caller gave, of
any type. It returns the value, or raises ``InvalidRequestError`` with the place, what
was expected, and what it got.

Public functions take a duration as a ``timedelta`` or as a number of seconds;
``as_timedelta`` and ``checked_duration`` are the only code that reads either. Messages
of the contract, deadlines and texts ("90m") follow from it.

>>> duration_text(parse_duration("36h"))
'36 hours'
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from numbers import Real
from typing import Any, Final, Self, TypeAlias, TypeVar, get_args

from google.protobuf.duration_pb2 import Duration

from storesvc.format.keys import InvalidItemError
from storesvc.format.names import InvalidNameError, RunName, check_id
from storesvc_client._values.key_patterns import Pattern
from storesvc_client._views.texts import MICROSECONDS
from storesvc_client.errors import DataLossError, InvalidRequestError

DurationLike: TypeAlias = timedelta | float
"""A duration as callers give it: a ``timedelta``, or seconds."""

MAX_DURATION: Final = timedelta(days=3_652_500)
"""Longest duration that a protobuf ``Duration`` can hold, about 10,000 years."""

_NAMES: Final = {
    name: size
    for unit, size in MICROSECONDS.items()
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
    """Returns a duration that the contract can hold, rounded to microseconds: a
    ``timedelta``, or a number of seconds; it may be 0 or negative."""
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
    """Returns a duration above 0."""
    found = as_timedelta(what, length)
    if not timedelta(0) < found <= most:
        raise _unusable(what, f"above 0, of at most {most.days} days", length)
    return found


def seconds_or_none(what: str, length: DurationLike | None) -> float | None:
    """Returns the seconds of a timeout; None, which has no limit, stays."""
    return None if length is None else as_timedelta(what, length).total_seconds()


def _unusable(what: str, bounds: str, got: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"{what}: expected a timedelta or seconds {bounds}, got {got!r}"
    )


def duration_message(length: DurationLike, what: str) -> Duration:
    message = Duration()
    message.FromTimedelta(as_timedelta(what, length))
    return message


def parse_past(text: str, now: datetime) -> datetime:
    """Returns the time of an age ("24h") or of a time in ISO 8601.

    A time without a zone is in the zone of this machine.
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


N = TypeVar("N")


def run_name(name: object) -> RunName:
    """Returns the parsed name of ``namespace/run``."""
    text = _text(name, "a run, such as 'prod/llama-8b'")
    try:
        return RunName.parse(text)
    except InvalidNameError as e:
        raise InvalidRequestError(str(e)) from None


def parse_received(parse: Callable[[str], N], text: str) -> N:
    """Parses a resource name that a server sent."""
    try:
        return parse(text)
    except (InvalidNameError, InvalidItemError) as e:
        raise DataLossError(
            f"the server sent a name that no store holds ({e}); ask another server",
            reason="CORRUPT_DATA",
        ) from None


def namespace_resource(namespace: object) -> str:
    text = _text(namespace, "a namespace, such as 'prod'")
    try:
        check_id(text, "namespace")
    except InvalidNameError as e:
        raise InvalidRequestError(str(e)) from None
    return f"namespaces/{text}"


def parent_resource(parent: object) -> str:
    """Returns the resource name of a run, a namespace, or (for None) the store."""
    if parent is None:
        return "namespaces/-"
    if isinstance(parent, str) and "/" in parent:
        return run_name(parent).resource
    return namespace_resource(parent)


def is_text(value: object) -> bool:
    """Returns whether a value is a text that UTF-8 can encode."""
    try:
        return isinstance(value, str) and bool(value.encode() or True)
    except UnicodeEncodeError:  # a lone surrogate
        return False


def _text(value: object, wanted: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"expected {wanted}, got {value!r}")
    return value


MAX_ENTRIES: Final = 64
"""Maximum labels, and maximum metrics, of a checkpoint or a run."""

MAX_TEXT_BYTES: Final = 256
"""Maximum UTF-8 bytes of a label's key and value, and of a metric's key."""

_SHOWN: Final = 60
"""Maximum characters of an argument that a message repeats."""


def checked_labels(place: str, labels: object) -> dict[str, str]:
    """Returns labels as a dict; an empty one for None."""
    found = {}
    for key, text in _entries(f"{place}: labels=", labels).items():
        if not is_text(text) or len(text.encode()) > MAX_TEXT_BYTES:
            raise InvalidRequestError(
                f"{place}: labels=: expected a text of at most {MAX_TEXT_BYTES} bytes "
                f"for {key!r}, got {shown(text)}"
            )
        found[key] = text
    return found


def checked_metrics(place: str, metrics: object) -> dict[str, float]:
    """Returns metrics as a dict of floats; an empty one for None."""
    found = {}
    for key, value in _entries(f"{place}: metrics=", metrics).items():
        try:
            if isinstance(value, str | bytes | bytearray):  # float() would parse it
                raise TypeError
            found[key] = float(value)
        except (TypeError, ValueError, OverflowError) as e:
            raise InvalidRequestError(
                f"{place}: metrics=: expected a number for {key!r}, got {shown(value)}"
            ) from e
    return found


def checked_cast(place: str, cast: object) -> str | None:
    """Returns the name of the dtype that floating-point leaves are cast to, or None."""
    from storesvc.format.dtypes import floating_name  # imports NumPy

    name = None if cast is None else floating_name(cast)
    if name is None and cast is not None:
        raise InvalidRequestError(
            f"{place}: expected a floating-point dtype such as 'bfloat16', got {cast!r}"
        )
    return name


def checked_texts(place: str, texts: object) -> list[str]:
    """Returns one or several texts as a list."""
    if isinstance(texts, str):
        return [texts]
    if not isinstance(texts, Iterable) or isinstance(texts, bytes | bytearray):
        raise InvalidRequestError(f"{place}: expected texts, got {shown(texts)}")
    found = list(texts)
    for text in found:
        if not isinstance(text, str):
            raise InvalidRequestError(f"{place}: expected texts, got {shown(text)}")
    return found


def checked_patterns(place: str, patterns: object) -> list[Pattern]:
    """Returns one or several globs or compiled regular expressions as a list."""
    given: Iterable[Any] = [patterns]
    if isinstance(patterns, Iterable) and not isinstance(
        patterns, str | bytes | bytearray
    ):
        given = patterns
    found: list[Pattern] = []
    for pattern in given:
        # an expression may be one of bytes
        text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"{place}: expected globs or compiled regular expressions, got "
                f"{shown(pattern)}"
            )
        found.append(pattern)
    return found


def checked_text(place: str, text: object) -> str:
    """Returns a text; "" for None."""
    if text is None:
        return ""
    if not isinstance(text, str) or not is_text(text):
        raise InvalidRequestError(f"{place}: expected a text, got {shown(text)}")
    return text


def checked_flag(place: str, flag: object) -> bool | None:
    if flag is not None and not isinstance(flag, bool):
        raise InvalidRequestError(f"{place}: expected a bool, got {shown(flag)}")
    return flag


def checked_choice(place: str, value: object, choices: Any) -> None:
    """Checks that a value is an argument of a ``Literal``."""
    if value not in get_args(choices):
        expected = ", ".join(map(repr, get_args(choices)))
        raise InvalidRequestError(
            f"{place}: expected one of {expected}, got {shown(value)}"
        )


def _entries(place: str, given: object) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"{place}: expected a mapping, got {shown(given)}")
    if len(given) > MAX_ENTRIES:
        raise InvalidRequestError(
            f"{place}: expected at most {MAX_ENTRIES} entries, got {len(given)}"
        )
    for key in given:
        if not is_text(key) or not 1 <= len(key.encode()) <= MAX_TEXT_BYTES:
            raise InvalidRequestError(
                f"{place}: expected texts of 1 to {MAX_TEXT_BYTES} bytes as keys, got "
                f"{shown(key)}"
            )
    return dict(given)


def shown(value: object) -> str:
    """Returns an argument for a message, shortened."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
