"""``storectl trace``: shows the timeline of a save."""

import shutil

import click

from storesvc_client.cli.arguments import json_option, whole_checkpoint
from storesvc_client.cli.completion import Part, complete_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.output import json_value, print_json
from storesvc_client.cli.paths import CheckpointPath


@click.command()
@click.argument(
    "path",
    type=whole_checkpoint,
    metavar="PATH",
    shell_complete=complete_path(Part.CHECKPOINT, Part.CHECKPOINT),
)
@json_option
@pass_connection
def trace(connection: Connection, *, path: CheckpointPath, as_json: bool) -> None:
    """Show how long each part of a save took.

    One table for each process: the phases until it had stored its chunks, from
    their first start to their last end, and the seconds that its threads spent
    in them. Of more than 16 processes, those that took longest are kept. The
    trace has the same id in a collector of OpenTelemetry.

    \b
    Examples:
      storectl trace prod/llama-8b@latest
      storectl trace prod/llama-8b@500 --json
    """
    from storesvc_client._values.timelines import trace_text

    with connection.open() as client:
        found = client.run(path.run).trace(path.which)
    if as_json:
        print_json(json_value(found))
        return
    width = shutil.get_terminal_size((100, 0)).columns
    click.echo(trace_text(found, width=width))
