"""``storectl ls`` lists runs, checkpoints or leaves; ``tree`` draws the leaves."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from storesvc_client._views.tables import Column, Shrink
from storesvc_client._views.texts import (
    Line,
    Node,
    count_text,
    draw,
    grow,
    item_text,
    plural,
    size_text,
)
from storesvc_client.cli.arguments import (
    WholeNumber,
    expand_option,
    foreign_options,
    json_option,
    readable_checkpoint,
    readable_path,
)
from storesvc_client.cli.completion import (
    Part,
    complete_condition,
    complete_order,
    complete_path,
)
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.errors import check_namespace
from storesvc_client.cli.leaves import Selection, select_leaves, unread_notes
from storesvc_client.cli.output import json_value, print_json, print_note, print_table
from storesvc_client.cli.parent_details import View, read_view
from storesvc_client.cli.paths import (
    CheckpointPath,
    ForeignOptions,
    ForeignStore,
    LeafPath,
    NamespacePath,
    Readable,
    RunPath,
    StorePath,
    is_foreign,
)

if TYPE_CHECKING:
    from storesvc_client import DataLossError
    from storesvc_client.cli.records import RecordSelection

_COLUMNS: Final = (
    Column("", shrink=Shrink.DRAWING),
    Column(""),
    Column("", right=True),
)


@click.command()
@click.argument(
    "path",
    type=readable_checkpoint,
    metavar="PATH",
    shell_complete=complete_path(Part.CHECKPOINT, Part.LEAF),
)
@click.option(
    "--depth",
    type=WholeNumber(min=1),
    metavar="N",
    help="Draw N levels; the last one counts the leaves below it.",
)
@expand_option
@foreign_options
@json_option
@pass_connection
def tree(
    connection: Connection,
    *,
    path: CheckpointPath | LeafPath,
    depth: int | None,
    expand: bool,
    options: ForeignOptions,
    as_json: bool,
) -> None:
    """Draw the leaves of a checkpoint as a tree.

    Its items are listed below them. A node with a single child shares a line with it.
    Numbered siblings with the same content are drawn once: "layer_{0..11}  12 x 8
    leaves" stands for twelve subtrees of eight leaves, and the lines below it show the
    first of them. "{0..30..2}" are the even numbers up to 30.

    \b
    Examples:
      storectl tree prod/llama-8b@latest
      storectl tree prod/llama-8b@500 --depth 2
      storectl tree prod/llama-8b@500 --expand
      storectl tree 'prod/llama-8b@500:opt_state/**'
    """
    with connection.open_for(path, options) as client:
        selection = select_leaves(client, path)
    if as_json:
        nodes = grow(selection.leaves)
        unread = {"unread": dict(selection.unread)} if selection.unread else {}
        document = {
            "name": str(selection.checkpoint),
            "leaf_count": len(selection.leaves),
            "size_bytes": selection.size_bytes,
            "children": [_node_document(node, depth=depth) for node in nodes],
            "items": [json_value(item) for item in selection.items],
        }
        print_json(unread | document)
        return
    count = count_text(len(selection.leaves), "leaf")
    top = (str(selection.checkpoint), count, size_text(selection.size_bytes))
    drawing = draw(grow(selection.leaves), depth=depth, expand=expand)
    lines = [top, *drawing, *_items(selection)]
    print_table(_COLUMNS, lines)
    for note in unread_notes(selection.unread):
        print_note(note)


def _items(selection: Selection) -> Iterator[Line]:
    """Yields the lines of the items."""
    items = selection.items
    if items:
        total = sum(item.size_bytes for item in items)
        yield "items", count_text(len(items), "item"), size_text(total)
    for item in items:
        branch = "└── " if item is items[-1] else "├── "
        yield f"{branch}{item.name}", item_text(item), size_text(item.size_bytes)


def _node_document(node: Node, *, depth: int | None) -> dict[str, Any]:
    """Returns a node as JSON, which contains every one of similar siblings."""
    document = {
        "name": node.name,
        "leaf_count": node.leaf_count,
        "size_bytes": node.size_bytes,
    }
    if node.leaf:
        return document | {
            "key": node.leaf.key,
            "kind": node.leaf.kind,
            "dtype": node.leaf.dtype,
            "shape": node.leaf.shape,
            "prng_impl": node.leaf.prng_impl,
        }
    if depth == 1:
        return document
    below = depth and depth - 1
    children = [_node_document(child, depth=below) for child in node.children]
    return document | {"children": children}


@click.command()
@click.argument(
    "path",
    type=readable_path,
    metavar="[PATH]",
    required=False,
    shell_complete=complete_path(Part.NAMESPACE, Part.LEAF),
)
@click.option(
    "--where",
    multiple=True,
    metavar="CONDITION",
    shell_complete=complete_condition,
    help="List only records that match, such as 'loss<2.5'; all, if repeated.",
)
@click.option(
    "--sort",
    metavar="FIELD",
    shell_complete=complete_order,
    help="Sort by a field, the lowest value first; -FIELD: the highest first.",
)
@click.option(
    "--limit",
    type=WholeNumber(min=1),
    metavar="N",
    help="Print the first N only; a line on stderr says if there are more.",
)
@click.option(
    "--deleted",
    is_flag=True,
    help="List the deleted checkpoints of a run, and when they are purged.",
)
@expand_option
@foreign_options
@json_option
@pass_connection
def ls(
    connection: Connection,
    *,
    path: StorePath | None,
    where: Sequence[str],
    sort: str | None,
    limit: int | None,
    deleted: bool,
    expand: bool,
    options: ForeignOptions,
    as_json: bool,
) -> None:
    """List runs, checkpoints or leaves.

    Without PATH: all runs. Checkpoints come newest first, leaves by key. A terminal
    shows leaves with numbered keys that are alike once, as storectl tree does. Labels
    that an import or a copy sets are shown by storectl stat, and with --json.

    \b
    Fields of --where and --sort are the columns, the names of --json, and:
      loss, stage           a metric or a label; also metrics.loss, labels.stage
      age                   time since the commit: age<12h
      tags, pinned          alone: any tag, a pin; tags=best*: such a tag

    A condition compares with <, <=, >, >=, = or !=; &, |, ~ and parentheses join
    several. Names and values with spaces or such signs are quoted. A checkpoint without
    a value matches only !=, and is sorted last.

    \b
    Examples:
      storectl ls                                  all runs
      storectl ls prod                             the runs of a namespace
      storectl ls prod/llama-8b                    the checkpoints of a run
      storectl ls prod/llama-8b --limit 1 --json   its newest one, for a program
      storectl ls prod/llama-8b --sort loss --where 'loss<2.5' --limit 20
      storectl ls prod/llama-8b --where 'pinned | stage=final & age<7d'
      storectl ls prod/llama-8b --deleted          those that can be undeleted
      storectl ls prod/llama-8b@latest             the leaves of a checkpoint
      storectl ls 'prod/llama-8b@500:**/kernel'    leaves whose key matches
      storectl ls prod/llama-8b@500 --sort -size   its leaves, the largest first
      storectl ls orbax:gs://bucket/run            checkpoints that Orbax wrote
    """
    if deleted and not isinstance(path, RunPath):
        raise click.UsageError("--deleted goes with a run, such as prod/llama-8b")
    options.check(path)
    is_foreign_run = isinstance(path, RunPath) and is_foreign(path.run)
    if deleted and is_foreign_run:
        raise click.UsageError("--deleted goes with a run of a store")
    view = read_view(path, deleted=deleted)
    selection = None
    if where or sort is not None:
        from storesvc_client.cli.records import RecordSelection, find_schema

        schema = find_schema(path, deleted=deleted)
        selection = RecordSelection(schema, where=where, sort=sort)
    damaged: list[DataLossError] = []
    with connection.open_for(path, options) as source:
        records = view.records(source, path, damaged.append)
        view.listing.show(
            selection.select_records(records, limit=limit) if selection else records,
            limit=limit,
            as_json=as_json,
            damaged=damaged,
            is_selection=selection is not None,
            expand=expand,
            absence=lambda: _absence(view, selection, source, path),
        )
    if selection and (warning := selection.warning()):
        print_note(warning)


def _absence(
    view: View,
    selection: "RecordSelection | None",
    source: Readable,
    path: StorePath | None,
) -> str:
    """Returns the note of an empty list.

    Raises:
        Refusal: There is no such namespace.
    """
    if isinstance(path, NamespacePath) and not isinstance(source, ForeignStore):
        check_namespace(source, path.namespace)
    return selection.absence() if selection else f"no {plural(view.listing.table.noun)}"
