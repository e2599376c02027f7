"""Prints tables and fields for people, and JSON for programs.

Tables are plain columns, two spaces apart. In a terminal that is too narrow,
``table_layout`` shortens cells; in a pipe or a file a table is complete. Unprintable
characters in text from a store are escaped, so that no label can control a terminal.

JSON is that of `storesvc_client/_values/texts.py`.
"""

import os
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from enum import Enum
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import click

from storesvc_client._values.texts import (
    ABSENT,
    json_text,
    json_value,
    number_text,
    order_metrics,
    plural,
    printable,
)

if TYPE_CHECKING:
    from storesvc_client import DataLossError

__all__ = [
    "GAP",
    "SAME",
    "Column",
    "Listing",
    "Shrink",
    "aligned",
    "char_width",
    "json_value",
    "print_fields",
    "print_json",
    "print_note",
    "print_table",
    "report",
    "text_width",
]

_Item = TypeVar("_Item")

SAME: Final = "same"
"""Cell of a value that is that of the cell before."""

GAP: Final = "  "
"""Space between columns."""


class Shrink(Enum):
    """A way to shorten cells in a terminal that is too narrow."""

    NO = "not at all"
    END = "at the end, as of texts"
    PREFIX = "by the beginning that all have, as of keys"
    DRAWING = "at the end, as of lines of a tree"
    TIME = "seconds and zone, of times"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str
    right: bool = False
    """True for quantities, which are aligned right."""
    shrink: Shrink = Shrink.NO
    """The way its cells are shortened."""
    is_minor: bool = False
    """True if it is hidden before all others."""


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table; without titles, it has no header."""
    cells = [tuple(map(printable, row)) for row in rows]
    hidden: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    if sys.stdout.isatty():
        room = get_terminal_size().columns
        if max(map(text_width, aligned(columns, cells)), default=0) > room:
            from storesvc_client.cli.table_layout import narrowed

            table = narrowed(columns, cells, room=room)
            columns, cells, hidden = table.columns, [*table.rows], table.hidden
            prefixes = table.prefixes
    for prefix in prefixes:
        click.echo(prefix)
    has_titles = any(column.title for column in columns)
    for number, line in enumerate(aligned(columns, cells)):
        click.echo(_bold(line) if has_titles and number == 0 else line)
    if hidden:
        titles = ", ".join(filter(None, hidden)) or "all columns"
        print_note(f"no room for {titles}; a wider terminal or a pipe shows all")


def _bold(text: str) -> str:
    is_plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return text if is_plain else click.style(text, bold=True)


def aligned(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a table: the titles, if there are any, and the rows."""
    titles = tuple(column.title for column in columns)
    lines = [titles, *rows] if any(titles) else rows
    widths = [max(map(text_width, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield GAP.join(map(_pad, line, widths, columns)).rstrip()


def text_width(text: str) -> int:
    """Returns the characters of a terminal that a text takes."""
    return len(text) if text.isascii() else sum(map(char_width, text))


def char_width(char: str) -> int:
    """Returns the characters of a terminal that a character takes."""
    return 1 + (unicodedata.east_asian_width(char) in "WF")


def print_fields(title: str, pairs: Iterable[tuple[str, str | Sequence[str]]]) -> None:
    """Prints names and values below a title; of a sequence, a value on each line."""
    known = list(pairs)
    width = max(len(name) for name, _ in known)
    click.echo(_bold(printable(title)))
    for name, value in known:
        first, *others = [value] if isinstance(value, str) else value
        click.echo(f"  {name:<{width}}  {printable(first)}".rstrip())
        for other in others:
            click.echo(f"  {'':<{width}}  {printable(other)}")


def print_json(value: object) -> None:
    """Prints one JSON document."""
    click.echo(json_text(json_value(value), indent=2))


def print_note(text: str) -> None:
    """Prints a remark on stderr, so that it does not enter a pipe."""
    click.echo(f"storectl: {printable(text)}", err=True)


def report(errors: "Sequence[DataLossError]") -> None:
    """Prints errors of damaged records on stderr, and raises the last one."""
    for error in errors[:-1]:
        print_note(str(error))
    if errors:
        raise errors[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing(Generic[_Item]):
    """The layout of a list of items of one kind."""

    noun: str
    columns: tuple[Column, ...]
    row: Callable[[_Item], tuple[str, ...]]
    document: Callable[[_Item], object] = field(default=lambda item: item)
    """Returns the value of an item that JSON shows."""
    metrics: Callable[[_Item], Mapping[str, float]] | None = None
    """Returns the metrics of an item; each is a column in front of the last one."""

    def show(
        self,
        items: Iterable[_Item],
        *,
        as_json: bool,
        limit: int | None = None,
        damaged: "Sequence[DataLossError]" = (),
        is_selection: bool = False,
        absence: Callable[[], str] | None = None,
    ) -> None:
        """Prints the items; notes on stderr what it leaves out.

        Args:
            items: Items to print.
            as_json: Whether to print JSON.
            limit: Maximum number of items, including damaged ones; None prints all.
            is_selection: Whether the items are chosen from a list that is read beyond
                them: then damaged records of it do not count.
            damaged: Errors of damaged records; grows while the items are read.
            absence: Returns the note of an empty list, once the items are read, or
                raises why there cannot be any.

        Raises:
            DataLossError: The last of ``damaged``; the others are printed before.
        """
        shown: list[_Item] = []
        rest = False
        for item in items:
            counted = len(shown) if is_selection else len(shown) + len(damaged)
            rest = limit is not None and counted >= limit
            if rest:
                break
            shown.append(item)
        # the search for the first omitted item may have found one more damaged record
        reported = damaged
        if limit is not None and not is_selection:
            reported = damaged[: limit - len(shown)]
        rest = rest or len(reported) < len(damaged)
        note = ""
        if not shown and not damaged:  # may raise, before anything is printed
            note = absence() if absence else f"no {plural(self.noun)}"
        if as_json:
            print_json([*map(self.document, shown)])
        elif shown:
            print_table(*self._table(shown))
        elif note:
            print_note(note)
        if rest:
            known = f"of {len(items):,} " if isinstance(items, Sized) else ""
            noun = self.noun if limit == 1 and not known else plural(self.noun)
            print_note(f"{limit:,} {known}{noun} shown, there are more")
        report(reported)

    def _table(
        self, items: Sequence[_Item]
    ) -> tuple[Sequence[Column], Iterable[Sequence[str]]]:
        rows = map(self.row, items)
        if self.metrics is None:
            return self.columns, rows
        values = [*map(self.metrics, items)]
        names = order_metrics(name for each in values for name in each)
        texts = (
            [number_text(each[name]) if name in each else ABSENT for name in names]
            for each in values
        )
        *columns, last = self.columns
        return (
            [*columns, *(Column(name, right=True) for name in names), last],
            (
                [*row[:-1], *cells, row[-1]]
                for row, cells in zip(rows, texts, strict=True)
            ),
        )


def _pad(cell: str, width: int, column: Column) -> str:
    space = " " * (width - text_width(cell))
    return space + cell if column.right else cell + space
