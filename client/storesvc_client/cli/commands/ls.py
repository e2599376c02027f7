"""``storectl ls``: lists runs, checkpoints or leaves."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from storesvc_client._values.texts import plural
from storesvc_client.cli.arguments import (
    WholeNumber,
    foreign_options,
    json_option,
    readable_path,
)
from storesvc_client.cli.completion import (
    Part,
    complete_condition,
    complete_order,
    complete_path,
)
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.foreign import ForeignOptions, ForeignStore
from storesvc_client.cli.output import print_note
from storesvc_client.cli.paths import (
    NamespacePath,
    RunPath,
    StorePath,
    is_foreign,
)
from storesvc_client.cli.records.views import View, view_of
from storesvc_client.cli.suggestions import check_namespace

if TYPE_CHECKING:
    from storesvc_client import DataLossError
    from storesvc_client.cli.foreign import Readable
    from storesvc_client.cli.records.selection import RecordSelection


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
    options: ForeignOptions,
    as_json: bool,
) -> None:
    """List runs, checkpoints or leaves.

    Without PATH: all runs. Checkpoints come newest first, leaves by key. Labels that an
    import or a copy sets are shown by storectl stat, and with --json.

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
    view = view_of(path, deleted=deleted)
    selection = _selection(path, where=where, sort=sort, deleted=deleted)
    damaged: list[DataLossError] = []
    with connection.open_for(path, options) as source:
        records = view.records(source, path, damaged.append)
        view.listing.show(
            selection.of(records, limit=limit) if selection else records,
            limit=limit,
            as_json=as_json,
            damaged=damaged,
            is_selection=selection is not None,
            absence=lambda: _absence(view, selection, source, path),
        )
    if selection and (warning := selection.warning()):
        print_note(warning)


def _selection(
    path: StorePath | None, *, where: Sequence[str], sort: str | None, deleted: bool
) -> "RecordSelection | None":
    """Returns the selection of the options; None without one."""
    if not where and sort is None:
        return None
    from storesvc_client.cli.records.fields import schema_of
    from storesvc_client.cli.records.selection import RecordSelection

    return RecordSelection(schema_of(path, deleted=deleted), where=where, sort=sort)


def _absence(
    view: View,
    selection: "RecordSelection | None",
    source: "Readable",
    path: StorePath | None,
) -> str:
    """Returns the note of an empty list.

    Raises:
        Refusal: There is no such namespace.
    """
    if isinstance(path, NamespacePath) and not isinstance(source, ForeignStore):
        check_namespace(source, path.namespace)
    return selection.absence() if selection else f"no {plural(view.listing.noun)}"
