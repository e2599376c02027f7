"""Fixtures: fresh roots in an emulated bucket, and servers over them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import gcs_root
from tests.fake_gcs import FakeGcs
from tests.support.server_process import ServerProcess


@pytest.fixture
def root(gcs: FakeGcs) -> Iterator[str]:
    """The root of a fresh store in a bucket without faults."""
    gcs.clear()
    yield gcs_root()
    gcs.clear()


@pytest.fixture
def bucket_server(root: str, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server of the store."""
    server = ServerProcess(tmp_path, tmp_path, uri=root)
    server.start()
    yield server
    server.kill()
