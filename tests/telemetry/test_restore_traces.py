"""Spans of restores, and of operations that fail, as a collector receives them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.examples import sampled
from tests.support.otlp_collector import Collector, ReceivedSpan
from tests.support.server_process import ServerProcess

RESTORES = """
where = {"streamed": None, "direct": sys.argv[3]}
with store.connect(sys.argv[1]) as client:
    run = client.run("prod/restored")
    run.save(0, {"x": np.arange(1 << 18, dtype=np.float32)}).result()
for name, direct in where.items():
    with store.connect(sys.argv[1], direct=direct) as client:
        run = client.run("prod/restored")
        run.restore()
        with trace.get_tracer("job").start_as_current_span("resume " + name):
            run.restore()
            list(run.checkpoints())
        try:
            run.restore(99)
        except store.NotFoundError:
            pass
        try:
            run.restore(like={"secret": np.ones(3)})
        except store.MismatchError:
            pass
provider.shutdown()
"""

SAVES = """
import os, signal, threading

with store.connect(sys.argv[1]) as client:
    run = client.run("prod/saves")
    x = np.arange(1 << 18, dtype=np.float32)

    run.save(0, {"x": x}).result()
    assert isinstance(run.save(0, {"x": x}).exception(), store.AlreadyExistsError)

    def fails(_):
        raise OSError("a terminal that is closed")

    assert isinstance(run.save(2, {"x": x}, progress=fails).exception(), OSError)
    try:
        run.save(3, {"x": object()})  # rejected before it begins
    except store.UnsupportedLeafError:
        pass
    run.save(4, {"x": np.zeros(1 << 20)})  # ends while the client is closed

with store.connect(sys.argv[1], timeout=1) as client:
    run = client.run("prod/saves")
    os.kill(int(sys.argv[3]), signal.SIGSTOP)
    left = run.save(5, {"x": x})
    try:
        with client:
            # Ctrl-C while the client waits for its saves
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    except KeyboardInterrupt:
        pass
    os.kill(int(sys.argv[3]), signal.SIGCONT)
    assert left.exception(60) is not None
provider.shutdown()
"""


@pytest.fixture(scope="module")
def restores(
    traced_server: ServerProcess, collector: Collector, run_client: Callable[..., str]
) -> list[list[ReceivedSpan]]:
    """Spans of the restores of a client process, by trace, in the order of time."""
    run_client(RESTORES, traced_server.address, traced_server.root.as_uri())
    last = "storesvc.v1.CheckpointService/DeleteHold"
    spans = collector.until(
        lambda spans: (
            sum(one.name == last for one in spans) >= 4
            and sum(one.name == "storesvc.run.restore" for one in spans) == 8
        )
    )
    others = ("storesvc.upload", "gc.pass")
    roots = [one for one in spans if not one.parent and one.name not in others]
    roots.sort(key=lambda one: one.start)
    return [[one for one in spans if one.trace == root.trace] for root in roots]


def named(spans: list[ReceivedSpan], name: str) -> ReceivedSpan:
    (found,) = [one for one in spans if one.name == name]
    return found


CALLS = {"ReadManifest", "CreateHold", "DeleteHold"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "extra"), sampled([(4, set()), (0, {"ReadChunks"})], every=2)
)
def test_a_restore_without_a_current_span_is_a_trace_of_its_own(
    restores: list[list[ReceivedSpan]], at: int, extra: set[str]
) -> None:
    spans = restores[at]
    (root,) = [one for one in spans if not one.parent]
    restore = named(spans, "storesvc.restore")
    calls = {
        one.name.rpartition("/")[2]: one for one in spans if one.service == "storesvc"
    }

    assert root.name == "storesvc.run.restore"
    assert restore.parent == root.id
    assert calls.keys() >= CALLS | extra
    assert calls["ReadManifest"].parent == root.id
    for name in {"CreateHold", "DeleteHold"} | extra:
        assert calls[name].parent == restore.id
    assert "ReadChunks" in extra or "ReadChunks" not in calls


@pytest.mark.parametrize(("at", "name"), [(1, "streamed"), (5, "direct")])
def test_calls_within_a_span_of_the_caller_belong_to_it(
    restores: list[list[ReceivedSpan]], at: int, name: str
) -> None:
    spans = restores[at]
    (root,) = [one for one in spans if not one.parent]

    assert root.name == f"resume {name}"
    assert named(spans, "storesvc.run.restore").parent == root.id
    assert named(spans, "storesvc.v1.CheckpointService/ListCheckpoints").parent == (
        root.id
    )


def test_each_parent_is_in_the_trace(restores: list[list[ReceivedSpan]]) -> None:
    assert len(restores) == 8
    for spans in restores:
        ids = {one.id for one in spans}
        assert all(one.parent in ids for one in spans if one.parent)


@pytest.mark.parametrize("at", [2, 6])
def test_a_restore_of_an_absent_checkpoint_has_a_span_with_the_reason(
    restores: list[list[ReceivedSpan]], at: int
) -> None:
    root = named(restores[at], "storesvc.run.restore")

    assert root.is_error
    assert root.attributes == {
        "storesvc.run": "prod/restored",
        "error.type": "CHECKPOINT_NOT_FOUND",
    }


@pytest.mark.parametrize("at", [3, 7])
def test_a_restore_that_fails_has_the_phases_that_it_came_to(
    restores: list[list[ReceivedSpan]], at: int
) -> None:
    restore = named(restores[at], "storesvc.restore")
    phases = [one.name for one in restores[at] if one.parent == restore.id]

    assert restore.is_error
    assert restore.attributes == {
        "storesvc.run": "prod/restored",
        "storesvc.step": 0,
        "storesvc.process": 0,
        "error.type": "MismatchError",
    }
    assert phases == ["plan"]
    assert "secret" not in json.dumps([one.attributes for one in restores[at]])


@pytest.mark.slow
def test_each_save_that_begins_has_one_span_however_it_ends(
    tmp_path: Path, collector: Collector, run_client: Callable[..., str]
) -> None:
    process = ServerProcess(tmp_path / "store", tmp_path)
    process.start()
    try:
        run_client(SAVES, process.address, str(process.pid))
    finally:
        process.kill()

    def ends(spans: Any) -> list[tuple[int, str]]:
        return sorted(
            (one.attributes["storesvc.step"], one.attributes.get("error.type", ""))
            for one in spans
            if one.name == "storesvc.save"
            and one.attributes["storesvc.run"] == "prod/saves"
        )

    spans = collector.until(lambda spans: len(ends(spans)) >= 5)
    found = ends(spans)
    assert found[:4] == [(0, ""), (0, "CHECKPOINT_EXISTS"), (2, "OSError"), (4, "")]
    assert [step for step, _ in found[4:]] == [5]
    assert found[4][1]
    failed = [one for one in spans if one.attributes.get("storesvc.step") == 2]
    (save,) = [one for one in failed if one.name == "storesvc.save"]
    assert save.is_error
    assert save.trace == save.attributes["storesvc.upload"]
    phases = {one.name for one in spans if one.parent == save.id}
    assert {"plan", "begin", "commit"} <= phases
