"""``storectl gc``: deletes what has no more use."""

from datetime import timedelta
from typing import TYPE_CHECKING, Final

import click

from storesvc_client.cli.arguments import duration, json_option, parent_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.output import (
    ABSENT,
    Column,
    print_json,
    print_note,
    print_table,
)
from storesvc_client.cli.paths import NamespacePath, RunPath

if TYPE_CHECKING:
    from storesvc_client import Collected

_COLUMNS: Final = (
    Column("RUN", folds=True),
    Column("ABORTED", right=True),
    Column("DELETED", right=True),
    Column("PURGED", right=True),
    Column("GARBAGE", right=True),
    Column("REMOVED", right=True),
    Column("LEFT", folds=True),
)


@click.command()
@click.argument("path", type=parent_path, metavar="[PATH]", required=False)
@click.option("--dry-run", is_flag=True, help="Change nothing; tell what would be.")
@click.option(
    "--grace",
    type=duration,
    metavar="TIME",
    help="How long ago something must have lost its use, such as 10m; 1h without.",
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
    """Delete what has no more use.

    Servers do the same by themselves, from time to time. Aborts uploads that nothing
    is heard of, applies retention policies, purges deleted checkpoints whose time has
    come, and removes the objects that nothing needs any more. What a checkpoint, a
    hold or a live upload needs stays, also while saves and restores go on. An upload
    is dead once the process that collects has seen it silent for its lease: where no
    server runs, a single gc ends only those that are silent for two days. With a
    short --grace, readers that have no hold may lose what they read.

    \b
    Columns: uploads aborted, checkpoints deleted by the policy, checkpoints purged,
    objects found without use, objects removed, why something was left for later.

    \b
    Examples:
      storectl gc --dry-run              all runs, only told
      storectl gc prod/llama-8b
      storectl gc prod --grace 10m --json
    """
    parent = None if path is None else str(path)
    with connection.open() as client:
        passes = list(client.collect(parent, grace=grace, dry_run=dry_run))
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
