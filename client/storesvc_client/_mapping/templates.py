"""Templates of keys: the patterns of a mapping.

A template is a key with placeholders in braces; a brace itself is doubled. ``{name}``
stands for a piece of a key without "/" and ".", ``{name:int}`` for a decimal integer
without leading zeros, ``{name*}`` for any text, at most once in a template.

``{name:int[3:]}`` stands for an integer from 3 on, ``{name:int[:3]}`` for 0, 1 and 2.
The value is the place in the range: 3 has the value 0 in the first one. A rule that
makes leaves needs each integer of a range that has an end.

A template matches a key in at most one way, so it also makes the key from its values.
Behind an integer comes text that is no digit, and one part of a key, between "/" or
".", has at most one placeholder that is no integer. No template is a regular expression
of its author, and none takes much longer than a few comparisons of a key.

>>> Template.parse("{name}_proj.{what}").match("q_proj.weight")
{'name': 'q', 'what': 'weight'}
>>> template = Template.parse("layers/{n:int}/{rest*}")
>>> template.match("layers/3/attn/q")
{'n': 3, 'rest': 'attn/q'}
>>> template.fill({"n": 3, "rest": "attn/q"})
'layers/3/attn/q'
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, TypeAlias

from storesvc.format.keys import MAX_KEY_BYTES
from storesvc_client._values.arguments import shown

Value: TypeAlias = int | str
"""Value of a placeholder."""

MAX_PLACEHOLDERS: Final = 16
"""Maximum placeholders of a template."""

INTEGER: Final = ":int"
REST: Final = "*"

_NUMBER: Final = "0|[1-9][0-9]{0,17}"
_TOKEN: Final = re.compile(
    r"(?P<brace>\{\{|\}\})|\{(?P<name>[A-Za-z_][A-Za-z0-9_]{0,63})(?P<kind>:int|\*)?"
    rf"((?<=:int)\[(?P<start>{_NUMBER})?:(?P<stop>{_NUMBER})?\])?\}}|(?P<text>[^{{}}]+)",
)
_EXPRESSIONS: Final = {
    "": "([^/.]+)",
    INTEGER: f"({_NUMBER})",
    REST: "(.+)",
}
"""Expression of each kind of placeholder. Only the rest is tried at several places:
where a separator follows it."""

INTEGERS: Final = range(10**18)
"""All integers of a key."""


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A part of a template that stands for a text or an integer."""

    name: str
    kind: str
    """"" for a piece without separators, ``INTEGER`` or ``REST``."""
    numbers: range = INTEGERS
    """The integers that it stands for, if it does; the first one has the value 0."""

    def __str__(self) -> str:
        ends = f"[{self.numbers.start or ''}:{self.numbers.stop % INTEGERS.stop or ''}]"
        return f"{{{self.name}{self.kind}{'' if ends == '[:]' else ends}}}"

    def fill(self, value: Value) -> str:
        """Returns the text for a value."""
        return str(value + self.numbers.start if isinstance(value, int) else value)


@dataclass(frozen=True)
class Template:
    """A key with placeholders."""

    parts: tuple[str | Placeholder, ...]
    """Texts and placeholders; no text follows another one."""

    @classmethod
    def parse(cls, text: str) -> "Template":
        """Returns the template of a text.

        Raises:
            ValueError: The text is none; the message says why.
        """
        if len(text) > MAX_KEY_BYTES:
            raise ValueError(
                f"expected a key of at most {MAX_KEY_BYTES} bytes, got {len(text)}"
            )
        parts, at = list[str | Placeholder](), 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise ValueError(
                    f"{text!r}: expected {{name}}, {{name:int}}, {{name:int[3:]}} or "
                    f"{{name*}}, got {text[at : at + 20]!r}; double a brace of a key"
                )
            at = found.end()
            if found["name"] is not None:
                ends = int(found["start"] or 0), int(found["stop"] or INTEGERS.stop)
                if not range(*ends):
                    raise ValueError(
                        f"{text!r}: expected integers, such as [3:5], got {found[0]}"
                    )
                kind = found["kind"] or ""
                parts.append(Placeholder(found["name"], kind, range(*ends)))
                continue
            literal = found["text"] or found["brace"][0]
            if parts and isinstance(last := parts[-1], str):
                parts[-1] = last + literal
            else:
                parts.append(literal)
        template = cls(tuple(parts))
        names = template.kinds
        if len(names) < len(template.placeholders) or len(names) > MAX_PLACEHOLDERS:
            raise ValueError(
                f"{shown(text)}: expected each placeholder once, and at most "
                f"{MAX_PLACEHOLDERS}"
            )
        return template

    def __str__(self) -> str:
        return "".join(
            part.replace("{", "{{").replace("}", "}}")
            if isinstance(part, str)
            else str(part)
            for part in self.parts
        )

    @cached_property
    def placeholders(self) -> list[Placeholder]:
        """Its placeholders in their order."""
        return [part for part in self.parts if isinstance(part, Placeholder)]

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Kind of each placeholder, by name."""
        return {each.name: each.kind for each in self.placeholders}

    def with_kinds(self, kinds: Mapping[str, str]) -> "Template":
        """Returns it with placeholders of other kinds."""
        parts = (
            part if isinstance(part, str) else replace(part, kind=kinds[part.name])
            for part in self.parts
        )
        return Template(tuple(parts))

    def check_source(self) -> None:
        """Checks that a key matches in at most one way.

        Raises:
            ValueError: It may match in several; the message says where.
        """
        if [each.kind for each in self.placeholders].count(REST) > 1:
            raise ValueError(
                f"{str(self)!r}: expected at most one placeholder with a *, got more"
            )
        for at, part in enumerate(self.parts[:-1]):
            if isinstance(part, str) or (problem := self._find_problem(at)) is None:
                continue
            expected, got = problem
            raise ValueError(
                f"{str(self)!r}: expected {expected} behind {part}, got {got}; name "
                "the whole part of the key"
            )

    def _find_problem(self, at: int) -> tuple[str, str] | None:
        """Returns what was expected behind a placeholder, and what is there; None if
        its end is certain."""
        part, *rest = self.parts[at:]
        assert isinstance(part, Placeholder)
        text = rest[0] if isinstance(rest[0], str) else ""
        got = text[:1] or str(rest[0])
        if part.kind == INTEGER:
            return None if text and not text[0].isdigit() else ("no digit", got)
        if part.kind == REST:
            return None if text and text[0] in "/." else ("'/' or '.'", got)
        # A piece has one end if up to the next separator there are only texts, and
        # integers behind a text that does not end with a digit: then all of them have
        # their places from the end of that part of the key on.
        before = ""
        for each in rest:
            if isinstance(each, Placeholder):
                follows_text = before and before[-1] not in "0123456789"
                if each.kind != INTEGER or not follows_text:
                    return (
                        "text or an integer up to the next '/' or '.'",
                        str(Template(tuple(rest)))[:40],
                    )
            elif not {"/", "."}.isdisjoint(each):
                return None
            before = str(each)
        return None

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        return re.compile(
            "".join(
                re.escape(part) if isinstance(part, str) else _EXPRESSIONS[part.kind]
                for part in self.parts
            ),
            re.DOTALL,
        )

    def match(self, key: str) -> dict[str, Value] | None:
        """Returns the values of the placeholders in a key; None if it does not
        match."""
        found = self._expression.fullmatch(key)
        if found is None:
            return None
        values: dict[str, Value] = {}
        for part, text in zip(self.placeholders, found.groups(), strict=True):
            is_integer = part.kind == INTEGER
            if is_integer and int(text) not in part.numbers:
                return None
            values[part.name] = int(text) - part.numbers.start if is_integer else text
        return values

    def fill(self, values: Mapping[str, Value]) -> str:
        """Returns the key with values for the placeholders."""
        return "".join(
            part if isinstance(part, str) else part.fill(values[part.name])
            for part in self.parts
        )
