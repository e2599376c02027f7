"""Processes that restore together: all begin, or none does."""

import time
from datetime import timedelta

import pytest

import storesvc_client as store
from storesvc_client._jobs import JointReading, JointRestore
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
            assert isinstance(error, store.UnavailableError), error
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
