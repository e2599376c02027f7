"""Processes that restore together: all begin, or none does; all end well, or none."""

import logging
import re
import time
from datetime import timedelta

import pytest

import storesvc_client as store
from storesvc_client import _joint_reading
from storesvc_client._joint_reading import JointReading, JointRestore
from storesvc_client._values import ProcessReading
from tests.thread_job import ThreadJob, ThreadProcess


def restore_of(process: ThreadProcess, seconds: float = 60.0) -> JointRestore:
    patience = timedelta(seconds=seconds)
    return JointReading(process, "tests/run@1", patience=patience).restore()


def test_what_process_0_chooses_all_do() -> None:
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

        told = job.run(part)

        assert time.monotonic() - begun < 30
        for other in {0, 1, 2} - {index}:
            error = told[other]
            assert isinstance(error, store.GivenUpError), error
            assert f"process {index}: no such leaf" in str(error)


def test_process_0_does_not_begin_without_one_that_waited_too_long_for_it() -> None:
    job = ThreadJob(2)
    first, second = (restore_of(job.process(index), 0.01) for index in range(2))

    with pytest.raises(store.UnavailableError, match="process 0 of 2 has not asked"):
        second.check("plan", "")
    with pytest.raises(store.UnavailableError, match="process 0 of 2 has not asked"):
        first.check("plan", "")


def test_processes_that_come_one_after_another_are_not_waited_for_in_turn() -> None:
    job = ThreadJob(4)
    begun = time.monotonic()

    def part(process: ThreadProcess) -> None:
        time.sleep(0.5 * process.index)
        restore_of(process, 0.6).check("plan", "")

    told = job.run(part)

    assert all(isinstance(each, store.UnavailableError) for each in told), told
    assert "of 4 has not asked" in str(told[0])
    assert time.monotonic() - begun < 30


def read_in(process: ThreadProcess, seconds: float) -> ProcessReading:
    return ProcessReading(
        process=f"process {process.index}",
        read_bytes=process.index,
        seconds=seconds,
        slowest=f"file {process.index}",
        slowest_seconds=seconds / 2,
    )


def test_all_are_told_which_process_read_the_longest() -> None:
    def part(process: ThreadProcess) -> ProcessReading:
        joint = restore_of(process)
        joint.check("plan", "")
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
            joint = restore_of(process)
            joint.check("plan", "")
            if process.index == index:
                joint.fail(store.DataLossError("leaf 'w' is damaged"))
            else:
                joint.end(read_in(process, 1), seconds=60)

        told = ThreadJob(3).run(part)

        for other in {0, 1, 2} - {index}:
            error = told[other]
            assert isinstance(error, store.GivenUpError), error
            assert f"process {index}: leaf 'w' is damaged" in str(error)


@pytest.mark.parametrize("is_first_late", [False, True])
def test_one_error_tells_of_each_process_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, is_first_late: bool
) -> None:
    monkeypatch.setattr(_joint_reading, "GRACE_SECONDS", 0.5)
    late = {0, 1, 3} if is_first_late else {1, 3}

    def part(process: ThreadProcess) -> str:
        joint = restore_of(process)
        joint.check("plan", "")
        if process.index in late:
            return joint.fail(store.UnavailableError(f"lacks file {process.index}"))
        if process.index != 2:
            joint.end(read_in(process, 1), seconds=0.1)
        return ""

    first, *_, last = map(str, ThreadJob(5).run(part))

    for told in (first, last):
        assert "process 1: lacks file 1" in told
        assert "process 2 has not ended" in told
        assert "process 3: lacks file 3" in told
    assert is_first_late == ("process 0: lacks file 0" in last)


def test_a_failure_that_another_process_told_is_not_told_again() -> None:
    def part(process: ThreadProcess) -> None:
        joint = restore_of(process)
        joint.check("plan", "")
        if process.index == 1:
            joint.fail(store.GivenUpError("process 2 could not read its share"))
        elif process.index == 2:
            joint.fail(store.DataLossError("leaf 'w' is damaged"))
        else:
            joint.end(read_in(process, 1), seconds=60)

    told, *_ = ThreadJob(3).run(part)

    assert "process 2: leaf 'w' is damaged" in str(told)
    assert "process 1" not in str(told)


def test_who_is_done_logs_who_is_waited_for_and_what_that_one_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_joint_reading, "LOOK_SECONDS", 0.05)
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
        joint = restore_of(process)
        joint.check("plan", "")
        if process.index == 1:
            with joint.telling(lambda: "it reads pool/7"):
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
