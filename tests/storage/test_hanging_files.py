"""Files that hang, as on a lost network, block neither other calls nor an exit."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

import storesvc_client as store
from storesvc.errors import StorageUnavailableError
from storesvc.format.names import RunName
from storesvc.storage import requests, rooted_files
from storesvc.storage.file_bucket import FileBackend
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc_proto.v1 import chunk_service_pb2 as api
from storesvc_proto.v1.chunk_service_pb2_grpc import ChunkServiceStub
from tests.support.contract import Writer, frame
from tests.support.examples import soaked
from tests.support.hanging_disk import HangingDisk
from tests.support.saved_checkpoint import CHUNKS, Saved
from tests.support.server_process import ServerProcess

RUN = RunName("tests", "hangs")

WAITED = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
"""Error of a call that waits for a file that hangs."""


@pytest.fixture
def disk(tmp_path: Path) -> HangingDisk:
    return HangingDisk(tmp_path / "disk")


@pytest.fixture
def server(
    start_server: Callable[..., ServerProcess], disk: HangingDisk
) -> ServerProcess:
    """A server on a disk with hanging files, with a checkpoint."""
    server = start_server()
    server.kill()
    server.environment = disk.environment
    server.start()
    Writer(server.address, str(RUN), 3, chunks=CHUNKS).save(range(CHUNKS))
    return server


def read_chunk(server: ServerProcess) -> grpc.StatusCode:
    """Reads a chunk for up to two seconds, and returns the outcome."""
    uid = Saved(server.root, RUN).record.upload
    with grpc.insecure_channel(server.address) as channel:
        request = api.ReadChunksRequest(
            name=f"{RUN.resource}/checkpoints/3", uid=uid, chunk=[0]
        )
        try:
            list(ChunkServiceStub(channel).ReadChunks(request, timeout=2))
        except grpc.RpcError as e:
            code: grpc.StatusCode = e.code()
            return code
    return grpc.StatusCode.OK


@pytest.mark.slow
def test_a_server_ends_after_its_drain_while_a_data_file_hangs(
    server: ServerProcess, disk: HangingDisk
) -> None:
    disk.hang(Saved(server.root, RUN).file(0))
    assert read_chunk(server) in WAITED

    assert 0 == server.stop()


@pytest.mark.slow
def test_a_server_ends_after_its_drain_while_records_hang(
    server: ServerProcess, disk: HangingDisk
) -> None:
    """TensorStore reads records in its own threads."""
    disk.hang(Saved(server.root, RUN).slot)
    for _ in range(3):
        assert read_chunk(server) in WAITED

    assert 0 == server.stop()


@pytest.mark.slow
def test_a_server_ends_shortly_after_its_drain_while_a_write_hangs(
    server: ServerProcess, disk: HangingDisk
) -> None:
    writer = Writer(server.address, str(RUN), 4)
    writer.begin()
    directory = server.root / f"data/{RUN}/pool/{writer.name.rpartition('/')[2]}"
    disk.hang(directory)  # its sync, once a file is in it
    with ThreadPoolExecutor() as pool:
        writing = pool.submit(writer.write, frame(0, 1, 2))
        while not directory.exists():
            assert not writing.done()

        server.stop()  # it took less than START_SECONDS
        with pytest.raises(grpc.RpcError):
            writing.result()


@pytest.mark.slow
def test_hanging_data_files_do_not_block_other_calls(
    server: ServerProcess, disk: HangingDisk
) -> None:
    saved = Saved(server.root, RUN)
    disk.hang(saved.file(0))
    with ThreadPoolExecutor(40) as pool:
        reads = [pool.submit(read_chunk, server) for _ in range(40)]
        Writer(server.address, "tests/others", 1).save()
        assert {read.result() for read in reads} <= WAITED
    Writer(server.address, "tests/others", 2).save()

    disk.go_on(saved.file(0))
    assert grpc.StatusCode.OK == read_chunk(server)
    with store.connect(server.address) as client:
        assert client.run(str(RUN)).verify(3).ok


@pytest.mark.slow
def test_hanging_records_do_not_block_other_calls(
    server: ServerProcess, disk: HangingDisk
) -> None:
    disk.hang(Saved(server.root, RUN).slot)
    with ThreadPoolExecutor(20) as pool:
        reads = [pool.submit(read_chunk, server) for _ in range(20)]
        assert {read.result() for read in reads} <= WAITED

    Writer(server.address, "tests/others", 1).save()


async def test_a_read_that_hangs_fails_at_its_deadline_and_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "DISK_SECONDS", 0.2)
    may_go_on = threading.Event()
    open_file = rooted_files.open_file

    def hanging(root: Path, place: str) -> int:
        may_go_on.wait()
        return open_file(root, place)

    bucket = await TensorStoreBucket.open(tmp_path.as_uri())
    await bucket.write_new("data/n/r/pool/a", [b"123"])
    monkeypatch.setattr(rooted_files, "open_file", hanging)
    try:
        with pytest.raises(StorageUnavailableError, match=r"pool/a: .*not answer"):
            await bucket.read_range("data/n/r/pool/a", 0, 3)
        with pytest.raises(StorageUnavailableError, match="pool/a: an earlier"):
            await bucket.read_range("data/n/r/pool/a", 0, 3)
    finally:
        may_go_on.set()


async def test_generations_of_records_are_those_that_tensorstore_makes(
    tmp_path: Path,
) -> None:
    """If they differed, each record would be read twice, again by TensorStore."""
    bucket = await TensorStoreBucket.open(tmp_path.as_uri())
    written = await bucket.write("a/b", b"1")
    for _ in range(2):
        stored = await bucket.read("a/b")
        assert stored is not None
        assert (b"1", written) == (stored.data, stored.generation)
        assert isinstance(bucket._backend, FileBackend)
        assert bucket._backend._makes_generations
    await bucket.write("a/b", b"2", condition=written)


CLIENT = """
import sys
from datetime import timedelta
import storesvc_client as store
from storesvc_client._restore import sources
from tests.support.sessions import send_through_server
root, marker, route = sys.argv[1:]
client = store.connect(root)
opened = client.run("tests/hangs").open(3)
if route == "streamed":
    send_through_server(client)
if route == "direct":
    sources.DISK_SECONDS = 0.5
open(marker, "w").close()
try:
    opened.restore(deadline=timedelta(seconds=3600 if route == "direct" else 1))
except store.UnavailableError as e:
    print(e, flush=True)
client.close()
print("closed", flush=True)
"""


@pytest.mark.parametrize(
    "route", soaked(["direct", "streamed", "direct with a deadline"], every=3)
)
def test_a_process_with_an_embedded_store_ends_while_a_data_file_hangs(
    server: ServerProcess, disk: HangingDisk, route: str
) -> None:
    server.stop()
    file = Saved(server.root, RUN).file(0)
    marker = Path(disk.environment["STORESVC_TEST_HANGS"]) / file.name

    ended = subprocess.run(
        [sys.executable, "-c", CLIENT, server.root.as_uri(), str(marker), route],
        env=os.environ | disk.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (0, "") == (ended.returncode, ended.stderr)
    reported, closed = ended.stdout.splitlines()
    assert "closed" == closed
    assert file.name in reported
