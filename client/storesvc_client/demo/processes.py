"""Starts and ends the processes of the demo: a store server and training processes.

Each is a context manager and ends with its block. They run in their own sessions, so
that Ctrl-C reaches them only through these blocks.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from storesvc_client.demo.job_log import Event, parse

__all__ = ["DemoError", "Server", "Trainer", "storectl"]

_READY_SECONDS = 30.0
_STOP_SECONDS = 20.0
_STORECTL_SECONDS = 30.0


class DemoError(RuntimeError):
    """A process of the demo failed or timed out."""


class _Process:
    """A child process whose stderr goes to a file."""

    def __init__(
        self, name: str, command: list[str], log: Path, environment: dict[str, str]
    ) -> None:
        self.name = name
        self._log = log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=os.environ | environment,
                text=True,
                errors="replace",
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.running():
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def running(self) -> bool:
        """Returns whether the process still runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends the process by SIGKILL."""
        self._process.kill()
        self._process.wait()

    def failure(self, what: str) -> DemoError:
        """Returns an error with the last lines of the process's stderr."""
        lines = self._log.read_text(errors="replace").splitlines()[-15:]
        return DemoError("\n".join([f"{self.name} {what}; its last lines:", *lines]))


class Server(_Process):
    """A store server on loopback, on a free port, over a directory."""

    def __init__(self, root: Path, directory: Path) -> None:
        self._ready = directory / "ready"
        command = [
            *(sys.executable, "-m", "storesvc_client.cli", "serve"),
            *("--root", root.absolute().as_uri()),
            *("--port", "0"),
            *("--ready-file", str(self._ready)),
        ]
        super().__init__("The store server", command, directory / "server.log", {})

    def address(self) -> str:
        """Returns HOST:PORT, once the server serves there.

        Raises:
            DemoError: It ended, or took longer than 30 s.
        """
        deadline = time.monotonic() + _READY_SECONDS
        while time.monotonic() < deadline:
            if self._ready.exists() and (text := self._ready.read_text()).endswith(
                "\n"
            ):
                return text.strip()
            if not self.running():
                raise self.failure(f"ended with exit code {self._process.returncode}")
            time.sleep(0.02)
        raise self.failure(f"did not serve within {_READY_SECONDS:.0f} s")


class Trainer(_Process):
    """A training process."""

    def __init__(self, name: str, arguments: list[str], directory: Path) -> None:
        super().__init__(
            name,
            [sys.executable, "-m", "storesvc_client.demo.train", *arguments],
            directory / f"{name.replace(' ', '-')}.log",
            # processes on one mesh run the same program: compile it once
            {
                "JAX_COMPILATION_CACHE_DIR": str(directory / "compiled"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
            },
        )

    def events(self) -> Iterator[Event]:
        """Yields what the process prints, until it ends."""
        assert self._process.stdout is not None
        for text in self._process.stdout:
            if (event := parse(text)) is not None:
                yield event

    def exit_code(self) -> int:
        """Returns the exit code of a process whose events have ended; negative for a
        signal.

        Raises:
            DemoError: It still runs after 20 s.
        """
        try:
            return self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired as e:
            raise self.failure(f"did not end in {_STOP_SECONDS:.0f} s") from e

    def check(self) -> None:
        """Waits for the end of a process whose events have ended.

        Raises:
            DemoError: It failed.
        """
        if (code := self.exit_code()) != 0:
            raise self.failure(f"ended with exit code {code}")


def storectl(*arguments: str, width: int) -> subprocess.CompletedProcess[str]:
    """Returns the output and the exit code of ``storectl`` with these arguments.

    Raises:
        DemoError: It took longer than 30 s.
    """
    try:
        return subprocess.run(
            [sys.executable, "-m", "storesvc_client.cli", *arguments],
            env=os.environ | {"COLUMNS": str(width)},
            capture_output=True,
            text=True,
            timeout=_STORECTL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as e:
        raise DemoError(
            f"storectl {arguments}: timed out after {e.timeout:.0f} s"
        ) from e
