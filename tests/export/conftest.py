"""Fixtures of the tests of exports."""

from collections.abc import Iterator

import pytest

from tests.export.parts import Save, saving


@pytest.fixture
def saved() -> Iterator[Save]:
    """Saves trees, and opens their checkpoints."""
    with saving() as save:
        yield save
