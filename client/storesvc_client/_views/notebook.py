"""HTML of the values that notebooks show: checkpoints, trees, diffs, reports, lists.

Each function returns the ``_repr_html_`` of a value. Tables have at most ``MAX_ROWS``
rows, and a line that counts the others. Every text is escaped, and there is no script,
no style sheet and no colour of our own: a table takes the colours of the page around
it, light or dark, and only its lines are half-transparent grey. Characters that do not
print, such as those that reverse a line, are shown as escapes.

``Listing`` is an iterator over rows that a server sends page by page. Showing it reads
the rows that are left and keeps them, so that a later loop yields them all the same.
``Rows`` and ``Leaves`` are a list and a dict.

Example:
    >>> table([Column("STEP", right=True)], [("100",)])[:6]
    '<table'
    >>> @listed("number")
    ... def numbers() -> Iterator[int]:
    ...     yield from (1, 2)
    >>> list(numbers())
    [1, 2]
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from html import escape
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, Self, TypeVar

from storesvc_client._views.tables import (
    DECISIONS,
    DIFFERENCES,
    HOLDS,
    ITEM_DIFFERENCES,
    LEAVES,
    RUNS,
    SIZE,
    STEP,
    TAGS,
    UPLOADS_BY_RUN,
    Column,
    Shrink,
    Table,
    field_column,
    group_by_uid,
    metric_column,
    time_column,
)
from storesvc_client._views.texts import (
    count_text,
    draw,
    grow,
    item_text,
    natural_key,
    order_metrics,
    pairs_text,
    plural,
    printable,
    size_text,
    sizes_text,
    time_text,
)
from storesvc_client.errors import StoreError

if TYPE_CHECKING:
    from storesvc_client._telemetry.reports import RestoreReport, SaveReport, SaveTrace
    from storesvc_client._values.models import (
        Checkpoint,
        Diff,
        ItemDifference,
        ItemInfo,
        LeafDifference,
        LeafInfo,
        Tag,
        Verification,
    )

_LINE = "border-bottom:1px solid rgba(128,128,128,0.4)"


def table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[str]],
    *,
    caption: str = "",
    omitted: str = "",
) -> str:
    """Returns a table.

    Args:
        columns: The columns; if no one has a title, there is no header.
        rows: A text for each column.
        caption: Text above the table; "" for none.
        omitted: Text of a last line, about rows that are left out; "" for none.
    """
    parts = ['<table style="border-collapse:collapse;color:inherit">']
    if caption:
        style = "text-align:left;caption-side:top;color:inherit;padding:2px 0"
        parts.append(f'<caption style="{style}">{text(caption)}</caption>')
    if any(column.title for column in columns):
        titles = (_cell("th", column, column.title) for column in columns)
        parts.append(f"<thead><tr>{''.join(titles)}</tr></thead>")
    parts.append("<tbody>")
    for row in rows:
        cells = zip(columns, row, strict=True)
        parts.append(f"<tr>{''.join(_cell('td', *each) for each in cells)}</tr>")
    if omitted:
        parts.append(
            f'<tr><td colspan="{len(columns)}" style="text-align:left">'
            f"{text(omitted)}</td></tr>"
        )
    parts.append("</tbody></table>")
    return "".join(parts)


def heading(title: str) -> str:
    """Returns a line above tables."""
    return f'<div style="padding:4px 0"><strong>{text(title)}</strong></div>'


def note(words: str) -> str:
    """Returns a line of plain text."""
    return f'<div style="padding:2px 0">{text(words)}</div>'


def text(words: str) -> str:
    return escape(printable(words))


def _cell(tag: str, column: Column, words: str) -> str:
    align = "right" if column.right else "left"
    style = f"text-align:{align};padding:2px 10px 2px 0;color:inherit;{_LINE}"
    if column.shrink is Shrink.DRAWING:
        style += ";white-space:pre;font-family:monospace;line-height:1.2"
    return f'<{tag} style="{style}">{text(words)}</{tag}>'


T = TypeVar("T")
P = ParamSpec("P")


class Listing(Iterator[T], Generic[T]):
    """An iterator over the rows of a list, which a notebook shows as a table."""

    def __init__(self, noun: str, rows: Iterator[T]) -> None:
        """Creates the list; nothing is read yet."""
        self._noun = noun
        self._rows = rows
        self._read_ahead = deque[T]()
        """Rows that were read to be shown, and not yielded yet."""
        self._error: StoreError | None = None
        """Error after these rows, to be raised in its place."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if self._read_ahead:
            return self._read_ahead.popleft()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return next(self._rows)

    def __repr__(self) -> str:
        return f"<iterator over {plural(self._noun)}>"

    def _repr_html_(self) -> str:
        if self._error is None:
            try:
                self._read_ahead.extend(self._rows)
            except StoreError as e:
                self._error = e
        ending = "" if self._error is None else f"the list ends here: {self._error}"
        return list_html(self._read_ahead, noun=self._noun, ending=ending)


def list_results(
    noun: str,
) -> Callable[[Callable[P, Iterator[T]]], Callable[P, Listing[T]]]:
    """Returns a decorator for functions that return an iterator: they then return a
    ``Listing``."""

    def call_listed(function: Callable[P, Iterator[T]]) -> Callable[P, Listing[T]]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Listing[T]:
            return Listing(noun, function(*args, **kwargs))

        return call

    return call_listed


class Rows(list[T]):
    """A list that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return list_html(self)


class Leaves(dict[str, "LeafInfo"]):
    """Leaves by key, which a notebook shows as a table."""

    def __repr__(self) -> str:
        size = size_text(sum(leaf.size_bytes for leaf in self.values()))
        return f"<{count_text(len(self), 'leaf')}, {size}>"

    def _repr_html_(self) -> str:
        return list_html([*self.values()], noun="leaf")


MAX_ROWS: Final = 50
"""Rows of a table that are shown."""

_PAIR: Final = (Column(""), Column(""))
_DRAWING: Final = (
    Column("", shrink=Shrink.DRAWING),
    Column(""),
    Column("", right=True),
)


def list_html(values: Sequence[object], *, noun: str = "row", ending: str = "") -> str:
    """Returns the table of a list.

    Args:
        noun: What they are, if there is none of them.
        ending: Text below the table, such as an error that ended the list.
    """
    below = note(ending) if ending else ""
    if not values:
        return note(f"no {plural(noun)}") + below
    kind = type(values[0]).__name__
    if kind == "Checkpoint":
        layout = _lay_out_checkpoints(values, {})
    else:
        layout = _LAYOUTS[kind]
    caption = count_text(len(values), layout.noun)
    return _table(layout, values, caption=caption) + below


def run_html(
    name: str,
    address: str,
    newest: Sequence["Checkpoint"],
    tags: Iterable["Tag"],
    problem: str,
) -> str:
    """Returns the table of the newest checkpoints of a run.

    Args:
        newest: Its newest checkpoints, one more than are shown if there are more.
        problem: Reason why they are not known; "" if they are.
    """
    parts = [heading(f"{name} in {address}")]
    if problem:
        parts.append(note(problem))
    elif not newest:
        parts.append(note("no checkpoints"))
    else:
        layout = _lay_out_checkpoints(newest, group_by_uid(tags))
        shown = newest[:RUN_ROWS]
        more = "older ones: run.checkpoints()" if len(newest) > RUN_ROWS else ""
        parts.append(table(layout.columns, map(layout.row, shown), omitted=more))
    return "".join(parts)


RUN_ROWS: Final = 10
"""Checkpoints that a run shows."""


def checkpoint_html(found: "Checkpoint") -> str:
    fields = {
        "committed": time_text(found.commit_time),
        "size": size_text(found.size_bytes),
        "added": f"{size_text(found.own_bytes)} of stored chunks",
        "leaves": f"{found.leaf_count:,}",
        "items": f"{found.item_count:,}",
        "chunks": f"{found.chunk_count:,}",
        "metrics": pairs_text(found.metrics),
        "labels": pairs_text(found.labels),
        "pinned": "yes" if found.pinned else "no",
    }
    if found.delete_time is not None:
        fields["deleted"] = time_text(found.delete_time)
    if found.purge_time is not None:
        fields["can be undeleted until"] = time_text(found.purge_time)
    return _fields(f"{found.run}@{found.step}", fields)


def tree_html(
    title: str, leaves: Mapping[str, "LeafInfo"], items: Sequence["ItemInfo"]
) -> str:
    """Returns the drawing of a tree of leaves, as ``storectl tree`` draws it, and the
    table of the items next to it."""
    size = size_text(sum(leaf.size_bytes for leaf in leaves.values()))
    lines = list(draw(grow(leaves.values())))
    drawing = table(
        _DRAWING, lines[:MAX_ROWS], omitted=_omitted_text(len(lines), "line", MAX_ROWS)
    )
    top = heading(f"{title}  {count_text(len(leaves), 'leaf')}, {size}")
    return top + drawing + (list_html(items) if items else "")


def items_html(title: str, items: Sequence["ItemInfo"]) -> str:
    return heading(title) + list_html(items, noun="item")


def diff_html(found: "Diff") -> str:
    """Returns the differences between two checkpoints."""
    before, after = found.base, found.checkpoint
    counts = _counts(found.differences)
    counts.append(f"{count_text(found.same_leaf_count, 'leaf')} the same")
    parts = [
        heading(f"{before.run}@{before.step} to {after.run}@{after.step}"),
        note(", ".join(counts)),
    ]
    if found.differences:
        ordered = sorted(found.differences, key=lambda one: natural_key(one.key))
        parts.append(_table(_LAYOUTS["LeafDifference"], ordered))
    if found.items:
        parts.append(note(f"items: {', '.join(_counts(found.items))}"))
        parts.append(_table(_LAYOUTS["ItemDifference"], found.items))
    return "".join(parts)


def _counts(differences: Iterable["LeafDifference | ItemDifference"]) -> list[str]:
    """Returns texts such as "2 added", in the order of the kinds."""
    kinds = Counter(one.kind for one in differences)
    return [f"{count:,} {kind}" for kind, count in sorted(kinds.items())]


def verification_html(found: "Verification") -> str:
    checkpoint = found.checkpoint
    read = f"{found.chunk_count:,} chunks, {size_text(found.stored_bytes)}"
    parts = [heading(f"{checkpoint.run}@{checkpoint.step}")]
    if found.ok:
        parts.append(note(f"{read}: no damage"))
    else:
        parts.append(note(read))
        parts.append(_table(_LAYOUTS["Damage"], found.damages, caption="damage"))
    return "".join(parts)


def trace_html(found: "SaveTrace") -> str:
    """Returns the processes of a save, with the phase that took each the longest."""
    columns = (
        *(Column("PROCESS", right=True), Column("HOST"), Column("SECONDS", right=True)),
        *(Column("SENT", right=True), Column("LONGEST PHASE")),
    )
    rows = []
    for one in found.writers:
        longest = max(one.timeline, key=lambda span: span.busy_seconds, default=None)
        rows.append(
            (
                str(one.writer),
                one.owner,
                _seconds(one.seconds),
                size_text(one.sent_bytes),
                f"{longest.name}, {_seconds(longest.busy_seconds)} s"
                if longest
                else "",
            )
        )
    took = (found.commit_time - found.create_time).total_seconds()
    return (
        heading(f"save of {found.run}@{found.step}")
        + note(f"from the begin of the upload to the commit: {_seconds(took)} s")
        + table(columns, rows)
    )


def save_report_html(report: "SaveReport") -> str:
    """Returns bytes and phases of a save."""
    fields = {
        "started": time_text(report.start_time),
        "seconds": _seconds(report.seconds),
        "blocked the caller": f"{_seconds(report.blocking_seconds)} s",
        "total": size_text(report.total_bytes),
        "sent": size_text(report.sent_bytes),
        "reused": size_text(report.reused_bytes),
    }
    if report.slowest:
        fields["slowest"] = f"{report.slowest}, {_seconds(report.slowest_seconds)} s"
    if report.last_process:
        fields["last process"] = report.last_process
    if report.needs_like:
        fields["needs like="] = ", ".join(report.needs_like)
    title = f"save of {report.run}@{report.step}"
    return _fields(title, fields) + _phases(report.timings)


def restore_report_html(report: "RestoreReport") -> str:
    """Returns bytes and phases of a restore."""
    fields = {
        "started": time_text(report.start_time),
        "seconds": _seconds(report.seconds),
        "read": size_text(report.read_bytes),
        "received": size_text(report.received_bytes),
        "returned": size_text(report.returned_bytes),
        "checksums": "compared" if report.is_verified else "none: unverified",
    }
    if report.slowest:
        fields["slowest"] = f"{report.slowest}, {_seconds(report.slowest_seconds)} s"
    if report.slowest_process is not None:
        slowest = report.slowest_process
        fields["slowest process"] = f"{slowest.process}, {_seconds(slowest.seconds)} s"
    for step, damage in report.damaged.items():
        fields[f"damaged step {step}"] = damage
    title = f"restore of {report.run}@{report.step}"
    return _fields(title, fields) + _phases(report.timings)


def _fields(title: str, fields: Mapping[str, str]) -> str:
    return heading(title) + table(_PAIR, fields.items())


def _phases(timings: Mapping[str, float]) -> str:
    longest_first = sorted(timings.items(), key=lambda pair: -pair[1])
    columns = (Column("PHASE"), Column("SECONDS", right=True))
    return table(columns, ((name, _seconds(took)) for name, took in longest_first))


def _table(layout: Table, values: Sequence[object], *, caption: str = "") -> str:
    return table(
        layout.columns,
        map(layout.row, islice(values, MAX_ROWS)),
        caption=caption,
        omitted=_omitted_text(len(values), layout.noun, MAX_ROWS),
    )


def _omitted_text(count: int, noun: str, shown: int) -> str:
    """Returns the text of a table's last line; "" if all rows are shown."""
    rest = count - shown
    return (
        f"and {rest:,} more {noun if rest == 1 else plural(noun)}" if rest > 0 else ""
    )


def _seconds(length: float) -> str:
    return f"{length:.3g}"


def _lay_out_checkpoints(
    found: Sequence[Any], tags: Mapping[str, Sequence["Tag"]]
) -> Table:
    """Returns the table of checkpoints; each metric is a column, losses first."""
    metrics = order_metrics(
        name for one in islice(found, MAX_ROWS) for name in one.metrics
    )

    named = Column("TAGS", lambda one: " ".join(t.name for t in tags[one.uid]))
    columns = (
        *(STEP, time_column("COMMITTED", "commit_time"), SIZE),
        Column("LEAVES", lambda one: f"{one.leaf_count:,}", right=True),
        *([named] if tags else []),
        *map(metric_column, metrics),
        *(_LABELS, Column("STATE", _state_text)),
    )
    return Table("checkpoint", columns)


def _state_text(one: "Checkpoint") -> str:
    states = {"pinned": one.pinned, "deleted": one.delete_time is not None}
    return ", ".join(name for name, applies in states.items() if applies)


_LABELS: Final = field_column("LABELS", "labels", pairs_text)

_LAYOUTS: Final[Mapping[str, Table]] = {
    "RunInfo": Table(
        "run",
        (*RUNS, _LABELS),
    ),
    "UploadInfo": UPLOADS_BY_RUN,
    "Tag": TAGS,
    "HoldInfo": HOLDS,
    "RetentionDecision": DECISIONS,
    "LeafInfo": LEAVES,
    "LeafDifference": DIFFERENCES,
    "ItemInfo": Table(
        "item",
        (field_column("ITEM", "name"), Column("KIND", item_text), SIZE),
    ),
    "ItemDifference": ITEM_DIFFERENCES,
    "Damage": Table(
        "damage",
        (
            Column("KEY", lambda one: one.key or "''"),
            field_column("CHUNK", "index", sizes_text),
            field_column("KIND", "kind"),
            field_column("MESSAGE", "message"),
        ),
    ),
}
"""Tables of the values that lists consist of."""
