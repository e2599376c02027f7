"""Fixtures: a console of a seeded store."""

from collections.abc import Iterator

import pytest

import storesvc_client as store
from tests.console.seeded import seed
from tests.console.served import ServedConsole
from tests.support.server_process import ServerProcess


@pytest.fixture(scope="module")
def server_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server that does not apply the retention policy of ``seed``."""
    folder = tmp_path_factory.mktemp("server")
    server = ServerProcess(folder / "store", folder, "--gc-interval", "0s")
    server.start()
    yield server.address
    server.kill()


@pytest.fixture(scope="module")
def seeded(server_address: str) -> Iterator[store.Client]:
    """A client of a server with the runs of ``seed``; its tests change nothing."""
    with store.connect(server_address) as client:
        seed(client)
        yield client


@pytest.fixture(scope="module")
def console(seeded: store.Client) -> Iterator[ServedConsole]:
    """The console of that server."""
    with ServedConsole(seeded) as served:
        yield served
