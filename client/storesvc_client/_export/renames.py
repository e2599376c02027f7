"""Renames of tensors as data: a list of rules, read from JSON.

A rule is ``[REGEX, REPLACEMENT]`` or ``[REGEX, REPLACEMENT, {"transpose": [1, 0]}]``. A
tensor is named by the parts of its path, joined by "."; the first rule whose expression
matches all of the name applies, and ``\\1`` or ``\\g<name>`` in the replacement is a
group of the match. A name that no rule matches is kept.

>>> rules = parse_rules([[r"(.*)\\.kernel", r"\\1.weight", {"transpose": [1, 0]}]], "x")
>>> renamed("mlp.up.kernel", rules)
Renamed(name='mlp.up.weight', axes=(1, 0))
>>> renamed("mlp.norm.scale", rules)
Renamed(name='mlp.norm.scale', axes=None)
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from storesvc_client._values.arguments import shown
from storesvc_client.errors import InvalidRequestError

RenameTable: TypeAlias = str | Path | Iterable[Sequence[Any]]
"""Rules, a path of their JSON file, or the name of a table that comes with storesvc."""

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


def renamed(name: str, rules: Sequence[Rule]) -> Renamed:
    """Returns the new name of a tensor."""
    for rule in rules:
        if found := rule.pattern.fullmatch(name):
            return Renamed(found.expand(rule.replacement), rule.axes)
    return Renamed(name, None)


def read_rules(table: RenameTable | None) -> list[Rule]:
    """Returns the rules of a table.

    Raises:
        InvalidRequestError: There is no such file or table, or it has no such rules.
    """
    if table is None:
        return []
    if not isinstance(table, str | Path):
        return parse_rules(list(table), "rename=")
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
    return parse_rules(rules, place)


def parse_rules(rules: object, place: str) -> list[Rule]:
    """Returns the rules of a list.

    Args:
        rules: Value of JSON.
        place: Its place, for messages.

    Raises:
        InvalidRequestError: A rule has another form; the message names it.
    """
    if not isinstance(rules, list):
        raise InvalidRequestError(
            f"{place}: expected a list of rules, got {shown(rules)}"
        )
    return [_rule(each, f"{place} rule {at}") for at, each in enumerate(rules)]


def _rule(given: object, place: str) -> Rule:
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
