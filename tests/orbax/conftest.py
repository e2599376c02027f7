"""Managers of Orbax and of this library, for tests that hold for both."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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


def _new(cls: Any, place: Callable[[], Any], stack: ExitStack) -> NewManager:
    """Returns a function that creates a manager; "again" opens the last place again."""
    places: list[Any] = []

    def create(*, again: bool = False, **options: Any) -> Any:
        if not again:
            places.append(place())
        manager = cls(places[-1], **options)
        stack.callback(manager.close)
        return manager

    return create


@pytest.fixture(params=sampled(["storesvc", "orbax"], every=2))
def new_manager(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    runs: Callable[[], store.Run],
) -> Iterator[NewManager]:
    """Creates a ``CheckpointManager``: of Orbax in a directory, or of this library."""
    with ExitStack() as stack:
        if request.param == "orbax":
            names = itertools.count()
            yield _new(
                ocp.CheckpointManager, lambda: tmp_path / f"{next(names)}", stack
            )
        else:
            yield _new(orbax.CheckpointManager, runs, stack)


@pytest.fixture(params=sampled(["storesvc", "orbax"], every=2))
def new_checkpointer(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    runs: Callable[[], store.Run],
) -> Iterator[NewManager]:
    """Creates a ``Checkpointer`` of version 1: of Orbax, or of this library."""
    with ExitStack() as stack:
        if request.param == "orbax":
            names = itertools.count()
            yield _new(
                training.Checkpointer, lambda: tmp_path / f"{next(names)}", stack
            )
        else:
            yield _new(orbax.Checkpointer, runs, stack)


@pytest.fixture
def our_manager(runs: Callable[[], store.Run]) -> Iterator[NewManager]:
    """Creates a ``CheckpointManager`` of this library."""
    with ExitStack() as stack:
        yield _new(orbax.CheckpointManager, runs, stack)
