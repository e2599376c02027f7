"""Fixtures: real server processes over fresh file stores, and clients of them."""

import itertools
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

# before anything imports jax: eight devices to spread arrays over
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import pytest

import storesvc_client as store
from tests.server_process import ServerProcess

# It has an environment of its own: make test-easydel.
collect_ignore = [] if find_spec("easydel") else ["easydel"]


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
