"""``storectl stat``: shows a namespace, a run, a checkpoint or a leaf in detail."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from storesvc_client._documents.checkpoints import (
    checkpoint_document,
    chunk_grid,
    contents,
    deleted_checkpoint,
    find_base_step,
    leaf_document,
)
from storesvc_client._views.texts import (
    ABSENT,
    count_text,
    dtype_text,
    mesh_text,
    pairs_text,
    printable,
    shape_text,
    size_text,
    sizes_text,
    spec_text,
    time_text,
)
from storesvc_client.cli.arguments import (
    foreign_options,
    json_option,
    readable_path,
)
from storesvc_client.cli.completion import Part, complete_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.leaves import Selection, select_leaf
from storesvc_client.cli.output import json_value, print_fields, print_json
from storesvc_client.cli.paths import (
    ForeignOptions,
    ForeignStore,
    LeafPath,
    NamespacePath,
    RunPath,
    StorePath,
    is_foreign,
)

if TYPE_CHECKING:
    from storesvc.format.names import Which
    from storesvc_client import (
        Checkpoint,
        ForeignCheckpoint,
        ForeignInfo,
        OpenCheckpoint,
        Run,
    )

_SHOWN_ITEMS: Final = 20
"""Maximum items that are listed; with --json, all are."""


@click.command()
@click.argument(
    "path",
    type=readable_path,
    metavar="PATH",
    shell_complete=complete_path(Part.NAMESPACE, Part.LEAF),
)
@foreign_options
@json_option
@pass_connection
def stat(
    connection: Connection,
    *,
    path: StorePath,
    options: ForeignOptions,
    as_json: bool,
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
    checkpoint, opened = _open_if_present(run, which)
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
    """Prints a checkpoint of another project."""
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


def _open_if_present(
    run: "Run", which: "Which"
) -> "tuple[Checkpoint, OpenCheckpoint] | tuple[Checkpoint, None]":
    """Returns a checkpoint, opened unless it is deleted."""
    from storesvc_client import NotFoundError

    try:
        opened = run.open(which)
    except NotFoundError as e:
        return deleted_checkpoint(run, e), None
    return opened.info, opened


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
