"""Fixtures: real server processes over fresh file stores, and clients of them."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# before anything imports jax: eight devices to spread arrays over
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import pytest

import storesvc_client as store

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


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts a server over a fresh root, or over one that is given."""
    started: list[ServerProcess] = []

    def start(*arguments: str, root: Path | None = None) -> ServerProcess:
        directory = tmp_path / f"server-{len(started)}"
        directory.mkdir()
        server = ServerProcess(root or tmp_path / "store", directory, *arguments)
        server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that the tests of a module share."""
    directory = tmp_path_factory.mktemp("server")
    process = ServerProcess(directory / "store", directory)
    process.start()
    yield process
    process.kill()


@pytest.fixture(scope="module")
def server_address(server: ServerProcess) -> str:
    """Its ``HOST:PORT``."""
    return server.address


@pytest.fixture
def client(server_address: str) -> Iterator[store.Client]:
    """A client of it."""
    with store.connect(server_address) as connected:
        yield connected


_runs = itertools.count()


@pytest.fixture
def run(client: store.Client) -> store.Run:
    """A run that no other test uses."""
    return client.run(f"tests/run-{next(_runs)}")
