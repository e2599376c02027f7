"""Spans that a real collector receives from servers and clients."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

import storesvc_client as store
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from tests.support.examples import sampled
from tests.support.otlp_collector import Collector, ReceivedSpan, collecting_spans
from tests.support.server_process import EndedError, ServerProcess

CLIENT = """
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader]))
with store.connect(sys.argv[1]) as client:
    run = client.run("prod/traced")
    state = {"x": np.arange(1 << 18, dtype=np.float32), "y": np.ones(3)}
    first = run.save(0, state).report()
    state["y"] += 1
    second = run.save(1, state).report()
    opened = run.open(1)
    with trace.get_tracer("job").start_as_current_span("resume"):
        opened.restore()
provider.shutdown()
measured = {
    metric.name: [metric.unit, sum(
        point.sum if hasattr(point, "sum") else point.value
        for point in metric.data.data_points
    )]
    for resource in reader.get_metrics_data().resource_metrics
    for scope in resource.scope_metrics
    for metric in scope.metrics
}
print(json.dumps({
    "uploads": [first.upload, second.upload],
    "sent": [first.sent_bytes, second.sent_bytes],
    "seconds": [first.seconds, second.seconds],
    "timings": [first.timings, second.timings],
    "read": opened.report.read_bytes,
    "restore": opened.report.timings,
    "measured": measured,
}))
"""


@pytest.fixture(scope="module")
def reports(traced_server: ServerProcess, run_client: Callable[..., str]) -> Any:
    """Reports of a client process that sends its spans to the same collector."""
    return json.loads(run_client(CLIENT, traced_server.address))


def spans_of(upload: str, collector: Collector) -> list[ReceivedSpan]:
    """Returns the spans of the trace of an upload, once it is complete."""
    wanted = {"storesvc.upload", "storesvc.save", "commit"}

    def found() -> list[ReceivedSpan]:
        return [one for one in collector.spans if one.trace == upload]

    collector.until(lambda _: wanted <= {one.name for one in found()})
    return found()


def children_of(span: ReceivedSpan, spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
    return [one for one in spans if one.parent == span.id and one.trace == span.trace]


@pytest.mark.slow
def test_client_and_server_share_one_trace_for_a_save(
    collector: Collector, reports: Any
) -> None:
    for at, upload in enumerate(reports["uploads"]):
        spans = spans_of(upload, collector)
        (root,) = [one for one in spans if one.name == "storesvc.upload"]
        (save,) = [one for one in spans if one.name == "storesvc.save"]

        assert (root.service, root.parent) == ("storesvc", "")
        assert save.parent == root.id
        assert save.service != "storesvc"
        assert root.attributes["storesvc.own_bytes"] == reports["sent"][at]
        assert save.attributes["storesvc.sent_bytes"] == reports["sent"][at]
        assert save.attributes["storesvc.step"] == at
        assert save.end - save.start == pytest.approx(reports["seconds"][at], abs=1e-5)


def test_the_phases_of_a_report_are_the_children_of_its_span(
    collector: Collector, reports: Any
) -> None:
    spans = collector.until(
        lambda spans: sum(one.name == "storesvc.save" for one in spans) == 2
    )
    for at, upload in enumerate(reports["uploads"]):
        (save,) = [o for o in spans if o.trace == upload and o.name == "storesvc.save"]
        phases = children_of(save, spans)
        busy = {one.name: one.attributes["storesvc.busy_seconds"] for one in phases}

        assert busy == reports["timings"][at]
        for one in phases:
            assert save.start - 1e-5 <= one.start <= one.end <= save.end + 1e-5


def test_a_restore_belongs_to_the_span_of_its_caller(
    collector: Collector, reports: Any
) -> None:
    spans = collector.until(
        lambda spans: {"storesvc.restore", "resume"} <= {one.name for one in spans}
    )
    (resume,) = [one for one in spans if one.name == "resume"]
    (restore,) = children_of(resume, spans)

    assert restore.name == "storesvc.restore"
    assert restore.attributes["storesvc.read_bytes"] == reports["read"]
    assert restore.service != "storesvc"
    phases = [one for one in children_of(restore, spans) if one.service != "storesvc"]
    assert {o.name: o.attributes["storesvc.busy_seconds"] for o in phases} == (
        reports["restore"]
    )


@pytest.mark.slow
def test_a_meter_of_the_process_gets_the_values_of_the_reports(reports: Any) -> None:
    measured = reports["measured"]

    assert measured["storesvc.save.success"] == ["1", 2]
    assert measured["storesvc.save.sent_bytes"] == ["By", sum(reports["sent"])]
    unit, seconds = measured["storesvc.save.total_duration"]
    assert (unit, seconds) == ("s", pytest.approx(sum(reports["seconds"])))
    unit, seconds = measured["storesvc.save.plan_duration"]
    assert seconds == pytest.approx(sum(each["plan"] for each in reports["timings"]))
    assert measured["storesvc.restore.read_bytes"] == ["By", reports["read"]]


@pytest.mark.usefixtures("reports")
def test_each_call_of_a_save_has_a_span_of_the_server(collector: Collector) -> None:
    def calls(spans: Any) -> set[str]:
        return {one.name for one in spans if one.service == "storesvc"}

    names = {"BeginUpload", "WriteChunks", "CommitUpload"}
    methods = {f"storesvc.v1.UploadService/{name}" for name in names}
    spans = collector.until(lambda spans: methods <= calls(spans))

    for one in spans:
        if one.name.endswith("/CommitUpload"):
            assert one.attributes["storesvc.run"] == "prod/traced"
            assert one.attributes["storesvc.upload"] == one.trace
            assert "commit" in {child.name for child in children_of(one, spans)}
    assert not [name for name in calls(spans) if name.startswith("grpc.health")]


def test_the_trace_of_a_caller_continues(
    traced_server: ServerProcess, collector: Collector
) -> None:
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    metadata = (("traceparent", f"00-{trace}-{parent}-01"),)
    with grpc.insecure_channel(traced_server.address) as channel:
        request = api.ListRunsRequest(parent="namespaces/-")
        CheckpointServiceStub(channel).ListRuns(request, timeout=20, metadata=metadata)

    spans = collector.until(lambda spans: any(one.trace == trace for one in spans))
    (span,) = [one for one in spans if one.trace == trace]
    assert (span.name, span.parent) == (
        "storesvc.v1.CheckpointService/ListRuns",
        parent,
    )


@pytest.mark.parametrize(
    "hostile",
    [
        "",
        "00",
        f"00-{'1' * 32}-{'2' * 16}-00",
        "00-" + "0" * 32 + "-" + "1" * 16 + "-01",
        "x" * 5000,
        "00-zz-zz-01",
    ],
)
def test_a_malformed_traceparent_is_ignored(
    traced_server: ServerProcess, hostile: str
) -> None:
    metadata = (("traceparent", hostile),)
    with grpc.insecure_channel(traced_server.address) as channel:
        request = api.ListRunsRequest(parent="namespaces/-")
        CheckpointServiceStub(channel).ListRuns(request, timeout=20, metadata=metadata)


def test_a_failed_call_has_its_reason(
    traced_server: ServerProcess, collector: Collector
) -> None:
    address = traced_server.address
    with store.connect(address) as client, pytest.raises(store.NotFoundError):
        client.run("prod/none").open(3)

    spans = collector.until(
        lambda spans: any(
            o.attributes.get("error.type") == "RUN_NOT_FOUND" for o in spans
        )
    )
    failed = [o for o in spans if o.attributes.get("error.type") == "RUN_NOT_FOUND"]
    assert all(one.is_error for one in failed)
    assert failed[0].attributes["rpc.response.status_code"] == "NOT_FOUND"


@pytest.mark.slow
@pytest.mark.usefixtures("reports")
def test_a_pass_of_the_collection_has_a_span_for_each_run(collector: Collector) -> None:
    spans = collector.until(
        lambda spans: any(o.attributes.get("storesvc.runs", 0) >= 1 for o in spans)
    )
    (one, *_) = [o for o in spans if o.attributes.get("storesvc.runs", 0) >= 1]

    assert one.name == "gc.pass"
    assert "prod/traced" in {
        child.attributes["storesvc.run"] for child in children_of(one, spans)
    }


@pytest.mark.usefixtures("reports")
def test_log_records_in_json_have_the_call_and_its_trace(
    traced_server: ServerProcess, collector: Collector, reports: Any
) -> None:
    records = [json.loads(line) for line in traced_server.log.splitlines()]
    commits = [one for one in records if one.get("method") == "CommitUpload"]
    spans = collector.until(
        lambda spans: sum(o.name.endswith("/CommitUpload") for o in spans) >= 2
    )
    ids = {
        o.attributes["storesvc.request_id"]
        for o in spans
        if "rpc.method" in o.attributes
    }

    assert [one["trace_id"] for one in commits] == reports["uploads"]
    for one in commits:
        assert one["run"] == "prod/traced"
        assert one["upload"] == one["trace_id"]
        assert one["request_id"] in ids
        assert one["level"] == "INFO"
        assert one["time"].endswith("Z")


@pytest.mark.slow
def test_a_collector_that_does_not_answer_delays_nothing(tmp_path: Path) -> None:
    with collecting_spans() as slow:
        slow.delay_seconds = 60
        server = ServerProcess(
            *(tmp_path / "store", tmp_path, "--otlp-endpoint", slow.url)
        )
        server.start()
        with store.connect(server.address) as client:
            for step in range(5):
                client.run("prod/slow").save(step, {"x": [1.0]}).result()
        assert server.stop() == 0
        slow.delay_seconds = 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "endpoint", sampled(["localhost:4318", "ftp://x", "http://"], every=3)
)
def test_a_server_rejects_an_endpoint_that_is_no_url(
    tmp_path: Path, endpoint: str
) -> None:
    server = ServerProcess(tmp_path / "s", tmp_path, "--otlp-endpoint", endpoint)

    with pytest.raises(EndedError, match="OTLP endpoint"):
        server.start()
