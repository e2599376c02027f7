"""``CheckpointManager``: which steps it saves, lists, keeps and deletes, as Orbax."""

import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import args, checkpoint_manager
from orbax.checkpoint import checkpoint_managers as managers
from orbax.checkpoint.abstract_checkpoint_manager import AbstractCheckpointManager

from tests.orbax.conftest import NewManager, commit
from tests.support.examples import sampled

TREE = {"w": np.arange(4.0, dtype=np.float32)}


def save(manager: Any, *steps: int, **options: Any) -> list[bool]:
    saved = [
        manager.save(step, args=args.StandardSave(TREE), **options) for step in steps
    ]
    manager.wait_until_finished()
    return saved


def test_a_new_manager_has_no_steps(new_manager: NewManager) -> None:
    manager = new_manager()
    found = manager.latest_step(), manager.best_step(), list(manager.all_steps())
    assert found == (None, None, [])


def test_steps_are_listed_in_a_manager_that_is_opened_later(
    new_manager: NewManager,
) -> None:
    save(new_manager(), 1, 2)
    assert list(new_manager(again=True).all_steps()) == [1, 2]


def test_a_step_that_is_not_newer_is_not_saved(new_manager: NewManager) -> None:
    assert save(new_manager(), 2, 2, 1, 3) == [True, False, False, True]


def test_force_saves_a_step_that_is_not_newer(new_manager: NewManager) -> None:
    manager = new_manager()
    save(manager, 5)
    assert save(manager, 3, force=True) == [True]
    assert sorted(manager.all_steps()) == [3, 5]


def test_force_does_not_overwrite_a_step(new_manager: NewManager) -> None:
    manager = new_manager()
    save(manager, 5)
    with pytest.raises(checkpoint_manager.StepAlreadyExistsError, match="5"):
        save(manager, 5, force=True)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"save_interval_steps": 3}, [1, 3, 6]),
        ({"save_interval_steps": 4, "save_on_steps": [5, 7]}, [1, 4, 5, 7]),
        ({"should_save_fn": lambda step, before: step == (before or 0) + 2}, [2, 4, 6]),
        ({"save_decision_policy": managers.SpecificStepsPolicy([2, 3])}, [2, 3]),
    ],
)
def test_the_options_decide_when_to_save(
    new_manager: NewManager, options: dict[str, Any], expected: list[int]
) -> None:
    manager = new_manager(options=ocp.CheckpointManagerOptions(**options))
    decided = {}
    for step in range(1, 8):
        decided[step] = manager.should_save(step)
        save(manager, step)
    assert [step for step, saves in decided.items() if saves] == expected
    assert list(manager.all_steps()) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    sampled(
        [
            ({"max_to_keep": 2}, [5, 6]),
            ({"max_to_keep": 1, "keep_period": 3}, [3, 6]),
            ({"keep_period": 3}, [1, 2, 3, 4, 5, 6]),
            ({"preservation_policy": managers.LatestN(3)}, [4, 5, 6]),
            (
                {
                    "preservation_policy": managers.AnyPreservationPolicy(
                        [managers.LatestN(1), managers.EveryNSteps(2)]
                    )
                },
                [2, 4, 6],
            ),
            (
                {
                    "preservation_policy": managers.AnyPreservationPolicy(
                        [managers.LatestN(1), managers.CustomSteps([1, 4])]
                    )
                },
                [1, 4, 6],
            ),
        ],
        every=3,
    ),
)
def test_the_options_decide_what_stays(
    new_manager: NewManager, options: dict[str, Any], expected: list[int]
) -> None:
    manager = new_manager(options=ocp.CheckpointManagerOptions(**options))
    save(manager, *range(1, 7))
    assert list(manager.all_steps()) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 4)])
def test_the_best_step_has_the_best_metric(
    new_manager: NewManager, mode: str, best: int
) -> None:
    options = ocp.CheckpointManagerOptions(
        best_fn=lambda metrics: metrics["loss"], best_mode=mode, max_to_keep=3
    )
    manager = new_manager(options=options)
    for step, loss in enumerate((3.0, 2.5, 1.0, 2.0, 5.0)):
        save(manager, step, metrics={"loss": loss, "more": {"lr": 0.1}})
    assert manager.best_step() == best
    assert manager.metrics(best)["more"] == {"lr": 0.1}


def test_metrics_of_a_step_that_is_missing_are_none(new_manager: NewManager) -> None:
    assert new_manager().metrics(3) is None


def test_a_deleted_step_is_gone(new_manager: NewManager) -> None:
    manager = new_manager()
    save(manager, 1, 2)
    manager.delete(1)
    assert list(manager.all_steps()) == [2]
    with pytest.raises(FileNotFoundError):
        manager.delete(1)


def test_a_missing_step_cannot_be_restored(new_manager: NewManager) -> None:
    manager = new_manager()
    with pytest.raises(FileNotFoundError):
        manager.restore(None)
    save(manager, 1)
    with pytest.raises(FileNotFoundError):
        manager.restore(7, args=args.StandardRestore())


def test_without_a_step_the_newest_is_restored(new_manager: NewManager) -> None:
    manager = new_manager()
    save(manager, 1)
    commit(manager, 2, args.StandardSave({"w": np.ones(4, np.float32)}))
    found = manager.restore(None, args=args.StandardRestore())
    assert found["w"].tolist() == [1.0] * 4


def test_reload_finds_steps_of_another_manager(new_manager: NewManager) -> None:
    first = new_manager()
    second = new_manager(again=True)
    save(first, 4)
    assert list(second.all_steps()) == []
    second.reload()
    assert list(second.all_steps()) == [4]


def test_a_read_only_manager_saves_and_deletes_nothing(new_manager: NewManager) -> None:
    save(new_manager(), 1)
    options = ocp.CheckpointManagerOptions(read_only=True)
    manager = new_manager(again=True, options=options)
    assert save(manager, 2) == [False]
    manager.delete(1)
    assert list(manager.all_steps()) == [1]


def test_a_save_without_a_background_is_committed_when_it_returns(
    new_manager: NewManager,
) -> None:
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    manager = new_manager(options=options)
    manager.save(1, args=args.StandardSave(TREE))
    assert not manager.is_saving_in_progress()
    assert list(new_manager(again=True).all_steps()) == [1]


def test_the_arrays_may_change_after_save_returns(new_manager: NewManager) -> None:
    manager = new_manager()
    tree = {"w": np.arange(4.0)}
    manager.save(1, args=args.StandardSave(tree))
    tree["w"][:] = -1
    manager.wait_until_finished()
    found = manager.restore(1, args=args.StandardRestore())
    assert found["w"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_manager_is_a_context(new_manager: NewManager) -> None:
    with new_manager() as manager:
        manager.save(1, args=args.StandardSave({"w": jnp.ones(2)}))
    assert list(new_manager(again=True).all_steps()) == [1]


def test_the_path_of_a_step_and_an_item_exists_once_saved(
    new_manager: NewManager,
) -> None:
    manager = new_manager()
    commit(manager, 100, args.Composite(state=args.StandardSave(TREE)))
    path = manager.directory / "100" / "state"
    assert path.exists()
    assert not (manager.directory / "100" / "iter").exists()
    assert not (manager.directory / "101").exists()
    assert (path.name, path.parent.name) == ("state", "100")


def test_metadata_has_what_the_step_was_saved_with(new_manager: NewManager) -> None:
    before = time.time_ns()
    manager = new_manager(metadata={"lr": 1})
    save(manager, 1, custom_metadata={"scan_layers": True})
    found = manager.metadata(1)
    assert found.custom_metadata == {"scan_layers": True}
    assert found.commit_timestamp_nsecs > before
    assert isinstance(found, checkpoint_manager.StepMetadata)
    assert manager.metadata() == checkpoint_manager.RootMetadata(
        custom_metadata={"lr": 1}
    )
    assert AbstractCheckpointManager in type(manager).__mro__
    with pytest.raises(FileNotFoundError):
        manager.metadata(9)


def test_nothing_ends_a_job_without_a_preemption(new_manager: NewManager) -> None:
    manager = new_manager()
    assert not manager.reached_preemption(1)
    manager.check_for_errors()
