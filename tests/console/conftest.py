"""Fixtures: a console of a seeded store."""

from collections.abc import Iterator

import pytest

import storesvc_client as store
from tests.console.seeded import hostile_entries, seed
from tests.console.served import ServedConsole
from tests.support.server_process import ServerProcess


@pytest.fixture(scope="module")
def server_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with the runs of ``seed``, whose policy it does not apply,
    since it is another one than committed them; its audit log has hostile names."""
    folder = tmp_path_factory.mktemp("server")
    log = folder / "audit.log"
    log.write_bytes(hostile_entries())
    options = ("--gc-interval", "0s", "--audit-log", str(log))
    server = ServerProcess(folder / "store", folder, *options)
    server.start()
    with store.connect(server.address) as client:
        seed(client)
        server.kill()
    server.start()
    yield server.address
    server.kill()


@pytest.fixture(scope="module")
def seeded(server_address: str) -> Iterator[store.Client]:
    """A client of that server; its tests change nothing."""
    with store.connect(server_address) as client:
        yield client


@pytest.fixture(scope="module")
def console(seeded: store.Client) -> Iterator[ServedConsole]:
    """The console of that server."""
    with ServedConsole(seeded) as served:
        yield served


@pytest.fixture
def own(client: store.Client) -> Iterator[ServedConsole]:
    """The console of a client of this test."""
    with ServedConsole(client) as served:
        yield served
