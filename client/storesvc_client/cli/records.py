"""Fields of the records that ``ls`` lists, for ``--where`` and ``--sort``.

A field has the name of its column, or its name with ``--json``. Other names are metrics
and labels; ``metrics.NAME`` and ``labels.NAME`` are nothing else, also where a field
has the same name.

>>> CHECKPOINTS.field("loss").value(tagged)
2.5

A condition compares a field with a value; ``&``, ``|``, ``~`` and parentheses join
conditions, as in retention policies. What is wrong with the value is found before the
first record is compared::

    condition  = all { "|" all }
    all        = part { "&" part }
    part       = "~" part | "(" condition ")" | comparison
    comparison = FIELD [ OPERATOR VALUE ]
    OPERATOR   = "<" | "<=" | ">" | ">=" | "=" | "!="
    FIELD, VALUE = a word, or a text in quotes

A field without an operator is one that is set: ``pinned``, ``tags``, ``loss``. A record
that lacks a field satisfies only ``!=``. ``*`` and ``?`` in the value of a text that is
not in quotes match any characters, and any character.

>>> query = parse_condition("loss<2.5 & ~pinned", CHECKPOINTS, now=now)
>>> [checkpoint.step for checkpoint in checkpoints if query.matches(checkpoint)]
[300, 200]
"""

import heapq
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from fnmatch import translate
from operator import attrgetter
from typing import Any, Final, Self, TypeAlias

import click

from storesvc_client._values.expressions import MAX_NESTING, ExpressionReader, Token
from storesvc_client._views.texts import dtype_text, natural_key, plural, shape_text
from storesvc_client.cli.errors import nearest

Value: TypeAlias = float | str | bool | datetime | tuple[str, ...] | None
"""The value of a field; None, "" or an empty tuple if the record has none."""


class Kind(Enum):
    """The type of a field; the text describes a value that is expected."""

    NUMBER = "a number"
    SIZE = "a size, such as 500000 or 1.5GiB"
    TIME = "a time, such as 2026-11-24 or 2026-11-24T07:55"
    AGE = "a duration, such as 12h or 3d"
    FLAG = "yes or no"
    TEXT = "a text"
    TEXTS = "a text, of a list"
    ANY = "a number or a text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of records of one type."""

    name: str
    kind: Kind
    value: Callable[[Any], Value]
    json_name: str = ""
    """Its other name, if it has one."""

    @property
    def may_stand_alone(self) -> bool:
        """True if its name alone is a condition."""
        return self.kind in (Kind.FLAG, Kind.TEXTS, Kind.ANY)

    def is_set(self, record: Any) -> bool:
        match self.value(record):
            case None | "" | () | False:
                return False
            case _:
                return True

    def sort_value(self, record: Any) -> tuple[object, ...] | None:
        """Returns a value that is comparable with others of this field; None if the
        record has none, or NaN. Numbers sort before texts."""
        match self.value(record):
            case None | "" | ():
                return None
            case datetime() as time:
                # the older, the greater its age
                return (-time.timestamp() if self.kind is Kind.AGE else time,)
            case tuple() as texts:
                return (1, natural_key(" ".join(texts)))
            case str() as text if self.kind is Kind.ANY:
                number = as_number(text)
                if number is None:
                    return (1, natural_key(text))
                return None if math.isnan(number) else (0, number)
            case str() as text:
                return (1, natural_key(text))
            case number:
                return None if math.isnan(number) else (0, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The fields of records of one type."""

    noun: str
    fields: Mapping[str, Field]
    """Fields by name, as in the columns."""
    maps: tuple[str, ...] = ()
    """Attributes of a record that are mappings from names to values: metrics, labels.
    The first has precedence for a name that both have."""

    def field(self, name: str) -> Field | None:
        """Returns the field of a name; None if the records cannot have it."""
        for known in self.fields.values():
            if name in (known.name, known.json_name):
                return known
        prefix, dot, rest = name.partition(".")
        if dot and prefix in self.maps:
            of_map = _map_field([prefix], rest)
            return Field(name=name, kind=Kind.ANY, value=of_map)
        if self.maps:
            of_maps = _map_field(self.maps, name)
            return Field(name=name, kind=Kind.ANY, value=of_maps)
        return None

    def record_names(self, record: Any) -> set[str]:
        return {name for each in self.maps for name in getattr(record, each)}


def as_number(text: str) -> float | None:
    """Returns the number of a text, an integer if it is one; None for another text.

    >>> as_number("1e3"), as_number("1_000"), as_number("fast")
    (1000.0, 1000, None)
    """
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return None


def _map_field(maps: Sequence[str], name: str) -> Callable[[Any], Value]:
    def value(record: Any) -> Value:
        found = (getattr(record, each) for each in maps)
        return next((values[name] for values in found if name in values), None)

    return value


def _fields(**kinds: tuple[Kind, str | Callable[[Any], Value]]) -> dict[str, Field]:
    """Returns fields, each with the attribute of the records that it is, or a function;
    an attribute is its name in JSON, too, but that of an age is the time's."""
    return {
        name: Field(
            name=name,
            kind=kind,
            value=attrgetter(where) if isinstance(where, str) else where,
            json_name=where if isinstance(where, str) and kind is not Kind.AGE else "",
        )
        for name, (kind, where) in kinds.items()
    }


_SIZES: Final = _fields(
    size=(Kind.SIZE, "size_bytes"),
    leaves=(Kind.NUMBER, "leaf_count"),
    items=(Kind.NUMBER, "item_count"),
    chunks=(Kind.NUMBER, "chunk_count"),
)
_CHECKPOINT: Final = _SIZES | _fields(
    step=(Kind.NUMBER, "step"),
    committed=(Kind.TIME, "commit_time"),
    begun=(Kind.TIME, "create_time"),
    age=(Kind.AGE, "commit_time"),
    stored=(Kind.SIZE, "stored_bytes"),
    own=(Kind.SIZE, "own_bytes"),
    pinned=(Kind.FLAG, "pinned"),
    principal=(Kind.TEXT, "principal"),
    uid=(Kind.TEXT, "uid"),
)

CHECKPOINTS: Final = Schema(
    noun="checkpoint",
    fields=_CHECKPOINT | _fields(tags=(Kind.TEXTS, "tags")),
    maps=("metrics", "labels"),
)
"""Fields of ``TaggedCheckpoint``."""

DELETED: Final = Schema(
    noun="deleted checkpoint",
    fields=_CHECKPOINT
    | _fields(deleted=(Kind.TIME, "delete_time"), purge=(Kind.TIME, "purge_time")),
    maps=("metrics", "labels"),
)
"""Fields of ``Checkpoint``."""

FOREIGN: Final = Schema(
    noun="checkpoint",
    fields=_fields(
        step=(Kind.NUMBER, "step"),
        written=(Kind.TIME, "create_time"),
        age=(Kind.AGE, "create_time"),
    )
    | _SIZES,
    maps=("metrics", "labels"),
)
"""Fields of ``ForeignInfo``."""

RUNS: Final = Schema(
    noun="run",
    fields=_fields(
        run=(Kind.TEXT, "name"),
        latest=(Kind.NUMBER, "latest_step"),
        created=(Kind.TIME, "create_time"),
        age=(Kind.AGE, "create_time"),
        uid=(Kind.TEXT, "uid"),
    ),
    maps=("labels",),
)
"""Fields of ``RunInfo``."""

LEAVES: Final = Schema(
    noun="leaf",
    fields=_fields(
        key=(Kind.TEXT, "key"),
        kind=(Kind.TEXT, "kind"),
        dtype=(Kind.TEXT, dtype_text),
        shape=(Kind.TEXT, shape_text),
        size=(Kind.SIZE, "size_bytes"),
        chunks=(Kind.NUMBER, "chunk_count"),
    ),
)
"""Fields of ``LeafInfo``."""


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
        is_quoted: Whether the value was in quotes: then it is no pattern.
        now: Current time, for ages.
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
            return _with_time(field, sign, _time(text), lambda time: time)
        case Kind.AGE:
            return _with_time(field, sign, _duration(text), lambda time: now - time)
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
        # isnan would convert an int, which may be too large for that
        if wanted != wanted and found != found:  # noqa: PLR0124
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


def _with_time(
    field: Field, sign: Operator, wanted: Any, measure: Callable[[datetime], Any]
) -> Predicate:
    compare = _COMPARE[sign]

    def matches(record: Any) -> bool:
        value = field.value(record)
        return isinstance(value, datetime) and compare(measure(value), wanted)

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


_TOKEN: Final = re.compile(
    r"""(?P<operator><=|>=|!=|==|[=<>])|(?P<join>[&|~()])"""
    r"""|(?P<quoted>'[^']*'?|"[^"]*"?)|(?P<word>[^\s&|~()<>=!'"]+)|(?P<other>\S)"""
)
_HINTS: Final = {
    "and": "; & joins conditions",
    "or": "; | joins conditions",
    "not": "; ~ negates a condition",
    "!": "; ~ negates a condition",
    "&": "; a single & joins conditions",
    "|": "; a single | joins conditions",
}
"""Hints for signs of other languages."""


class QueryError(ValueError):
    """A condition or an order that cannot be read; names the place in the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition on records."""

    matches: Predicate
    fields: frozenset[Field]
    """Fields that it compares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An order of records; those without a value come last in both directions."""

    field: Field
    descending: bool

    @property
    def key(self) -> Callable[[Any], Any]:
        """Returns the sort key of a record.

        With ``descending`` it is a key for a reversed order.
        """

        def order_key(record: Any) -> tuple[object, ...]:
            value = self.field.sort_value(record)
            is_missing = value is None
            is_first = not is_missing if self.descending else is_missing
            return is_first, () if value is None else value

        return order_key


def parse_condition(text: str, schema: Schema, *, now: datetime) -> Condition:
    reader = _Reader(text, schema, now)
    matches = reader.read()
    return Condition(matches=matches, fields=frozenset(reader.fields))


def parse_order(text: str, schema: Schema) -> Order:
    """Returns the order of a text: a field; after "-" the highest is the first."""
    name = text.removeprefix("-").strip()
    field = schema.field(name) if name else None
    if field is None:
        expected = _expected_field(schema)
        raise QueryError(f"{expected}, got {name!r}{_hint(name, schema)}")
    return Order(field=field, descending=text.startswith("-"))


class _Reader(ExpressionReader[Predicate]):
    """Reads a condition; each method takes what its name says."""

    after_part = "&, | or )"
    after_expression = "&, | or the end"
    nesting = f"at most {MAX_NESTING} nested parentheses"

    def __init__(self, text: str, schema: Schema, now: datetime) -> None:
        super().__init__(text, _TOKEN)
        self._schema = schema
        self._now = now
        self.fields: set[Field] = set()

    def negate(self, part: Predicate) -> Predicate:
        return lambda record: not part(record)

    def join(self, sign: str, parts: Sequence[Predicate]) -> Predicate:
        if sign == "|":
            return lambda record: any(part(record) for part in parts)
        return lambda record: all(part(record) for part in parts)

    def operand(self) -> Predicate:
        place = self.at
        name = self._word("a field")
        field = self._schema.field(name)
        if field is None:
            self.at = place
            raise self._error(_expected_field(self._schema), _hint(name, self._schema))
        self.fields.add(field)
        if self.next.kind != "operator":
            if not field.may_stand_alone:
                raise self._error(f"expected an operator after {name}, such as < or =")
            return field.is_set
        operator = Operator.parse(self.next.text)
        self.at += 1
        place = self.at
        is_quoted = self.next.kind == "quoted"
        is_number = operator.orders and field.kind is Kind.ANY
        expected = Kind.NUMBER if is_number else field.kind
        value = self._word(f"{expected.value} after {operator.value}")
        try:
            return comparison(
                field, operator, value, is_quoted=is_quoted, now=self._now
            )
        except ValueError as e:
            self.at = place
            raise self._error(str(e)) from e

    def _word(self, expected: str) -> str:
        match self.next:
            case Token("word", text):
                self.at += 1
                return text
            case Token("quoted", text) if len(text) > 1 and text[0] == text[-1]:
                self.at += 1
                return text[1:-1]
            case Token("quoted", text):
                raise self._error(f"expected {text[0]} at its end")
            case _:
                raise self._error(f"expected {expected}")

    def unexpected_error(self, expected: str) -> QueryError:
        return self._error(f"expected {expected}")

    def _error(self, expected: str, hint: str = "") -> QueryError:
        """Returns the error at the next token."""
        found = self.next
        if found.text:
            place, got = f"at character {found.start + 1}", repr(found.text[:60])
        else:
            place, got = "at the end", "nothing"
        before = [t for t in self.tokens[: self.at][-1:] if t.kind == "word"]
        hints = (_HINTS.get(t.text.lower()) for t in (found, *before))
        hint = hint or next(filter(None, hints), "")
        return QueryError(f"{self.text[:200]!r} {place}: {expected}, got {got}{hint}")


def _expected_field(schema: Schema) -> str:
    others = " or a metric or label" if "metrics" in schema.maps else ""
    others = others or (" or a label" if schema.maps else "")
    return f"expected a field: {', '.join(sorted(schema.fields))}{others}"


def _hint(name: str, schema: Schema) -> str:
    """Returns the suggestion of a field with a similar name."""
    found = nearest(name, schema.fields)
    return f"; did you mean {found}?" if found else ""


_MOST_NAMES: Final = 1000
"""Maximum names that are kept for a suggestion."""


class RecordSelection:
    """Applies ``--where`` and ``--sort`` to the records of one list."""

    def __init__(
        self, schema: Schema, *, where: Sequence[str] = (), sort: str | None = None
    ) -> None:
        from datetime import UTC, datetime

        now = datetime.now(UTC)
        option = "--where"
        try:
            self._conditions = [parse_condition(t, schema, now=now) for t in where]
            option = "--sort"
            self._order = None if sort is None else parse_order(sort, schema)
        except QueryError as e:
            raise click.BadParameter(str(e), param_hint=option) from e
        self._schema = schema
        used = {field for each in self._conditions for field in each.fields}
        if self._order:
            used.add(self._order.field)
        self._absent = {each.name: each for each in used if each.kind is Kind.ANY}
        self._known = set[str]()
        self._count = 0
        self._is_complete = False

    def select_records(
        self, records: Iterable[Any], *, limit: int | None
    ) -> Iterator[Any]:
        """Yields the records that match, in order.

        Args:
            records: All records; they are read one by one.
            limit: Maximum number that the caller uses; None: all. One more is yielded
                if there are more, and no more are kept.
        """
        kept = self._matching(records)
        order = self._order
        if order is None:
            yield from kept
        elif limit is None:
            yield from sorted(kept, key=order.key, reverse=order.descending)
        else:
            pick = heapq.nlargest if order.descending else heapq.nsmallest
            yield from pick(limit + 1, kept, key=order.key)

    def absence(self) -> str:
        """Returns the note of an empty list."""
        noun = plural(self._schema.noun)
        if not self._count:
            return f"no {noun}"
        if self._count == 1:
            return f"the only {self._schema.noun} does not match --where"
        return f"none of {self._count:,} {noun} matches --where"

    def warning(self) -> str | None:
        """Returns a note on names that no record has; None if each is found."""
        if not (self._is_complete and self._count and self._absent):
            return None
        return self._absence_text(min(self._absent))

    def _absence_text(self, name: str) -> str:
        bare = (
            name.partition(".")[2]
            if name.partition(".")[0] in self._schema.maps
            else name
        )
        known = sorted(self._known | {*self._schema.fields})
        found = nearest(bare, known)
        what = " or ".join(which.removesuffix("s") for which in self._schema.maps)
        ending = f"; did you mean {found}?" if found else ""
        return f"no {self._schema.noun} has a {what} {name!r}{ending}"

    def _matching(self, records: Iterable[Any]) -> Iterator[Any]:
        for record in records:
            self._count += 1
            if self._absent:  # until each name that is used was found
                for name, field in [*self._absent.items()]:
                    if field.value(record) is not None:
                        del self._absent[name]
                if len(self._known) < _MOST_NAMES:
                    self._known |= self._schema.record_names(record)
            if all(condition.matches(record) for condition in self._conditions):
                yield record
        self._is_complete = True
        order = self._order
        if order is not None and self._count and order.field.name in self._absent:
            raise click.BadParameter(
                self._absence_text(order.field.name), param_hint="--sort"
            )
