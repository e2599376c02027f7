"""A manager returns the same as Orbax's while a save is in the background."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import args

import storesvc_client as store
from storesvc_client import orbax
from tests.orbax.conftest import NewManager, commit


def tree(value: float) -> Any:
    """Returns a tree whose save takes some time."""
    return {"w": np.full(1 << 21, value, np.float32)}


@pytest.mark.parametrize("step", [None, 1], ids=["newest", "by-step"])
def test_a_restore_waits_for_the_save(
    new_manager: NewManager, step: int | None
) -> None:
    manager = new_manager()
    commit(manager, 0, args.StandardSave(tree(0.0)))
    manager.save(1, args=args.StandardSave(tree(1.0)))
    assert manager.restore(step, args=args.StandardRestore())["w"][0] == 1.0


def test_the_step_that_is_being_saved_is_listed(new_manager: NewManager) -> None:
    gate = threading.Event()
    manager = new_manager(
        options=ocp.CheckpointManagerOptions(
            best_fn=lambda metrics: metrics["loss"],
            best_mode="min",
            async_options=ocp.options.AsyncOptions(
                post_finalization_callback=gate.wait
            ),
        )
    )
    try:
        manager.save(3, args=args.StandardSave(tree(0.0)), metrics={"loss": 0.5})
        assert manager.is_saving_in_progress()
        listed = manager.latest_step(), list(manager.all_steps()), manager.best_step()
        assert listed == (3, [3], 3)
        assert not manager.should_save(3)
    finally:
        gate.set()
    manager.wait_until_finished()
    assert list(manager.all_steps()) == [3]


def test_what_is_known_of_a_step_waits_for_its_commit(our_manager: NewManager) -> None:
    manager = our_manager()  # Orbax fails, or returns None
    for step in range(4):
        manager.save(
            step,
            args=args.StandardSave(tree(step)),
            metrics={"loss": step},
            custom_metadata={"step": step},
        )
        if step == 0:
            assert manager.metrics(step) == {"loss": 0}
        elif step == 1:
            assert manager.metadata(step).custom_metadata == {"step": 1}
        elif step == 2:
            assert manager.item_metadata(step)["w"].shape == (1 << 21,)
        else:
            manager.delete(step)
    assert manager.all_steps() == [0, 1, 2]


def test_a_load_of_version_1_waits_for_the_save(runs: Callable[[], store.Run]) -> None:
    with orbax.Checkpointer(runs()) as checkpointer:  # Orbax's raises
        checkpointer.save(0, tree(0.0))
        checkpointer.save_async(1, tree(1.0))
        assert [found.step for found in checkpointer.checkpoints] == [0, 1]
        assert checkpointer.load()["w"][0] == 1.0
        checkpointer.save_async(2, tree(2.0))
        assert checkpointer.metadata(2).step == 2
        checkpointer.save_async(3, tree(3.0))
        assert checkpointer.load(checkpointer.latest)["w"][0] == 3.0


def test_a_restore_of_the_newest_raises_the_error_of_its_save(
    our_manager: NewManager,
) -> None:
    manager = our_manager()
    manager.directory.run.save(1, tree(0.0)).result()  # another job takes the step
    manager.save(1, args=args.StandardSave(tree(1.0)))
    with pytest.raises(store.AlreadyExistsError):
        manager.restore(None)
    assert manager.restore(None)["w"][0] == 0.0


def test_a_callback_reads_the_step_that_it_is_called_for(
    our_manager: NewManager,
) -> None:
    seen: list[float] = []

    def read() -> None:
        seen.append(float(manager.restore(None, args=args.StandardRestore())["w"][0]))

    options = ocp.CheckpointManagerOptions(
        async_options=ocp.options.AsyncOptions(post_finalization_callback=read)
    )
    manager = our_manager(options=options)
    commit(manager, 1, args.StandardSave(tree(7.0)))
    assert seen == [7.0]
