"""``storectl uploads``: lists checkpoints that are being written."""

from typing import TYPE_CHECKING, Final, assert_never

import click

from storesvc_client._views.tables import UPLOADS, UPLOADS_BY_RUN
from storesvc_client.cli.arguments import json_option, parent_path
from storesvc_client.cli.completion import Part, complete_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.errors import Refusal
from storesvc_client.cli.output import Listing, print_json
from storesvc_client.cli.paths import NamespacePath, RunPath

if TYPE_CHECKING:
    from storesvc_client import DataLossError, Run


_OF_RUN: Final = Listing(UPLOADS)
_OF_RUNS: Final = Listing(UPLOADS_BY_RUN)


@click.command()
@click.argument(
    "path",
    type=parent_path,
    metavar="[PATH]",
    required=False,
    shell_complete=complete_path(Part.NAMESPACE, Part.RUN),
)
@click.option(
    "--abort",
    metavar="UPLOAD",
    help="Abort an upload: its writers can no longer commit.",
)
@json_option
@pass_connection
def uploads(
    connection: Connection,
    *,
    path: NamespacePath | RunPath | None,
    abort: str | None,
    as_json: bool,
) -> None:
    """List checkpoints that are being written, or abort one.

    Without PATH: the uploads of all runs, including runs without a checkpoint. WRITERS
    counts the writers that have finished, WAITS FOR numbers the first of the others, by
    their process in the job; OWNER began the upload. A server aborts an upload whose
    lease has expired.

    \b
    Examples:
      storectl uploads
      storectl uploads prod
      storectl uploads prod/llama-8b
      storectl uploads prod/llama-8b --abort 0d2f6c1e9a5b4c3d8e7f60718293a4b5
    """
    if abort is not None and not isinstance(path, RunPath):
        raise click.UsageError("--abort needs the run of the upload")
    with connection.open() as client:
        if abort is not None and isinstance(path, RunPath):
            _abort(client.run(path.run), abort, as_json=as_json)
            return
        damaged: list[DataLossError] = []
        parent = None if path is None else str(path)
        found = list(client.uploads(parent, on_damage=damaged.append))
        listing = _OF_RUNS
        if isinstance(path, RunPath):
            listing = _OF_RUN
            if not found and not damaged:
                client.run(path.run).info()  # raises if there is no such run
        listing.show(found, as_json=as_json, damaged=damaged)


def _abort(run: "Run", upload: str, *, as_json: bool) -> None:
    found = run.uploads.get(upload)
    match found.state:
        case "live":
            run.uploads.abort(upload)
        case "ended":
            raise Refusal(f"{run.name} upload {upload}: it has already ended")
        case "committed":
            path = f"{run.name}@{found.step}"
            raise Refusal(
                f"{run.name} upload {upload}: it is committed; 'storectl rm {path}' "
                "deletes the checkpoint"
            )
        case "unknown":
            raise Refusal(
                f"{run.name} upload {upload}: expected a live upload, got one in a "
                "state that this release does not know; use a newer storectl"
            )
        case state:
            assert_never(state)
    if as_json:
        print_json(run.uploads.get(upload))
    else:
        click.echo(f"upload {upload} of {run.name}@{found.step} aborted")
