"""``storectl trace``: shows the timeline of a save, or of a report in a file."""

import shutil
from pathlib import Path

import click

from storesvc_client._values.texts import printable
from storesvc_client.cli.arguments import json_option, whole_checkpoint
from storesvc_client.cli.completion import Part, complete_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.errors import Refusal
from storesvc_client.cli.output import json_value, print_json
from storesvc_client.cli.paths import CheckpointPath


@click.command()
@click.argument(
    "path",
    type=whole_checkpoint,
    metavar="[PATH]",
    required=False,
    shell_complete=complete_path(Part.CHECKPOINT, Part.CHECKPOINT),
)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Show the report of a restore or a save that a job has written.",
)
@json_option
@pass_connection
def trace(
    connection: Connection,
    *,
    path: CheckpointPath | None,
    report: Path | None,
    as_json: bool,
) -> None:
    """Show how long each part of a save took.

    One table for each process: the phases until it had stored its chunks, from
    their first start to their last end, and the seconds that its threads spent
    in them. Of more than 16 processes, those that took longest are kept. The
    trace has the same id in a collector of OpenTelemetry.

    A restore is not in the store. With --report, the timeline is that of a file
    with the text of report.to_json(), and no server is needed.

    \b
    Examples:
      storectl trace prod/llama-8b@latest
      storectl trace prod/llama-8b@500 --json
      storectl trace --report restore.json
    """
    from storesvc_client._values.reports import (
        MAX_REPORT_BYTES,
        parse_report,
        report_document,
        report_text,
        trace_text,
    )

    if (path is None) == (report is None):
        raise click.UsageError(
            "expected a checkpoint or --report FILE, got "
            + ("neither" if path is None else "both; omit one of them")
        )
    width = shutil.get_terminal_size((100, 0)).columns
    if report is not None:
        place = f"report {printable(str(report))}"
        try:
            with report.open("rb") as file:
                data = file.read(MAX_REPORT_BYTES + 1)
        except OSError as e:
            why = e.strerror
            raise Refusal(f"{place}: cannot be read: {why}; correct the path") from e
        read = parse_report(data, place)
        document, text = report_document(read), report_text(read, width=width)
    else:
        assert path is not None
        with connection.open() as client:
            found = client.run(path.run).trace(path.which)
        document, text = json_value(found), trace_text(found, width=width)
    if as_json:
        print_json(document)
    else:
        click.echo(text)
