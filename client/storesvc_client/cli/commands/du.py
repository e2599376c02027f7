"""``storectl du``: shows the bytes of checkpoints and runs."""

from typing import TYPE_CHECKING, Any, Final

import click

from storesvc_client._values.texts import size_text
from storesvc_client.cli.arguments import any_path, json_option
from storesvc_client.cli.completion import Part, complete_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.output import (
    Column,
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
from storesvc_client.cli.suggestions import check_namespace

if TYPE_CHECKING:
    from storesvc_client import Checkpoint, Client, DataLossError, Usage

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
    from storesvc_client._documents.usages import usages_of

    damaged: list[DataLossError] = []
    usages = usages_of(client, namespace, damaged.append)
    if namespace and not usages and not damaged:
        check_namespace(client, namespace)
    if as_json:
        print_json(usages)
    elif usages:
        print_table(_RUNS, map(_run_row, usages))
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


def _run_row(usage: "Usage") -> tuple[str, ...]:
    return (
        usage.run,
        str(usage.checkpoint_count),
        str(usage.upload_count),
        size_text(usage.logical_bytes),
        size_text(usage.stored_bytes),
        size_text(usage.distinct_bytes),
    )


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
