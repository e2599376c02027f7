"""The log names a bucket in trouble, with one throttled line per kind of trouble."""

import logging
import re
import time
from pathlib import Path

import pytest

import storesvc_client as store
from storesvc.storage import hedging, requests
from storesvc.storage.hedging import PAUSE_SECONDS, Limits
from storesvc_client._rpc import retry
from tests.fake_gcs import ALWAYS, FakeGcs, Stall, Status
from tests.support.command_line import printed
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.emulated

CALLS = 30

GUIDE = Path(__file__).parents[2] / "deploy" / "README.md"


def at_most(seconds: float) -> int:
    """Returns the maximum number of lines of one key in that time."""
    return 1 + int(seconds / PAUSE_SECONDS)


@pytest.mark.slow
def test_a_server_whose_bucket_denies_it_logs_at_a_throttled_rate_and_still_answers(
    root: str, gcs: FakeGcs, bucket_server: ServerProcess
) -> None:
    with store.connect(bucket_server.address) as client:
        run = client.run("tests/warned")
        run.save(1, {"x": 1}).result()
        # A deletion in the background would be denied, too.
        left = re.compile(f"{re.escape(root)}/.*(/staging/|/uploads/.*/)")
        while any(left.match(f"gs://bucket/{name}") for name in gcs.names("bucket")):
            time.sleep(0.01)
        before = len(bucket_server.log)
        gcs.fault(".", Status(403, message="who are you"), times=ALWAYS)

        began = time.monotonic()
        for _ in range(CALLS):
            with pytest.raises(store.PreconditionError):
                run.checkpoint(1)
        seconds = time.monotonic() - began

    reported = [
        line for line in bucket_server.log[before:].splitlines() if "WARNING" in line
    ]
    assert 1 <= len(reported) <= at_most(seconds)
    kind = "WARNING storesvc.rpc.status"
    said = "the storage denies this to our credentials (who are you); let them"
    assert f"] {root}/data/tests/warned/checkpoints/" in reported[0]
    assert kind in reported[0]
    assert said in reported[0]
    assert printed(bucket_server.address, "ping").startswith(
        f"{bucket_server.address}: store "
    )
    for quoted in (kind.split()[1], said.replace("who are you", "...")):
        assert quoted in GUIDE.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("code", [429, 503])
def test_failures_of_a_bucket_are_logged_at_a_throttled_rate(
    root: str,
    gcs: FakeGcs,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(requests, "SEND_SECONDS", 0.0)
    monkeypatch.setattr(retry, "PATIENCE_SECONDS", 0.0)
    with store.connect(root) as client:
        run = client.run("tests/warned")
        run.save(1, {"x": 1}).result()
        gcs.fault("GET .*checkpoints/0", Status(code), times=ALWAYS)

        began = time.monotonic()
        with caplog.at_level(logging.WARNING, logger="storesvc.rpc"):
            for _ in range(3):
                with pytest.raises(store.UnavailableError):
                    run.checkpoint(1)
        seconds = time.monotonic() - began

    logged = [r.getMessage() for r in caplog.records if r.name == "storesvc.rpc.status"]
    assert 1 <= len(logged) <= at_most(seconds)
    assert logged[0].startswith(f"{root}/data/tests/warned/checkpoints/")
    assert ": the storage failed: " in caplog.messages[0]


@pytest.mark.slow
def test_a_bucket_that_does_not_answer_is_logged_at_a_throttled_rate(
    root: str,
    gcs: FakeGcs,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(requests, "LATE_SECONDS", 0.2)
    limits = Limits(floor_seconds=600, answer_seconds=0.2)
    with store.connect(root, timeout=2) as client:
        run = client.run("tests/warned")
        run.save(1, {"x": 1}).result()
    monkeypatch.setattr(hedging, "READS", limits)
    monkeypatch.setattr(retry, "PATIENCE_SECONDS", 0.0)
    with store.connect(root, timeout=2) as client:
        run = client.run("tests/warned")
        for request_line in ("GET .*/o[?]", "GET .*checkpoints/0"):
            gcs.fault(request_line, Stall(), times=ALWAYS)

        began = time.monotonic()
        with caplog.at_level(logging.WARNING, logger="storesvc"):
            for ask in (lambda: run.checkpoint(1), lambda: list(run.checkpoints())):
                with pytest.raises(store.UnavailableError):
                    ask()
        seconds = time.monotonic() - began
        gcs.clear()

    lists = [m for m in caplog.messages if m == f"{root} has not answered for 0 s"]
    reads = [m for m in caplog.messages if m.endswith("; retrying")]
    assert 1 <= len(lists) <= at_most(seconds)
    assert 1 <= len(reads) <= at_most(seconds)
    assert reads[0].startswith(f"{root}/data/tests/warned/checkpoints/0")
