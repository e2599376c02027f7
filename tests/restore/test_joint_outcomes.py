"""Processes that restore together: all begin or none, all succeed or none."""

import logging
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import storesvc_client as store
from storesvc_client._job import job as wait_log
from storesvc_client._job.job import JointSave
from storesvc_client._restore import joint as joint_restore
from storesvc_client._restore.joint import JointRestore
from storesvc_client._restore.open_tree import get_reader
from storesvc_client._telemetry.reports import ProcessReading
from storesvc_client._values.arguments import Deadline
from tests.support.thread_job import ThreadJob, ThreadProcess, check_peer_failures

WHAT = "tests/run@1"


def restore_of(
    process: ThreadProcess, seconds: float = 60.0, what: str = WHAT
) -> JointRestore:
    """Returns a restore that a process has begun."""
    joint = JointRestore(process, "tests/run")
    joint.begin(what, lambda: "runs/1", Deadline.after(seconds))
    return joint


def start_reading(process: ThreadProcess) -> JointRestore:
    """Returns a restore whose processes have met before the first byte."""
    joint = restore_of(process)
    joint.check("plan", "")
    return joint


def test_all_processes_follow_the_choice_of_process_0() -> None:
    def part(process: ThreadProcess) -> str:
        return restore_of(process).check("plan", f"choice {process.index}")

    assert ["choice 0"] * 3 == ThreadJob(3).run(part)


def test_a_process_that_fails_first_is_named_at_once() -> None:
    for index in range(3):
        job, begun = ThreadJob(3), time.monotonic()

        def part(process: ThreadProcess, index: int = index) -> None:
            joint = restore_of(process)
            if process.index == index:
                joint.fail(LookupError("no such leaf"))
            else:
                joint.check("plan", "")

        outcomes = job.run(part)

        assert time.monotonic() - begun < 30
        others = [outcomes[other] for other in {0, 1, 2} - {index}]
        check_peer_failures(others, f"process {index}: no such leaf")


@pytest.mark.slow
def test_process_0_does_not_begin_after_another_process_timed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joint_restore, "GRACE_SECONDS", 0.1)
    has_waited = threading.Event()

    def part(process: ThreadProcess) -> None:
        joint = restore_of(process, 1.0)
        if process.index == 0:
            has_waited.wait(60)
        try:
            joint.check("plan", "")
        finally:
            has_waited.set()

    for error in ThreadJob(2).run(part):
        assert isinstance(error, store.UnavailableError), error
        assert "process 0 of 2 is not ready to read after 1 s" in str(error)


@pytest.mark.slow
def test_one_deadline_covers_the_wait_for_all_late_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joint_restore, "GRACE_SECONDS", 0.1)
    job = ThreadJob(4)
    begun = time.monotonic()

    def part(process: ThreadProcess) -> None:
        time.sleep(0.5 * process.index)
        restore_of(process, 0.6).check("plan", "")

    outcomes = job.run(part)

    assert all(isinstance(each, store.UnavailableError) for each in outcomes), outcomes
    assert "of 4 has not called it" in str(outcomes[0])
    assert time.monotonic() - begun < 30


def read_in(process: ThreadProcess, seconds: float) -> ProcessReading:
    return ProcessReading(
        process=f"process {process.index}",
        read_bytes=process.index,
        seconds=seconds,
        slowest=f"file {process.index}",
        slowest_seconds=seconds / 2,
    )


def test_every_process_reports_the_slowest_process() -> None:
    def part(process: ThreadProcess) -> ProcessReading:
        joint = start_reading(process)
        return joint.end(read_in(process, [1.0, 3.0, 2.0][process.index]), seconds=60)

    slowest = ProcessReading(
        process="process 1",
        read_bytes=1,
        seconds=3.0,
        slowest="file 1",
        slowest_seconds=1.5,
    )
    assert [slowest] * 3 == ThreadJob(3).run(part)


def test_a_process_that_fails_to_read_fails_the_others_by_name() -> None:
    for index in range(3):

        def part(process: ThreadProcess, index: int = index) -> None:
            joint = start_reading(process)
            if process.index == index:
                joint.fail(store.DataLossError("leaf 'w' is damaged"))
            else:
                joint.end(read_in(process, 1), seconds=60)

        outcomes = ThreadJob(3).run(part)

        others = [outcomes[other] for other in {0, 1, 2} - {index}]
        check_peer_failures(others, f"process {index}: leaf 'w' is damaged")


@pytest.mark.slow
@pytest.mark.parametrize("is_first_late", [False, True])
def test_one_error_lists_the_missing_files_of_each_process(
    monkeypatch: pytest.MonkeyPatch, is_first_late: bool
) -> None:
    monkeypatch.setattr(joint_restore, "GRACE_SECONDS", 0.5)
    late = {0, 1, 3} if is_first_late else {1, 3}

    def part(process: ThreadProcess) -> str:
        joint = start_reading(process)
        if process.index in late:
            return joint.fail(store.UnavailableError(f"lacks file {process.index}"))
        if process.index != 2:
            joint.end(read_in(process, 1), seconds=0.1)
        return ""

    first, *_, last = map(str, ThreadJob(5).run(part))

    for error in (first, last):
        assert "process 1: lacks file 1" in error
        assert "process 2 has not ended" in error
        assert "process 3: lacks file 3" in error
    assert is_first_late == ("process 0: lacks file 0" in last)


def test_a_failure_reported_by_another_process_is_not_repeated() -> None:
    def part(process: ThreadProcess) -> None:
        joint = start_reading(process)
        if process.index == 1:
            joint.fail(store.PeerFailedError("process 2 could not read its share"))
        elif process.index == 2:
            joint.fail(store.DataLossError("leaf 'w' is damaged"))
        else:
            joint.end(read_in(process, 1), seconds=60)

    outcomes, *_ = ThreadJob(3).run(part)

    assert "process 2: leaf 'w' is damaged" in str(outcomes)
    assert "process 1" not in str(outcomes)


def test_a_finished_process_logs_the_others_that_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wait_log, "FIRST_SECONDS", 0.05)
    by_first = (
        r"restore of tests/run@1 waits for process 1 of 3, for \d s now: it reads"
    )
    by_last = (
        r"restore of tests/run@1 waits for process 0 of 3, .* process 1 .* it reads"
    )

    def logged(pattern: str) -> bool:
        return any(re.match(pattern, each) for each in messages())

    def messages() -> list[str]:
        return [record.getMessage() for record in list(caplog.records)]

    def part(process: ThreadProcess) -> None:
        joint = start_reading(process)
        if process.index == 1:
            with joint.publishing(lambda: "it reads pool/7"):
                end = time.monotonic() + 60
                while time.monotonic() < end and not (
                    logged(by_first) and logged(by_last)
                ):
                    time.sleep(0.01)
        joint.end(read_in(process, 1), seconds=60)

    with caplog.at_level(logging.WARNING):
        ThreadJob(3).run(part)

    assert logged(by_first), messages()
    assert logged(by_last), messages()


def test_a_failure_is_reported_while_others_are_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joint_restore, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(joint_restore, "POLL_SECONDS", 0.05)
    heard = threading.Barrier(3)

    def part(process: ThreadProcess) -> None:
        joint = start_reading(process)
        if process.index == 2:
            joint.fail(store.DataLossError("leaf 'w' is damaged"))
        elif process.index == 1:
            heard.wait(60)  # it is slow: it ends once the others have given up
            joint.end(read_in(process, 1), seconds=60)
        else:
            try:
                joint.end(read_in(process, 1), seconds=600)
            finally:
                heard.wait(60)

    outcomes = ThreadJob(4).run(part)

    others = [outcomes[index] for index in (0, 1, 3)]
    check_peer_failures(others, "process 2: leaf 'w' is damaged")


def test_errors_list_causes_before_unfinished_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joint_restore, "GRACE_SECONDS", 0.2)
    begun = threading.Barrier(8)

    def part(process: ThreadProcess) -> None:
        joint = start_reading(process)
        begun.wait(60)
        if process.index == 6:
            joint.fail(store.PeerFailedError("process 1 reports: leaf 'w' is damaged"))
        elif process.index in (0, 7):
            joint.end(read_in(process, 1), seconds=0.1)

    first, *_ = ThreadJob(8).run(part)

    cause, *others = str(first).partition("of the job: ")[2].split("; ")
    assert "process 6: process 1 reports: leaf 'w' is damaged" == cause
    assert [f"process {n} has not ended" for n in (1, 2, 3)] == others[:3]
    assert ["and 2 more"] == others[3:]


class Unreachable(ThreadProcess):
    """A process that cannot reach the coordinator's board."""

    def read(self, key: str, *, seconds: float = 0.0) -> str | None:
        raise store.UnavailableError("no board")

    def post(self, key: str, text: str) -> None:
        raise store.UnavailableError("no board")


def test_an_unreachable_board_hides_no_failure() -> None:
    process = Unreachable(ThreadJob(2), 0)

    assert "" == JointRestore(process, "tests/run").fail(KeyboardInterrupt())
    JointSave(process, "tests/run", 1).fail(KeyboardInterrupt())


def test_the_last_progress_callback_runs_before_the_end(tmp_path: Path) -> None:
    """An error of the callback fails the restore of all processes."""

    def part(process: ThreadProcess) -> None:
        def callback(progress: store.Progress) -> None:
            if progress.is_done and process.index == 1:
                raise BrokenPipeError("terminal closed")

        opened = run.open(1)
        get_reader(opened).job = process
        opened.restore(progress=callback)

    with store.connect(tmp_path.as_uri()) as client:
        run = client.run("tests/run")
        run.save(1, {"w": np.arange(10)}).result()
        first, failed, third = ThreadJob(3).run(part)

    assert isinstance(failed, BrokenPipeError), failed
    check_peer_failures([first, third], "process 1: terminal closed")
