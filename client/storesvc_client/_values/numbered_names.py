"""Names that differ in a number, and one text for several of them, as in a shell.

>>> (series,) = numbered_series(["layer_0", "layer_1", "layer_2", "layer_8"])
>>> series.text, series.indices
('layer_{0..2,8}', (0, 1, 2, 3))
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

_NAME: Final = re.compile(r"(.*?)(0*)([0-9]{1,18})([^0-9]*)", re.DOTALL)
"""A name, whose last number is the third group; without the zeros before it."""

_MOST_RANGES: Final = 4
"""Maximum ranges in the text of a series."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Names that differ in their last number."""

    indices: tuple[int, ...]
    """Positions of the names among all."""
    text: str
    """Text for all of them, such as "layer_{0..11}"; of a single one, its name."""


def numbered_series(names: Sequence[str]) -> list[Series]:
    """Returns the series of names, in the order of their first ones; a name without a
    number is one of its own.

    Args:
        names: Different names; numbers ascend, as ``natural_key`` sorts them.
    """
    found = [_NAME.fullmatch(name) for name in names]
    # Of 08, 09, 10, the last one has two digits for the same reason as the others.
    padded = {_padding(each) for each in found if each and each[2]}
    members: dict[object, list[int]] = defaultdict(list)
    for at, each in enumerate(found):
        if each is None:
            members[at].append(at)
            continue
        prefix, width, suffix = _padding(each)
        is_padded = (prefix, width, suffix) in padded
        members[prefix, width if is_padded else 0, suffix].append(at)
    return [
        Series(indices=tuple(those), text=_text([names[at] for at in those]))
        for those in members.values()
    ]


def _padding(found: re.Match[str]) -> tuple[str, int, str]:
    return found[1], len(found[2] + found[3]), found[4]


def _text(names: Sequence[str]) -> str:
    first = _NAME.fullmatch(names[0])
    if len(names) == 1 or first is None:
        return names[0]
    start, end = len(first[1]), len(first[4])
    digits = [name[start : len(name) - end] for name in names]
    return f"{first[1]}{{{','.join(_ranges(digits))}}}{first[4]}"


def _ranges(digits: Sequence[str]) -> Iterator[str]:
    """Yields ranges of ascending numbers; their text stays short."""
    numbers = [int(each) for each in digits]
    steps = {b - a for a, b in pairwise(numbers)}
    if len(steps) == 1 and len(numbers) > 2 and (step := steps.pop()) > 1:
        yield f"{digits[0]}..{digits[-1]}..{step}"
        return
    starts = [
        at
        for at, number in enumerate(numbers)
        if at == 0 or number != numbers[at - 1] + 1
    ]
    ends = [at - 1 for at in starts[1:]] + [len(numbers) - 1]
    for first, last in list(zip(starts, ends, strict=True))[:_MOST_RANGES]:
        yield digits[first] if first == last else f"{digits[first]}..{digits[last]}"
    if len(starts) > _MOST_RANGES:
        yield "…"
