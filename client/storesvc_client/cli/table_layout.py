"""Fits a table into a terminal that is too narrow for it.

The table loses, in this order, columns without any value, the seconds of times, the
beginning that all keys have, and the ends of long texts, for which an ellipsis stands.
If that is not enough, minor columns and then the last ones are hidden, and the caller
says so. Numbers, names, steps, ids and what distinguishes keys are never cut: a part of
one looks like another one.

>>> cut("loss=2.5 acc=0.5", 10, Shrink.END)
'loss=2.5 …'
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from os.path import commonprefix
from typing import Final

from storesvc_client._values.texts import ABSENT
from storesvc_client.cli.output import GAP, SAME, Column, Shrink, char_width, text_width

_MINUTES: Final = len("2026-11-24 07:55")
_ELLIPSIS: Final = "…"


_LEAST: Final = {Shrink.END: 10, Shrink.DRAWING: 20}
"""Minimum characters of a text that is cut; fewer are unreadable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowed:
    """A table that fits."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    hidden: tuple[str, ...]
    """Titles of columns that have values and do not fit; the first is hidden first."""
    prefixes: tuple[str, ...] = ()
    """Lines above the table: the beginnings that the cells of a column lack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A column with its cells."""

    column: Column
    cells: tuple[str, ...]

    @property
    def width(self) -> int:
        return max(map(text_width, (self.column.title, *self.cells)))

    @property
    def least(self) -> int:
        """The width that it can be cut to."""
        if self.column.shrink not in _LEAST:
            return self.width
        least = max(_LEAST[self.column.shrink], text_width(self.column.title))
        return min(self.width, least)

    @property
    def is_empty(self) -> bool:
        return self.column.shrink in _LEAST and {ABSENT, SAME, ""}.issuperset(
            self.cells
        )

    def in_minutes(self) -> "_Part":
        """Returns it with shorter times."""
        if self.column.shrink is not Shrink.TIME:
            return self
        return replace(self, cells=tuple(cell[:_MINUTES] for cell in self.cells))

    @property
    def prefix(self) -> str:
        """The parts that all its cells begin with; "" if it is no column of paths."""
        if self.column.shrink is not Shrink.PREFIX or len(self.cells) < 2:
            return ""
        shared = commonprefix(self.cells)  # noqa: RUF071 - up to its last "/"
        return shared[: shared.rfind("/") + 1]

    def without(self, prefix: str) -> "_Part":
        """Returns it with cells that lack a beginning."""
        cells = tuple(cell.removeprefix(prefix) for cell in self.cells)
        return replace(self, cells=cells)

    def cut_to(self, width: int) -> "_Part":
        how = self.column.shrink
        return replace(self, cells=tuple(cut(cell, width, how) for cell in self.cells))


def narrowed(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], *, room: int
) -> Narrowed:
    """Returns a table that fits, or has a single column.

    Args:
        columns: The columns.
        rows: The cells of each row.
        room: Width of the terminal in characters.
    """
    cells = tuple(zip(*rows, strict=True)) or ((),) * len(columns)
    every = [
        _Part(column=column, cells=tuple(each))
        for column, each in zip(columns, cells, strict=True)
    ]
    parts = _without_empty(every, room)
    if _total([part.width for part in parts]) > room:
        parts = [part.in_minutes() for part in parts]
    prefixes: tuple[str, ...] = ()
    if _total([part.width for part in parts]) > room:
        prefixes = tuple(
            f"{part.column.title} below {part.prefix}" for part in parts if part.prefix
        )
        parts = [part.without(part.prefix) for part in parts]
    hidden: list[str] = []
    while len(parts) > 1 and _total([part.least for part in parts]) > room:
        minor = [part for part in parts if part.column.is_minor]
        last = (minor or parts)[-1]
        parts.remove(last)
        hidden.append(last.column.title)
    widths = _shared_out(parts, room)
    parts = [part.cut_to(w) for part, w in zip(parts, widths, strict=True)]
    return Narrowed(
        columns=tuple(part.column for part in parts),
        rows=tuple(zip(*(part.cells for part in parts), strict=True)),
        hidden=tuple(hidden),
        prefixes=prefixes,
    )


def cut(text: str, width: int, how: Shrink) -> str:
    """Returns a text that takes at most ``width`` characters of a terminal."""
    if text_width(text) <= width or how not in _LEAST:
        return text
    return _beginning(text, width - 1) + _ELLIPSIS


def _beginning(text: str, width: int) -> str:
    """Returns as many characters as fit."""
    ends = accumulate(map(char_width, text))
    return text[: sum(end <= width for end in ends)]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _without_empty(parts: Sequence[_Part], room: int) -> list[_Part]:
    """Leaves out columns without a value, the last ones first, until the rest fits."""
    kept = [*parts]
    for part in reversed(parts):
        if part.is_empty and _total([each.width for each in kept]) > room:
            kept.remove(part)
    return kept


def _shared_out(parts: Sequence[_Part], room: int) -> list[int]:
    """Returns widths that fit: the widest columns are cut first."""
    widths = [max(part.least, min(part.width, room)) for part in parts]
    while _total(widths) > room:
        wide = [at for at, part in enumerate(parts) if widths[at] > part.least]
        if not wide:
            break
        widths[max(wide, key=lambda at: widths[at])] -= 1
    return widths
