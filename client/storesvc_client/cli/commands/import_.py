"""``storectl import``: imports checkpoints that other projects wrote."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from storesvc.format.names import Which
from storesvc_client.cli.arguments import (
    WholeNumber,
    foreign_options,
    json_option,
    label,
    run_path,
)
from storesvc_client.cli.completion import Part, complete_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.foreign import ForeignOptions
from storesvc_client.cli.paths import (
    CheckpointPath,
    LeafPath,
    RunPath,
    parse_foreign_path,
)
from storesvc_client.cli.transfers import show_transfers, step_list

if TYPE_CHECKING:
    from storesvc_client import ForeignRun


def _source(text: str) -> RunPath | CheckpointPath:
    match parse_foreign_path(text):
        case RunPath() | CheckpointPath() as path:
            return path
        case LeafPath(checkpoint):
            raise click.BadParameter(
                f"{text!r}: expected whole checkpoints, such as {checkpoint}"
            )


@click.command("import")
@click.argument("source", type=_source, metavar="SRC")
@click.argument(
    "path",
    type=run_path,
    metavar="RUN",
    shell_complete=complete_path(Part.RUN, Part.RUN),
)
@click.option(
    "--steps", type=step_list, metavar="STEPS", help="Import these steps: 100,200."
)
@click.option("--latest", is_flag=True, help="Import the newest step only.")
@click.option(
    "--jobs",
    type=WholeNumber(min=1),
    metavar="N",
    help="Reads in flight, by default 16.",
)
@click.option(
    "--label",
    "labels",
    type=label,
    metavar="KEY=TEXT",
    multiple=True,
    help="Set a label of each checkpoint. Repeatable.",
)
@click.option(
    "--without",
    multiple=True,
    metavar="ITEM",
    help="Leave this item of Orbax out of each step, such as one that cannot be read. "
    "Repeatable.",
)
@foreign_options
@click.option("--create", is_flag=True, help="Create the store if there is none.")
@json_option
@pass_connection
def import_(
    connection: Connection,
    *,
    source: RunPath | CheckpointPath,
    path: RunPath,
    steps: Sequence[int] | None,
    latest: bool,
    jobs: int | None,
    labels: Sequence[tuple[str, str]],
    without: Sequence[str],
    options: ForeignOptions,
    create: bool,
    as_json: bool,
) -> None:
    """Import checkpoints that other projects wrote.

    SRC is a format and a location: orbax:/ckpts/run, safetensors:gs://bucket/model;
    @STEP or @latest after it means that step alone. Steps that were imported before are
    skipped, so an import that was interrupted is repeated to finish it. Labels of a
    checkpoint record where it comes from.

    \b
    Examples:
      storectl import orbax:/ckpts/llama-8b prod/llama-8b
      storectl import orbax:gs://bucket/llama-8b prod/llama-8b --create
      storectl import safetensors:/models/llama prod/llama --label team=a
    """
    options.check(source)
    which: Which | None = "latest" if latest else None
    if isinstance(source, CheckpointPath):
        if steps is not None or latest:
            raise click.UsageError(
                "expected one of --steps, --latest and a step in SRC"
            )
        which = source.which
    if steps is not None and latest:
        raise click.UsageError("expected one of --steps and --latest")
    from storesvc_client import open_foreign, progress_bar
    from storesvc_client._api.run import run_import
    from storesvc_client._foreign.importing import wanted_steps

    foreign = open_foreign(
        source.run,
        trust_uncommitted=options.trust_uncommitted,
        without=without,
        keep_names=options.keep_names,
    )
    wanted = steps if which is None else _steps(foreign, which)
    if create:
        # rejects a wrong location before a store is created
        wanted_steps(foreign.name, foreign.steps(), wanted)
    with connection.open(create=create) as client:
        run = client.run(path.run)
        transfers = run_import(
            run,
            foreign,
            steps=wanted,
            labels=dict(labels),
            progress=progress_bar(),
            jobs=jobs,
        )
        show_transfers(transfers, into=run, as_json=as_json)


def _steps(foreign: "ForeignRun", which: Which) -> list[int] | None:
    """Returns one step of a run; None if the newest one is wanted and there is none."""
    if isinstance(which, int):
        return [which]
    found = foreign.steps()
    return [max(found)] if found else None
