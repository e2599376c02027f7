"""HTML of the values that notebooks show: checkpoints, trees, diffs, reports, lists.

Each function returns the ``_repr_html_`` of a value. Tables have at most ``MAX_ROWS``
rows, and a line that counts the others.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, Final, NamedTuple

from storesvc_client._values.durations import duration_text
from storesvc_client._values.findings import (
    Damage,
    Diff,
    ItemDifference,
    LeafDifference,
    Verification,
)
from storesvc_client._values.html import Column, heading, note, table
from storesvc_client._values.leaf_tree import draw, grow
from storesvc_client._values.natural_order import natural_key
from storesvc_client._values.reports import RestoreReport, SaveReport, SaveTrace
from storesvc_client._values.texts import (
    ABSENT,
    count_text,
    dtype_text,
    item_text,
    key_text,
    number_text,
    order_metrics,
    pairs_text,
    plural,
    shape_text,
    size_text,
    sizes_text,
    time_text,
    value_text,
)
from storesvc_client._values.values import (
    Checkpoint,
    HoldInfo,
    ItemInfo,
    LeafInfo,
    RetentionDecision,
    RunInfo,
    Tag,
    UploadInfo,
)

MAX_ROWS: Final = 50
"""Rows of a table that are shown."""

_PAIR: Final = (Column(""), Column(""))
_DRAWING: Final = (Column("", drawn=True), Column(""), Column("", right=True))


class _Layout(NamedTuple):
    """Table of values of one kind."""

    noun: str
    columns: tuple[Column, ...]
    row: Callable[[Any], tuple[str, ...]]


def list_html(values: Sequence[object], *, noun: str = "row", ending: str = "") -> str:
    """Returns the table of a list.

    Args:
        values: Values of one kind.
        noun: What they are, if there is none of them.
        ending: Text below the table, such as an error that ended the list.
    """
    below = note(ending) if ending else ""
    if not values:
        return note(f"no {plural(noun)}") + below
    if isinstance(values[0], Checkpoint):
        layout = _lay_out_checkpoints(values, {})
    else:
        layout = _LAYOUTS[type(values[0])]
    caption = count_text(len(values), layout.noun)
    return _table(layout, values, caption=caption) + below


def run_html(
    name: str,
    address: str,
    newest: Sequence[Checkpoint],
    tags: Iterable[Tag],
    problem: str,
) -> str:
    """Returns the table of the newest checkpoints of a run.

    Args:
        name: Name of the run.
        address: The store.
        newest: Its newest checkpoints, one more than are shown if there are more.
        tags: Its tags.
        problem: Reason why they are not known; "" if they are.
    """
    parts = [heading(f"{name} in {address}")]
    if problem:
        parts.append(note(problem))
    elif not newest:
        parts.append(note("no checkpoints"))
    else:
        names = defaultdict[str, list[str]](list)
        for tag in tags:
            names[tag.uid].append(tag.name)
        layout = _lay_out_checkpoints(newest, names)
        shown = newest[:RUN_ROWS]
        more = "older ones: run.checkpoints()" if len(newest) > RUN_ROWS else ""
        parts.append(table(layout.columns, map(layout.row, shown), omitted=more))
    return "".join(parts)


RUN_ROWS: Final = 10
"""Checkpoints that a run shows."""


def checkpoint_html(found: Checkpoint) -> str:
    """Returns the fields of a checkpoint."""
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
    title: str, leaves: Mapping[str, LeafInfo], items: Sequence[ItemInfo]
) -> str:
    """Returns the drawing of a tree of leaves, as ``storectl tree`` draws it, and the
    table of the items next to it."""
    size = size_text(sum(leaf.size_bytes for leaf in leaves.values()))
    lines = list(draw(grow(leaves.values())))
    drawing = table(
        _DRAWING, lines[:MAX_ROWS], omitted=_omitted(len(lines), "line", MAX_ROWS)
    )
    top = heading(f"{title}  {count_text(len(leaves), 'leaf')}, {size}")
    return top + drawing + (list_html(items) if items else "")


def items_html(title: str, items: Sequence[ItemInfo]) -> str:
    """Returns the table of the items of a checkpoint."""
    return heading(title) + list_html(items, noun="item")


def leaves_html(leaves: Mapping[str, LeafInfo]) -> str:
    """Returns the table of leaves."""
    return list_html([*leaves.values()], noun="leaf")


def diff_html(found: Diff) -> str:
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
        parts.append(_table(_LAYOUTS[LeafDifference], ordered))
    if found.items:
        parts.append(note(f"items: {', '.join(_counts(found.items))}"))
        parts.append(_table(_LAYOUTS[ItemDifference], found.items))
    return "".join(parts)


def _counts(differences: Iterable[LeafDifference | ItemDifference]) -> list[str]:
    """Returns texts such as "2 added", in the order of the kinds."""
    kinds = Counter(one.kind for one in differences)
    return [f"{count:,} {kind}" for kind, count in sorted(kinds.items())]


def verification_html(found: Verification) -> str:
    """Returns the findings of a verification."""
    checkpoint = found.checkpoint
    read = f"{found.chunk_count:,} chunks, {size_text(found.stored_bytes)}"
    parts = [heading(f"{checkpoint.run}@{checkpoint.step}")]
    if found.ok:
        parts.append(note(f"{read}: no damage"))
    else:
        parts.append(note(read))
        parts.append(_table(_LAYOUTS[Damage], found.damages, caption="damage"))
    return "".join(parts)


def trace_html(found: SaveTrace) -> str:
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


def save_report_html(report: SaveReport) -> str:
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


def restore_report_html(report: RestoreReport) -> str:
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


def _table(layout: _Layout, values: Sequence[object], *, caption: str = "") -> str:
    return table(
        layout.columns,
        map(layout.row, islice(values, MAX_ROWS)),
        caption=caption,
        omitted=_omitted(len(values), layout.noun, MAX_ROWS),
    )


def _omitted(count: int, noun: str, shown: int) -> str:
    """Returns the text of a table's last line; "" if all rows are shown."""
    rest = count - shown
    return (
        f"and {rest:,} more {noun if rest == 1 else plural(noun)}" if rest > 0 else ""
    )


def _seconds(length: float) -> str:
    return f"{length:.3g}"


def _time(moment: datetime | None) -> str:
    return ABSENT if moment is None else time_text(moment)


def _array(dtype: str | None, shape: Iterable[int] | None) -> str:
    return ABSENT if dtype is None or shape is None else dtype + sizes_text(shape)


def _lay_out_checkpoints(
    found: Sequence[Any], tags: Mapping[str, Sequence[str]]
) -> _Layout:
    """Returns the table of checkpoints; each metric is a column, losses first."""
    metrics = order_metrics(
        name for one in islice(found, MAX_ROWS) for name in one.metrics
    )

    def row(one: Checkpoint) -> tuple[str, ...]:
        states = {"pinned": one.pinned, "deleted": one.delete_time is not None}
        texts = {name: number_text(value) for name, value in one.metrics.items()}
        return (
            str(one.step),
            time_text(one.commit_time),
            size_text(one.size_bytes),
            f"{one.leaf_count:,}",
            *([" ".join(tags.get(one.uid, ()))] if tags else []),
            *(texts.get(name, ABSENT) for name in metrics),
            pairs_text(one.labels),
            ", ".join(name for name, applies in states.items() if applies),
        )

    columns = (
        *(_STEP, Column("COMMITTED"), _SIZE, Column("LEAVES", right=True)),
        *([Column("TAGS")] if tags else []),
        *(Column(name, right=True) for name in metrics),
        *(Column("LABELS"), Column("STATE")),
    )
    return _Layout("checkpoint", columns, row)


def _run_row(one: RunInfo) -> tuple[str, ...]:
    latest = ABSENT if one.latest_step is None else str(one.latest_step)
    return one.name, latest, time_text(one.create_time), pairs_text(one.labels)


def _upload_row(one: UploadInfo) -> tuple[str, ...]:
    writers = f"{one.finished_writer_count} of {one.writer_count}"
    return one.run, str(one.step), one.state, writers, one.owner, _time(one.renew_time)


def _difference_row(one: LeafDifference) -> tuple[str, ...]:
    chunks = f"{one.chunk_count:,}"
    if one.kind == "content":
        chunks = f"{one.changed_chunk_count:,} of {chunks}"
    return (
        one.key or "''",
        one.kind,
        _array(one.base_dtype, one.base_shape),
        _array(one.dtype, one.shape),
        chunks,
    )


def _item_row(one: ItemInfo) -> tuple[str, ...]:
    return one.name, item_text(one), size_text(one.size_bytes)


def _item_difference_row(one: ItemDifference) -> tuple[str, ...]:
    return (
        one.place,
        one.kind,
        value_text(one.base_value_kind, one.base_size_bytes),
        value_text(one.value_kind, one.size_bytes),
    )


def _leaf_row(one: LeafInfo) -> tuple[str, ...]:
    return (
        key_text(one),
        dtype_text(one),
        shape_text(one),
        size_text(one.size_bytes),
        f"{one.chunk_count:,}",
    )


def _decision_row(one: RetentionDecision) -> tuple[str, ...]:
    kept = "kept" if one.kept else "deleted"
    return str(one.step), kept, ", ".join(one.reasons), size_text(one.own_bytes)


_STEP: Final = Column("STEP", right=True)
_SIZE: Final = Column("SIZE", right=True)

_LAYOUTS: Final[Mapping[type, _Layout]] = {
    RunInfo: _Layout(
        "run",
        (
            *(Column("RUN"), Column("LATEST", right=True)),
            *(Column("CREATED"), Column("LABELS")),
        ),
        _run_row,
    ),
    UploadInfo: _Layout(
        "upload",
        (
            *(Column("RUN"), _STEP, Column("STATE"), Column("FINISHED WRITERS")),
            *(Column("OWNER"), Column("RENEWED")),
        ),
        _upload_row,
    ),
    Tag: _Layout(
        "tag",
        (Column("TAG"), _STEP, Column("PROTECTED"), Column("UPDATED")),
        lambda one: (
            one.name,
            str(one.step),
            "yes" if one.protected else "no",
            time_text(one.update_time),
        ),
    ),
    HoldInfo: _Layout(
        "hold",
        (Column("HOLD"), _STEP, Column("OWNER"), Column("TTL"), Column("EXPIRES")),
        lambda one: (
            one.id,
            str(one.step),
            one.owner,
            duration_text(one.ttl),
            time_text(one.expire_time),
        ),
    ),
    RetentionDecision: _Layout(
        "checkpoint",
        (_STEP, Column("KEPT"), Column("REASONS"), Column("OWN BYTES", right=True)),
        _decision_row,
    ),
    LeafInfo: _Layout(
        "leaf",
        (
            *(Column("KEY"), Column("DTYPE"), Column("SHAPE"), _SIZE),
            Column("CHUNKS", right=True),
        ),
        _leaf_row,
    ),
    LeafDifference: _Layout(
        "difference",
        (
            *(Column("KEY"), Column("CHANGE"), Column("BEFORE"), Column("AFTER")),
            Column("CHUNKS", right=True),
        ),
        _difference_row,
    ),
    ItemInfo: _Layout("item", (Column("ITEM"), Column("KIND"), _SIZE), _item_row),
    ItemDifference: _Layout(
        "difference",
        (Column("ITEM"), Column("CHANGE"), Column("BEFORE"), Column("AFTER")),
        _item_difference_row,
    ),
    Damage: _Layout(
        "damage",
        (Column("KEY"), Column("CHUNK"), Column("KIND"), Column("MESSAGE")),
        lambda one: (one.key or "''", sizes_text(one.index), one.kind, one.message),
    ),
}
"""Tables of the values that lists consist of."""
