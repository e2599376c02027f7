"""``storectl undelete``: reverts deletions."""

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from storesvc_client.cli.arguments import json_option, step_path
from storesvc_client.cli.batch import change_each
from storesvc_client.cli.completion import Part, Which, complete_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.errors import Refusal
from storesvc_client.cli.paths import CheckpointPath

if TYPE_CHECKING:
    from storesvc_client import Run


@click.command()
@click.argument(
    "paths",
    type=step_path,
    metavar="PATH...",
    nargs=-1,
    required=True,
    shell_complete=complete_path(Part.CHECKPOINT, Part.CHECKPOINT, which=Which.DELETED),
)
@json_option
@pass_connection
def undelete(
    connection: Connection, *, paths: Sequence[CheckpointPath], as_json: bool
) -> None:
    """Revert the deletion of checkpoints that are not yet purged.

    \b
    Examples:
      storectl undelete prod/llama-8b@500
      storectl ls prod/llama-8b --deleted   lists what can be undeleted

    Exit code 1: one of them could not be undeleted; the others are.
    """

    from storesvc_client import NotFoundError

    def undelete_one(run: "Run", step: int) -> tuple[str, object]:
        with suppress(NotFoundError):  # as of a deleted one
            run.checkpoint(step)
            raise Refusal(f"{run.name}@{step} is not deleted")
        checkpoint = run.undelete(step)
        return f"{checkpoint.run}@{checkpoint.step} undeleted", checkpoint

    change_each(connection, paths, undelete_one, as_json=as_json)
