"""The demo's job is killed between two saves, however late the kill comes."""

import signal
import subprocess
import sys
import time

import pytest

from storesvc_client.demo.processes import (
    Committed,
    Event,
    SaveBegun,
    Step,
    is_kill_point,
    parse,
)

JOB = """
from storesvc_client.demo.processes import (
    Committed, SaveBegun, Step, line, stop_at_kill_point
)

def trained():
    for step in range(1, 61):
        yield Step(step=step, loss=1.0, mesh="x=1")
        if step % 10 == 0:
            yield SaveBegun(step=step, blocked_seconds=0.1)
            yield Committed(step=step, size_bytes=8)

for event in stop_at_kill_point(trained(), checkpoint=30):
    print(line(event), flush=True)
"""
"""A job that trains without pauses, to its end unless it is stopped."""


def steps(first: int, last: int) -> list[Event]:
    return [Step(step=step, loss=1.0, mesh="x=1") for step in range(first, last + 1)]


@pytest.mark.slow
def test_a_job_waits_for_a_kill_that_comes_late() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", JOB], stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        events: list[Event] = []
        while not is_kill_point(events, checkpoint=30):
            event = parse(job.stdout.readline())
            assert event is not None
            events.append(event)
        time.sleep(1)  # as a machine under load may take
        job.kill()
        rest = job.stdout.read()

    assert steps(31, 32) == events[-2:]
    assert "" == rest
    assert -signal.SIGKILL == job.returncode


@pytest.mark.parametrize(
    ("expected", "events"),
    [
        (False, []),
        (False, steps(1, 9)),
        (False, [*steps(1, 9), SaveBegun(step=9, blocked_seconds=0.1), *steps(10, 15)]),
        (False, [*steps(1, 9), Committed(step=9, size_bytes=8), *steps(10, 10)]),
        (True, [*steps(1, 9), Committed(step=9, size_bytes=8), *steps(10, 11)]),
        (False, [*steps(1, 8), Committed(step=8, size_bytes=8), *steps(9, 12)]),
    ],
    ids=["nothing", "no save", "unacknowledged", "one step", "two steps", "too early"],
)
def test_a_job_is_killed_two_steps_after_an_acknowledged_save(
    expected: bool, events: list[Event]
) -> None:
    assert expected == is_kill_point(events, checkpoint=9)
