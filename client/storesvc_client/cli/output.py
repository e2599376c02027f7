"""Prints tables and fields for people, and JSON for programs.

Tables are plain columns, two spaces apart, and never truncated. In a terminal that is
too narrow, cells of folding columns break over lines. Unprintable characters in text
from a store are escaped, so that no label can control a terminal.

JSON follows the JSON mapping of protobuf: times are RFC 3339 in UTC, durations are
seconds such as "90s", NaN and the infinities are the strings "NaN", "Infinity" and
"-Infinity"; complex numbers are [real, imaginary]. Sizes are in bytes.
"""

import json
import math
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import click

from storesvc_client._values.texts import plural, printable

if TYPE_CHECKING:
    from storesvc_client import DataLossError

_Item = TypeVar("_Item")

_LEAST_FOLDED: Final = 16
"""Minimum width in characters of a folded column; narrower is unreadable."""

_NOT_FINITE: Final = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str
    right: bool = False
    """True for quantities, which are aligned right."""
    folds: bool = False
    """True if cells may break over lines in a terminal that is too narrow."""


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table; without titles, it has no header."""
    cells = [tuple(map(printable, row)) for row in rows]
    titles = tuple(column.title for column in columns)
    lines = [titles, *cells] if any(titles) else cells
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    if _needs_folding(columns, widths):
        _print_folded(columns, cells)
        return
    for line in lines:
        padded = map(_pad, line, widths, columns)
        click.secho("  ".join(padded).rstrip(), bold=line is titles or None)


def print_fields(title: str, pairs: Iterable[tuple[str, str | Sequence[str]]]) -> None:
    """Prints names and values below a title; of a sequence, a value on each line."""
    known = list(pairs)
    width = max(len(name) for name, _ in known)
    click.secho(printable(title), bold=True)
    for name, value in known:
        first, *others = [value] if isinstance(value, str) else value
        click.echo(f"  {name:<{width}}  {printable(first)}".rstrip())
        for other in others:
            click.echo(f"  {'':<{width}}  {printable(other)}")


def print_json(value: object) -> None:
    """Prints one JSON document."""
    click.echo(json.dumps(json_value(value), indent=2, ensure_ascii=False))


def print_note(text: str) -> None:
    """Prints a remark on stderr, so that it does not enter a pipe."""
    click.echo(f"storectl: {text}", err=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing(Generic[_Item]):
    """The layout of a list of items of one kind."""

    noun: str
    columns: tuple[Column, ...]
    row: Callable[[_Item], tuple[str, ...]]

    def show(
        self,
        items: Iterable[_Item],
        *,
        as_json: bool,
        limit: int | None = None,
        damaged: "Sequence[DataLossError]" = (),
    ) -> None:
        """Prints the items; notes on stderr what it leaves out.

        Args:
            items: Items to print.
            as_json: Whether to print JSON.
            limit: Maximum number of items, including damaged ones; None prints all.
            damaged: Errors of damaged records; grows while the items are read.

        Raises:
            DataLossError: The last of ``damaged``; the others are printed before.
        """
        shown: list[_Item] = []
        rest = False
        for item in items:
            rest = limit is not None and len(shown) + len(damaged) >= limit
            if rest:
                break
            shown.append(item)
        # the search for the first omitted item may have found one more damaged record
        reported = damaged if limit is None else damaged[: limit - len(shown)]
        rest = rest or len(reported) < len(damaged)
        if as_json:
            print_json(shown)
        elif shown:
            print_table(self.columns, map(self.row, shown))
        elif not damaged:
            print_note(f"no {plural(self.noun)}")
        if rest:
            known = f"of {len(items):,} " if isinstance(items, Sized) else ""
            noun = self.noun if limit == 1 and not known else plural(self.noun)
            print_note(f"{limit:,} {known}{noun} shown, there are more")
        for error in reported[:-1]:
            print_note(str(error))
        if reported:
            raise reported[-1]


def json_value(value: Any) -> Any:
    """Returns the value as JSON types."""
    if is_dataclass(value) and not isinstance(value, type):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
        return json_value(named)
    match value:
        case Mapping():
            return {str(key): json_value(item) for key, item in value.items()}
        case list() | tuple():
            return [json_value(item) for item in value]
        case datetime():
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case timedelta():
            return f"{value.total_seconds():.6f}".rstrip("0").rstrip(".") + "s"
        case complex():
            return [json_value(value.real), json_value(value.imag)]
        case float() if not math.isfinite(value):
            return _NOT_FINITE[str(value)]
        case None | bool() | int() | float():
            return value
        case _:
            return str(value)


def _needs_folding(columns: Sequence[Column], widths: Sequence[int]) -> bool:
    """Returns whether a terminal is too narrow and folding helps."""
    if not sys.stdout.isatty():
        return False
    from shutil import get_terminal_size

    room = get_terminal_size().columns - 2 * (len(columns) - 1)
    folding = sum(column.folds for column in columns)
    rigid = sum(
        width for column, width in zip(columns, widths, strict=True) if not column.folds
    )
    return folding > 0 and sum(widths) > room >= rigid + folding * _LEAST_FOLDED


def _print_folded(columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=not column.folds,
            overflow="fold",
            min_width=_LEAST_FOLDED if column.folds else None,
        )
    for row in cells:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)


def _pad(cell: str, width: int, column: Column) -> str:
    space = " " * (width - _width(cell))
    return space + cell if column.right else cell + space


def _width(cell: str) -> int:
    if cell.isascii():
        return len(cell)
    return sum(1 + (unicodedata.east_asian_width(char) in "WF") for char in cell)
