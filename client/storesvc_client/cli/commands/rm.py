"""``storectl rm``: deletes checkpoints."""

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from storesvc_client._values.texts import time_text
from storesvc_client.cli.arguments import duration, json_option, step_path
from storesvc_client.cli.batch import change_each
from storesvc_client.cli.completion import Part, Which, complete_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.errors import Refusal
from storesvc_client.cli.output import json_value
from storesvc_client.cli.paths import CheckpointPath

if TYPE_CHECKING:
    from storesvc_client import Checkpoint, Run


@click.command()
@click.argument(
    "paths",
    type=step_path,
    metavar="PATH...",
    nargs=-1,
    required=True,
    shell_complete=complete_path(Part.CHECKPOINT, Part.CHECKPOINT, which=Which.STEPS),
)
@click.option(
    "--purge-delay",
    type=duration,
    metavar="TIME",
    help="How long it can be undeleted, such as 3d; by default, as set for the run.",
)
@click.option(
    "--purge",
    is_flag=True,
    help="Purge it: it cannot be undeleted, and its step is free.",
)
@click.option("--yes", is_flag=True, help="Do not ask before a purge.")
@json_option
@pass_connection
def rm(
    connection: Connection,
    *,
    paths: Sequence[CheckpointPath],
    purge_delay: timedelta | None,
    purge: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete checkpoints; undelete reverts it until they are purged.

    PATH names the step, because "latest" or a tag may move. A pinned or tagged
    checkpoint is not deleted. --purge ends a checkpoint permanently, unless a hold or a
    live upload needs it; in a terminal it asks before.

    \b
    Examples:
      storectl rm prod/llama-8b@500
      storectl rm prod/llama-8b@500 prod/llama-8b@600 --purge-delay 12h
      storectl rm prod/llama-8b@500 --purge

    Exit code 1: one of them could not be deleted; the others are.
    """
    if purge and purge_delay is not None:
        raise click.UsageError("expected one of --purge and --purge-delay")
    if yes and not purge:
        raise click.UsageError("--yes goes with --purge")
    if purge and not yes and sys.stdin.isatty():
        names = ", ".join(map(str, paths))
        click.confirm(f"Purge {names} permanently?", abort=True, err=True)

    def delete(run: "Run", step: int) -> tuple[str, dict[str, Any]]:
        deleted = run.delete(step, purge_delay=purge_delay)
        if purge:
            _purge(run, deleted)
        line = _purged_text(deleted) if purge else _deleted_text(deleted)
        return line, json_value(deleted) | {"purged": purge}

    change_each(connection, paths, delete, as_json=as_json)


def _purge(run: "Run", deleted: "Checkpoint") -> None:
    """Purges a deleted checkpoint."""
    from storesvc_client import PreconditionError

    try:
        run.purge(deleted.step, uid=deleted.uid, etag=deleted.etag)
    except PreconditionError as e:
        raise Refusal(f"{e}; until then it stays deleted and can be undeleted") from e


def _purged_text(checkpoint: "Checkpoint") -> str:
    return f"{checkpoint.run}@{checkpoint.step} purged"


def _deleted_text(checkpoint: "Checkpoint") -> str:
    assert checkpoint.purge_time is not None
    path = f"{checkpoint.run}@{checkpoint.step}"
    until = time_text(checkpoint.purge_time)
    return f"{path} deleted; until {until}: storectl undelete {path}"
