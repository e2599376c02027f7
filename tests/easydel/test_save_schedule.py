"""When EasyDeL's trainers save, as its own checkpointer decides it."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from eformer.serialization import checkpointer as eformer

from storesvc_client.easydel.trainer import SaveSchedule

POLICIES = [
    eformer.CheckpointInterval(every=2, until=6),
    eformer.CheckpointInterval(every=5, until=None),
]


def schedule(policies: Any, interval: timedelta | None = None) -> SaveSchedule:
    return SaveSchedule(policies=policies, interval=interval)


@pytest.mark.parametrize(
    ("policies", "steps"),
    [
        (POLICIES, [2, 4, 6, 10, 15, 20]),
        (POLICIES[:1], [2, 4, 6]),
        (POLICIES[1:], [5, 10, 15, 20]),
        ([], []),
    ],
    ids=["two", "bounded", "endless", "none"],
)
def test_the_first_policy_that_reaches_a_step_decides(
    policies: Any, steps: list[int]
) -> None:
    due = schedule(policies)

    assert steps == [step for step in range(21) if due.is_due_at(step)]


def test_eformers_checkpointer_decides_the_same(tmp_path: Any) -> None:
    saved: list[int] = []
    theirs = eformer.Checkpointer(str(tmp_path), None, POLICIES)
    for step in range(40):
        callbacks: Any = [lambda *_, step=step: saved.append(step)]
        theirs.on_step(mesh=None, step=step, true_callbacks=callbacks)

    due = schedule(POLICIES)
    assert saved == [step for step in range(40) if due.is_due_at(step)]


def test_time_is_due_once_the_interval_has_passed() -> None:
    due = schedule([], timedelta(minutes=1))

    assert [False, True] == [due.is_due_after(seconds) for seconds in (59.9, 60.0)]
    assert not schedule([]).is_due_after(1e9)


def test_the_arguments_of_a_trainer_give_both() -> None:
    arguments = SimpleNamespace(
        get_checkpoint_policies=lambda: POLICIES,
        get_save_interval_timedelta=lambda: timedelta(minutes=5),
    )

    assert schedule(POLICIES, timedelta(minutes=5)) == SaveSchedule.from_arguments(
        arguments
    )
