"""Saves and restores report to jax.monitoring, to a step logger and to the profiler."""

import dataclasses
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint._src.logging import abstract_logger, step_statistics

import storesvc_client as store
from storesvc_client._telemetry.events import Telemetry, restore_events, save_events
from tests.client.monitored import Heard, listening
from tests.support.jax_job import run_job
from tests.support.programs import run_python
from tests.support.server_process import ServerProcess
from tests.support.sessions import restore_report

TREE = {"x": np.arange(8.0), "y": jnp.ones((64, 64))}
BYTES = 64 + 64 * 64 * 4


class Logger(abstract_logger.AbstractLogger):  # type: ignore[misc]
    """A logger of Orbax, which keeps what it receives."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def log_entry(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        self.entries.append(msg)


@pytest.fixture(params=["direct", "streamed"])
def target(
    request: pytest.FixtureRequest, server: ServerProcess, tmp_path: Path
) -> str:
    """A store in this process, or one behind a server."""
    return tmp_path.as_uri() if request.param == "direct" else server.address


@pytest.fixture
def heard() -> Iterator[Heard]:
    with listening() as found:
        yield found


def expected(events: list[Any]) -> tuple[list[str], dict[str, float]]:
    """Returns the names of events, and the values of durations and scalars."""
    values = {e.name: e.value for e in events if e.kind != "event"}
    return [e.name for e in events], values


def test_the_events_of_a_save_are_its_report(target: str, heard: Heard) -> None:
    with store.connect(target) as client:
        report = client.run("tests/monitored").save(1, TREE).report()

    place = "/jax/storesvc/save"
    phases = {
        f"{place}/{phase.replace(' ', '_')}_duration_secs": seconds
        for phase, seconds in report.timings.items()
    }
    assert [f"{place}/start", f"{place}/success"] == heard.names[:2]
    assert {
        f"{place}/total_duration_secs": report.seconds,
        f"{place}/blocking_duration_secs": report.blocking_seconds,
        f"{place}/total_bytes": report.total_bytes,
        f"{place}/sent_bytes": report.sent_bytes,
        f"{place}/reused_bytes": report.reused_bytes,
        **phases,
    } == heard.values
    assert {f"{place}/plan_duration_secs", f"{place}/await_previous_duration_secs"} < {
        *phases
    }
    assert expected(save_events(report))[0] == heard.names[1:]


def test_the_events_of_a_restore_are_its_report(target: str) -> None:
    with store.connect(target) as client:
        run = client.run("tests/monitored")
        run.save(2, TREE).result()
        with listening() as heard:
            report = restore_report(run)

    place = "/jax/storesvc/restore"
    assert expected(restore_events(report)) == (heard.names[1:], heard.values)
    assert f"{place}/start" == heard.names[0]
    assert f"{place}/success" == heard.names[1]
    assert report.seconds == heard.values[f"{place}/total_duration_secs"]
    assert report.timings["plan"] == heard.values[f"{place}/plan_duration_secs"]
    assert BYTES == report.returned_bytes == heard.values[f"{place}/returned_bytes"]
    assert report.read_bytes == heard.values[f"{place}/read_bytes"]
    assert 0 == heard.values[f"{place}/received_bytes"]


def test_each_save_and_restore_that_starts_ends(run: store.Run, heard: Heard) -> None:
    run.save(1, TREE).result()
    again = run.save(1, TREE)
    assert isinstance(again.exception(), store.AlreadyExistsError)
    with pytest.raises(store.UnsupportedLeafError):
        run.save(2, {"x": object()})  # rejected before anything starts
    run.restore()
    with pytest.raises(store.MismatchError):
        run.restore(like={"x": np.ones(3)})

    for what, error in (("save", "AlreadyExistsError"), ("restore", "MismatchError")):
        counts = [
            heard.names.count(f"/jax/storesvc/{what}/{name}")
            for name in ("start", "success", "failure")
        ]
        assert [2, 1, 1] == counts
        assert {"error": error} == heard.tags[f"/jax/storesvc/{what}/failure"]


def test_orbax_events_are_sent_only_if_they_are_asked_for(target: str) -> None:
    for orbax_events in (False, True):
        with (
            listening("/jax/orbax/") as heard,
            store.connect(target, orbax_events=orbax_events) as client,
        ):
            run = client.run("tests/orbax-events")
            saved = run.save(int(orbax_events), TREE)
            checkpoint, report = saved.result(), saved.report()
            seconds = restore_report(run).seconds

            assert (
                {
                    "/jax/orbax/write/blocking_duration_secs": report.blocking_seconds,
                    "/jax/orbax/write/total_duration_secs": report.seconds,
                    "/jax/orbax/write/gbytes": checkpoint.size_bytes / 2**30,
                    "/jax/orbax/read/total_duration_secs": seconds,
                }
                if orbax_events
                else {}
            ) == heard.values


def test_the_orbax_events_have_the_names_that_orbax_sends(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    with listening("/jax/orbax/") as theirs:
        checkpointer = ocp.Checkpointer(ocp.StandardCheckpointHandler())
        checkpointer.save(tmp_path / "orbax", {"x": jnp.ones(8)})
        checkpointer.restore(tmp_path / "orbax")
        checkpointer.close()
    root = (tmp_path / "ours").as_uri()
    with (
        listening("/jax/orbax/") as ours,
        store.connect(root, orbax_events=True) as client,
    ):
        client.run("a/b").save(1, {"x": jnp.ones(8)}).result()
        client.run("a/b").restore()

    assert 4 == len(ours.values)
    assert ours.values.keys() <= theirs.values.keys()
    for name, tags in ours.tags.items():
        assert theirs.tags[name] == tags
    gbytes = "/jax/orbax/write/gbytes"
    assert theirs.values[gbytes] == ours.values[gbytes]


def test_a_step_logger_receives_the_statistics_of_orbax(target: str) -> None:
    logger = Logger()
    with store.connect(target, step_logger=logger) as client:
        run = client.run("tests/logged")
        report = run.save(7, TREE).report()
        seconds = restore_report(run).seconds

    saved, restored = logger.entries
    assert saved.keys() == {
        field.name for field in dataclasses.fields(step_statistics.SaveStepStatistics)
    }
    assert restored.keys() == {
        field.name
        for field in dataclasses.fields(step_statistics.RestoreStepStatistics)
    }
    assert (7, "save", f"{target}/tests/logged") == (
        saved["step"],
        saved["event_type"],
        saved["directory"],
    )
    waited = report.timings["await previous"]
    assert waited == saved["wait_for_prev_duration_secs"]
    assert report.blocking_seconds == saved["checkpoint_manager_blocking_duration_secs"]
    assert report.blocking_seconds - waited == pytest.approx(
        saved["checkpointer_blocking_duration_secs"]
    )
    start = report.start_time.timestamp()
    assert start == saved["checkpoint_manager_blocking_start_time"]
    assert start + waited == saved["checkpointer_blocking_start_time"]
    assert ("restore", seconds, seconds) == (
        restored["event_type"],
        restored["checkpointer_duration_secs"],
        restored["checkpoint_manager_duration_secs"],
    )


def test_the_directory_of_the_statistics_shows_where_the_store_is(
    run: store.Run,
) -> None:
    saved = run.save(1, TREE)
    for root, directory in {
        "gs://bucket/prefix?concurrency=4": "gs://bucket/prefix/",
        "gs://bucket/prefix/": "gs://bucket/prefix/",
        "memory://": "memory://",
    }.items():
        logger = Logger()
        telemetry = Telemetry(root, step_logger=logger)
        telemetry.saved(saved.report(), saved.result(), process=0)

        assert f"{directory}{run.name}" == logger.entries[0]["directory"]


def test_a_save_blocks_its_caller_only_until_the_tree_may_change(
    run: store.Run,
) -> None:
    logger, goes_on = Logger(), threading.Event()
    telemetry = Telemetry("gs://bucket", step_logger=logger)

    def wait(progress: store.Progress) -> None:
        if progress.is_done:
            goes_on.wait(60)

    background = run.save(1, TREE, progress=wait)
    goes_on.set()
    waiting = run.save(2, TREE, snapshot="none")
    for save in (background, waiting):
        telemetry.saved(save.report(), save.result(), process=0)

    first, second = background.report(), waiting.report()
    assert 0 < first.blocking_seconds <= first.seconds
    assert second.blocking_seconds == second.seconds
    assert logger.entries[1]["synchronous"] is True


def test_a_save_that_waits_for_the_one_before_says_for_how_long(run: store.Run) -> None:
    waited = 0.0
    for step in range(0, 20, 2):  # a machine that pauses the process shortens a wait
        goes_on = threading.Event()
        run.save(step, TREE, progress=lambda _, go=goes_on: go.wait(60))
        timer = threading.Timer(0.3, goes_on.set)
        timer.start()
        report = run.save(step + 1, TREE).report()
        timer.join()
        waited = report.timings["await previous"]
        assert waited < report.blocking_seconds <= report.seconds
        if waited > 0.2:
            break

    assert waited > 0.2


def test_a_failing_listener_or_logger_fails_no_save(
    target: str, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(event: str, **_: object) -> None:
        if event.startswith("/jax/storesvc/"):
            raise ZeroDivisionError("a broken listener")

    class Broken:
        def log_entry(self, msg: dict[str, object]) -> None:
            raise KeyError("a broken logger")

    caplog.set_level(logging.WARNING)
    with (
        listening(also=[broken]) as heard,
        store.connect(target, step_logger=Broken()) as client,
    ):
        run = client.run("tests/broken")
        for step in (1, 2, 3):
            assert step == run.save(step, TREE).result().step
        assert 7.0 == run.restore()["x"][7]

    found = [record.message for record in caplog.records]
    assert 2 == len(found)
    assert all("affects no save or restore" in message for message in found)
    assert re.search(
        r"listener of jax.monitoring .*a broken listener", "\n".join(found)
    )
    assert re.search(r"step logger .*a broken logger", "\n".join(found))
    # the other listeners receive what comes after the event that one failed at
    assert 3 == heard.names.count("/jax/storesvc/save/total_duration_secs")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_logger": print}, r"step_logger=: expected an object with log_entry"),
        ({"orbax_events": "yes"}, r"orbax_events=: expected True or False, got 'yes'"),
    ],
)
def test_monitoring_of_another_kind_is_rejected(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(store.InvalidRequestError, match=message):
        store.connect("memory://", **options)


def test_only_process_0_sends_what_orbax_sends_from_one_process(run: store.Run) -> None:
    saved = run.save(1, TREE)
    saved.result()
    report = restore_report(run)
    telemetry = Telemetry("memory://", orbax_events=True)

    for process, count in ((0, 4), (1, 0)):
        with listening("/jax/orbax/") as heard:
            telemetry.saved(saved.report(), saved.result(), process=process)
            telemetry.restored(report, process=process, begun=None)
        assert count == len(heard.names)


@pytest.mark.slow
def test_each_process_of_a_job_reports_its_own_part(tmp_path: Path) -> None:
    first, second = run_job(
        "tests.client.monitored:saves_and_restores",
        2,
        devices=1,
        target=tmp_path.as_uri(),
    )

    for found in (first, second):
        names, values = found["names"], found["values"]
        assert 1 == names.count("/jax/storesvc/save/success")
        assert 1 == names.count("/jax/storesvc/restore/success")
        assert found["sent"] == values["/jax/storesvc/save/sent_bytes"]
        assert ["save", "restore"] == [one["event_type"] for one in found["entries"]]
        orbax = [name for name in names if name.startswith("/jax/orbax/")]
        assert (4 if found is first else 0) == len(orbax)
    size = first["values"]["/jax/orbax/write/gbytes"]
    assert 8 << 20 == size * 2**30  # of the checkpoint, not of a part of it


def test_the_profiler_of_jax_shows_the_phases(target: str, tmp_path: Path) -> None:
    with store.connect(target) as client:
        run = client.run("tests/profiled")
        with jax.profiler.trace(tmp_path / "trace"):
            report = run.save(1, TREE).report()
            restored = restore_report(run)

    (trace,) = (tmp_path / "trace").rglob("*.xplane.pb")
    spans = {
        text.decode()
        for text in re.findall(
            rb"storesvc\.(?:save|restore)\.[a-z ]+", trace.read_bytes()
        )
    }
    phases = {
        *(f"storesvc.save.{phase}" for phase in report.timings),
        *(f"storesvc.restore.{phase}" for phase in restored.timings),
    }
    # those that are summed over small chunks have no spans
    assert {"storesvc.save.commit", "storesvc.restore.rebuild"} <= spans
    assert spans <= phases


def test_a_process_without_jax_reports_nothing_and_imports_none() -> None:
    program = (
        "import sys\n"
        "from storesvc_client._telemetry.events import Telemetry\n"
        "from storesvc_client._telemetry.progress import Meter\n"
        "with Meter('save', 'a/b@1') as meter, meter.phase('plan'):\n"
        "    pass\n"
        "Telemetry('memory://').save_began()\n"
        "assert meter.timings['plan'] >= 0\n"
        "print('jax' in sys.modules)"
    )

    ran = run_python(program)

    assert "False\n" == ran.stdout
