"""The cost of an upload does not grow with the number of writers that it expects."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from storesvc.rpc.upload_service import MAX_WRITERS
from tests.conftest import gcs_root
from tests.fake_gcs import FakeGcs
from tests.support.contract import Writer, frame, sums
from tests.support.server_process import ServerProcess

RUN = "tests/writers"

pytestmark = [pytest.mark.emulated, pytest.mark.slow]


@pytest.fixture
def server(gcs: FakeGcs, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server whose requests to its storage are counted."""
    process = ServerProcess(tmp_path, tmp_path, "--gc-interval", "0 s", uri=gcs_root())
    process.start()
    yield process
    process.kill()


def request_count(gcs: FakeGcs, address: str, *, promised: int) -> int:
    """Returns how many requests to the storage a save makes that takes over another.

    Args:
        gcs: The storage.
        address: The server's.
        promised: Writers of the other, two of which store something.
    """
    first = Writer(address, RUN, promised, writers=promised)
    first.begin()
    first.write(frame(0), writer=0)
    first.write(frame(2), writer=promised - 1)
    gcs.clear()
    with pytest.raises(grpc.RpcError, match=f"but {promised} have not finished"):
        first.commit()
    second = Writer(address, RUN, promised)
    assert second.begin().resumes
    assert [0, 2] == second.find(sums(0, 1, 2))
    second.write(frame(1))
    second.finish(sums(0, 1, 2))
    second.commit()
    return len(gcs.log)


def test_an_upload_takes_over_one_of_many_writers_as_it_does_one_of_few(
    gcs: FakeGcs, server: ServerProcess
) -> None:
    few = request_count(gcs, server.address, promised=2)
    many = request_count(gcs, server.address, promised=MAX_WRITERS)

    # a slow machine may renew a lease once more
    assert many <= few + 5
