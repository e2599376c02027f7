"""Parses ``--where`` and ``--sort`` of lists.

A condition compares a field with a value; ``&``, ``|``, ``~`` and parentheses join
conditions, as in retention policies::

    condition  = all { "|" all }
    all        = part { "&" part }
    part       = "~" part | "(" condition ")" | comparison
    comparison = FIELD [ OPERATOR VALUE ]
    OPERATOR   = "<" | "<=" | ">" | ">=" | "=" | "!="
    FIELD, VALUE = a word, or a text in quotes

A field without an operator is one that is set: ``pinned``, ``tags``, ``loss``. A record
that lacks a field satisfies only ``!=``. ``*`` and ``?`` in the value of a text that is
not in quotes match any characters, and any character.

Nothing is read or printed here; the current time is an argument.

>>> query = parse_condition("loss<2.5 & ~pinned", CHECKPOINTS, now=now)
>>> [checkpoint.step for checkpoint in checkpoints if query.matches(checkpoint)]
[300, 200]
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from storesvc_client.cli.records.comparison import Operator, Predicate, comparison
from storesvc_client.cli.records.fields import Field, Kind, Schema
from storesvc_client.cli.suggestions import nearest

MAX_NESTING: Final = 32
"""Maximum depth of parentheses and negations, as in retention policies."""

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

        def key_of(record: Any) -> tuple[object, ...]:
            value = self.field.sort_value(record)
            is_missing = value is None
            is_first = not is_missing if self.descending else is_missing
            return is_first, () if value is None else value

        return key_of


def parse_condition(text: str, schema: Schema, *, now: datetime) -> Condition:
    """Returns the condition of a text.

    Args:
        text: The text.
        schema: Fields of the records.
        now: Current time, for ages.

    Raises:
        QueryError: The text is no condition on these fields.
    """
    reader = _Reader(text, schema, now)
    matches = reader.any(0)
    reader.end()
    return Condition(matches=matches, fields=frozenset(reader.fields))


def parse_order(text: str, schema: Schema) -> Order:
    """Returns the order of a text: a field, with "-" before it for the highest first.

    Raises:
        QueryError: The records have no such field.
    """
    name = text.removeprefix("-").strip()
    field = schema.field(name) if name else None
    if field is None:
        expected = _expected_field(schema)
        raise QueryError(f"{expected}, got {name!r}{_hint(name, schema)}")
    return Order(field=field, descending=text.startswith("-"))


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    start: int


class _Reader:
    """Reads a text from left to right; each method takes what its name says."""

    def __init__(self, text: str, schema: Schema, now: datetime) -> None:
        self._text = text
        self._schema = schema
        self._now = now
        self._tokens = [
            _Token(str(found.lastgroup), found[0], found.start())
            for found in _TOKEN.finditer(text)
        ]
        self._at = 0
        self.fields: set[Field] = set()

    def any(self, depth: int) -> Predicate:
        """Takes conditions with "|" between them."""
        parts = [self._all(depth)]
        while self._take("|"):
            parts.append(self._all(depth))
        return parts[0] if len(parts) == 1 else lambda r: any(p(r) for p in parts)

    def end(self) -> None:
        """Rejects what is left."""
        if self._next is not None:
            raise self._error("expected &, | or the end")

    def _all(self, depth: int) -> Predicate:
        parts = [self._part(depth)]
        while self._take("&"):
            parts.append(self._part(depth))
        return parts[0] if len(parts) == 1 else lambda r: all(p(r) for p in parts)

    def _part(self, depth: int) -> Predicate:
        if depth > MAX_NESTING:
            raise self._error(f"expected at most {MAX_NESTING} nested parentheses")
        if self._take("~"):
            negated = self._part(depth + 1)
            return lambda record: not negated(record)
        if self._take("("):
            inner = self.any(depth + 1)
            if not self._take(")"):
                raise self._error("expected &, | or )")
            return inner
        return self._comparison()

    def _comparison(self) -> Predicate:
        place = self._at
        name = self._word("a field")
        field = self._schema.field(name)
        if field is None:
            self._at = place
            raise self._error(_expected_field(self._schema), _hint(name, self._schema))
        self.fields.add(field)
        if self._kind != "operator":
            if not field.may_stand_alone:
                raise self._error(f"expected an operator after {name}, such as < or =")
            return field.is_set
        operator = Operator.parse(self._advance().text)
        place = self._at
        is_quoted = self._kind == "quoted"
        is_number = operator.orders and field.kind is Kind.ANY
        expected = Kind.NUMBER if is_number else field.kind
        value = self._word(f"{expected.value} after {operator.value}")
        try:
            return comparison(
                field, operator, value, is_quoted=is_quoted, now=self._now
            )
        except ValueError as e:
            self._at = place
            raise self._error(str(e)) from e

    @property
    def _next(self) -> _Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    @property
    def _kind(self) -> str:
        """Kind of the next token; "" at the end."""
        return self._next.kind if self._next else ""

    def _advance(self) -> _Token:
        self._at += 1
        return self._tokens[self._at - 1]

    def _take(self, join: str) -> bool:
        """Takes a joining character if it is next."""
        found = self._next
        is_next = found is not None and (found.kind, found.text) == ("join", join)
        self._at += is_next
        return is_next

    def _word(self, expected: str) -> str:
        match self._next:
            case _Token("word", text):
                self._at += 1
                return text
            case _Token("quoted", text) if len(text) > 1 and text[0] == text[-1]:
                self._at += 1
                return text[1:-1]
            case _Token("quoted", text):
                raise self._error(f"expected {text[0]} at its end")
            case _:
                raise self._error(f"expected {expected}")

    def _error(self, expected: str, hint: str = "") -> QueryError:
        """Returns the error at the next token."""
        found = self._next
        if found is None:
            place, got = "at the end", "nothing"
        else:
            place, got = f"at character {found.start + 1}", repr(found.text[:60])
        before = [t for t in self._tokens[: self._at][-1:] if t.kind == "word"]
        hints = (_HINTS.get(t.text.lower()) for t in (found, *before) if t)
        hint = hint or next(filter(None, hints), "")
        return QueryError(f"{self._text[:200]!r} {place}: {expected}, got {got}{hint}")


def _expected_field(schema: Schema) -> str:
    others = " or a metric or label" if "metrics" in schema.maps else ""
    others = others or (" or a label" if schema.maps else "")
    return f"expected a field: {', '.join(sorted(schema.fields))}{others}"


def _hint(name: str, schema: Schema) -> str:
    """Returns the suggestion of a field with a similar name."""
    found = nearest(name, schema.fields)
    return f"; did you mean {found}?" if found else ""
