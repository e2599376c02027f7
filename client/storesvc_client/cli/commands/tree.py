"""``storectl tree``: draws the leaves of a checkpoint as a tree."""

from collections.abc import Iterator
from typing import Any, Final

import click

from storesvc_client._values.texts import (
    Line,
    Node,
    count_text,
    draw,
    grow,
    item_text,
    size_text,
)
from storesvc_client.cli.arguments import (
    WholeNumber,
    foreign_options,
    json_option,
    readable_checkpoint,
)
from storesvc_client.cli.completion import Part, complete_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.foreign import ForeignOptions
from storesvc_client.cli.leaf_selection import Selection, select_leaves, unread_notes
from storesvc_client.cli.output import (
    Column,
    Shrink,
    json_value,
    print_json,
    print_note,
    print_table,
)
from storesvc_client.cli.paths import CheckpointPath, LeafPath

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
@click.option("--expand", is_flag=True, help="Draw each of numbered siblings.")
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
        print_json(_document(selection, depth=depth))
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


def _document(selection: Selection, *, depth: int | None) -> dict[str, Any]:
    nodes = grow(selection.leaves)
    unread = {"unread": dict(selection.unread)} if selection.unread else {}
    return unread | {
        "name": str(selection.checkpoint),
        "leaf_count": len(selection.leaves),
        "size_bytes": selection.size_bytes,
        "children": [_node_document(node, depth=depth) for node in nodes],
        "items": [json_value(item) for item in selection.items],
    }


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
