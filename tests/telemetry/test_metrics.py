"""A scrape of a server agrees with the reports of its clients."""

import asyncio
import math
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import storesvc_client as store
from storesvc.server import process
from storesvc.telemetry.prometheus import Metrics
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from tests.support.examples import sampled
from tests.support.scraped import SERVED, Samples, scrape, url_of
from tests.support.server_process import EndedError, ServerProcess

_UPLOADS = "storesvc.v1.UploadService"
_CALLS = "grpc_server_call_duration_seconds_count"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("metrics")
    process = ServerProcess(
        folder / "store", folder, *SERVED, "--metrics-run", "prod/listed"
    )
    process.start()
    yield process
    process.kill()


@pytest.fixture
def added(served: ServerProcess) -> Callable[..., float]:
    """Returns by how much a sample has grown since the start of the test."""
    before = scrape(served)

    def difference(name: str, **labels: str) -> float:
        return scrape(served).total(name, **labels) - before.total(name, **labels)

    return difference


def until(condition: Callable[[], bool]) -> None:
    """Waits for a condition: a call ends on the server after its reply."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def tree(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "large": rng.random((1 << 10, 700), np.float32),
        "small": rng.random(3),
        "one": np.array(seed, np.float32),
    }


@pytest.mark.slow
def test_the_bytes_of_saves_equal_those_of_their_reports(
    served: ServerProcess, added: Callable[..., float]
) -> None:
    with store.connect(served.address) as client:
        run, state = client.run("prod/saves"), tree(1)
        reports = []
        for step in range(3):
            state["small"] = state["small"] + step
            reports.append(run.save(step, state).report())

    sent = sum(each.sent_bytes for each in reports)
    reused = sum(each.reused_bytes for each in reports)
    assert reused > sent > 0
    assert added("storesvc_committed_bytes_total", source="sent") == sent
    assert added("storesvc_committed_bytes_total", source="reused") == reused
    assert added("storesvc_chunk_bytes_total", direction="in", path="stream") == sent
    assert added("storesvc_commits_total") == 3
    assert added("storesvc_commit_duration_seconds_count") == 3
    commits = {"grpc_method": f"{_UPLOADS}/CommitUpload", "grpc_status": "OK"}
    until(lambda: added(_CALLS, **commits) == 3)


def test_the_bytes_of_restores_equal_those_of_their_reports(
    served: ServerProcess, added: Callable[..., float]
) -> None:
    with store.connect(served.address) as client:
        run = client.run("prod/restores")
        run.save(0, tree(2)).result()
        first, second = run.open(0), run.open(0)
        first.restore()
        second.restore(select="small")
        reports = [each.report for each in (first, second)]
        read = sum(each.read_bytes for each in reports if each is not None)

    until(lambda: added("storesvc_chunk_bytes_total", direction="out") == read)


def test_direct_saves_count_as_direct(
    served: ServerProcess, added: Callable[..., float]
) -> None:
    with store.connect(served.address, direct=served.root.as_uri()) as client:
        report = client.run("prod/direct").save(0, tree(3)).report()

    assert added("storesvc_chunk_bytes_total", path="direct") == report.sent_bytes
    assert added("storesvc_committed_bytes_total", source="sent") == report.sent_bytes


def test_a_failed_call_counts_with_its_status_and_reason(
    served: ServerProcess, added: Callable[..., float]
) -> None:
    with store.connect(served.address) as client:
        with pytest.raises(store.NotFoundError):
            client.run("prod/nowhere").open(0)
        client.run("prod/twice").save(0, tree(4)).result()
        with pytest.raises(store.AlreadyExistsError):
            client.run("prod/twice").save(0, tree(5)).result()

    until(lambda: added("storesvc_call_errors_total", reason="RUN_NOT_FOUND") >= 1)
    until(lambda: added("storesvc_call_errors_total", reason="CHECKPOINT_EXISTS") >= 1)
    until(lambda: added(_CALLS, grpc_status="NOT_FOUND") >= 1)
    until(lambda: scrape(served).total("storesvc_calls_in_flight") == 0)


def test_a_method_that_the_server_lacks_counts_as_other(
    served: ServerProcess, added: Callable[..., float]
) -> None:
    with grpc.insecure_channel(served.address) as channel:
        for number in range(5):
            call: Any = channel.unary_unary(f"/some.Service/Method{number}")
            with pytest.raises(grpc.RpcError):
                call(b"", timeout=20)

    of_others = {"grpc_method": "other", "grpc_status": "UNIMPLEMENTED"}
    until(lambda: added(_CALLS, **of_others) == 5)
    assert added(_CALLS) == 5


def test_malformed_bytes_count_as_invalid_argument(
    served: ServerProcess, added: Callable[..., float]
) -> None:
    with grpc.insecure_channel(served.address) as channel:
        call: Any = channel.unary_unary("/storesvc.v1.CheckpointService/ListRuns")
        with pytest.raises(grpc.RpcError):
            call(b"\xff\xff\xff", timeout=20)

    until(lambda: added(_CALLS, grpc_status="INVALID_ARGUMENT") == 1)
    name = "grpc_server_call_rcvd_total_compressed_message_size_bytes_sum"
    until(lambda: added(name) == 3)


def test_sizes_of_calls_are_those_of_their_messages(
    served: ServerProcess, added: Callable[..., float]
) -> None:
    request = api.ListRunsRequest(parent="namespaces/-", page_size=7)
    with grpc.insecure_channel(served.address) as channel:
        response = CheckpointServiceStub(channel).ListRuns(request, timeout=20)

    received = "grpc_server_call_rcvd_total_compressed_message_size_bytes_sum"
    sent = "grpc_server_call_sent_total_compressed_message_size_bytes_sum"
    until(lambda: added(received) == request.ByteSize())
    until(lambda: added(sent) == response.ByteSize())


def test_a_cancelled_watch_is_in_flight_until_it_ends(served: ServerProcess) -> None:
    method = "storesvc.v1.CheckpointService/WatchCheckpoints"

    def in_flight() -> float:
        return scrape(served)("storesvc_calls_in_flight", grpc_method=method)

    with store.connect(served.address) as client:
        client.run("prod/watched").save(0, tree(6)).result()
    with grpc.insecure_channel(served.address) as channel:
        parent = "namespaces/prod/runs/watched"
        call = CheckpointServiceStub(channel).WatchCheckpoints(
            api.WatchCheckpointsRequest(parent=parent)
        )
        until(lambda: in_flight() == 1)
        call.cancel()
        until(lambda: in_flight() == 0)
    assert scrape(served)(_CALLS, grpc_method=method, grpc_status="CANCELLED") >= 1


def test_only_listed_runs_are_labels(served: ServerProcess) -> None:
    with store.connect(served.address) as client:
        for name in ("prod/listed", "prod/unlisted"):
            client.run(name).save(0, tree(7)).result()

    found = scrape(served)
    runs = {dict(labels).get("run") for _, labels in found.values} - {None}
    assert runs == {"listed"}
    newest = found(
        "storesvc_checkpoint_newest_timestamp_seconds", namespace="prod", run="listed"
    )
    assert abs(newest - time.time()) < 3600


@pytest.mark.slow
@pytest.mark.parametrize("count", sampled([20, 1000], every=2, checked_every=2))
def test_many_runs_add_no_series(served: ServerProcess, count: int) -> None:
    few = {"grpc_method", "operation", "purpose"}
    with store.connect(served.address) as client:
        client.run(f"many/first-{count}").save(0, {"x": np.zeros(2)}).result()
        before = scrape(served).values.keys()
        for number in range(count):
            run = client.run(f"many/run-{count}-{number}")
            run.save(number, {"x": np.ones(2)}).result()
        run.restore(number)
        after = scrape(served).values.keys()

    # Only methods, requests and waits that came for the first time add series.
    added = [labels for _, labels in after - before]
    assert not [one for one in added if not few & dict(one).keys()]
    assert not [one for one in after if any("run-" in value for _, value in one[1])]


@pytest.mark.slow
def test_a_collection_measures_the_store(tmp_path: Path) -> None:
    server = ServerProcess(
        *(tmp_path / "store", tmp_path, *SERVED, "--gc-interval", "0.1s")
    )
    server.start()
    try:
        with store.connect(server.address) as client:
            client.run("prod/a").save(0, tree(8)).result()
            report = client.run("prod/b").save(0, tree(9)).report()
        until(lambda: scrape(server)("storesvc_checkpoints") == 2)

        found = scrape(server)
        assert found("storesvc_runs") == 2
        assert found("storesvc_stored_bytes") == 2 * report.sent_bytes
        assert found("storesvc_uploads_open") == 0
        assert found("storesvc_gc_passes_total", result="complete") >= 1
        last = found("storesvc_gc_last_success_timestamp_seconds")
        assert abs(last - time.time()) < 3600
    finally:
        server.kill()


def test_contents_are_unknown_before_the_first_collection(
    served: ServerProcess,
) -> None:
    assert math.isnan(scrape(served)("storesvc_checkpoints"))


@pytest.mark.slow
def test_requests_to_the_storage_have_an_operation_and_a_result(
    served: ServerProcess, added: Callable[..., float]
) -> None:
    with store.connect(served.address) as client:
        client.run("prod/requests").save(0, tree(10)).result()

    name = "storesvc_storage_request_duration_seconds_count"
    for operation in ("read", "write", "list", "delete"):
        labels = {"storage": "file", "operation": operation, "result": "ok"}
        assert added(name, **labels) >= 1


def test_the_port_of_metrics_serves_http_only_there(served: ServerProcess) -> None:
    host, _, port = url_of(served).removeprefix("http://").partition(":")
    assert host == "127.0.0.1"
    with socket.create_connection((host, int(port.partition("/")[0])), 20) as client:
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert b"HTML" in client.recv(100)
    assert isinstance(scrape(served), Samples)


def probe(url: str) -> tuple[int, str]:
    """Returns the status and the text of a probe."""
    try:
        with urllib.request.urlopen(url, timeout=20) as response:
            return response.status, response.read().decode().strip()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode().strip()


PROBES = ("/healthz", "/readyz")


def test_the_port_of_metrics_answers_probes(served: ServerProcess) -> None:
    port = url_of(served).removesuffix("/metrics")

    assert [(200, "ok")] * 2 == [probe(port + path) for path in PROBES]


@asynccontextmanager
async def probes(*, is_ready: bool) -> AsyncIterator[Callable[[], list[Any]]]:
    """Yields a function that asks both probes of a server in this process."""
    metrics = process.serve_metrics(
        process.MetricsPort(port=0), certificate=None, is_ready=lambda: is_ready
    )
    async with metrics as port:
        urls = [f"http://127.0.0.1:{port}{path}" for path in PROBES]
        yield lambda: [probe(url) for url in urls]


async def test_a_server_that_drains_is_alive_and_not_ready() -> None:
    async with probes(is_ready=False) as ask:
        found = await asyncio.to_thread(ask)

    assert [(200, "ok"), (503, "does not serve")] == found


async def test_a_loop_that_is_blocked_fails_both_probes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "LOOP_SECONDS", 0.2)

    async with probes(is_ready=True) as ask:
        found = ask()  # blocks the loop

    assert [503, 503] == [status for status, _ in found]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--metrics-port", "1", "--metrics-host", "192.0.2.1"), "cannot be bound"),
        (("--metrics-port", "0", "--metrics-run", "prod"), "metrics run:"),
    ],
)
def test_a_server_rejects_an_invalid_place_of_metrics(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    server = ServerProcess(tmp_path / "store", tmp_path, *arguments)

    with pytest.raises(EndedError, match=message):
        server.start()


def test_the_reference_lists_every_metric() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    rows = re.findall(
        r"^\| `(\w+)` \| (\w+) \| [^|]* \| ([^|]+) \|$", text, re.MULTILINE
    )
    metrics = Metrics()
    metrics.track_certificate(lambda: 0.0)
    found = {
        family.name + ("_total" if family.type == "counter" else ""): (
            family.type,
            family.documentation,
        )
        for family in metrics.registry.collect()
        if family.name.startswith(("grpc_", "storesvc_"))
    }

    assert {name: (kind, meaning) for name, kind, meaning in rows} == found
