"""The server as a process: permitted clients, limits, and shutdown."""

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

import storesvc_client as store
from storesvc.rpc import registry
from storesvc.server.app import OPTIONS
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1 import chunk_service_pb2 as chunk_api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from storesvc_proto.v1.chunk_service_pb2_grpc import ChunkServiceStub
from tests.support.examples import sampled
from tests.support.rpcs import SERVICES
from tests.support.server_process import ServerProcess


def serve(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "storesvc_client.cli", "serve", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "host", sampled(["0.0.0.0", "::", "192.0.2.1", "example.com"], every=4)
)
def test_another_address_without_tls_is_rejected(tmp_path: Path, host: str) -> None:
    ended = serve("--root", tmp_path.as_uri(), "--host", host, "--port", "0")

    assert 1 == ended.returncode
    assert f"host {host}: expected a loopback address or TLS" in ended.stderr
    assert "--insecure" in ended.stderr
    assert 1 == ended.stderr.count("\n")
    assert [] == list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("root", "match"),
    [
        ("file://host/x", "expected file:///PATH"),
        ("ftp://x", "expected file:///PATH"),
        ("file:///proc/nowhere", "storage failed"),
    ],
)
def test_an_invalid_root_is_rejected_in_one_sentence(root: str, match: str) -> None:
    ended = serve("--root", root, "--port", "0")

    assert 1 == ended.returncode
    assert match in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_port_in_use_is_reported_in_one_sentence(
    server: ServerProcess, tmp_path: Path
) -> None:
    port = server.address.rpartition(":")[2]

    ended = serve("--root", tmp_path.as_uri(), "--port", port)

    assert 1 == ended.returncode
    assert f"address 127.0.0.1:{port}: it is in use" in ended.stderr


@pytest.mark.slow
def test_two_servers_of_one_root_serve_one_store(
    start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    first = start_server(root=tmp_path / "store")
    second = start_server(root=tmp_path / "store")
    with store.connect(first.address) as one, store.connect(second.address) as other:
        one.run("tests/two").save(1, {"x": np.arange(5)}).result()

        assert one.info().store_uid == other.info().store_uid
        assert 1 == other.run("tests/two").latest().step
        assert np.array_equal(np.arange(5), other.run("tests/two").restore(1)["x"])


def test_health_is_reported_for_the_process_and_each_service(
    start_server: Callable[..., ServerProcess],
) -> None:
    stub = HealthStub(grpc.insecure_channel(start_server().address))
    declared = {service.full_name for service in SERVICES}

    assert declared == set(registry.SERVICES)
    for name in ("", *declared):
        request = health_pb2.HealthCheckRequest(service=name)
        answer = stub.Check(request, timeout=10)  # type: ignore[attr-defined]  # its stubs lack it
        assert health_pb2.HealthCheckResponse.SERVING == answer.status


def test_sigterm_stops_the_server_with_exit_code_0(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()

    assert 0 == server.stop()
    assert "stopped" in server.log


@pytest.mark.slow
def test_a_restore_survives_a_graceful_restart(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    tree = {str(i): np.full(2**22, i, np.float32) for i in range(8)}
    with store.connect(server.address) as client:
        run = client.run("tests/drain")
        run.save(0, tree).result()
        leaves = run.open(0).read(tree)
        assert (next(leaves)[1] == 0).all()
        server.stop()
        server.start()
        for i, (_, array) in enumerate(leaves, start=1):
            assert (array == i).all()


@pytest.mark.slow
def test_a_client_that_disconnects_during_a_response_logs_no_error(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    with store.connect(server.address) as client:
        run = client.run("tests/gone")
        saved = run.save(0, {str(i): np.ones(2**20) for i in range(9)}).result()
    request = chunk_api.ReadChunksRequest(
        name="namespaces/tests/runs/gone/checkpoints/0", uid=saved.uid, chunk=range(9)
    )
    for _ in range(8):
        with grpc.insecure_channel(server.address) as channel:
            stream = ChunkServiceStub(channel).ReadChunks(request)
            next(stream)
            time.sleep(0.1)  # until it is full
            stream.cancel()

    assert 0 == server.stop()
    assert "bug" not in server.log


@pytest.mark.parametrize(
    "metadata",
    [(("x-large", "v" * 20_000),), tuple((f"x-{i}", "v" * 50) for i in range(400))],
    ids=["one large", "many"],
)
def test_large_metadata_is_rejected_and_the_connection_stays_open(
    server_address: str, metadata: tuple[tuple[str, str], ...]
) -> None:
    stub = CheckpointServiceStub(grpc.insecure_channel(server_address))
    request = api.ListRunsRequest(parent="namespaces/-")

    with pytest.raises(grpc.RpcError) as caught:
        stub.ListRuns(request, metadata=metadata, timeout=10)
    assert grpc.StatusCode.RESOURCE_EXHAUSTED == caught.value.code()
    stub.ListRuns(request, timeout=10)


def test_the_limits_have_their_documented_values() -> None:
    options = dict(OPTIONS)

    assert 4 << 20 == options["grpc.max_receive_message_length"]
    assert 4 << 20 == options["grpc.max_send_message_length"]
    assert 64 <= options["grpc.max_concurrent_streams"] <= 100
    assert (30_000, 10_000) == (
        options["grpc.keepalive_time_ms"],
        options["grpc.keepalive_timeout_ms"],
    )
    assert 0 == options["grpc.per_message_decompression"]


@pytest.mark.slow
def test_many_clients_save_and_restore_at_once(server_address: str) -> None:
    def work(number: int) -> bool:
        with store.connect(server_address) as client:
            run = client.run(f"tests/crowd-{number}")
            for step in range(2):
                tree = {"x": np.full(2**21, number * 10 + step, np.float32)}
                run.save(step, tree).result()
                assert (run.restore(step)["x"] == tree["x"]).all()
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
