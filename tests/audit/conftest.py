"""Fixtures: servers with an audit log."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.audited import Audited


@pytest.fixture
def audited(tmp_path: Path) -> Iterator[Callable[..., Audited]]:
    """Starts servers with an audit log."""
    started: list[Audited] = []

    def start(*arguments: str, log: Path | None = None) -> Audited:
        made = Audited(tmp_path, log or tmp_path / "audit.log", *arguments)
        started.append(made)
        return made

    yield start
    for each in started:
        each.server.stop()
