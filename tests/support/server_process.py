"""A server in a separate process, as operators run it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import storesvc_client as store
from tests.support import restrictions

START_SECONDS = 30


class EndedError(Exception):
    """The server ended before it accepted calls."""


class ServerProcess:
    """``storectl serve`` of one root, on the same port across kills and restarts."""

    def __init__(
        self, root: Path, directory: Path, *arguments: str, uri: str = ""
    ) -> None:
        """Makes a server that is not started.

        Args:
            root: Directory of its store.
            directory: Directory of its log.
            arguments: Additional arguments of its command.
            uri: Root of its store if it is not a directory on this machine.
        """
        self.root = root
        self._uri = uri or root.as_uri()
        self._ready = directory / "ready"
        self._log = directory / "server.log"
        restricted = restrictions.server_options(arguments, directory)
        self._arguments = (*arguments, *restricted)
        self.environment: dict[str, str] = {}
        """Additional environment variables; they apply from the next start on."""
        self._port = "0"
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""

    @property
    def pid(self) -> int:
        """ID of the process."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it still runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """Output of the process."""
        return self._log.read_text()

    def connect(self) -> "store.Client":
        """Returns a client of it, with the credentials that it requires."""
        return restrictions.connect(self.address)

    def start(self) -> None:
        """Starts it and waits until it accepts calls.

        Raises:
            EndedError: It ended before.
        """
        self.launch()
        self.await_ready()

    def launch(self) -> None:
        """Starts it."""
        self._ready.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "storesvc_client.cli", "serve"),
                    *("--root", self._uri, "--port", self._port),
                    *("--ready-file", str(self._ready), *self._arguments),
                ],
                stdout=log,
                stderr=log,
                env=os.environ | self.environment,
            )

    def await_ready(self) -> None:
        """Waits until it accepts calls.

        Raises:
            EndedError: It ended before.
        """
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while not self._ready.exists():
            if self._process.poll() is not None:
                raise EndedError(self.log)
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)
        self.address = self._ready.read_text().strip()
        self._port = self.address.rpartition(":")[2]
        restrictions.note_server(self.address, self._arguments)

    def wait(self) -> int:
        """Waits until it has ended, and returns its exit code."""
        assert self._process is not None
        return self._process.wait(START_SECONDS)

    def kill(self) -> None:
        """Kills it with SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """Stops it with SIGTERM, and returns its exit code."""
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> int:
        assert self._process is not None
        # does nothing if it has already ended
        self._process.send_signal(number)
        return self.wait()
