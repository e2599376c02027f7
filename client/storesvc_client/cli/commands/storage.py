"""``storectl du`` shows the bytes of checkpoints and runs; ``gc`` collects garbage."""

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import click

from storesvc_client._views.tables import Column, Shrink
from storesvc_client._views.texts import ABSENT, size_text
from storesvc_client.cli.arguments import any_path, duration, json_option, parent_path
from storesvc_client.cli.completion import Part, complete_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.errors import check_namespace
from storesvc_client.cli.output import (
    json_value,
    print_fields,
    print_json,
    print_note,
    print_table,
    report,
)
from storesvc_client.cli.paths import (
    CheckpointPath,
    LeafPath,
    NamespacePath,
    RunPath,
    StorePath,
)

if TYPE_CHECKING:
    from storesvc_client import Checkpoint, Client, Collected, DataLossError

_COLUMNS: Final = (
    Column("RUN"),
    Column("ABORTED", right=True),
    Column("DELETED", right=True),
    Column("PURGED", right=True),
    Column("GARBAGE", right=True),
    Column("REMOVED", right=True),
    Column("LEFT", shrink=Shrink.END),
)


@click.command()
@click.argument(
    "path",
    type=parent_path,
    metavar="[PATH]",
    required=False,
    shell_complete=complete_path(Part.NAMESPACE, Part.RUN),
)
@click.option(
    "--dry-run", is_flag=True, help="Change nothing; show what a collection would do."
)
@click.option(
    "--grace",
    type=duration,
    metavar="TIME",
    help="How long an object must have been garbage, such as 10m.  [default: 1h]",
)
@json_option
@pass_connection
def gc(
    connection: Connection,
    *,
    path: NamespacePath | RunPath | None,
    dry_run: bool,
    grace: timedelta | None,
    as_json: bool,
) -> None:
    """Collect garbage.

    Servers do the same at an interval. A collection aborts uploads whose lease has
    expired, applies retention policies, purges deleted checkpoints that are due, and
    deletes objects that nothing needs. Objects that a checkpoint, a hold or a live
    upload needs stay, also during saves and restores. Without a server, gc aborts only
    uploads that were idle for two days. With a short --grace, readers without a hold
    may lose what they read.

    \b
    ABORTED   uploads whose lease had expired
    DELETED   checkpoints that the retention policy does not keep
    PURGED    deleted checkpoints whose purge time had passed
    GARBAGE   objects that nothing refers to
    REMOVED   the objects of these that were deleted
    LEFT      why something is left for the next collection

    \b
    Examples:
      storectl gc --dry-run              all runs, changes nothing
      storectl gc prod/llama-8b
      storectl gc prod --grace 10m --json
    """
    parent = None if path is None else str(path)
    with connection.open() as client:
        passes = list(client.collect(parent, grace=grace, dry_run=dry_run))
        if isinstance(path, NamespacePath) and not passes:
            check_namespace(client, path.namespace)
    if as_json:
        print_json(passes)
    elif passes:
        print_table(_COLUMNS, map(_row, passes))
    else:
        print_note("no runs")


def _row(one: "Collected") -> tuple[str, ...]:
    counts = (
        one.aborted_upload_count,
        one.deleted_checkpoint_count,
        one.purged_checkpoint_count,
        one.garbage_object_count,
        one.deleted_object_count,
    )
    return one.run, *map(str, counts), one.postponed or ABSENT


_RUNS: Final = (
    Column("RUN"),
    Column("CHECKPOINTS", right=True),
    Column("UPLOADS", right=True),
    Column("LOGICAL", right=True),
    Column("STORED", right=True),
    Column("DISTINCT", right=True),
)
_CHECKPOINTS: Final = (
    Column("STEP", right=True),
    Column("LOGICAL", right=True),
    Column("STORED", right=True),
    Column("OWN", right=True),
    Column("SHARED", right=True),
)


def whole_path(text: str) -> NamespacePath | RunPath | CheckpointPath:
    """Returns the path of a namespace, a run or a checkpoint."""
    path: StorePath = any_path(text)
    if isinstance(path, LeafPath):
        raise click.BadParameter(
            f"{text!r}: expected a checkpoint as a whole, such as {path.checkpoint}"
        )
    return path


@click.command()
@click.argument(
    "path",
    type=whole_path,
    metavar="[PATH]",
    required=False,
    shell_complete=complete_path(Part.NAMESPACE, Part.CHECKPOINT),
)
@json_option
@pass_connection
def du(
    connection: Connection,
    *,
    path: NamespacePath | RunPath | CheckpointPath | None,
    as_json: bool,
) -> None:
    """Show how many bytes runs and checkpoints take.

    \b
    UPLOADS   checkpoints that are being written; their bytes are not counted
    LOGICAL   bytes of all leaves
    STORED    bytes of the chunks that hold them
    OWN       bytes of the chunks that came with this checkpoint
    SHARED    bytes of the chunks that it shares with an earlier one
    DISTINCT  bytes of all chunks of a run, shared ones counted once

    \b
    Examples:
      storectl du                       all runs
      storectl du prod                  the runs of a namespace
      storectl du prod/llama-8b         a run, and each of its checkpoints
      storectl du prod/llama-8b@latest --json
    """
    with connection.open() as client:
        match path:
            case None:
                _print_runs(client, None, as_json=as_json)
            case NamespacePath(namespace):
                _print_runs(client, namespace, as_json=as_json)
            case RunPath(run):
                _print_run(client, run, as_json=as_json)
            case CheckpointPath(run, which):
                found = client.run(run).checkpoint(which)
                if as_json:
                    print_json(_checkpoint_value(found))
                else:
                    print_table(_CHECKPOINTS, [_checkpoint_row(found)])


def _print_runs(client: "Client", namespace: str | None, *, as_json: bool) -> None:
    from storesvc_client._documents.checkpoints import list_usages

    damaged: list[DataLossError] = []
    usages = list_usages(client, namespace, damaged.append)
    if namespace and not usages and not damaged:
        check_namespace(client, namespace)
    if as_json:
        print_json(usages)
    elif usages:
        rows = (
            (
                usage.run,
                str(usage.checkpoint_count),
                str(usage.upload_count),
                size_text(usage.logical_bytes),
                size_text(usage.stored_bytes),
                size_text(usage.distinct_bytes),
            )
            for usage in usages
        )
        print_table(_RUNS, rows)
    elif not damaged:
        print_note("no runs")
    report(damaged)


def _print_run(client: "Client", name: str, *, as_json: bool) -> None:
    run = client.run(name)
    usage = run.usage()
    # the store rejects a list of a run that has no checkpoint yet
    checkpoints = list(run.checkpoints()) if usage.checkpoint_count else []
    if as_json:
        values = list(map(_checkpoint_value, checkpoints))
        print_json(json_value(usage) | {"checkpoints": values})
        return
    fields = {
        "checkpoints": f"{usage.checkpoint_count:,}",
        "deleted": f"{usage.deleted_checkpoint_count:,}",
        "uploads": f"{usage.upload_count:,}",
        "logical": size_text(usage.logical_bytes),
        "stored": size_text(usage.stored_bytes),
        "distinct": size_text(usage.distinct_bytes),
        "data files": f"{usage.file_count:,}",
    }
    print_fields(usage.run, fields.items())
    if checkpoints:
        click.echo()
        print_table(_CHECKPOINTS, map(_checkpoint_row, checkpoints))


def _checkpoint_row(checkpoint: "Checkpoint") -> tuple[str, ...]:
    return (
        str(checkpoint.step),
        size_text(checkpoint.size_bytes),
        size_text(checkpoint.stored_bytes),
        size_text(checkpoint.own_bytes),
        size_text(_shared_bytes(checkpoint)),
    )


def _checkpoint_value(checkpoint: "Checkpoint") -> dict[str, Any]:
    return {
        "run": checkpoint.run,
        "step": checkpoint.step,
        "uid": checkpoint.uid,
        "logical_bytes": checkpoint.size_bytes,
        "stored_bytes": checkpoint.stored_bytes,
        "own_bytes": checkpoint.own_bytes,
        "shared_bytes": _shared_bytes(checkpoint),
    }


def _shared_bytes(checkpoint: "Checkpoint") -> int:
    return checkpoint.stored_bytes - checkpoint.own_bytes
