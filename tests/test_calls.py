"""Restores that not all processes of a job call: those that all call meet."""

import logging
import re
import threading
from collections.abc import Collection

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import storesvc_client as store
from storesvc_client import _calls, _joint_restore
from storesvc_client._durations import Deadline
from storesvc_client._joint_restore import together
from tests.thread_job import ThreadJob, ThreadProcess

RUN = "tests/run"
AT_ONCE, LONG = 0.05, 60.0
ALL = (0, 1, 2)


def restored(
    process: ThreadProcess, what: str, seconds: float, *, error: str = ""
) -> str:
    """What a process restores, or what it is told instead."""
    try:
        with together(process, RUN) as joint:
            assert joint is not None
            if error:
                raise store.InvalidRequestError(error)
            deadline = Deadline.after(seconds)
            found = joint.begin(what, lambda: f"{what} of {process.index}", deadline)
            joint.check("plan", "")
            return found
    except store.StoreError as e:
        return f"{type(e).__name__}: {e}"


class Job:
    """Processes that live through several calls."""

    def __init__(self) -> None:
        job = ThreadJob(len(ALL))
        self.processes = [job.process(index) for index in ALL]

    def call(
        self,
        *callers: int,
        what: str = "x",
        others: str = "",
        other_caller: int = -1,
        error: str = "",
        seconds: float = LONG,
    ) -> list[str]:
        """Has processes restore the same, but for one that asks for something else, or
        is refused; returns what comes of it."""
        told = dict.fromkeys(callers, "")

        def part(index: int) -> None:
            is_other = index == other_caller
            told[index] = restored(
                self.processes[index],
                others if is_other and others else what,
                seconds,
                error=error if is_other else "",
            )

        threads = [threading.Thread(target=part, args=(index,)) for index in callers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return list(told.values())


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from([(0,), (1,), (0, 2), (1, 2)]), max_size=4))
@example([(0,), (0,), (1,)])
def test_calls_of_some_leave_those_of_all_in_step(calls: list[Collection[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_joint_restore, "GRACE_SECONDS", AT_ONCE)
        job = Job()
        for number, callers in enumerate(calls):
            for told in job.call(*callers, what=f"x{number}", seconds=AT_ONCE):
                assert told.startswith("UnavailableError: restore of x"), told
        for _ in range(2):
            assert ["y of 0"] * 3 == job.call(*ALL, what="y")


@pytest.mark.parametrize("refused", ALL)
def test_what_is_refused_in_one_process_is_told_to_all(refused: int) -> None:
    job = Job()

    told = job.call(*ALL, other_caller=refused, error="deadline= is not a length")

    for index in ALL:
        kind = "InvalidRequestError" if index == refused else "GivenUpError"
        assert told[index].startswith(kind), told
        assert "deadline= is not a length" in told[index]
        if index != refused:
            assert f"process {refused}: " in told[index]
    assert ["x of 0"] * 3 == job.call(*ALL)


@pytest.mark.parametrize("other", [1, 2])
def test_one_that_asks_for_something_else_is_told_to_all(other: int) -> None:
    job = Job()

    told = job.call(*ALL, what="x@5", others="x@6", other_caller=other)

    assert told[other].startswith("InvalidRequestError: restore of x@6: process 0 asks")
    for index in {*ALL} - {other}:
        assert told[index].startswith("GivenUpError: restore of x@5"), told
        assert f"process {other}: restore of x@6: process 0 asks for x@5" in told[index]
    assert ["x of 0"] * 3 == job.call(*ALL)


def test_who_comes_too_late_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_calls, "AGAIN_SECONDS", AT_ONCE)
    job = Job()
    job.call(0, 1, seconds=AT_ONCE)

    (late,) = job.call(2)

    assert "process 2 of 3 has not asked for it in 0.05 s" in late
    assert ["x of 0"] * 3 == job.call(*ALL)


def test_who_waits_for_a_process_that_does_not_call_logs_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_joint_restore, "LOOK_SECONDS", 0.05)

    with caplog.at_level(logging.WARNING):
        Job().call(1, what="by 1", seconds=0.5)
        Job().call(0, 2, what="by 0", seconds=0.5)

    logged = "\n".join(record.getMessage() for record in caplog.records)
    assert re.search("restore of by 1 waits for process 0 of 3, for 0 s", logged)
    assert re.search("restore of by 0 waits for process 1 of 3, for 0 s", logged)
    assert re.search("by 0 waits for process 0 of 3, .* it waits for process 1", logged)
