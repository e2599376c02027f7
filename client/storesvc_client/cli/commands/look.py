"""``storectl ls`` lists runs, checkpoints or leaves, ``tree`` draws the leaves, and
``stat`` shows one of all these in detail."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from storesvc_client._documents import (
    checkpoint_document,
    chunk_grid,
    contents,
    deleted_checkpoint,
    find_base_step,
    leaf_document,
)
from storesvc_client._views.tables import Column, Shrink
from storesvc_client._views.texts import (
    ABSENT,
    Line,
    Node,
    count_text,
    draw,
    dtype_text,
    grow,
    item_text,
    json_value,
    mesh_text,
    pairs_text,
    plural,
    printable,
    shape_text,
    size_text,
    sizes_text,
    spec_text,
    time_text,
)
from storesvc_client.cli.arguments import (
    WholeNumber,
    expand_option,
    foreign_options,
    json_option,
    path_argument,
    readable_checkpoint,
    readable_path,
)
from storesvc_client.cli.completion import complete_condition, complete_order
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.errors import check_namespace
from storesvc_client.cli.leaves import (
    Selection,
    select_leaf,
    select_leaves,
    unread_notes,
)
from storesvc_client.cli.output import print_fields, print_json, print_note, print_table
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
from storesvc_client.cli.records import RecordSelection

if TYPE_CHECKING:
    from storesvc.format.names import Which
    from storesvc_client import (
        Checkpoint,
        DataLossError,
        ForeignCheckpoint,
        ForeignInfo,
        OpenCheckpoint,
        Run,
    )


_COLUMNS: Final = (
    Column("", shrink=Shrink.DRAWING),
    Column(""),
    Column("", right=True),
)


@click.command()
@path_argument("path", readable_checkpoint)
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
@path_argument("path", readable_path, required=False)
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
        selection = RecordSelection(view.schema, where=where, sort=sort)
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
    selection: RecordSelection | None,
    source: Readable,
    path: StorePath | None,
) -> str:
    """Returns the note of an empty list."""
    if isinstance(path, NamespacePath) and not isinstance(source, ForeignStore):
        check_namespace(source, path.namespace)
    return selection.absence() if selection else f"no {plural(view.listing.table.noun)}"


_SHOWN_ITEMS: Final = 20
"""Maximum items that are listed; with --json, all are."""


@click.command()
@path_argument("path", readable_path)
@foreign_options
@json_option
@pass_connection
def stat(
    connection: Connection, *, path: StorePath, options: ForeignOptions, as_json: bool
) -> None:
    """Show details of a namespace, a run, a checkpoint or a leaf.

    Of a metric of a run, the value of its newest checkpoint comes first.

    \b
    Examples:
      storectl stat prod
      storectl stat prod/llama-8b
      storectl stat prod/llama-8b@latest
      storectl stat prod/llama-8b@500:params/embed/embedding
    """
    options.check(path)
    if isinstance(path, RunPath) and is_foreign(path.run):
        raise click.UsageError(
            f"{path}: expected a step or latest at the end, such as {path}@latest"
        )
    if isinstance(path, NamespacePath | RunPath):
        from storesvc_client.cli.parent_details import print_namespace, print_run

        with connection.open() as client:
            if isinstance(path, RunPath):
                print_run(client.run(path.run), as_json=as_json)
            else:
                print_namespace(client, path.namespace, as_json=as_json)
        return
    with connection.open_for(path, options) as source:
        if isinstance(path, LeafPath):
            _print_leaf(select_leaf(source, path), as_json=as_json)
        elif isinstance(source, ForeignStore):
            opened = source.run(path.run).open(path.which)
            _print_foreign(opened, as_json=as_json)
        else:
            _print_checkpoint(source.run(path.run), path.which, as_json=as_json)


def _print_checkpoint(run: "Run", which: "Which", *, as_json: bool) -> None:
    from storesvc_client import NotFoundError

    opened: OpenCheckpoint | None = None
    try:
        opened = run.open(which)
        checkpoint = opened.info
    except NotFoundError as e:
        checkpoint = deleted_checkpoint(run, e)
    tagged = [tag for tag in run.tags.list() if tag.uid == checkpoint.uid]
    base_step = find_base_step(run, checkpoint)
    document = checkpoint_document(checkpoint, opened, tags=tagged, base_step=base_step)
    if as_json:
        print_json(document)
        return
    fields: dict[str, str | Sequence[str]] = {
        "uid": checkpoint.uid,
        "begun": time_text(checkpoint.create_time),
        "committed": time_text(checkpoint.commit_time),
        **_optional_fields(checkpoint),
        "size": _exact_size(checkpoint.size_bytes),
        "stored": _exact_size(checkpoint.stored_bytes),
        "own": _exact_size(checkpoint.own_bytes),
        "shared": _exact_size(document["shared_bytes"]),
        "base": ABSENT if base_step is None else f"{run.name}@{base_step}",
        "leaves": f"{checkpoint.leaf_count:,}",
        "chunks": f"{checkpoint.chunk_count:,}",
        **({} if opened is None else _contents_fields(document)),
        "tags": ", ".join(
            f"{tag.name} (by {tag.principal})" if tag.principal else tag.name
            for tag in tagged
        )
        or ABSENT,
        "pinned": "yes" if checkpoint.pinned else "no",
        "metrics": pairs_text(checkpoint.metrics),
        "labels": pairs_text(checkpoint.labels),
    }
    print_fields(f"{checkpoint.run}@{checkpoint.step}", fields.items())


def _print_foreign(opened: "ForeignCheckpoint", *, as_json: bool) -> None:
    info, held = opened.info, contents(opened)
    if as_json:
        print_json(json_value(info) | held)
        return
    unread = [printable(f"{name}: {why}") for name, why in info.unread.items()]
    fields = {
        "location": info.url,
        "written": ABSENT if info.create_time is None else time_text(info.create_time),
        "size": _exact_size(info.size_bytes),
        "leaves": f"{info.leaf_count:,}",
        "chunks": f"{info.chunk_count:,}",
        "checksums": _checksums_text(info),
        **_contents_fields(held),
        **({"not read": unread} if unread else {}),
        "metrics": pairs_text(info.metrics),
        "labels": pairs_text(info.labels),
    }
    print_fields(opened.name, fields.items())


def _checksums_text(info: "ForeignInfo") -> str:
    if info.is_verified:
        return "of all elements"
    if not info.verified_count:
        return "none: unverified"
    total = info.leaf_count + info.item_count
    return f"of {info.verified_count:,} of {total:,} leaves and items"


def _optional_fields(checkpoint: "Checkpoint") -> dict[str, str]:
    """Returns who saved and changed a checkpoint, and when it was deleted, if known."""
    deleted, purge = checkpoint.delete_time, checkpoint.purge_time
    fields = {
        "saved by": checkpoint.principal,
        "changed by": checkpoint.change_principal,
        "deleted": time_text(deleted) if deleted else "",
        "purge": time_text(purge) if purge else "",
    }
    return {name: text for name, text in fields.items() if text}


def _contents_fields(held: Mapping[str, Any]) -> "dict[str, str | Sequence[str]]":
    return {
        "kinds": _counts_text(held["kinds"]),
        "dtypes": _counts_text(held["dtypes"]),
        "saved on": "; ".join(held["meshes"]) or ABSENT,
        "model": _model_text(held["model"]),
        "items": _item_lines(held["items"]),
    }


def _item_lines(items: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = list[str]()
    for item in items[:_SHOWN_ITEMS]:
        count = "" if item["process_count"] is None else f"{item['process_count']} x "
        what = f"{count}{item['kind']}, {size_text(item['size_bytes'])}"
        lines.append(f"{item['name']} ({what})")
    if len(items) > _SHOWN_ITEMS:
        lines.append(f"and {len(items) - _SHOWN_ITEMS} more")
    return lines or [ABSENT]


def _model_text(model: dict[str, Any] | None) -> str:
    if model is None:
        return ABSENT
    versions = model["versions"] if isinstance(model["versions"], dict) else {}
    by = ", ".join(f"{name} {version}" for name, version in versions.items())
    return printable(f"{model['model']} ({by})" if by else str(model["model"]))


def _print_leaf(selection: Selection, *, as_json: bool) -> None:
    (leaf,) = selection.leaves
    grid = chunk_grid(leaf)
    if as_json:
        print_json(leaf_document(leaf))
        return
    stored = {"stored as": leaf.dtype + sizes_text(leaf.shape)}
    fields = {
        "kind": leaf.kind.replace("_", " "),
        "dtype": dtype_text(leaf),
        "shape": shape_text(leaf),
        **(stored if leaf.prng_impl else {}),
        "size": _exact_size(leaf.size_bytes),
        "chunk shape": sizes_text(leaf.chunk_shape),
        "chunk grid": f"{sizes_text(grid)}, {count_text(leaf.chunk_count, 'chunk')}",
        "saved on": mesh_text(leaf.sharding),
        "sharding": spec_text(leaf.sharding),
    }
    print_fields(f"{selection.checkpoint}:{leaf.key}", fields.items())


def _exact_size(size_bytes: int) -> str:
    if size_bytes < 1024:
        return size_text(size_bytes)
    return f"{size_text(size_bytes)} ({size_bytes:,} bytes)"


def _counts_text(counts: Mapping[str, int]) -> str:
    ordered = Counter(counts).most_common()
    return ", ".join(f"{count:,} {name}" for name, count in ordered) or ABSENT
