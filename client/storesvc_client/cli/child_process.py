"""Runs a command, forwards signals to it, and returns its exit code."""

import math
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Final

from storesvc_client.cli.errors import Refusal

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
        process = _started(command, environment)
        for number in early:
            process.send_signal(number)
        # With a timeout it polls: a wait in the kernel would not run the handler if
        # the signal interrupted another thread.
        code = process.wait(timeout=math.inf)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _started(
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
