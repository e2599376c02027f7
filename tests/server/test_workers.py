"""Several processes serve one port: each accepts every call, and is soon replaced."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2

import storesvc_client as store
from tests.support.server_process import ServerProcess

WORKERS = 3
SECONDS = 30


@pytest.fixture
def server(start_server: Callable[..., ServerProcess]) -> ServerProcess:
    return start_server("--workers", str(WORKERS))


def workers(server: ServerProcess) -> list[int]:
    """Returns the IDs of the processes that listen on the port."""
    port = f":{int(server.address.rpartition(':')[2]):04X}"
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    rows = [row.split() for table in tables for row in table.read_text().splitlines()]
    listening = {
        f"socket:[{r[9]}]" for r in rows if r[1].endswith(port) and r[3] == "0A"
    }
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text()
    return [pid for pid in map(int, children.split()) if listening & _opened(pid)]


def _opened(process: int) -> set[str]:
    found = set()
    with suppress(OSError):  # it ends, or closes one
        for link in Path(f"/proc/{process}/fd").iterdir():
            found.add(str(link.readlink()))
    return found


def await_that(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_every_worker_returns_a_checkpoint_saved_through_one(
    server: ServerProcess,
) -> None:
    tree = {"x": np.arange(1 << 20)}
    with store.connect(server.address) as client:
        client.run("tests/workers").save(1, tree).result()

    def restored(_: int) -> bool:
        with store.connect(server.address) as client:
            found = client.run("tests/workers").restore("latest")
            return bool(np.array_equal(tree["x"], found["x"]))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(restored, range(12)))
    assert WORKERS == len(workers(server))


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_calls_continue(
    server: ServerProcess,
) -> None:
    tree = {str(i): np.full(1 << 20, i, np.float32) for i in range(4)}
    with store.connect(server.address) as client:
        run = client.run("tests/workers")
        run.save(0, tree).result()
        for killed in workers(server):
            leaves = run.open(0).read(tree)
            assert (next(leaves)[1] == 0).all()
            os.kill(killed, signal.SIGKILL)
            for i, (_, array) in enumerate(leaves, start=1):
                assert (array == i).all()
            assert run.latest().step == 0
            await_that(lambda: len(workers(server)) == WORKERS)
        assert server.log.count("exited unexpectedly, with exit code -9") == WORKERS


@pytest.mark.slow
def test_sigterm_drains_all_workers(server: ServerProcess) -> None:
    began = workers(server)

    assert 0 == server.stop()

    assert WORKERS == server.log.count("stopped")
    assert not any(Path(f"/proc/{worker}").exists() for worker in began)


@pytest.mark.slow
def test_workers_end_with_their_supervisor(server: ServerProcess) -> None:
    began = workers(server)

    server.kill()

    await_that(lambda: not any(Path(f"/proc/{pid}").exists() for pid in began))


@pytest.mark.slow
def test_every_worker_answers_once_the_ready_file_is_there(
    server: ServerProcess,
) -> None:
    for number in range(4 * WORKERS):
        options = (("grpc.use_local_subchannel_pool", 1), ("test.number", number))
        with grpc.insecure_channel(server.address, options=options) as channel:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            answer = check(health_pb2.HealthCheckRequest(), timeout=10)
            assert health_pb2.HealthCheckResponse.SERVING == answer.status


@pytest.mark.slow
@pytest.mark.parametrize("other", [1, 2])
def test_a_port_of_another_server_is_not_shared(
    start_server: Callable[..., ServerProcess], tmp_path: Path, other: int
) -> None:
    first = start_server("--workers", str(other))
    port = first.address.rpartition(":")[2]

    root = (tmp_path / "other").as_uri()
    for count in ("1", "2"):
        ended = _serve("--root", root, "--port", port, "--workers", count)
        assert 1 == ended.returncode
        assert "it is in use" in ended.stderr


def test_an_unservable_root_is_rejected_in_one_sentence(tmp_path: Path) -> None:
    ended = _serve("--root", "file:///proc/nowhere", "--port", "0", "--workers", "2")

    assert 1 == ended.returncode
    assert "storage failed" in ended.stderr
    assert "Traceback" not in ended.stderr


def _serve(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "storesvc_client.cli", "serve", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60
    )
