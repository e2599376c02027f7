"""The emulator of GCS fails where a test requests it, and logs its requests."""

import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import IncompleteRead

import pytest

from tests.fake_gcs import (
    Delay,
    FakeGcs,
    Late,
    Lost,
    Mute,
    Reset,
    Stall,
    Status,
    Tokens,
    Truncate,
)
from tests.support.gcs_calls import BUCKET, OBJECTS, GcsCalls

MiB = 1 << 20


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeGcs]:
    """An emulator that the tests share."""
    with FakeGcs(buckets=[BUCKET]) as gcs:
        yield gcs


@pytest.fixture
def gcs(shared: FakeGcs) -> Iterator[FakeGcs]:
    """The shared emulator, without faults and with an empty log."""
    shared.clear()
    yield shared
    shared.clear()


@pytest.fixture
def calls(gcs: FakeGcs) -> Iterator[GcsCalls]:
    """Calls of the emulator."""
    with GcsCalls(gcs.url) as calls:
        yield calls


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Name of an object that no other test uses."""
    return f"dir of/{request.node.name}"


def test_a_status_fault_is_answered_without_executing(
    gcs: FakeGcs, calls: GcsCalls
) -> None:
    gcs.fault("POST /upload.*dir of/x", Status(503, retry_after_seconds=7), times=2)

    got = [calls.upload("dir of/x", b"") for _ in range(3)]

    assert [503, 503, 200] == [reply.status for reply in got]
    assert "7" == got[0].headers["retry-after"]


def test_a_fault_may_skip_the_first_requests(gcs: FakeGcs, calls: GcsCalls) -> None:
    gcs.fault("POST", Status(429), after=2)

    assert [200, 200, 429, 200] == [calls.upload("x", b"").status for _ in range(4)]


def test_a_reset_request_is_not_executed(
    gcs: FakeGcs, calls: GcsCalls, name: str
) -> None:
    gcs.fault("POST", Reset())

    with pytest.raises(ConnectionError):
        calls.upload(name, b"x")

    assert 404 == calls.about(name).status


def test_a_request_with_a_lost_response_is_executed(
    gcs: FakeGcs, calls: GcsCalls, name: str
) -> None:
    gcs.fault("POST", Lost())

    with pytest.raises(ConnectionError):
        calls.upload(name, b"x")

    assert b"x" == calls.read(name).body
    assert (None, 0, 1) == (
        gcs.log[0].status,
        gcs.log[0].sent_bytes,
        gcs.log[0].stored_bytes,
    )


def test_a_truncated_answer_ends_early(gcs: FakeGcs, calls: GcsCalls) -> None:
    calls.upload("truncated", bytes(MiB))
    gcs.fault("GET.*alt=media", Truncate(1000))

    with pytest.raises((IncompleteRead, ConnectionError)):
        calls.read("truncated")

    assert 1000 == gcs.log[-1].sent_bytes
    assert MiB == len(calls.read("truncated").body)


def test_a_delayed_request_is_executed_late(gcs: FakeGcs, calls: GcsCalls) -> None:
    gcs.fault("POST", Delay(0.1))
    began = time.monotonic()

    calls.upload("x", b"")

    assert time.monotonic() - began >= 0.1
    assert gcs.log[0].seconds >= 0.1


def test_a_request_with_a_late_response_is_executed_at_once(
    gcs: FakeGcs, name: str
) -> None:
    gcs.fault("POST", Late(0.3))

    with (
        GcsCalls(gcs.url, timeout_seconds=0.1) as impatient,
        pytest.raises(TimeoutError),
    ):
        impatient.upload(name, b"x")

    with GcsCalls(gcs.url) as calls:
        assert b"x" == calls.read(name).body


def test_a_stalled_request_is_never_answered(gcs: FakeGcs, name: str) -> None:
    gcs.fault("POST", Stall())

    with (
        GcsCalls(gcs.url, timeout_seconds=0.1) as impatient,
        pytest.raises(TimeoutError),
    ):
        impatient.upload(name, b"x")

    with GcsCalls(gcs.url) as calls:
        assert 404 == calls.about(name).status


def test_a_mute_request_is_executed_and_never_answered(gcs: FakeGcs, name: str) -> None:
    gcs.fault("POST", Mute())

    with (
        GcsCalls(gcs.url, timeout_seconds=0.1) as impatient,
        pytest.raises(TimeoutError),
    ):
        impatient.upload(name, b"x")

    with GcsCalls(gcs.url) as calls:
        assert b"x" == calls.read(name).body


def test_access_is_denied_until_it_is_allowed(gcs: FakeGcs, calls: GcsCalls) -> None:
    place = calls.begin_upload("denied")
    gcs.deny(BUCKET)
    denied = [calls.list(), calls.upload("x", b""), calls.send_chunk(place, b"x")]
    gcs.allow(BUCKET)

    assert [403, 403, 403] == [reply.status for reply in denied]
    assert 200 == calls.list().status


def test_every_request_needs_a_token() -> None:
    with (
        FakeGcs(buckets=[BUCKET], tokens=Tokens("secret")) as gcs,
        GcsCalls(gcs.url) as calls,
    ):
        assert 401 == calls.list().status
        calls.headers["authorization"] = "Bearer secret"
        assert 200 == calls.list().status


def test_writes_of_one_name_are_rate_limited() -> None:
    with (
        FakeGcs(buckets=[BUCKET], seconds_between_writes=0.1) as gcs,
        GcsCalls(gcs.url) as calls,
    ):
        assert 200 == calls.upload("x", b"").status
        assert 429 == calls.upload("x", b"").status
        assert 429 == calls.delete("x").status
        assert 200 == calls.upload("y", b"").status
        time.sleep(0.1)
        assert 204 == calls.delete("x").status


def test_latency_and_rate_slow_a_transfer() -> None:
    with (
        FakeGcs(buckets=[BUCKET], latency_seconds=0.05, bytes_per_second=10e6) as gcs,
        GcsCalls(gcs.url) as calls,
    ):
        began = time.monotonic()
        calls.upload("x", bytes(MiB))
        calls.read("x")

    assert time.monotonic() - began >= 2 * (0.05 + 0.1)


# --- The log, and other processes -----------------------------------------------------


def test_the_log_counts_transferred_bytes(gcs: FakeGcs, calls: GcsCalls) -> None:
    calls.upload("logged", bytes(3 * MiB))
    calls.read("logged", "bytes=0-9")

    put, got = gcs.log
    assert ("POST", 200, 3 * MiB) == (put.method, put.status, put.received_bytes)
    assert ("GET", 206, 10) == (got.method, got.status, got.sent_bytes)
    assert f"{OBJECTS}/logged?alt=media" == got.target
    assert (3 * MiB, put.sent_bytes + 10) == (gcs.stored_bytes, gcs.sent_bytes)
    gcs.clear()
    assert ([], 0, 0) == (gcs.log, gcs.stored_bytes, gcs.sent_bytes)


def test_another_process_controls_the_emulator_over_http() -> None:
    command = [sys.executable, "-m", "tests.fake_gcs", "--bucket", BUCKET]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        with GcsCalls(process.stdout.readline().strip()) as calls:
            action = {"kind": "status", "code": 503}
            calls.post("/_fake/faults", {"match": "POST", "action": action, "after": 1})
            assert [200, 503] == [calls.upload("x", b"12").status for _ in range(2)]
            log = calls.ask("GET", "/_fake/log").document
            assert [200, 503] == [entry["status"] for entry in log["requests"]]
            assert 2 == log["stored_bytes"]
            calls.post("/_fake/clear", {})
            assert [] == calls.ask("GET", "/_fake/log").document["requests"]
            calls.post("/_fake/deny", {"bucket": BUCKET})
            assert 403 == calls.list().status
            assert 400 == calls.post("/_fake/faults", {"match": "x"}).status
        process.terminate()
