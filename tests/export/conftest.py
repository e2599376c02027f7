"""Fixtures of the tests of exports."""

import logging
from collections.abc import Iterator

import pytest

from tests.export.parts import Save, saving


@pytest.fixture
def saved() -> Iterator[Save]:
    """Saves trees, and opens their checkpoints."""
    with saving() as save:
        yield save


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    """Keeps Orbax from logging, which makes no difference to what it does."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
