"""``storectl verify``: reads a checkpoint and reports damage."""

from typing import TYPE_CHECKING

import click

from storesvc_client._values.texts import count_text, printable, size_text
from storesvc_client.cli.arguments import json_option, whole_checkpoint
from storesvc_client.cli.completion import Part, complete_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.errors import Refusal
from storesvc_client.cli.output import json_value, print_json
from storesvc_client.cli.paths import CheckpointPath

if TYPE_CHECKING:
    from storesvc_client import Client, Verification


@click.command()
@click.argument(
    "path",
    type=whole_checkpoint,
    metavar="PATH",
    shell_complete=complete_path(Part.CHECKPOINT, Part.CHECKPOINT),
)
@json_option
@pass_connection
def verify(connection: Connection, *, path: CheckpointPath, as_json: bool) -> None:
    """Read every byte of a checkpoint, and report damage.

    The server reads, and sends only what it finds. Each damage is a line that names the
    leaf and the chunk.

    \b
    Examples:
      storectl verify prod/llama-8b@latest
      storectl verify prod/llama-8b@500 --json

    Exit code 1: something is damaged.
    """
    with connection.open() as client:
        found = _verify(client, path)
    name = f"{found.checkpoint.run}@{found.checkpoint.step}"
    if as_json:
        print_json(json_value(found) | {"ok": found.ok})
    elif found.ok:
        read = f"{count_text(found.chunk_count, 'chunk')}, "
        click.echo(f"{name}: {read}{size_text(found.stored_bytes)}, all as saved")
    else:
        for damage in found.damages:
            click.echo(printable(damage.message))
    if not found.ok:
        raise Refusal(
            f"{name} is damaged in {count_text(len(found.damages), 'place')}; use "
            "another checkpoint"
        )


def _verify(client: "Client", path: CheckpointPath) -> "Verification":
    """Verifies a checkpoint; shows the progress."""
    from storesvc_client.cli.progress import progress

    run = client.run(path.run)
    checkpoint = run.checkpoint(path.which)
    done = 0
    with progress(str(path), total_bytes=checkpoint.stored_bytes) as advance:

        def show(found: "Verification") -> None:
            nonlocal done
            advance(found.stored_bytes - done)
            done = found.stored_bytes

        return run.verify(checkpoint.step, progress=show)
