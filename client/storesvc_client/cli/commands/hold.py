"""``storectl hold``: holds a checkpoint while a command runs."""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import click

from storesvc_client._values.texts import ABSENT, time_text
from storesvc_client.cli.arguments import duration, json_option, run_or_checkpoint
from storesvc_client.cli.completion import Part, complete_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.errors import Refusal
from storesvc_client.cli.output import Column, Listing, Shrink, print_json, print_note
from storesvc_client.cli.paths import CheckpointPath, RunPath

if TYPE_CHECKING:
    from storesvc_client import DataLossError, HoldInfo, Run

_DEFAULT_TTL: Final = timedelta(minutes=10)


def _row(hold: "HoldInfo") -> tuple[str, ...]:
    return (
        hold.id,
        str(hold.step),
        hold.owner or ABSENT,
        time_text(hold.expire_time),
    )


_HOLDS: Final = Listing(
    noun="hold",
    row=_row,
    columns=(
        Column("HOLD"),
        Column("STEP", right=True),
        Column("OWNER", shrink=Shrink.END),
        Column("EXPIRES", shrink=Shrink.TIME),
    ),
)


@click.command()
@click.argument(
    "path",
    type=run_or_checkpoint,
    metavar="PATH",
    shell_complete=complete_path(Part.RUN, Part.CHECKPOINT),
)
@click.argument("command", nargs=-1, metavar="[-- COMMAND...]")
@click.option(
    "--owner", metavar="NAME", help="Owner of the hold; this machine by default."
)
@click.option(
    "--ttl",
    type=duration,
    metavar="TIME",
    help="How long the hold outlives a killed storectl.  [default: 10m]",
)
@click.option("--delete", metavar="HOLD", help="End a hold of a run, of any owner.")
@json_option
@pass_connection
def hold(
    connection: Connection,
    *,
    path: RunPath | CheckpointPath,
    command: Sequence[str],
    owner: str | None,
    ttl: timedelta | None,
    delete: str | None,
    as_json: bool,
) -> None:
    """Hold a checkpoint while a command runs, or list holds.

    A held checkpoint is not purged; if it is deleted while it is held, it can be
    undeleted. COMMAND finds the path of the checkpoint, by step, in $STORECTL_HELD, and
    receives the signals that storectl receives.

    \b
    Examples:
      storectl hold prod/llama-8b@best -- python evaluate.py
      storectl hold prod/llama-8b            lists holds, also of restores
      storectl hold prod/llama-8b --delete 0d2f6c1e9a5b4c3d8e7f60718293a4b5

    Exit code: the code of COMMAND, as in shells; 1 if COMMAND succeeded and the hold
    was lost.
    """
    match path:
        case CheckpointPath() if command and delete is None and not as_json:
            lasting = _DEFAULT_TTL if ttl is None else ttl
            code = _run_held(connection, path, command, owner=owner, ttl=lasting)
            raise click.exceptions.Exit(code)
        case RunPath(name) if not command and owner is None and ttl is None:
            with connection.open() as client:
                if delete is None:
                    damaged: list[DataLossError] = []
                    holds = client.run(name).holds.list(on_damage=damaged.append)
                    _HOLDS.show(holds, as_json=as_json, damaged=damaged)
                else:
                    _delete(client.run(name), delete, as_json=as_json)
        case _:
            raise click.UsageError(
                "expected CHECKPOINT -- COMMAND, RUN, or RUN --delete HOLD"
            )


def _run_held(
    connection: Connection,
    path: CheckpointPath,
    command: Sequence[str],
    *,
    owner: str | None,
    ttl: timedelta,
) -> int:
    """Runs the command while the checkpoint is held; returns its exit code."""
    from storesvc_client import StoreError
    from storesvc_client.cli.child_process import run_command

    code = None
    with connection.open() as client:
        try:
            with client.run(path.run).holds.create(
                path.which, owner=owner, ttl=ttl
            ) as held:
                name = f"{path.run}@{held.checkpoint.step}"
                code = run_command(command, os.environ | {"STORECTL_HELD": name})
        except StoreError as e:
            if code is None:
                raise
            print_note(f"the hold on {name} was lost: {e}")
            return code or 1
    return code


def _delete(run: "Run", wanted: str, *, as_json: bool) -> None:
    damaged: list[DataLossError] = []
    holds = {hold.id: hold for hold in run.holds.list(on_damage=damaged.append)}
    unreadable = {e.metadata["name"].rpartition("/")[2] for e in damaged}
    if wanted not in {*holds, *unreadable}:
        raise Refusal(
            f"{run.name} has no hold {wanted!r}; 'storectl hold {run.name}' lists them"
        )
    run.holds.release(wanted)
    if as_json:
        print_json({"run": run.name, "hold": wanted, "deleted": True})
    else:
        held = f"@{holds[wanted].step}" if wanted in holds else ", which was damaged"
        click.echo(f"hold {wanted} on {run.name}{held} deleted")
