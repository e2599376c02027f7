"""``storectl hold``: holds a checkpoint while a command runs."""

import math
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Final

import click

from storesvc_client._views.tables import HOLDS
from storesvc_client.cli.arguments import (
    duration,
    json_option,
    path_argument,
    run_or_checkpoint,
)
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.errors import Refusal
from storesvc_client.cli.output import Listing, print_note, print_result
from storesvc_client.cli.paths import CheckpointPath, RunPath

if TYPE_CHECKING:
    from storesvc_client import DataLossError, Run

_TYPED: Final = frozenset({signal.SIGINT, signal.SIGQUIT})
"""Signals that a terminal sends to all processes in its foreground."""

_FORWARDED: Final = (
    *_TYPED,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class NoSuchCommand(Refusal):
    """A command that does not exist; exits with the code of shells."""

    exit_code = 127


class CannotRun(Refusal):
    """A command that cannot be run; exits with the code of shells."""

    exit_code = 126


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Returns the exit code of a command, 128 + N if signal N ended it.

    Raises:
        NoSuchCommand: It does not exist.
        CannotRun: It could not be started.
    """
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        if process is None:
            early.append(number)
        elif not (number in _TYPED and _is_in_foreground()):
            process.send_signal(number)

    # Signals that are ignored, as under nohup, stay ignored for the command too.
    forwarded = [n for n in _FORWARDED if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in forwarded}
    try:
        process = _start_command(command, environment)
        for number in early:
            process.send_signal(number)
        # With a timeout it polls: a wait in the kernel would not run the handler if
        # the signal interrupted another thread.
        code = process.wait(timeout=math.inf)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _start_command(
    command: Sequence[str], environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(command, env=environment)
    except FileNotFoundError as e:
        raise NoSuchCommand(f"{command[0]}: there is no such command") from e
    except OSError as e:
        raise CannotRun(f"{command[0]}: {e.strerror or e}") from e


def _is_in_foreground() -> bool:
    """Returns whether signals of the terminal reach this process group."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:  # there is none
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)


_DEFAULT_TTL: Final = timedelta(minutes=10)


_HOLDS: Final = Listing(HOLDS)


@click.command()
@path_argument("path", run_or_checkpoint)
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
    held = f"@{holds[wanted].step}" if wanted in holds else ", which was damaged"
    document = {"run": run.name, "hold": wanted, "deleted": True}
    print_result(
        document, f"hold {wanted} on {run.name}{held} deleted", as_json=as_json
    )
