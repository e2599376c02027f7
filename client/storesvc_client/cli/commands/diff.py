"""``storectl diff``: compares two checkpoints."""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import click

from storesvc_client._values.texts import ABSENT, count_text, sizes_text, value_text
from storesvc_client.cli.arguments import (
    foreign_options,
    json_option,
    readable_whole,
)
from storesvc_client.cli.completion import Part, complete_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.foreign import ForeignOptions
from storesvc_client.cli.output import SAME, Column, Shrink, print_json, print_table
from storesvc_client.cli.paths import CheckpointPath, is_foreign

if TYPE_CHECKING:
    from storesvc_client import Diff, ItemDifference, LeafDifference
    from storesvc_client._foreign.comparison import Comparison

_COLUMNS: Final = (
    Column("KEY", shrink=Shrink.PREFIX),
    Column("WHAT"),
    Column("BEFORE"),
    Column("AFTER", shrink=Shrink.END),
    Column("CHUNKS", right=True),
)

_ITEM_COLUMNS: Final = (
    Column("ITEM"),
    Column("WHAT"),
    Column("BEFORE"),
    Column("AFTER"),
)


@click.command()
@click.argument(
    "before",
    type=readable_whole,
    metavar="BEFORE",
    shell_complete=complete_path(Part.CHECKPOINT, Part.CHECKPOINT),
)
@click.argument(
    "after",
    type=readable_whole,
    metavar="AFTER",
    shell_complete=complete_path(Part.CHECKPOINT, Part.CHECKPOINT),
)
@foreign_options
@json_option
@pass_connection
def diff(
    connection: Connection,
    *,
    before: CheckpointPath,
    after: CheckpointPath,
    options: ForeignOptions,
    as_json: bool,
) -> None:
    """Compare two checkpoints, leaf by leaf and item by item.

    Reads no data: contents are compared by their digests. Checkpoints of other projects
    have none: with one of them, all elements are read and compared. WHAT is "added",
    "removed", "shape", "dtype" or "content"; "unknown" if a leaf was saved in other
    chunks, whose digests cannot be compared; for an item also "kind", as from text to
    JSON. CHUNKS counts the chunks of the leaf; for content, the chunks that differ.

    \b
    Examples:
      storectl diff prod/llama-8b@500 prod/llama-8b@latest
      storectl diff prod/llama-8b@500 prod/llama-8b-tuned@20 --json
      storectl diff orbax:gs://bucket/run@500 prod/llama-8b@500
    """
    options.check(before, after)
    if is_foreign(before.run) or is_foreign(after.run):
        found: Diff | Comparison = _compared(connection, before, after, options)
    else:
        with connection.open() as client:
            run, of = client.run(before.run), client.run(after.run)
            found = run.diff(before.which, after.which, of=of)
    if as_json:
        print_json(found)
        return
    if found.differences:
        print_table(_COLUMNS, map(_row, found.differences))
    if found.items:
        print_table(_ITEM_COLUMNS, map(_item_row, found.items))
    click.echo(_sums(found))


def _compared(
    connection: Connection,
    before: CheckpointPath,
    after: CheckpointPath,
    options: ForeignOptions,
) -> "Comparison":
    """Compares elements, as checkpoints of other projects have no digests."""
    from storesvc_client._foreign.comparison import compare

    with (
        connection.open_for(before, options.of(before)) as old,
        connection.open_for(after, options.of(after)) as new,
    ):
        base = old.run(before.run).open(before.which)
        return compare(base, new.run(after.run).open(after.which))


def _row(leaf: "LeafDifference") -> tuple[str, ...]:
    chunks = str(leaf.chunk_count)
    if leaf.kind == "content":
        chunks = f"{leaf.changed_chunk_count} of {chunks}"
    before = _array_text(leaf.base_dtype, leaf.base_shape)
    after = _array_text(leaf.dtype, leaf.shape)
    return (
        leaf.key or "''",
        leaf.kind,
        before,
        SAME if after == before else after,
        chunks,
    )


def _item_row(item: "ItemDifference") -> tuple[str, ...]:
    return (
        item.place,
        item.kind,
        value_text(item.base_value_kind, item.base_size_bytes),
        value_text(item.value_kind, item.size_bytes),
    )


def _array_text(dtype: str | None, shape: tuple[int, ...] | None) -> str:
    return ABSENT if dtype is None or shape is None else dtype + sizes_text(shape)


def _sums(found: "Diff | Comparison") -> str:
    counts = _counts(leaf.kind for leaf in found.differences)
    same = f"{count_text(found.same_leaf_count, 'leaf')} the same"
    text = f"{counts}; {same}" if counts else f"no leaf differs; {same}"
    if not found.items:
        return text
    return f"{text}; items: {_counts(item.kind for item in found.items)}"


def _counts(kinds: Iterable[str]) -> str:
    counted = sorted(Counter(kinds).items())
    return ", ".join(f"{count:,} {kind}" for kind, count in counted)
