"""``storectl uploads``: checkpoints that are being written."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

from storesvc_client.cli._arguments import json_option, run_path
from storesvc_client.cli._connection import Connection, pass_connection
from storesvc_client.cli._listing import Listing
from storesvc_client.cli._output import Column, print_json, time_text
from storesvc_client.cli._paths import RunPath
from storesvc_client.cli._refusal import Refusal

if TYPE_CHECKING:
    from storesvc_client import DataLossError, Run, UploadInfo


_SHOWN: Final = 4
"""Writers that one row names."""


def _row(upload: "UploadInfo") -> tuple[str, ...]:
    return (
        upload.id,
        str(upload.step),
        time_text(upload.create_time),
        time_text(upload.renew_time),
        f"{upload.finished_writer_count} of {upload.writer_count}",
        _named(upload.unfinished_writers),
    )


def _named(writers: Sequence[int]) -> str:
    shown = ", ".join(map(str, writers[:_SHOWN]))
    return f"{shown}, ..." if len(writers) > _SHOWN else shown


_UPLOADS: Final = Listing(
    noun="upload",
    row=_row,
    columns=(
        Column("UPLOAD"),
        Column("STEP", right=True),
        Column("BEGAN"),
        Column("LAST SIGN"),
        Column("WRITERS"),
        Column("WAITS FOR"),
    ),
)


@click.command()
@click.argument("path", type=run_path, metavar="RUN")
@click.option(
    "--abort",
    metavar="UPLOAD",
    help="Give an upload up: who writes it can no longer commit.",
)
@json_option
@pass_connection
def uploads(
    connection: Connection, *, path: RunPath, abort: str | None, as_json: bool
) -> None:
    """List checkpoints that are being written, or give one up.

    WRITERS counts those that have finished, WAITS FOR numbers the first of the others:
    the processes of a job. An upload that gives no more sign of life is given up by
    the server.

    \b
    Examples:
      storectl uploads prod/llama-8b
      storectl uploads prod/llama-8b --abort 0d2f6c1e9a5b4c3d8e7f60718293a4b5
    """
    with connection.open() as client:
        run = client.run(path.run)
        if abort is None:
            _show(run, as_json=as_json)
        else:
            _abort(run, abort, as_json=as_json)


def _show(run: "Run", *, as_json: bool) -> None:
    damaged: list[DataLossError] = []
    found = list(run.uploads(on_damage=damaged.append))
    if not found and not damaged:
        run.info()  # a run that does not exist has no uploads either
    _UPLOADS.show(found, as_json=as_json, damaged=damaged)


def _abort(run: "Run", upload: str, *, as_json: bool) -> None:
    found = run.upload(upload)
    if found.state == "ended":
        raise Refusal(f"{run.name} upload {upload}: it is over already")
    if found.state == "committed":
        path = f"{run.name}@{found.step}"
        raise Refusal(
            f"{run.name} upload {upload}: it is committed; 'storectl rm {path}' "
            "deletes a checkpoint"
        )
    run.abort(upload)
    if as_json:
        print_json(run.upload(upload))
    else:
        click.echo(f"upload {upload} of {run.name}@{found.step} aborted")
