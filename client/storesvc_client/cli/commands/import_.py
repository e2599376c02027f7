"""``storectl import``: imports checkpoints that other projects wrote."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from storesvc_client.cli.arguments import (
    json_option,
    keep_names_option,
    label,
    run_path,
)
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.foreign import names_error
from storesvc_client.cli.paths import RunPath, has_names
from storesvc_client.cli.transfers import show_transfers, step_list

if TYPE_CHECKING:
    from storesvc_client import ForeignRun


@click.command("import")
@click.argument("source", metavar="SRC")
@click.argument("path", type=run_path, metavar="RUN")
@click.option(
    "--steps", type=step_list, metavar="STEPS", help="Import these steps: 100,200."
)
@click.option("--latest", is_flag=True, help="Import the newest step only.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
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
    "--trust-uncommitted",
    is_flag=True,
    help="Import steps of Orbax in a bucket without commit_success.txt, too: copies of "
    "a directory have none.",
)
@keep_names_option
@json_option
@pass_connection
def import_(
    connection: Connection,
    *,
    source: str,
    path: RunPath,
    steps: Sequence[int] | None,
    latest: bool,
    jobs: int | None,
    labels: Sequence[tuple[str, str]],
    trust_uncommitted: bool,
    keep_names: bool,
    as_json: bool,
) -> None:
    """Import checkpoints that other projects wrote.

    SRC is a format and a location: orbax:///ckpts/run, safetensors:gs://bucket/model.
    The lowest step is imported first.
    Steps that were imported before are skipped, so an import that was interrupted is
    repeated to finish it. Labels of a checkpoint record where it comes from.

    \b
    Examples:
      storectl import orbax:///ckpts/llama-8b prod/llama-8b
      storectl import orbax:gs://bucket/llama-8b prod/llama-8b --latest
      storectl import safetensors:/models/llama prod/llama --steps 0 --label team=a
    """
    if keep_names and not has_names(source):
        raise names_error()
    if steps is not None and latest:
        raise click.UsageError("expected one of --steps and --latest")
    from storesvc_client import open_foreign, progress_bar
    from storesvc_client._api.run import run_import

    foreign = open_foreign(
        source, trust_uncommitted=trust_uncommitted, keep_names=keep_names
    )
    wanted = _latest(foreign) if latest else steps
    with connection.open() as client:
        transfers = run_import(
            client.run(path.run),
            foreign,
            steps=wanted,
            labels=dict(labels),
            progress=progress_bar(),
            jobs=jobs,
        )
        show_transfers(transfers, as_json=as_json)


def _latest(foreign: "ForeignRun") -> list[int] | None:
    found = foreign.steps()
    return [max(found)] if found else None
