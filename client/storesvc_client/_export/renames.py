"""Renames of tensors as data: a list of rules, read from JSON.

A rule is ``[REGEX, REPLACEMENT]`` or ``[REGEX, REPLACEMENT, {"transpose": [1, 0]}]``. A
tensor is named by the parts of its path, joined by "."; the first rule whose expression
matches all of the name applies, and ``\\1`` or ``\\g<name>`` in the replacement is a
group of the match. A name that no rule matches is kept.

The table of a model, ``{"model": NAME, "rules": [...]}``, names all of its parameters,
wherever a tree has them: its rules match the end of a name, but for the "value" of an
``nnx.Variable``. ``"unused": {NAME: SETTING}`` has the new names of tensors that the
model does not use if its config sets ``SETTING``.

>>> table = parse_table([[r"(.*)\\.kernel", r"\\1.weight", {"transpose": [1, 0]}]], "x")
>>> table.rename("mlp.up.kernel")
Renamed(name='mlp.up.weight', axes=(1, 0), rule=0, tree='')
>>> table.rename("mlp.norm.scale")
Renamed(name='mlp.norm.scale', axes=None, rule=None, tree='')
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from storesvc_client._values.arguments import shown
from storesvc_client.errors import InvalidRequestError

RenameTable: TypeAlias = str | Path | Mapping[str, Any] | Iterable[Sequence[Any]]
"""Rules, the table of a model, a path of the JSON file of either, or the name of a
table that comes with storesvc."""

MAX_TABLE_BYTES: Final = 16 << 20
"""Maximum size of a file of rules."""

_TABLE_NAME: Final = re.compile(r"[a-z0-9_]+")


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule."""

    pattern: re.Pattern[str]
    replacement: str
    axes: tuple[int, ...] | None
    """Permutation of the dimensions, as for ``numpy.transpose``; None for none."""


class Renamed(NamedTuple):
    """The name of an exported tensor, and the permutation of its dimensions."""

    name: str
    axes: tuple[int, ...] | None
    rule: int | None
    """Number of the rule that applies; None if none does."""
    tree: str
    """Beginning of the name that the table of a model ignores; "" or ends in "."."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renames:
    """A table."""

    place: str = "rename="
    """For messages."""
    rules: Sequence[Rule] = ()
    model: str = ""
    """The model all of whose parameters it names; "" for any list of rules."""
    unused: Mapping[str, str] = field(default_factory=dict)

    def rename(self, name: str) -> Renamed:
        """Returns the new name of a tensor."""
        for at, rule in enumerate(self.rules):
            pattern = rule.pattern
            found = pattern.search(name) if self.model else pattern.fullmatch(name)
            if found:
                new = found.expand(rule.replacement)
                return Renamed(new, rule.axes, at, name[: found.start()])
        return Renamed(name, None, None, "")


def read_table(table: RenameTable | None) -> Renames:
    """Returns a table.

    Raises:
        InvalidRequestError: There is no such file or table, or it has no such rules.
    """
    if table is None:
        return Renames()
    if not isinstance(table, str | Path):
        given = table if isinstance(table, Mapping) else list(table)
        return parse_table(given, "rename=")
    place = f"renames {table}"
    file: Any = Path(table)
    if isinstance(table, str) and _TABLE_NAME.fullmatch(table):
        file = files(__package__) / "renames" / f"{table}.json"
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_TABLE_BYTES + 1)
        if len(text) > MAX_TABLE_BYTES:
            raise ValueError(f"more than {MAX_TABLE_BYTES} bytes")
        rules = json.loads(text)
    except OSError as e:
        raise InvalidRequestError(
            f"{place}: expected a JSON file of rules, or the name of a table: "
            f"{e.strerror or e}"
        ) from e
    except (ValueError, RecursionError) as e:
        raise InvalidRequestError(
            f"{place}: expected JSON, got other text ({e})"
        ) from e
    return parse_table(rules, place)


def parse_table(table: object, place: str) -> Renames:
    """Returns the table of a value.

    Args:
        table: Value of JSON.
        place: Its place, for messages.

    Raises:
        InvalidRequestError: It, or a rule, has another form; the message names it.
    """
    fields: dict[str, Any] = (
        dict(table) if isinstance(table, Mapping) else {"rules": table}
    )
    rules, model = fields.pop("rules", None), fields.pop("model", "")
    unused = fields.pop("unused", {})
    well_typed = isinstance(model, str) and isinstance(unused, Mapping)
    if fields or not well_typed or not isinstance(rules, list) or not rules:
        raise InvalidRequestError(
            f'{place}: expected a list of rules, or {{"model": NAME, "rules": [...]}}, '
            f"got {shown(table)}"
        )
    found = [
        _rule(each, f"{place} rule {at}", is_suffix=bool(model))
        for at, each in enumerate(rules)
    ]
    return Renames(place=place, rules=found, model=model, unused=unused)


def _rule(given: object, place: str, *, is_suffix: bool) -> Rule:
    match given:
        case [str(pattern), str(replacement)] | (str(pattern), str(replacement)):
            axes = None
        case [str(pattern), str(replacement), {"transpose": list(given_axes), **rest}]:
            axes = tuple(given_axes)
            if rest or any(type(n) is not int for n in axes):
                raise InvalidRequestError(_expected(place, given))
            if sorted(axes) != list(range(len(axes))):
                raise InvalidRequestError(
                    f"{place}: expected a permutation of the dimensions, such as "
                    f"[1, 0], got {list(axes)}"
                )
        case _:
            raise InvalidRequestError(_expected(place, given))
    try:
        compiled = re.compile(pattern)
        if is_suffix:
            compiled = re.compile(rf"(?:\A|(?<=\.))(?:{pattern})(?:\.value)?\Z")
        # an expression and a replacement that do not fit fail here, and not at a leaf
        re.compile(f"{pattern}|").sub(replacement, "")
    except (re.error, IndexError) as e:
        raise InvalidRequestError(
            f"{place}: expected a regular expression and a replacement with its "
            f"groups, got {pattern!r} and {replacement!r}: {e}"
        ) from e
    return Rule(compiled, replacement, axes)


def _expected(place: str, given: object) -> str:
    return (
        f'{place}: expected [REGEX, REPLACEMENT] or [REGEX, REPLACEMENT, {{"transpose"'
        f": [...]}}], got {shown(given)}"
    )
