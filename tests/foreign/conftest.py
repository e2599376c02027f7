"""Fixtures of the tests of imports and mounts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.foreign.orbax_checkpoints import WRITERS, tree_for


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes the checkpoints of a writer of Orbax once; returns their folder."""
    folder = tmp_path_factory.mktemp("orbax")

    def write(writer: str) -> Path:
        path = folder / writer
        if not path.exists():
            WRITERS[writer](path, tree_for(writer))
        return path

    return write
