"""Waits for a server are logged, and never block the train loop."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import storesvc_client as store
from storesvc_client._rpc import retry
from storesvc_client._rpc.retry import Wait
from tests.client.monitored import listening
from tests.support.server_process import ServerProcess

TREE = {"x": np.arange(1000)}


@pytest.fixture
def server(start_server: Callable[..., ServerProcess]) -> Iterator[ServerProcess]:
    """A server that the tests stop and kill."""
    server = start_server()
    yield server
    server.kill()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes waits be logged after a short time."""
    monkeypatch.setattr(retry, "WARN_SECONDS", 0.4)
    monkeypatch.setattr(retry, "POLL_SECONDS", 0.05)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns the logged warnings."""
    return [found.message for found in caplog.records if found.levelname == "WARNING"]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_save_does_not_wait_for_a_save_whose_server_is_away(
    server: ServerProcess,
    soon: None,
    how: signal.Signals,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry, "PATIENCE_SECONDS", 8.0)
    client = store.connect(server.address, timeout=4)
    run = client.run("tests/gone")
    run.save(1, TREE).result()
    os.kill(server.pid, how)

    with listening() as heard:
        stalled = run.save(2, TREE)
        after = run.save(3, TREE)

    assert [False, True] == [stalled.done(), after.done()]
    names = [name.rpartition("/")[2] for name in heard.names]
    assert ["start", "start", "failure"] == names
    assert {"error": "UnavailableError"} in heard.tags.values()
    waits = f"waiting for store {server.address} to answer CreateCheckpoint until"
    not_begun = (
        "save of tests/gone@3 was not started: the save of step 2 before it waits"
    )
    # Two threads log them, so either may be first.
    ends = time.monotonic() + 10
    while len(warnings(caplog)) < 2 and time.monotonic() < ends:
        time.sleep(0.05)
    assert [True, True] == [
        warning.startswith(begin)
        for warning, begin in zip(
            sorted(warnings(caplog)), (not_begun, waits), strict=True
        )
    ]
    with pytest.raises(store.UnavailableError, match=not_begun):
        after.result()
    with pytest.raises(store.UnavailableError, match="save of tests/gone@2"):
        stalled.result()
    client.close()


@pytest.mark.slow
def test_with_if_busy_queue_a_save_queues_behind_a_waiting_one(
    server: ServerProcess,
) -> None:
    with store.connect(server.address) as client:
        run = client.run("tests/back")
        run.save(1, TREE).result()
        server.kill()
        run.save(2, TREE)
        third = run.save(3, TREE, if_busy="queue")
        server.start()
        third.result()

        assert [3, 2, 1] == [found.step for found in run.checkpoints()]


@pytest.mark.slow
def test_each_call_that_is_retried_is_logged(
    server: ServerProcess,
    soon: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = store.connect(server.address)
    run = client.run("tests/each")
    run.save(1, TREE).result()
    opened = run.open(1)
    watch = run.watch()
    server.kill()
    calls: dict[str, Callable[[], object]] = {
        "ListRuns": lambda: list(client.runs()),
        "ListCheckpoints": lambda: list(run.checkpoints()),
        "GetCheckpoint": lambda: run.checkpoint("latest"),
        "ReadManifest": lambda: run.restore("latest"),
        "CreateHold": lambda: run.holds.create(1),
        "SetTag": lambda: run.tags.set("best", 1),
        "WatchCheckpoints": lambda: next(watch),
        "VerifyCheckpoint": lambda: run.verify(1),
        "DiffCheckpoints": lambda: run.diff(1, 1),
    }
    monkeypatch.setattr(retry, "PATIENCE_SECONDS", 1.0)

    for call in calls.values():
        with pytest.raises(store.UnavailableError):
            call()

    found = warnings(caplog)
    expected = [f"waiting for store {server.address} to answer {n} " for n in calls]
    assert expected == [
        next((e for e in expected if w.startswith(e)), w) for w in found
    ], found
    del opened
    client.close()


@pytest.mark.slow
def test_storectl_names_the_missing_server_and_ends_at_its_timeout(
    server: ServerProcess,
) -> None:
    os.kill(server.pid, signal.SIGSTOP)

    ended = subprocess.run(
        [
            *(sys.executable, "-m", "storesvc_client.cli", "-s", server.address),
            *("--timeout", "4", "ls"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    waiting, refusal = ended.stderr.splitlines()
    store_ = f"waiting for store {server.address} to answer GetServerInfo until"
    assert waiting.startswith(store_)
    assert waiting.endswith("it has not answered yet")
    assert refusal.startswith(f"storectl: store {server.address} did not answer")
    assert 1 == ended.returncode


def test_a_long_call_is_not_late_while_the_server_answers_health_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    asked: list[float] = []

    def answers() -> bool:
        asked.append(now[0] - 100.0)
        return now[0] < 110.0

    wait = Wait("ReadChunks", is_quick=False, patience=30.0)
    late = []
    for _ in range(20):
        now[0] += 1.0
        wait.check(answers)
        late.append(wait.is_late)

    assert [2.0, 6.0, 14.0] == asked
    assert [False] * 13 + [True] * 7 == late
