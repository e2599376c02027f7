"""``storectl ls``: lists runs, checkpoints or leaves."""

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Final

import click

from storesvc_client._values.texts import (
    ABSENT,
    dtype_text,
    key_text,
    pairs_text,
    shape_text,
    size_text,
    time_text,
)
from storesvc_client.cli.arguments import (
    json_option,
    keep_names_option,
    readable_path,
)
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.foreign import ForeignStore, names_error
from storesvc_client.cli.leaf_selection import select_leaves
from storesvc_client.cli.output import Column, Listing
from storesvc_client.cli.paths import (
    CheckpointPath,
    LeafPath,
    NamespacePath,
    RunPath,
    StorePath,
    has_names,
    is_foreign,
)

if TYPE_CHECKING:
    from storesvc_client import (
        Checkpoint,
        DataLossError,
        ForeignInfo,
        LeafInfo,
        RunInfo,
    )


_RECORDS: Final = ("copy.", "import.", "orbax.commit_time")
"""Beginnings of labels that record where a checkpoint comes from; ``stat`` shows
them."""


def _labels_text(labels: Mapping[str, str]) -> str:
    return pairs_text(
        {key: text for key, text in labels.items() if not key.startswith(_RECORDS)}
    )


def _run_row(run: "RunInfo") -> tuple[str, ...]:
    latest = ABSENT if run.latest_step is None else str(run.latest_step)
    return run.name, latest, time_text(run.create_time)


def _checkpoint_row(checkpoint: "Checkpoint") -> tuple[str, ...]:
    return (
        str(checkpoint.step),
        time_text(checkpoint.commit_time),
        size_text(checkpoint.size_bytes),
        str(checkpoint.leaf_count),
        pairs_text(checkpoint.metrics),
        _labels_text(checkpoint.labels),
    )


def _foreign_row(checkpoint: "ForeignInfo") -> tuple[str, ...]:
    return (
        str(checkpoint.step),
        _moment_text(checkpoint.create_time),
        size_text(checkpoint.size_bytes),
        str(checkpoint.leaf_count),
        pairs_text(checkpoint.metrics),
        _labels_text(checkpoint.labels),
    )


def _deleted_row(checkpoint: "Checkpoint") -> tuple[str, ...]:
    return (
        str(checkpoint.step),
        _moment_text(checkpoint.delete_time),
        _moment_text(checkpoint.purge_time),
        size_text(checkpoint.size_bytes),
        pairs_text(checkpoint.metrics),
        _labels_text(checkpoint.labels),
    )


def _moment_text(time: datetime | None) -> str:
    return ABSENT if time is None else time_text(time)


def _leaf_row(leaf: "LeafInfo") -> tuple[str, ...]:
    return (
        key_text(leaf),
        dtype_text(leaf),
        shape_text(leaf),
        size_text(leaf.size_bytes),
        str(leaf.chunk_count),
    )


_RUNS: Final = Listing(
    noun="run",
    row=_run_row,
    columns=(
        Column("RUN", folds=True),
        Column("LATEST", right=True),
        Column("CREATED"),
    ),
)
_CHECKPOINTS: Final = Listing(
    noun="checkpoint",
    row=_checkpoint_row,
    columns=(
        Column("STEP", right=True),
        Column("COMMITTED"),
        Column("SIZE", right=True),
        Column("LEAVES", right=True),
        Column("METRICS", folds=True),
        Column("LABELS", folds=True),
    ),
)
_FOREIGN: Final = Listing(
    noun="checkpoint",
    row=_foreign_row,
    columns=(
        Column("STEP", right=True),
        Column("WRITTEN"),
        Column("SIZE", right=True),
        Column("LEAVES", right=True),
        Column("METRICS", folds=True),
        Column("LABELS", folds=True),
    ),
)
_DELETED: Final = Listing(
    noun="deleted checkpoint",
    row=_deleted_row,
    columns=(
        Column("STEP", right=True),
        Column("DELETED"),
        Column("PURGE"),
        Column("SIZE", right=True),
        Column("METRICS", folds=True),
        Column("LABELS", folds=True),
    ),
)
_LEAVES: Final = Listing(
    noun="leaf",
    row=_leaf_row,
    columns=(
        Column("KEY", folds=True),
        Column("DTYPE"),
        Column("SHAPE"),
        Column("SIZE", right=True),
        Column("CHUNKS", right=True),
    ),
)


@click.command()
@click.argument("path", type=readable_path, metavar="[PATH]", required=False)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="Print the first N only; a line on stderr says if there are more.",
)
@click.option(
    "--deleted",
    is_flag=True,
    help="List the deleted checkpoints of a run, and when they are purged.",
)
@keep_names_option
@json_option
@pass_connection
def ls(
    connection: Connection,
    *,
    path: StorePath | None,
    limit: int | None,
    deleted: bool,
    keep_names: bool,
    as_json: bool,
) -> None:
    """List runs, checkpoints or leaves.

    Without PATH: all runs. Checkpoints come newest first, leaves by key. Labels that an
    import or a copy sets are shown by storectl stat, and with --json.

    \b
    Examples:
      storectl ls                                  all runs
      storectl ls prod                             the runs of a namespace
      storectl ls prod/llama-8b                    the checkpoints of a run
      storectl ls prod/llama-8b --limit 1 --json   its newest one, for a program
      storectl ls prod/llama-8b --deleted          checkpoints that can be undeleted
      storectl ls prod/llama-8b@latest             the leaves of a checkpoint
      storectl ls 'prod/llama-8b@500:**/kernel'    leaves whose key matches
      storectl ls orbax:gs://bucket/run            checkpoints that Orbax wrote
    """
    if deleted and not isinstance(path, RunPath):
        raise click.UsageError("--deleted goes with a run, such as prod/llama-8b")
    if keep_names and not has_names(path):
        raise names_error()
    damaged: list[DataLossError] = []
    if isinstance(path, RunPath) and is_foreign(path.run):
        if deleted:
            raise click.UsageError("--deleted goes with a run of a store")
        written = ForeignStore(keep_names=keep_names).run(path.run).checkpoints()
        _FOREIGN.show(written, limit=limit, as_json=as_json)
        return
    if isinstance(path, CheckpointPath | LeafPath):
        with connection.open_for(path, keep_names=keep_names) as opened:
            leaves = select_leaves(opened, path).leaves
        _LEAVES.show(leaves, limit=limit, as_json=as_json)
        return
    with connection.open() as client:
        match path:
            case None | NamespacePath():
                namespace = path.namespace if path else None
                runs = client.runs(namespace, on_damage=damaged.append)
                _RUNS.show(runs, limit=limit, as_json=as_json, damaged=damaged)
            case RunPath(run) if deleted:
                gone = client.run(run).checkpoints(
                    deleted=True, on_damage=damaged.append
                )
                _DELETED.show(gone, limit=limit, as_json=as_json, damaged=damaged)
            case RunPath(run):
                found = client.run(run).checkpoints(on_damage=damaged.append)
                _CHECKPOINTS.show(found, limit=limit, as_json=as_json, damaged=damaged)
