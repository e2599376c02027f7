"""Compares the field of a record with a value, as ``--where`` does.

What is wrong with the value is found before the first record is compared.
"""

import operator
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from enum import Enum
from fnmatch import translate
from typing import Any, Final, Self, TypeAlias

from storesvc_client.cli.records.fields import Field, Kind, as_number

Predicate: TypeAlias = Callable[[Any], bool]
"""A condition on a record."""


class Operator(Enum):
    """An operator of a comparison."""

    BELOW = "<"
    AT_MOST = "<="
    ABOVE = ">"
    AT_LEAST = ">="
    EQUAL = "="
    UNEQUAL = "!="

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the operator of a text; ``==`` is ``=``."""
        return cls("=" if text == "==" else text)

    @property
    def orders(self) -> bool:
        """True if it needs an order, as numbers have."""
        return self not in (Operator.EQUAL, Operator.UNEQUAL)


_COMPARE: Final[dict[Operator, Callable[[Any, Any], bool]]] = {
    Operator.BELOW: operator.lt,
    Operator.AT_MOST: operator.le,
    Operator.ABOVE: operator.gt,
    Operator.AT_LEAST: operator.ge,
    Operator.EQUAL: operator.eq,
    Operator.UNEQUAL: operator.ne,
}

_FLAGS: Final = {"yes": True, "true": True, "no": False, "false": False}

_SIZE: Final = re.compile(
    r"([0-9]{1,30}(?:_[0-9]{1,30}){0,9}(?:\.[0-9]{1,30})?)\s*([kKMGTPE]?)(i?)B?"
)
_PREFIXES: Final = {prefix: power for power, prefix in enumerate("_KMGTPE")} | {"": 0}


def comparison(
    field: Field, sign: Operator, text: str, *, is_quoted: bool, now: datetime
) -> Predicate:
    """Returns the condition that a field compares so with the value of a text.

    Args:
        field: The field.
        sign: The operator.
        text: The value.
        is_quoted: Whether the value was in quotes: then it is no pattern.
        now: Current time, for ages.

    Raises:
        ValueError: The field has no such values, or no such order; describes what is
            expected.
    """
    if sign.orders and field.kind in (Kind.FLAG, Kind.TEXT, Kind.TEXTS):
        raise ValueError(f"expected = or != before the value of {field.name}")
    if not sign.orders and field.kind in (Kind.TIME, Kind.AGE):
        raise ValueError(f"expected <, <=, > or >= before the value of {field.name}")
    match field.kind:
        case Kind.NUMBER:
            return _with_number(field, sign, _number(text, field))
        case Kind.SIZE:
            return _with_number(field, sign, parse_size(text))
        case Kind.TIME:
            return _with_time(field, sign, _time(text))
        case Kind.AGE:
            return _with_age(field, sign, _duration(text), now)
        case Kind.FLAG:
            wanted = _FLAGS.get(text.lower())
            if wanted is None:
                raise ValueError(f"expected {field.kind.value}")
            return _with_number(field, sign, wanted)
        case Kind.ANY if sign.orders:
            return _with_number(field, sign, _number(text, field))
        case Kind.ANY if not is_quoted and (number := as_number(text)) is not None:
            return _with_number_or_text(field, sign, number, text)
        case _:
            return _with_text(field, sign, text, is_pattern=not is_quoted)


def parse_size(text: str) -> int:
    """Returns the bytes of a size.

    >>> parse_size("1.5GiB"), parse_size("2MB"), parse_size("100")
    (1610612736, 2000000, 100)

    Raises:
        ValueError: It is no size.
    """
    found = _SIZE.fullmatch(text)
    if found is None or (found[3] and not found[2]):
        raise ValueError(f"expected {Kind.SIZE.value}")
    unit: int = (1024 if found[3] else 1000) ** _PREFIXES[found[2].upper()]
    if "." in found[1]:
        return round(float(found[1]) * unit)
    return int(found[1]) * unit  # exact, unlike a float


def _number(text: str, field: Field) -> float:
    number = as_number(text)
    if number is None:
        also = ", which an order needs" if field.kind is Kind.ANY else ""
        raise ValueError(f"expected {Kind.NUMBER.value}{also}")
    return number


def _time(text: str) -> datetime:
    """Returns the time of a text; the first moment of a date, in the local zone."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError) as e:
        raise ValueError(f"expected {Kind.TIME.value}") from e


def _duration(text: str) -> timedelta:
    from storesvc_client import InvalidRequestError
    from storesvc_client._values.arguments import parse_duration

    try:
        return parse_duration(text)
    except InvalidRequestError as e:
        raise ValueError(f"expected {Kind.AGE.value}") from e


def _with_number(field: Field, sign: Operator, wanted: float) -> Predicate:
    compare = _COMPARE[sign]

    def matches(record: Any) -> bool:
        value = field.value(record)
        found = as_number(value) if isinstance(value, str) else value
        if found is None:
            return sign is Operator.UNEQUAL
        if _both_nan(found, wanted):
            return sign is Operator.EQUAL
        return compare(found, wanted)

    return matches


def _with_number_or_text(
    field: Field, sign: Operator, number: float, text: str
) -> Predicate:
    """Returns the condition that a value is a number, or a text that looks like it:
    a label of digits, such as a commit, is no rounded number."""
    is_equal = _with_number(field, Operator.EQUAL, number)

    def matches(record: Any) -> bool:
        value = field.value(record)
        found = value == text if isinstance(value, str) else is_equal(record)
        return found == (sign is Operator.EQUAL)

    return matches


def _with_time(field: Field, sign: Operator, wanted: datetime) -> Predicate:
    compare = _COMPARE[sign]

    def matches(record: Any) -> bool:
        value = field.value(record)
        return value is not None and compare(value, wanted)

    return matches


def _with_age(
    field: Field, sign: Operator, wanted: timedelta, now: datetime
) -> Predicate:
    compare = _COMPARE[sign]

    def matches(record: Any) -> bool:
        value = field.value(record)
        return isinstance(value, datetime) and compare(now - value, wanted)

    return matches


def _with_text(
    field: Field, sign: Operator, wanted: str, *, is_pattern: bool
) -> Predicate:
    """Returns the condition that a text, or one of several, is this one."""
    is_glob = is_pattern and not {"*", "?"}.isdisjoint(wanted)
    # no brackets: a shape such as [4,8] is a text
    pattern = re.compile(translate(wanted.replace("[", "[[]"))) if is_glob else None

    def is_wanted(text: str) -> bool:
        return text == wanted if pattern is None else pattern.match(text) is not None

    def matches(record: Any) -> bool:
        value = field.value(record)
        texts = value if isinstance(value, tuple) else (value,)
        found = any(isinstance(text, str) and is_wanted(text) for text in texts)
        return found == (sign is Operator.EQUAL)

    return matches


def _both_nan(found: Any, wanted: float) -> bool:
    # isnan would convert an int, which may be too large for that
    return wanted != wanted and found != found  # noqa: PLR0124
