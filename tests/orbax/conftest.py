"""Managers of Orbax and of this library, for tests that hold for both."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.experimental.v1 import training

import storesvc_client as store
from storesvc_client import orbax
from tests.support.examples import sampled

NewManager = Callable[..., Any]


@pytest.fixture(scope="session")
def orbax_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[store.Client]:
    """A store in this process."""
    root = tmp_path_factory.mktemp("orbax-store")
    with store.connect(f"file://{root}") as client:
        yield client


@pytest.fixture
def runs(orbax_store: store.Client) -> Callable[[], store.Run]:
    """Returns a run that no other test uses."""
    return lambda: orbax_store.run(f"orbax/run-{next(_NUMBERS)}")


_NUMBERS = itertools.count()


def commit(manager: Any, step: int, argument: Any, **options: Any) -> None:
    """Saves a step, and waits for its commit."""
    manager.save(step, args=argument, **options)
    manager.wait_until_finished()


@contextmanager
def _creating(cls: Any, place: Callable[[], Any]) -> Iterator[NewManager]:
    """Yields a function that creates a manager; "again" opens the last place again."""
    places: list[Any] = []
    with ExitStack() as stack:

        def create(*, again: bool = False, **options: Any) -> Any:
            if not again:
                places.append(place())
            manager = cls(places[-1], **options)
            stack.callback(manager.close)
            return manager

        yield create


@pytest.fixture(params=sampled(["storesvc", "orbax"], every=2))
def owner(request: pytest.FixtureRequest) -> str:
    """The library whose classes a test creates."""
    name: str = request.param
    return name


@pytest.fixture
def new_place(
    owner: str, tmp_path: Path, runs: Callable[[], store.Run]
) -> Callable[[], Any]:
    """Returns a directory for Orbax, or a run for this library."""
    names = itertools.count()
    return runs if owner == "storesvc" else lambda: tmp_path / f"{next(names)}"


@pytest.fixture
def new_manager(owner: str, new_place: Callable[[], Any]) -> Iterator[NewManager]:
    """Creates a ``CheckpointManager``: of Orbax in a directory, or of this library."""
    module = orbax if owner == "storesvc" else ocp
    with _creating(module.CheckpointManager, new_place) as create:
        yield create


@pytest.fixture
def new_checkpointer(owner: str, new_place: Callable[[], Any]) -> Iterator[NewManager]:
    """Creates a ``Checkpointer`` of version 1: of Orbax, or of this library."""
    module = orbax if owner == "storesvc" else training
    with _creating(module.Checkpointer, new_place) as create:
        yield create


@pytest.fixture
def our_manager(runs: Callable[[], store.Run]) -> Iterator[NewManager]:
    """Creates a ``CheckpointManager`` of this library."""
    with _creating(orbax.CheckpointManager, runs) as create:
        yield create
