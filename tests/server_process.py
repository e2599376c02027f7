"""A server as operators run it: a process of its own."""

import signal
import subprocess
import sys
import time
from pathlib import Path

START_SECONDS = 30


class ServerProcess:
    """``storectl serve`` over one root, on one port, through kills and restarts."""

    def __init__(self, root: Path, directory: Path, *arguments: str) -> None:
        self.root = root
        self._ready = directory / "ready"
        self._log = directory / "server.log"
        self._arguments = arguments
        self._port = "0"
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """What it printed."""
        return self._log.read_text()

    def start(self) -> None:
        """Starts it and waits until it takes calls."""
        self._ready.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "storesvc_client.cli", "serve"),
                    *("--root", self.root.as_uri(), "--port", self._port),
                    *("--ready-file", str(self._ready), *self._arguments),
                ],
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._ready.exists():
            assert self._process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)
        self.address = self._ready.read_text().strip()
        self._port = self.address.rpartition(":")[2]

    def kill(self) -> None:
        """Ends it as a power cut would, as far as it can tell."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """Ends it in good order, and returns its exit code."""
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(START_SECONDS)
