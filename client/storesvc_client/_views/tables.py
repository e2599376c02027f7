"""Tables of what lists consist of: columns, each with its cell of a value.

The command line and notebooks draw the same tables, each in its own way.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from storesvc_client._views.texts import (
    ABSENT,
    dtype_text,
    key_text,
    number_text,
    shape_text,
    size_text,
    sizes_text,
    time_text,
    value_text,
)

if TYPE_CHECKING:
    from storesvc_client._values.models import (
        HoldInfo,
        LeafDifference,
        Tag,
        UploadInfo,
    )

T = TypeVar("T", "Tag", "HoldInfo")

SAME: Final = "same"
"""Cell of a value that is that of the cell before."""


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
    cell: Callable[[Any], str] = str
    """Returns the text of a value."""
    right: bool = False
    """True for quantities, which are aligned right."""
    shrink: Shrink = Shrink.NO
    """The way its cells are shortened."""
    is_minor: bool = False
    """True if it is hidden before all others."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of values of one kind."""

    noun: str
    """Name of a row, such as "checkpoint"."""
    columns: tuple[Column, ...]

    def row(self, value: Any) -> tuple[str, ...]:
        """Returns the texts of a value, one for each column."""
        return tuple(column.cell(value) for column in self.columns)


def field_column(
    title: str, name: str, show: Callable[[Any], str] = str, **layout: Any
) -> Column:
    """Returns a column of a field; `layout` are fields of ``Column``."""

    def cell(value: Any) -> str:
        found = getattr(value, name)
        return ABSENT if found in (None, "") else show(found)

    return Column(title, cell, **layout)


count_column: Final = partial(field_column, right=True)
size_column: Final = partial(field_column, show=size_text, right=True)
time_column: Final = partial(field_column, show=time_text, shrink=Shrink.TIME)


def metric_column(name: str) -> Column:
    """Returns a column of the values of a metric."""

    def cell(value: Any) -> str:
        metrics = value.metrics
        return number_text(metrics[name]) if name in metrics else ABSENT

    return Column(name, cell, right=True)


STEP: Final = count_column("STEP", "step")
SIZE: Final = size_column("SIZE", "size_bytes")
OWNER: Final = field_column("OWNER", "owner", shrink=Shrink.END)
RUNS: Final = (
    field_column("RUN", "name"),
    count_column("LATEST", "latest_step"),
    time_column("CREATED", "create_time"),
)

TAGS: Final = Table(
    "tag",
    (
        *(field_column("TAG", "name"), STEP, time_column("SET", "update_time")),
        Column("PROTECTED", lambda tag: "yes" if tag.protected else "no"),
    ),
)
HOLDS: Final = Table(
    "hold",
    (
        *(field_column("HOLD", "id"), STEP, OWNER),
        time_column("EXPIRES", "expire_time"),
    ),
)
DECISIONS: Final = Table(
    "checkpoint",
    (
        *(STEP, Column("KEPT", lambda decision: "yes" if decision.kept else "no")),
        Column(
            "WHY", lambda each: "; ".join(each.reasons) or ABSENT, shrink=Shrink.END
        ),
        size_column("OWN BYTES", "own_bytes"),
    ),
)
LEAVES: Final = Table(
    "leaf",
    (
        *(Column("KEY", key_text, shrink=Shrink.PREFIX), Column("DTYPE", dtype_text)),
        *(Column("SHAPE", shape_text), SIZE, count_column("CHUNKS", "chunk_count")),
    ),
)


def _writers_text(upload: "UploadInfo") -> str:
    return f"{upload.finished_writer_count} of {upload.writer_count}"


def group_by_uid(values: Iterable[T]) -> dict[str, list[T]]:
    """Returns tags or holds by the checkpoint that they are of."""
    found = defaultdict[str, list[T]](list)
    for value in values:
        found[value.uid].append(value)
    return found


def unfinished_text(upload: "UploadInfo", most: int = 4) -> str:
    """Returns the first writers that an upload waits for."""
    writers = upload.unfinished_writers
    named = ", ".join(map(str, writers[:most]))
    return f"{named}, ..." if len(writers) > most else named


UPLOADS: Final = Table(
    "upload",
    (
        *(field_column("UPLOAD", "id"), STEP),
        *(time_column("BEGAN", "create_time"), time_column("RENEWED", "renew_time")),
        *(Column("WRITERS", _writers_text), Column("WAITS FOR", unfinished_text)),
        OWNER,
    ),
)
UPLOADS_BY_RUN: Final = Table("upload", (field_column("RUN", "run"), *UPLOADS.columns))


def _before_text(leaf: "LeafDifference") -> str:
    return _array_text(leaf.base_dtype, leaf.base_shape)


def _after_text(leaf: "LeafDifference") -> str:
    after = _array_text(leaf.dtype, leaf.shape)
    return SAME if after == _before_text(leaf) else after


def _chunks_text(leaf: "LeafDifference") -> str:
    changed = f"{leaf.changed_chunk_count} of " if leaf.kind == "content" else ""
    return f"{changed}{leaf.chunk_count}"


def _array_text(dtype: str | None, shape: tuple[int, ...] | None) -> str:
    return ABSENT if dtype is None or shape is None else dtype + sizes_text(shape)


DIFFERENCES: Final = Table(
    "difference",
    (
        Column("KEY", lambda leaf: leaf.key or "''", shrink=Shrink.PREFIX),
        *(field_column("WHAT", "kind"), Column("BEFORE", _before_text)),
        Column("AFTER", _after_text, shrink=Shrink.END),
        Column("CHUNKS", _chunks_text, right=True),
    ),
)
ITEM_DIFFERENCES: Final = Table(
    "difference",
    (
        *(field_column("ITEM", "place"), field_column("WHAT", "kind")),
        Column("BEFORE", lambda i: value_text(i.base_value_kind, i.base_size_bytes)),
        Column("AFTER", lambda item: value_text(item.value_kind, item.size_bytes)),
    ),
)
