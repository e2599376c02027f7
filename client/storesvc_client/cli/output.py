"""Prints tables and fields for people, JSON for programs, and the progress of long
operations on stderr.

Tables are plain columns, two spaces apart; in a pipe or a file a table is complete.
Unprintable characters in text from a store are escaped, so that no label can control a
terminal.

In a terminal that is too narrow, a table loses, in this order, columns without any
value, the seconds of times, the beginning that all keys have, and the ends of long
texts, for which an ellipsis stands. If that is not enough, minor columns and then the
last ones are hidden, and a note says so. Numbers, names, steps, ids and what
distinguishes keys are never cut: a part of one looks like another one.

>>> cut("loss=2.5 acc=0.5", 10, Shrink.END)
'loss=2.5 …'
"""

import os
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from os.path import commonprefix
from shutil import get_terminal_size
from threading import Timer
from typing import TYPE_CHECKING, Any, Final

import click

from storesvc_client._views.tables import (
    SAME,
    Column,
    Shrink,
    Table,
    metric_column,
)
from storesvc_client._views.texts import (
    ABSENT,
    count_text,
    json_text,
    json_value,
    numbered_keys,
    order_metrics,
    plural,
    printable,
    size_text,
)

if TYPE_CHECKING:
    from storesvc_client import DataLossError, Run
    from storesvc_client._values.models import Transfer

_DELAY_SECONDS: Final = 1.0


@contextmanager
def progress(title: str, *, total_bytes: int) -> Iterator[Callable[[int], object]]:
    """Yields a function to call with the bytes of each completed part."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich import progress as bars
    from rich.console import Console

    bar = bars.Progress(
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        bars.DownloadColumn(binary_units=True),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(title, total=total_bytes)
    timer = Timer(_DELAY_SECONDS, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda size_bytes: bar.advance(task, size_bytes)
    finally:
        timer.cancel()
        timer.join()
        if bar.live.is_started:  # else it would print an empty line if TERM is dumb
            bar.stop()


GAP: Final = "  "
"""Space between columns."""


def print_table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[str]],
    *,
    expand: bool = True,
) -> None:
    """Prints a table; without titles, it has no header. Without ``expand``, a terminal
    shows alike rows of numbered keys once, with their count before each quantity."""
    cells = [tuple(map(printable, row)) for row in rows]
    hidden: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    if sys.stdout.isatty():
        if not expand and columns[0].shrink is Shrink.PREFIX:
            cells = [*_collapsed(columns, cells)]
        room = get_terminal_size().columns
        if max(map(text_width, align_rows(columns, cells)), default=0) > room:
            table = narrow_table(columns, cells, room=room)
            columns, cells, hidden = table.columns, [*table.rows], table.hidden
            prefixes = table.prefixes
    for prefix in prefixes:
        click.echo(prefix)
    has_titles = any(column.title for column in columns)
    for number, line in enumerate(align_rows(columns, cells)):
        click.echo(_bold(line) if has_titles and number == 0 else line)
    if hidden:
        titles = ", ".join(filter(None, hidden)) or "all columns"
        print_note(f"no room for {titles}; a wider terminal or a pipe shows all")


def print_values(
    columns: Sequence[Column], values: Iterable[Any], *, expand: bool = True
) -> None:
    """Prints the table of values, as ``print_table`` does."""
    rows = ([column.cell(value) for column in columns] for value in values)
    print_table(columns, rows, expand=expand)


def _collapsed(
    columns: Sequence[Column], rows: Sequence[Sequence[str]]
) -> Iterator[tuple[str, ...]]:
    likeness = [tuple(row[1:]) for row in rows]
    for series in numbered_keys([row[0] for row in rows], likeness):
        count = len(series.indices)
        cells = zip(columns[1:], likeness[series.indices[0]], strict=True)
        texts = (
            f"{count:,} x {cell}" if column.right and count > 1 else cell
            for column, cell in cells
        )
        yield series.text, *texts


def _bold(text: str) -> str:
    is_plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return text if is_plain else click.style(text, bold=True)


def align_rows(
    columns: Sequence[Column], rows: Sequence[Sequence[str]]
) -> Iterator[str]:
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
    click.echo(json_text(json_value(value), indent=2))


def print_result(document: object, text: str, *, as_json: bool) -> None:
    """Prints a result: a line for people, or its JSON document for programs."""
    if as_json:
        print_json(document)
    else:
        click.echo(printable(text))


def print_note(text: str) -> None:
    """Prints a remark on stderr, so that it does not enter a pipe."""
    click.echo(f"storectl: {printable(text)}", err=True)


def report(errors: "Sequence[DataLossError]") -> None:
    """Prints errors of damaged records on stderr, and raises the last one."""
    for error in errors[:-1]:
        print_note(str(error))
    if errors:
        raise errors[-1]


@dataclass(frozen=True, slots=True)
class Listing:
    """The layout of a list of items of one kind."""

    table: Table
    document: Callable[[Any], object] = field(default=lambda item: item)
    """Returns the value of an item that JSON shows."""
    has_metrics: bool = False
    """True if each metric of the items is a column in front of the last one."""

    def show(
        self,
        items: Iterable[Any],
        *,
        as_json: bool,
        limit: int | None = None,
        damaged: "Sequence[DataLossError]" = (),
        is_selection: bool = False,
        absence: Callable[[], str] | None = None,
        expand: bool = False,
    ) -> None:
        """Prints the items; notes on stderr what it leaves out.

        Args:
            limit: Maximum number of items, including damaged ones; None prints all.
            is_selection: Whether the items are chosen from a list that is read beyond
                them: then damaged records of it do not count.
            damaged: Errors of damaged records; grows while the items are read.
            absence: Returns the note of an empty list, once the items are read, or
                raises why there cannot be any.
            expand: Whether each of alike rows of numbered keys is shown in a terminal.

        Raises:
            DataLossError: The last of ``damaged``; the others are printed before.
        """
        shown: list[Any] = []
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
            note = absence() if absence else f"no {plural(self.table.noun)}"
        if as_json:
            print_json([*map(self.document, shown)])
        elif shown:
            print_values(self._columns(shown), shown, expand=expand)
        elif note:
            print_note(note)
        if rest:
            known = f"of {len(items):,} " if isinstance(items, Sized) else ""
            noun = (
                self.table.noun if limit == 1 and not known else plural(self.table.noun)
            )
            print_note(f"{limit:,} {known}{noun} shown, there are more")
        report(reported)

    def _columns(self, items: Sequence[Any]) -> Sequence[Column]:
        """Returns the columns, with one for each metric of the items."""
        if not self.has_metrics:
            return self.table.columns
        names = order_metrics(name for each in items for name in each.metrics)
        *columns, last = self.table.columns
        return [*columns, *map(metric_column, names), last]


def _pad(cell: str, width: int, column: Column) -> str:
    space = " " * (width - text_width(cell))
    return space + cell if column.right else cell + space


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


def narrow_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], *, room: int
) -> Narrowed:
    """Returns a table that fits, or has a single column."""
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
    ends = accumulate(map(char_width, text))
    return text[: sum(end < width for end in ends)] + _ELLIPSIS


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


def show_transfers(
    transfers: "Iterable[Transfer]", *, into: "Run | None", as_json: bool
) -> "list[Transfer]":
    """Performs transfers, and prints each, a line as soon as it is done, or one JSON
    document at the end, also if one of them fails.

    A note on stderr names the run: a wrong name creates one, or mixes two; none does
    for ``into=None``, of many runs.
    """
    done: list[Transfer] = []
    note = _note(into) if into is not None else ""
    try:
        for transfer in transfers:
            if note and transfer.is_new:
                print_note(note)
                note = ""
            done.append(transfer)
            if not as_json:
                name = f"{transfer.checkpoint.run}@{transfer.checkpoint.step}"
                text = "was there already"
                if transfer.is_new:
                    size = size_text(transfer.checkpoint.size_bytes)
                    sent = size_text(transfer.sent_bytes)
                    text = f"{size}, {sent} stored{_unverified_text(transfer)}"
                click.echo(printable(f"{name}: {text}"))
    finally:
        if as_json and done:
            print_json(done)
    if not done and as_json:
        print_json([])
    elif not done:
        click.echo("storectl: no checkpoints", err=True)
    return done


def _note(run: "Run") -> str:
    """Returns what the first new checkpoint does to a run, before it is there."""
    from storesvc_client import NotFoundError

    try:
        count = sum(1 for _ in run.checkpoints(on_damage=lambda _: None))
    except NotFoundError:
        return f"created run {run.name}"
    return f"added to run {run.name}, which had {count_text(count, 'checkpoint')}"


def _unverified_text(transfer: "Transfer") -> str:
    """Returns what was not compared with checksums of the source; "" for nothing."""
    if transfer.is_verified:
        return ""
    if not transfer.verified_count:
        return ", source has no checksums"
    total = transfer.checkpoint.leaf_count + transfer.checkpoint.item_count
    return (
        f", {transfer.verified_count:,} of {total:,} leaves and items compared with "
        "checksums, source has none of the others"
    )


def step_list(text: str) -> list[int]:
    """Returns the steps of an option; a type of click parameters."""
    try:
        steps = [int(part) for part in text.split(",")]
    except ValueError:
        steps = []
    if not steps or min(steps) < 0:
        raise click.BadParameter(f"{text!r}: expected steps, such as 100,200")
    return steps
