"""When a loop saves: values, their combinations, and decisions without a clock."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import storesvc_client as store
from storesvc_client._values.save_schedule import LOOKS, Schedule
from storesvc_client._values.triggers import make_schedule


def test_triggers_combine_to_one_schedule() -> None:
    every = store.Steps(1000) | store.Minutes(15) | store.Steps(300)

    assert "Steps(1000) | Minutes(15) | Steps(300)" == repr(every)
    assert Schedule(steps=(300, 1000), seconds=900.0) == make_schedule(every)
    assert Schedule(steps=(1000,)) == make_schedule(store.Steps(1000))
    assert Schedule(seconds=30.0) == make_schedule(
        store.Minutes(0.5) | store.Minutes(9)
    )
    assert store.Steps(5) | store.Minutes(1) == store.Steps(5) | timedelta(minutes=1)


def test_a_timedelta_is_a_trigger() -> None:
    minute = timedelta(minutes=1)

    assert Schedule(seconds=60.0) == make_schedule(minute)
    assert Schedule(steps=(5,), seconds=60.0) == make_schedule(minute | store.Steps(5))
    assert Schedule(steps=(5,), seconds=60.0) == make_schedule(store.Steps(5) | minute)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: store.Steps(0), "Steps: expected a whole number of at least 1, got 0"),
        (lambda: store.Steps(True), "Steps: expected a whole .* got True"),
        (lambda: store.Steps(1.5), "Steps: expected a whole .* got 1.5"),  # type: ignore[arg-type]
        (lambda: store.Minutes(0), "Minutes: expected a number above 0, got 0"),
        (lambda: store.Minutes(float("nan")), "Minutes: .* got nan"),
        (lambda: store.Minutes("15"), "Minutes: .* got '15'"),  # type: ignore[arg-type]
        (lambda: store.Steps(1) | 5, r"every=: expected Steps\(1000\), .* got 5"),  # type: ignore[operator]
        (lambda: store.Steps(1) | timedelta(0), "Minutes: .* above 0, got 0"),
        (
            lambda: store.Tolerate(0),
            "Tolerate: .* at least 1, got 0; Raise.. tolerates",
        ),
        (lambda: store.Tolerate(-1), "Tolerate: expected .* at least 1, got -1"),
    ],
)
def test_what_is_no_trigger_is_rejected(make: Any, message: str) -> None:
    with pytest.raises(store.InvalidRequestError, match=message):
        make()


@given(
    steps=st.lists(st.integers(1, 50), max_size=3),
    seconds=st.none() | st.floats(0.1, 1e6),
    step=st.integers(0, 10_000),
    waited=st.floats(0, 2e6),
)
def test_a_save_is_due_at_multiples_and_after_the_interval(
    steps: list[int], seconds: float | None, step: int, waited: float
) -> None:
    schedule = Schedule(steps=tuple(steps), seconds=seconds)

    is_multiple = any(step % each == 0 for each in steps)
    has_waited = seconds is not None and waited >= seconds
    assert (is_multiple or has_waited) == schedule.decide(step=step, waited=waited)
    assert is_multiple == schedule.is_due_at(step)


@given(
    steps=st.lists(st.integers(1, 50), max_size=3),
    ahead=st.none() | st.integers(1, 100),
    step=st.integers(0, 10_000),
)
def test_no_step_is_missed_between_two_decisions(
    steps: list[int], ahead: int | None, step: int
) -> None:
    schedule = Schedule(steps=tuple(steps))
    look_at = None if ahead is None else step + ahead
    if not steps and look_at is None:
        return

    found = schedule.asks_next(step, look_at)

    assert step < found
    assert found == look_at or schedule.is_due_at(found)
    assert not any(schedule.is_due_at(between) for between in range(step + 1, found))
    assert look_at is None or found <= look_at


def looks_until_due(schedule: Schedule, paces: list[float]) -> tuple[int, float]:
    """Simulates process 0; returns how often it looked at its clock, and the seconds at
    which it found the save due. Step n takes ``paces[n]`` seconds, the last one all
    later steps."""
    waited, step, looks, pace = 0.0, 0, 0, float("inf")
    while True:
        looks += 1
        if schedule.is_due_after(waited):
            return looks, waited
        ahead = schedule.steps_to_look(waited=waited, seconds_per_step=pace)
        assert ahead is not None
        before = waited
        for _ in range(ahead):
            waited += paces[min(step, len(paces) - 1)]
            step += 1
        pace = (waited - before) / ahead


@given(seconds=st.floats(1, 1e5), count=st.floats(0.01, 2000))
def test_with_steady_steps_a_save_is_late_by_one_step_and_looks_are_few(
    seconds: float, count: float
) -> None:
    pace = seconds / count

    looks, found = looks_until_due(Schedule(seconds=seconds), [pace])

    assert found <= seconds + 2.001 * pace
    assert looks <= 2 * LOOKS + 2


@given(
    seconds=st.floats(10, 500),
    paces=st.lists(st.floats(0.2, 1.0), min_size=1, max_size=20),
    slowdown=st.floats(1, 100),
)
def test_a_save_is_late_by_a_part_of_the_interval_when_steps_become_slower(
    seconds: float, paces: list[float], slowdown: float
) -> None:
    slow = [*paces, max(paces) * slowdown]

    _, found = looks_until_due(Schedule(seconds=seconds), slow)

    ratio = slow[-1] / min(slow)
    assert found <= seconds + seconds / LOOKS * ratio + 2 * slow[-1]


def test_a_clock_that_does_not_matter_is_not_looked_at() -> None:
    schedule = Schedule(steps=(10,))

    assert schedule.steps_to_look(waited=0.0, seconds_per_step=1.0) is None
    assert not schedule.is_due_after(1e9)


def test_while_a_save_is_overdue_looks_are_as_rare_as_before() -> None:
    schedule = Schedule(seconds=160.0)

    assert 10 == schedule.steps_to_look(waited=0.0, seconds_per_step=1.0)
    assert 10 == schedule.steps_to_look(waited=500.0, seconds_per_step=1.0)
    assert 3 == schedule.steps_to_look(waited=156.5, seconds_per_step=1.0)
    assert 1 == schedule.steps_to_look(waited=159.5, seconds_per_step=1.0)
    assert 1 == schedule.steps_to_look(waited=0.0, seconds_per_step=float("inf"))
    assert 1_000_000 == schedule.steps_to_look(waited=0.0, seconds_per_step=0.0)
