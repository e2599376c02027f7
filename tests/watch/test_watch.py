"""Watching: each event once, and nothing that a restart loses; and storectl watch."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import grpc
import numpy as np
import pytest

import storesvc_client as store
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from tests.support.refusals import rejected
from tests.support.server_process import ServerProcess


def save(run: store.Run, step: int) -> store.Checkpoint:
    return run.save(step, {"x": np.arange(3) + step}, metrics={"loss": 0.5}).result()


def steps(events: Iterator[store.Event], count: int) -> list[int]:
    return [event.step for event in islice(events, count)]


def test_a_watch_reports_the_changes_of_a_run(run: store.Run) -> None:
    save(run, 1)
    events = run.watch()

    saved = save(run, 2)
    event = next(events)
    assert ("committed", run.name, 2) == (event.kind, event.run, event.step)
    assert (saved, saved.uid, None) == (event.checkpoint, event.uid, event.tag)

    run.tags.set("best", 2)
    run.tags.set("best", 1)
    run.tags.delete("best")
    run.delete(1)
    run.undelete(1)
    run.update(1, pinned=True)
    seen = [(e.kind, e.step, e.tag) for e in islice(events, 6)]
    assert seen == [
        ("tagged", 2, "best"),
        ("tagged", 1, "best"),
        ("untagged", 1, "best"),
        ("deleted", 1, None),
        ("undeleted", 1, None),
        ("updated", 1, None),
    ]
    events.close()
    with pytest.raises(StopIteration):
        next(events)


def test_latest_brings_the_newest_checkpoint_and_then_all_that_follow(
    run: store.Run,
) -> None:
    assert [0] == _after_saving(run, 0)
    save(run, 1)
    assert [1, 2] == _after_saving(run, 2)
    assert [2, 3] == _after_saving(run, 3)


def _after_saving(run: store.Run, step: int) -> list[int]:
    events = run.watch("latest")
    save(run, step)
    last = -1
    found = []
    while last != step:
        last = next(events).step
        found.append(last)
    events.close()
    return found


def test_a_watch_of_a_namespace_reports_all_its_runs(client: store.Client) -> None:
    one, other = client.run("watched/one"), client.run("watched/other")
    save(one, 1)
    latest = client.watch("watched", "latest")
    events = client.watch("watched")
    save(other, 2)
    save(one, 3)
    save(client.run("tests/elsewhere"), 4)
    save(other, 5)

    assert [2, 3, 5] == steps(events, 3)
    assert [1, 2, 3, 5] == steps(latest, 4)


def test_a_token_goes_on_with_another_client(
    client: store.Client, run: store.Run, server_address: str
) -> None:
    events = run.watch()
    save(run, 1)
    token = next(events).resume_token
    events.close()
    save(run, 2)

    with store.connect(server_address) as another:
        again = another.run(run.name).watch(token)
        save(run, 3)
        assert [2, 3] == steps(again, 2)
        with pytest.raises(store.InvalidRequestError, match="one of its events, got"):
            another.run("tests/not-it").watch(token)
        for since in ("yesterday", ""):
            wrong = f"watch of tests: expected since= 'now', .* got {since!r}$"
            with pytest.raises(store.InvalidRequestError, match=wrong):
                another.watch("tests", since)
        with pytest.raises(store.InvalidRequestError, match="namespace"):
            another.watch("No Such")


@pytest.mark.slow
def test_a_checkpoint_that_was_purged_since_is_reported_by_name(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    with store.connect(server.address) as client:
        run = client.run("tests/purged")
        events = run.watch()
        uid = save(run, 1).uid
        token = next(events).resume_token
        events.close()
        save(run, 2)
        run.delete(1)
        run.purge(1)
        server.kill()  # and with it all that it had looked at
        server.start()

        events = run.watch(token)
        assert 2 == next(events).step
        gone = next(events)
        seen = gone.kind, gone.step, gone.uid, gone.checkpoint
        assert ("deleted", 1, uid, None) == seen
        events.close()


@pytest.mark.parametrize(
    "parent", ["namespaces/-", "tests", "namespaces/a/runs/b.", ""]
)
def test_only_one_namespace_or_run_is_watched(server_address: str, parent: str) -> None:
    stub = CheckpointServiceStub(grpc.insecure_channel(server_address))

    with pytest.raises(grpc.RpcError, match="expected") as refused:
        next(stub.WatchCheckpoints(api.WatchCheckpointsRequest(parent=parent)))

    assert grpc.StatusCode.INVALID_ARGUMENT == refused.value.code()


def test_a_watch_ends_with_its_client(server_address: str) -> None:
    with store.connect(server_address) as client:
        events = client.run("tests/closed").watch()

    with pytest.raises(store.InvalidRequestError, match="closed"):
        next(events)


@pytest.mark.slow
def test_no_event_is_lost_or_repeated_when_servers_are_killed(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    with store.connect(server.address) as client:
        run = client.run("tests/killed")
        events = run.watch()
        for step in range(0, 9, 3):
            save(run, step)
            save(run, step + 1)
            assert [step] == steps(events, 1)
            server.kill()
            server.start()
            save(run, step + 2)
            assert [step + 1, step + 2] == steps(events, 2)


@pytest.mark.slow
def test_a_commit_at_one_server_is_reported_by_the_other(
    start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    first = start_server(root=tmp_path / "store")
    second = start_server(root=tmp_path / "store")
    with store.connect(first.address) as one, store.connect(second.address) as other:
        here = one.run("tests/two").watch()
        there = other.run("tests/two").watch()
        for step in range(4):
            save((one, other)[step % 2].run("tests/two"), step)
            assert [step] == steps(here, 1)
            assert [step] == steps(there, 1)


@pytest.mark.slow
def test_a_server_stops_without_waiting_for_watches(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    with store.connect(server.address) as client:
        run = client.run("tests/stopped")
        events = run.watch()
        save(run, 1)
        assert [1] == steps(events, 1)

        began = time.monotonic()
        assert 0 == server.stop()
        assert 10 > time.monotonic() - began

        server.start()
        save(run, 2)
        assert [2] == steps(events, 1)


@pytest.mark.slow
def test_a_server_that_stays_away_ends_a_watch(
    start_server: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storesvc_client._rpc.retry.PATIENCE_SECONDS", 1.0)
    server = start_server()
    with store.connect(server.address) as client:
        events = client.run("tests/away").watch()
        server.kill()

        with pytest.raises(store.UnavailableError):
            next(events)


def test_an_embedded_store_is_watched_too() -> None:
    with store.connect("memory://") as client:
        run = client.run("tests/embedded")
        events = run.watch("latest")
        save(run, 1)
        assert [1] == steps(events, 1)


# --- damage ----------------------------------------------------------------------


@pytest.fixture
def damaged(
    start_server: Callable[..., ServerProcess],
) -> Iterator[tuple[ServerProcess, store.Client, str]]:
    """A server, a client, and a token of the run "tests/damaged" before its
    checkpoint 1, whose record is damaged, and 2, which is whole."""
    server = start_server()
    with store.connect(server.address) as client:
        run = client.run("tests/damaged")
        save(run, 0)
        events = run.watch("latest")
        token = next(events).resume_token
        events.close()
        save(run, 1)
        save(run, 2)
        place = RunPaths(RunName.parse(run.name)).checkpoint(1)
        (server.root / place).write_bytes(b"noise")
        server.kill()
        server.start()
        yield server, client, token


@pytest.mark.slow
def test_a_watch_that_meets_damage_says_how_to_go_on_after_it(
    damaged: tuple[ServerProcess, store.Client, str],
) -> None:
    _, client, token = damaged
    run = client.run("tests/damaged")

    with rejected("CORRUPT_DATA", store.DataLossError, match="watch since") as caught:
        next(run.watch(token))
    assert [2] == steps(run.watch(caught.value.metadata["resume_token"]), 1)


@pytest.mark.slow
def test_storectl_watch_says_how_to_go_on_after_damage(
    damaged: tuple[ServerProcess, store.Client, str],
) -> None:
    server, _, token = damaged
    process = storectl(server.address, "tests/damaged", "--since", token)
    out, err = ended(process)

    assert (1, "") == (process.returncode, out)
    assert 1 == err.count("\n")
    *_, command, path, option, after = err.split()
    assert ["watch", "tests/damaged", "--since"] == [command, path, option]
    process = storectl(server.address, path, option, after, "--count", "1")
    out, err = ended(process)
    assert out.startswith("committed  tests/damaged@2")
    assert (0, "") == (process.returncode, err)


# --- storectl watch --------------------------------------------------------------


def storectl(address: str, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "storesvc_client.cli", "-s", address, "watch"]
    process = subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("storectl: watching")
    return process


def ended(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """What else it prints until it ends, which is little. ``communicate`` would lose
    what was read ahead of a line that was asked for."""
    process.wait(timeout=60)
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        return process.stdout.read(), process.stderr.read()


@pytest.mark.slow
def test_storectl_prints_a_line_an_event_as_they_come(
    run: store.Run, server_address: str
) -> None:
    save(run, 1)
    process = storectl(server_address, run.name, "--since", "latest", "--count", "5")
    assert process.stdout is not None
    assert f"committed  {run.name}@1  " in process.stdout.readline()
    save(run, 2)
    run.tags.set("best", 2)
    run.update(2, labels={"stage": "sft"})
    run.update(1, metrics={})
    out, err = ended(process)

    committed, tagged, *updated = out.splitlines()
    assert [
        f"updated    {run.name}@2  stage=sft",
        f"updated    {run.name}@1",
    ] == updated
    assert f"committed  {run.name}@2  24 B  loss=0.5" == committed
    assert f"tagged     {run.name}@2  best" == tagged
    assert (0, "") == (process.returncode, err)


@pytest.mark.slow
def test_storectl_prints_tokens_that_it_goes_on_from(
    run: store.Run, server_address: str
) -> None:
    save(run, 1)
    process = storectl(
        server_address, run.name, "--since", "latest", "--json", "--count", "1"
    )
    out, _ = ended(process)
    event = json.loads(out)
    save(run, 2)
    since = ("--since", event["resume_token"])
    process = storectl(server_address, run.name, *since, "--json", "--count", "1")
    out, _ = ended(process)

    assert ("committed", 1, None) == (event["kind"], event["step"], event["tag"])
    assert 1 == out.count("\n")
    assert 2 == json.loads(out)["checkpoint"]["step"]


@pytest.mark.slow
def test_ctrl_c_ends_storectl_watch_without_a_traceback(
    run: store.Run, server_address: str
) -> None:
    process = storectl(server_address, run.name)
    process.send_signal(signal.SIGINT)
    out, err = ended(process)

    assert (130, "", "") == (process.returncode, out, err)


def test_storectl_watches_only_runs_and_namespaces(server_address: str) -> None:
    command = [sys.executable, "-m", "storesvc_client.cli", "-s", server_address]
    ended = subprocess.run(
        [*command, "watch", "prod/run@5"], capture_output=True, text=True, check=False
    )

    assert 2 == ended.returncode
    assert (
        "expected a namespace or a run, such as prod or prod/llama-8b" in ended.stderr
    )
