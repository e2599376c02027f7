"""Tables of what lists consist of: columns, and the row of a value.

The command line and notebooks draw the same tables, each in its own way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from storesvc_client._views.texts import (
    ABSENT,
    dtype_text,
    key_text,
    shape_text,
    size_text,
    sizes_text,
    time_text,
    value_text,
)

if TYPE_CHECKING:
    from storesvc_client._values.models import (
        HoldInfo,
        ItemDifference,
        LeafDifference,
        LeafInfo,
        RetentionDecision,
        Tag,
        UploadInfo,
    )

T_contra = TypeVar("T_contra", contravariant=True)

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
    right: bool = False
    """True for quantities, which are aligned right."""
    shrink: Shrink = Shrink.NO
    """The way its cells are shortened."""
    is_minor: bool = False
    """True if it is hidden before all others."""


@dataclass(frozen=True, slots=True)
class Table(Generic[T_contra]):
    """A table of values of one kind."""

    noun: str
    """Name of a row, such as "checkpoint"."""
    columns: tuple[Column, ...]
    row: Callable[[T_contra], tuple[str, ...]]
    """Returns the texts of a value, one for each column."""


STEP: Final = Column("STEP", right=True)
SIZE: Final = Column("SIZE", right=True)
CHUNKS: Final = Column("CHUNKS", right=True)
OWNER: Final = Column("OWNER", shrink=Shrink.END)

TAGS: Final["Table[Tag]"] = Table(
    "tag",
    (Column("TAG"), STEP, Column("SET", shrink=Shrink.TIME), Column("PROTECTED")),
    lambda tag: (
        tag.name,
        str(tag.step),
        time_text(tag.update_time),
        "yes" if tag.protected else "no",
    ),
)
HOLDS: Final["Table[HoldInfo]"] = Table(
    "hold",
    (Column("HOLD"), STEP, OWNER, Column("EXPIRES", shrink=Shrink.TIME)),
    lambda hold: (
        hold.id,
        str(hold.step),
        hold.owner or ABSENT,
        time_text(hold.expire_time),
    ),
)
DECISIONS: Final["Table[RetentionDecision]"] = Table(
    "checkpoint",
    (
        *(STEP, Column("KEPT"), Column("WHY", shrink=Shrink.END)),
        Column("OWN BYTES", right=True),
    ),
    lambda decision: (
        str(decision.step),
        "yes" if decision.kept else "no",
        "; ".join(decision.reasons) or ABSENT,
        size_text(decision.own_bytes),
    ),
)
LEAVES: Final["Table[LeafInfo]"] = Table(
    "leaf",
    (
        *(Column("KEY", shrink=Shrink.PREFIX), Column("DTYPE"), Column("SHAPE")),
        *(SIZE, CHUNKS),
    ),
    lambda leaf: (
        key_text(leaf),
        dtype_text(leaf),
        shape_text(leaf),
        size_text(leaf.size_bytes),
        str(leaf.chunk_count),
    ),
)

_SHOWN_WRITERS: Final = 4


def _upload_row(upload: "UploadInfo") -> tuple[str, ...]:
    writers = upload.unfinished_writers
    named = ", ".join(map(str, writers[:_SHOWN_WRITERS]))
    return (
        upload.id,
        str(upload.step),
        time_text(upload.create_time),
        time_text(upload.renew_time),
        f"{upload.finished_writer_count} of {upload.writer_count}",
        f"{named}, ..." if len(writers) > _SHOWN_WRITERS else named,
        upload.owner or ABSENT,
    )


UPLOADS: Final = Table(
    "upload",
    (
        *(Column("UPLOAD"), STEP, Column("BEGAN", shrink=Shrink.TIME)),
        *(Column("RENEWED", shrink=Shrink.TIME), Column("WRITERS")),
        *(Column("WAITS FOR"), OWNER),
    ),
    _upload_row,
)
UPLOADS_BY_RUN: Final["Table[UploadInfo]"] = Table(
    "upload",
    (Column("RUN"), *UPLOADS.columns),
    lambda upload: (upload.run, *_upload_row(upload)),
)


def _difference_row(leaf: "LeafDifference") -> tuple[str, ...]:
    chunks = str(leaf.chunk_count)
    if leaf.kind == "content":
        chunks = f"{leaf.changed_chunk_count} of {chunks}"
    before = _array_text(leaf.base_dtype, leaf.base_shape)
    after = _array_text(leaf.dtype, leaf.shape)
    after = SAME if after == before else after
    return leaf.key or "''", leaf.kind, before, after, chunks


def _array_text(dtype: str | None, shape: tuple[int, ...] | None) -> str:
    return ABSENT if dtype is None or shape is None else dtype + sizes_text(shape)


DIFFERENCES: Final = Table(
    "difference",
    (
        *(Column("KEY", shrink=Shrink.PREFIX), Column("WHAT"), Column("BEFORE")),
        *(Column("AFTER", shrink=Shrink.END), CHUNKS),
    ),
    _difference_row,
)
ITEM_DIFFERENCES: Final["Table[ItemDifference]"] = Table(
    "difference",
    (Column("ITEM"), Column("WHAT"), Column("BEFORE"), Column("AFTER")),
    lambda item: (
        item.place,
        item.kind,
        value_text(item.base_value_kind, item.base_size_bytes),
        value_text(item.value_kind, item.size_bytes),
    ),
)
