"""Fixtures: states that another process trains and saves."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.easydel.saving import Original, read
from tests.easydel.scenarios import SCENARIOS, Scenario
from tests.support.server_process import ServerProcess

SAVED_SECONDS = 240


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignores easydel's warnings about flax and jax."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.filterwarnings("error:::storesvc_client"))


class SavingProcess:
    """The running process ``tests.easydel.saving``."""

    def __init__(self, address: str, folder: Path, names: list[str]) -> None:
        self._folder = folder
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.easydel.saving"),
                    *(address, str(folder), *names),
                ],
                stdout=log,
                stderr=log,
            )

    def original(self, name: str) -> Original:
        """Waits until a scenario's checkpoint is committed; returns its digests."""
        file = self._folder / name
        deadline = time.monotonic() + SAVED_SECONDS
        while not file.exists():
            assert self._process.poll() in (None, 0), self._log.read_text()[-4000:]
            assert time.monotonic() < deadline, self._log.read_text()[-4000:]
            time.sleep(0.05)
        return read(file)

    def kill(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def saving(
    request: pytest.FixtureRequest,
    server: ServerProcess,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SavingProcess]:
    """A process that saves the selected scenarios in order, in parallel with the tests
    of the first ones.
    """
    chosen = [
        str(item.callspec.params["name"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        if "saving" in item.fixturenames
    ]
    names = list(dict.fromkeys(chosen))
    process = SavingProcess(server.address, tmp_path_factory.mktemp("saving"), names)
    yield process
    process.kill()


@pytest.fixture
def scenario(name: str) -> Scenario:
    """The scenario of a test that is parametrized by name."""
    return SCENARIOS[name]


@pytest.fixture
def original(name: str, saving: SavingProcess) -> Original:
    """Digests of its checkpoint."""
    return saving.original(name)
