"""What storectl prints: tables and fields for people, JSON for programs.

Tables are plain columns, two spaces apart, and nothing is ever cut. Only a terminal
that is too narrow gets cells that break over lines, where that helps. Text that came
from a store is shown with what cannot be printed escaped, so no label can steer a
terminal.

JSON follows protobuf's mapping where JSON has no word of its own: times are
RFC 3339 in UTC, lengths of time are seconds such as "90s", NaN and the infinities are
the strings "NaN", "Infinity" and "-Infinity", complex numbers are [real, imaginary].
Sizes are in bytes.
"""

import json
import math
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime, timedelta
from shlex import quote
from typing import Any, Final, assert_never

import click

ABSENT: Final = "-"
"""Stands in a cell that has nothing to say."""

_LEAST_FOLDED: Final = 16
"""Characters of a column below which folding its cells makes them unreadable."""

_NOT_FINITE: Final = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_UNITS: Final = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str
    right: bool = False
    """Whether it holds quantities, which line up at their right ends."""
    folds: bool = False
    """Whether its cells may break over lines where a terminal is too narrow."""


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table; one without titles has no header."""
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


def print_fields(title: str, pairs: Iterable[tuple[str, str]]) -> None:
    """Prints what is known about one thing."""
    known = list(pairs)
    width = max(len(name) for name, _ in known)
    click.secho(printable(title), bold=True)
    for name, value in known:
        click.echo(f"  {name:<{width}}  {printable(value)}".rstrip())


def print_json(value: object) -> None:
    """Prints one JSON document."""
    click.echo(json.dumps(json_value(value), indent=2, ensure_ascii=False))


def print_note(text: str) -> None:
    """Prints a remark beside the output, where no pipe takes it up."""
    click.echo(f"storectl: {text}", err=True)


def json_value(value: Any) -> Any:
    """Returns the value in the types that JSON has."""
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


def size_text(size_bytes: int) -> str:
    """Returns a size as people say it, such as "1.2 GiB"."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    exponent = min((size_bytes.bit_length() - 1) // 10, len(_UNITS))
    return f"{size_bytes / 1024**exponent:.1f} {_UNITS[exponent - 1]}"


def time_text(time: datetime) -> str:
    """Returns a time as this machine's clock shows it."""
    return time.astimezone().isoformat(sep=" ", timespec="seconds")


def count_text(count: int, noun: str) -> str:
    """Returns "1 leaf", "2 leaves"."""
    return f"{count:,} {noun if count == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """Returns "leaves" for "leaf"."""
    return {"leaf": "leaves"}.get(noun, f"{noun}s")


def number_text(value: complex | None) -> str:
    """Returns a number, short; integers stay whole."""
    match value:
        case None:
            return ABSENT
        case bool() | int():
            return str(value)
        case float() | complex():
            return f"{value:.6g}"
        case _:
            assert_never(value)


def pairs_text(pairs: Mapping[str, str | float]) -> str:
    """Returns labels or metrics in one line, by name."""
    texts = (
        f"{name}={quote(value) if isinstance(value, str) else number_text(value)}"
        for name, value in sorted(pairs.items())
    )
    return " ".join(texts) or ABSENT


def printable(text: str) -> str:
    """Returns the text with escapes for what a terminal would obey or hide."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )


def _needs_folding(columns: Sequence[Column], widths: Sequence[int]) -> bool:
    """Returns whether a terminal is too narrow, and folding helps."""
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
