"""``storectl gc``: collects garbage."""

from datetime import timedelta
from typing import TYPE_CHECKING, Final

import click

from storesvc_client._values.texts import ABSENT
from storesvc_client.cli.arguments import duration, json_option, parent_path
from storesvc_client.cli.completion import Part, complete_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.output import (
    Column,
    Shrink,
    print_json,
    print_note,
    print_table,
)
from storesvc_client.cli.paths import NamespacePath, RunPath
from storesvc_client.cli.suggestions import check_namespace

if TYPE_CHECKING:
    from storesvc_client import Collected

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
