"""The training loop in jobs of several processes: one decision, one commit."""

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import storesvc_client as store
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName
from storesvc_client._job.job import Decision, Decisions, Departures, Job, JointSave
from storesvc_client._restore.open_tree import get_reader
from tests.loop import loop_parts
from tests.support.examples import soaked
from tests.support.jax_job import JaxJob, run_job
from tests.support.saved_checkpoint import flip
from tests.support.thread_job import ThreadJob

PLACES = RunPaths(RunName.parse(loop_parts.RUN))
PART = "tests.loop.loop_parts:trains"


def terminated(job: JaxJob, marker: Path, *indices: int) -> list[dict[str, Any]]:
    """Starts a job, sends SIGTERM to some of its processes, and returns the results."""
    job.start()
    job.await_condition(lambda: marker.exists() and marker.read_text())
    for index in indices:
        job.processes[index].send_signal(signal.SIGTERM)
    codes: Sequence[int] = job.wait()
    assert [0] * job.count == codes, job.log()
    return [job.outcome(index) for index in range(job.count)]


@pytest.mark.slow
@pytest.mark.parametrize("indices", [(2,), (0, 1, 2, 3)], ids=str)
def test_sigterm_to_any_process_makes_one_commit_and_ends_all_at_one_step(
    tmp_path: Path, indices: tuple[int, ...]
) -> None:
    marker = tmp_path / "marker"
    arguments = {
        "target": (tmp_path / "store").as_uri(),
        "total": 100_000,
        "marker": str(marker),
    }

    found = terminated(JaxJob(PART, 4, 2, arguments), marker, *indices)

    first = found[0]
    assert [first["saved"]] * 4 == [each["saved"] for each in found]
    start, last = first["saved"]
    assert 0 == start
    assert last > loop_parts.FIRST_STEPS
    text = f"received SIGTERM at step {last}; saved step {last}"
    assert [text] * 4 == [each["outcome"] for each in found]
    assert [0, last] == first["steps"]

    # and the next job, of two processes, continues with the step after it
    arguments |= {"total": last + 4, "marker": ""}
    found = run_job(PART, 2, devices=4, **arguments)
    assert [last + 1] * 2 == [each["start"] for each in found]
    assert [[0, last, last + 3]] * 2 == [each["steps"] for each in found]
    assert [last + 4.0] * 2 == [each["value"] for each in found]


@pytest.mark.slow
def test_the_clock_of_process_0_decides_for_all(tmp_path: Path) -> None:
    found = run_job(
        PART,
        3,
        devices=1,
        target=tmp_path.as_uri(),
        total=150,
        every=100,
        minutes=0.6 / 60,
    )

    assert [""] * 3 == [each["error"] for each in found]
    saved = found[0]["saved"]
    assert [saved] * 3 == [each["saved"] for each in found]
    # the clock adds some; how many depends on the machine
    assert {0, 100, 149} < set(saved)
    assert saved == found[0]["steps"]


@pytest.mark.slow
def test_without_a_clock_steps_alone_decide(tmp_path: Path) -> None:
    found = run_job(PART, 2, devices=2, target=tmp_path.as_uri(), total=40, every=15)

    assert [[0, 15, 30, 39]] * 2 == [each["saved"] for each in found]
    assert ["finished at step 39; saved step 39"] * 2 == [
        each["outcome"] for each in found
    ]


@pytest.mark.slow
def test_processes_that_wait_for_a_decision_raise_the_failure_of_process_0(
    tmp_path: Path,
) -> None:
    found = run_job(
        PART, 2, devices=1, target=tmp_path.as_uri(), total=40, every=10, fails_at=20
    )

    assert "ZeroDivisionError: " == found[0]["error"]
    assert found[1]["error"].startswith(
        "PeerFailedError: loop of tests/loop: process 0 ("
    )
    assert "ended its loop before step 20: ZeroDivisionError" in found[1]["error"]


@pytest.mark.slow
def test_saves_fail_at_once_when_another_process_has_left_its_loop(
    tmp_path: Path,
) -> None:
    found = run_job(
        PART,
        3,
        devices=1,
        target=tmp_path.as_uri(),
        total=100,
        every=10,
        fails_at=10,
        fails_in=1,
        tolerated=1,
        is_local=True,  # or the steps of the others would wait for it, in jax
    )

    assert [0] == found[1]["saved"] == found[0]["steps"]
    assert found[0]["failures"] > 1
    error = found[0]["error"]  # long before the lease of 600 s is over
    assert "PeerFailedError: save of tests/loop@" in error
    assert "process 1 (" in error
    assert error.endswith(") has left the loop: ZeroDivisionError")
    assert "PeerFailedError: loop of tests/loop: process 0 (" in found[2]["error"]


@pytest.mark.slow
def test_failures_that_are_too_many_end_all_processes_at_one_step(
    tmp_path: Path,
) -> None:
    found = run_job(
        PART,
        2,
        devices=1,
        target=tmp_path.as_uri(),
        total=100,
        every=5,
        breaks_at=12,
        tolerated=1,
    )

    assert [[0, 5, 10, 15, 20]] * 2 == [each["saved"] for each in found]
    assert [25, 25] == [each["last"] for each in found]
    assert [2, 2] == [each["failures"] for each in found]
    assert [0, 5, 10] == found[0]["steps"]
    kind = found[0]["error"].partition(":")[0]
    assert kind in ("UnavailableError", "PeerFailedError"), found
    assert f"ended its loop before step 25: {kind}" in found[1]["error"]


@pytest.mark.slow
def test_all_processes_save_next_to_deleted_steps(tmp_path: Path) -> None:
    target = tmp_path.as_uri()
    run_job(PART, 2, devices=1, target=target, total=31, every=10)
    with store.connect(target) as client:
        for step in (20, 30):
            client.run(loop_parts.RUN).delete(step)

    found = run_job(PART, 2, devices=1, target=target, total=33, every=10)

    assert [""] * 2 == [each["error"] for each in found]
    assert [11] * 2 == [each["start"] for each in found]
    assert [[21, 31, 32]] * 2 == [each["saved"] for each in found]
    assert [0, 10, 21, 31, 32] == found[0]["steps"]


def damage_data(root: Path, step: int) -> None:
    """Flips a bit of the last shard of a checkpoint, which process 1 reads."""
    with store.connect(root.as_uri()) as client:
        places = get_reader(client.run(loop_parts.RUN).open(step)).manifest.places
        assert client.run(loop_parts.RUN).verify(step).ok
    pool = root / PLACES.pool
    row = len(places.file) - 1
    file = pool / places.files[places.file[row]]
    flip(file, int(places.offset[row]) + 99)


def damage_manifest(root: Path, step: int) -> None:
    """Removes the manifest of a checkpoint."""
    with store.connect(root.as_uri()) as client:
        uid = client.run(loop_parts.RUN).checkpoint(step).uid
    (found,) = (root / PLACES.root / "manifests").glob(f"{uid}*")
    found.unlink()


def damage_record(root: Path, step: int) -> None:
    """Flips a bit of the record of a checkpoint."""
    flip(root / PLACES.checkpoint(step), -1)


@pytest.mark.parametrize(
    ("damage", "text"),
    soaked(
        [
            (damage_data, "leaf 'w' chunk"),
            (damage_manifest, "manifest"),
            (damage_record, "the record of tests/loop@30"),
        ],
        every=3,
    ),
)
def test_all_processes_step_back_from_damage_that_one_of_them_finds(
    tmp_path: Path, damage: Callable[[Path, int], None], text: str
) -> None:
    target = (tmp_path / "store").as_uri()
    run_job(PART, 2, devices=1, target=target, total=31, every=10)
    damage(tmp_path / "store", 30)

    found = run_job(PART, 2, devices=1, target=target, total=33, every=10)

    assert [""] * 2 == [each["error"] for each in found]
    assert [21] * 2 == [each["start"] for each in found]
    assert [["30"]] * 2 == [list(each["damaged"]) for each in found]
    assert text in found[0]["damaged"]["30"]
    assert found[0]["damaged"] == found[1]["damaged"]
    # step 30 is not saved a second time; step 31 is, instead
    assert [[31, 32]] * 2 == [each["saved"] for each in found]
    assert [33.0] * 2 == [each["value"] for each in found]


# Departures and decisions, in a job of threads.


@pytest.mark.slow
def test_a_process_that_leaves_fails_the_saves_that_it_has_not_begun() -> None:
    job = ThreadJob(2)
    first, second = job.process(0), job.process(1)
    stays, leaves = Departures(first, "loop/0"), Departures(second, "loop/0")
    saves = [JointSave(first, "a/b", step, stays) for step in range(3)]
    JointSave(second, "a/b", 0, leaves)

    leaves.leave("ValueError: no data")

    expected = "process 1 has left the loop: ValueError: no data"
    assert saves[0].ended() is None
    for save in saves[1:]:
        for outcome in (save.ended(seconds=600), save.begun(seconds=600)):
            assert outcome is not None
            assert expected == outcome.failure
    other = Departures(first, "loop/1")
    assert JointSave(first, "a/b", 3, other).ended() is None


def test_a_save_that_all_have_begun_does_not_fail_once_a_later_one_does() -> None:
    job = ThreadJob(2)
    first, second = job.process(0), job.process(1)
    stays, leaves = Departures(first, "loop/0"), Departures(second, "loop/0")
    saves = [JointSave(first, "a/b", step, stays) for step in range(3)]
    JointSave(second, "a/b", 0, leaves)
    leaves.leave("its steps have ended")

    failed = [save.ended() for save in reversed(saves[1:])]

    assert [None, "process 1 has left the loop: its steps have ended"] == [
        outcome and outcome.failure for outcome in failed
    ]
    assert saves[0].ended() is None
    later = saves[2].ended()
    assert later is not None
    assert "process 1 has left the loop: its steps have ended" == later.failure


def test_decisions_are_read_in_order() -> None:
    decisions = [Decision(step=step, saves=step % 2 == 0) for step in range(5)]

    def part(process: Job) -> list[Decision]:
        seen = Decisions(process, "tests/run")
        if seen.is_leader:
            for decision in decisions:
                seen.publish(decision)
            return decisions
        return [seen.await_next(step) for step in range(5)]

    assert [decisions] * 3 == ThreadJob(3).run(part)


def test_each_loop_has_decisions_of_its_own() -> None:
    def part(process: Job) -> list[bool]:
        found = []
        for saves in (True, False):
            seen = Decisions(process, "tests/run")
            if seen.is_leader:
                seen.publish(Decision(step=1, saves=saves))
                seen.end("over")
                found.append(saves)
            else:
                found.append(seen.await_next(1).saves)
        return found

    assert [[True, False]] * 2 == ThreadJob(2).run(part)


def test_a_process_at_another_step_or_without_process_0_raises() -> None:
    def part(process: Job) -> str:
        seen = Decisions(process, "tests/run")
        if seen.is_leader:
            seen.publish(Decision(step=1))
            seen.end("ValueError: no data")
            return ""
        with pytest.raises(store.InvalidRequestError, match="is at step 1, this proc"):
            seen.await_next(2)
        with pytest.raises(
            store.PeerFailedError, match="before step 3: ValueError: no"
        ):
            seen.await_next(3)
        return "raised"

    assert ["", "raised"] == ThreadJob(2).run(part)


@pytest.mark.slow
def test_a_long_wait_for_process_0_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("storesvc_client._job.job.FIRST_SECONDS", 0.1)
    monkeypatch.setattr("storesvc_client._job.job._TURN_SECONDS", 0.05)

    def part(process: Job) -> int:
        seen = Decisions(process, "tests/run")
        if seen.is_leader:
            time.sleep(0.5)
            seen.publish(Decision(step=7))
        else:
            seen.await_next(7)
        return process.index

    assert [0, 1] == ThreadJob(2).run(part)
    assert "loop of tests/run waits for process 0 at step 7, for" in caplog.text
