"""Joint restores meet also after restores that only some processes called."""

import logging
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import storesvc_client as store
from storesvc_client._job import job as wait_log
from storesvc_client._restore import joint as joint_restore
from storesvc_client._restore.joint import join_restore
from storesvc_client._values.arguments import Deadline
from tests.support.examples import examples
from tests.support.thread_job import ThreadJob, ThreadProcess

RUN = "tests/run"
AT_ONCE, LONG = 0.05, 60.0
ALL = (0, 1, 2)


def restored(
    process: ThreadProcess,
    what: str,
    seconds: float,
    *,
    refusal: BaseException | None = None,
    absence: store.StoreError | None = None,
) -> str:
    """Returns the checkpoint that a process restores, or the error that it raises.

    Args:
        process: The process.
        what: Checkpoint that it requests.
        seconds: Its deadline.
        refusal: Error of this process before it requests anything.
        absence: Error of process 0 if it does not find the checkpoint.
    """

    def resolve() -> str:
        if absence is not None:
            raise absence
        return f"{what} of {process.index}"

    try:
        with join_restore(process, RUN) as joint:
            assert joint is not None
            if refusal is not None:
                raise refusal
            found = joint.begin(what, resolve, Deadline.after(seconds))
            joint.check("plan", "")
            return found
    except (store.StoreError, KeyboardInterrupt) as e:
        return f"{type(e).__name__}: {e}"


class Job:
    """Processes that make several calls."""

    def __init__(self) -> None:
        job = ThreadJob(len(ALL))
        self.processes = [job.process(index) for index in ALL]

    def call(
        self,
        *callers: int,
        what: str = "x",
        others: str = "",
        other_caller: int = -1,
        refusal: BaseException | None = None,
        absence: store.StoreError | None = None,
        seconds: float = LONG,
    ) -> list[str]:
        """Restores in the processes; one of them may request another checkpoint, or
        fail before. Returns the outcomes."""
        outcomes = dict.fromkeys(callers, "")

        def part(index: int) -> None:
            is_other = index == other_caller
            outcomes[index] = restored(
                self.processes[index],
                others if is_other and others else what,
                seconds,
                refusal=refusal if is_other else None,
                absence=absence,
            )

        threads = [threading.Thread(target=part, args=(index,)) for index in callers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return list(outcomes.values())


REFUSED = store.InvalidRequestError("deadline= is not a length")
ABSENT = store.NotFoundError("x is not there")


@pytest.mark.slow
@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([(0,), (1,), (0, 2), (1, 2)]),
            st.sampled_from([None, REFUSED, KeyboardInterrupt()]),
            st.sampled_from([None, ABSENT]),
        ),
        max_size=4,
    )
)
@example([((0,), None, None), ((0,), None, ABSENT), ((1,), None, None)])
@example([((0,), REFUSED, None), ((1,), REFUSED, None), ((1, 2), None, None)])
def test_calls_of_some_processes_do_not_desynchronise_later_joint_calls(
    calls: list[tuple[Sequence[int], BaseException | None, store.StoreError | None],],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint_restore, "GRACE_SECONDS", AT_ONCE)
        patch.setattr(joint_restore, "REFUSED_SECONDS", AT_ONCE)
        job = Job()
        for callers, refusal, absence in calls:
            outcomes = job.call(
                *callers,
                other_caller=callers[0],
                refusal=refusal,
                absence=absence,
                seconds=AT_ONCE,
            )
            assert not [each for each in outcomes if " of 0" == each[-5:]], outcomes
        for _ in range(2):
            assert ["y of 0"] * 3 == job.call(*ALL, what="y")


@pytest.mark.slow
def test_late_processes_get_the_not_found_error_of_process_0() -> None:
    job = Job()

    def late() -> None:
        time.sleep(0.5)
        outcomes.append(restored(job.processes[2], "x", LONG))

    outcomes = list[str]()
    thread = threading.Thread(target=late)
    thread.start()
    outcomes += job.call(0, 1, absence=ABSENT)
    thread.join()

    assert ["NotFoundError: x is not there"] * 3 == outcomes
    assert ["x of 0"] * 3 == job.call(*ALL)


@pytest.mark.parametrize("refused", ALL)
def test_an_invalid_request_in_one_process_is_reported_to_all(refused: int) -> None:
    job = Job()

    outcomes = job.call(*ALL, other_caller=refused, refusal=REFUSED)

    for index in ALL:
        kind = "InvalidRequestError" if index == refused else "PeerFailedError"
        assert outcomes[index].startswith(kind), outcomes
        assert "deadline= is not a length" in outcomes[index]
        if index != refused:
            assert f"process {refused}: " in outcomes[index]
    assert ["x of 0"] * 3 == job.call(*ALL)


@pytest.mark.parametrize("other", [1, 2])
def test_a_process_with_another_request_is_reported_to_all(other: int) -> None:
    job = Job()

    outcomes = job.call(*ALL, what="x@5", others="x@6", other_caller=other)

    assert outcomes[other].startswith(
        "InvalidRequestError: restore of x@6: process 0 restores"
    )
    for index in {*ALL} - {other}:
        assert outcomes[index].startswith("PeerFailedError: restore of x@5"), outcomes
        assert (
            f"process {other}: restore of x@6: process 0 restores x@5"
            in outcomes[index]
        )
    assert ["x of 0"] * 3 == job.call(*ALL)


@pytest.mark.slow
@pytest.mark.parametrize("late", [1, 2])
def test_an_interrupted_process_is_reported_and_later_calls_succeed(late: int) -> None:
    job = Job()

    outcomes = job.call(*ALL, other_caller=late, refusal=KeyboardInterrupt(), seconds=1)

    for index in {*ALL} - {late}:
        failed = outcomes[index].startswith("PeerFailedError")
        assert failed or "has not called it" in outcomes[index]
    assert ["x of 0"] * 3 == job.call(*ALL)


@pytest.mark.slow
def test_a_wait_for_an_absent_process_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(joint_restore, "GRACE_SECONDS", AT_ONCE)
    monkeypatch.setattr(wait_log, "FIRST_SECONDS", 0.05)

    with caplog.at_level(logging.WARNING):
        Job().call(1, what="by 1", seconds=0.5)
        Job().call(0, 2, what="by 0", seconds=0.5)

    logged = "\n".join(record.getMessage() for record in caplog.records)
    assert re.search("restore of by 1 waits for process 0 of 3, for 0 s", logged)
    assert re.search("restore of by 0 waits for process 1 of 3, for 0 s", logged)
    assert re.search("by 0 waits for process 0 of 3, .* it waits for process 1", logged)


class Faulty:
    """A process whose board fails once, or that is interrupted in a call of it."""

    def __init__(self, process: ThreadProcess, at: int, fault: BaseException) -> None:
        self.index, self.count = process.index, process.count
        self.count_passed, self.advance = process.count_passed, process.advance
        self._process, self._left, self._fault = process, at, fault

    def post(self, key: str, text: str) -> None:
        """See ``Job.post``; the text is posted before the fault."""
        self._process.post(key, text)
        self._fail()

    def read(self, key: str, *, seconds: float = 0.0) -> str | None:
        """See ``Job.read``."""
        self._fail()
        return self._process.read(key, seconds=seconds)

    def _fail(self) -> None:
        self._left -= 1
        if self._left == -1:
            raise self._fault


@pytest.mark.slow
@settings(max_examples=examples(30), deadline=None)
@given(
    st.sampled_from(ALL),
    st.integers(0, 25),
    st.sampled_from([store.UnavailableError("no board"), KeyboardInterrupt()]),
    st.sampled_from([None, REFUSED]),
    st.sampled_from([None, ABSENT]),
)
def test_calls_after_an_interrupt_at_any_point_meet(
    index: int,
    at: int,
    fault: BaseException,
    refusal: BaseException | None,
    absence: store.StoreError | None,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint_restore, "GRACE_SECONDS", AT_ONCE)
        patch.setattr(joint_restore, "REFUSED_SECONDS", AT_ONCE)
        job = Job()
        sound = job.processes[index]
        job.processes[index] = cast("ThreadProcess", Faulty(sound, at, fault))
        job.call(
            *ALL, other_caller=index, refusal=refusal, absence=absence, seconds=0.3
        )
        job.processes[index] = sound
        for _ in range(2):
            assert ["y of 0"] * 3 == job.call(*ALL, what="y", seconds=5)


@pytest.mark.slow
def test_the_first_failure_is_reported_and_not_the_slow_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joint_restore, "GRACE_SECONDS", 0.1)
    job = Job()

    def part(process: ThreadProcess) -> str:
        try:
            with join_restore(process, RUN) as joint:
                assert joint is not None
                joint.begin("x", lambda: "x", Deadline.after(LONG))
                if process.index == 1:
                    raise store.MismatchError("leaf w: shape")
                if process.index == 0:
                    time.sleep(2)  # it reads its manifest
                joint.check("plan", "")
                return ""
        except store.StoreError as e:
            return f"{type(e).__name__}: {e}"

    with ThreadPoolExecutor(3) as pool:
        outcomes = list(pool.map(part, job.processes))

    assert "MismatchError: leaf w: shape" == outcomes[1]
    for each in (outcomes[0], outcomes[2]):
        assert each.startswith("PeerFailedError") or "Mismatch" in each, outcomes
        assert "process 1: leaf w: shape" in each
        assert "not ready" not in each
