"""Fixtures: a console of a seeded store."""

from collections.abc import Iterator

import pytest

import storesvc_client as store
from tests.console.seeded import seed
from tests.console.served import ServedConsole


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
