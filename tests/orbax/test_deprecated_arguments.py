"""``items=``, its keywords and ``logger=`` do what they do in Orbax."""

import inspect
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import args
from orbax.checkpoint.experimental.v1 import training

import storesvc_client as store
from storesvc_client import orbax
from tests.orbax.conftest import NewManager, commit

TREE = {"w": jnp.ones(1)}

NO_TARGET = pytest.mark.filterwarnings("ignore:Sharding info not provided")
"""Orbax's warning about a restore without a target."""


@NO_TARGET
def test_the_only_item_is_saved_and_restored(new_manager: NewManager) -> None:
    manager = new_manager(item_handlers=ocp.PyTreeCheckpointHandler())
    half = {"w": ocp.SaveArgs(dtype=np.dtype(jnp.bfloat16))}
    assert manager.save(1, TREE)
    manager.wait_until_finished()
    assert manager.save(2, TREE, {"save_args": half})
    manager.wait_until_finished()
    assert manager.restore(1, TREE)["w"].tolist() == [1.0]
    assert manager.restore(2)["w"].dtype == jnp.bfloat16
    host = {"restore_args": {"w": ocp.RestoreArgs(restore_type=np.ndarray)}}
    assert type(manager.restore(1, restore_kwargs=host)["w"]) is np.ndarray


@NO_TARGET
def test_items_are_saved_and_restored_by_name(new_manager: NewManager) -> None:
    handlers = {"a": ocp.PyTreeCheckpointHandler(), "b": ocp.JsonCheckpointHandler()}
    manager = new_manager(item_handlers=handlers)
    assert manager.save(1, {"a": TREE, "b": {"x": 1}})
    manager.wait_until_finished()
    assert sorted(manager.restore(1, {"a": TREE}).keys()) == ["a"]
    found = manager.restore(1, {"a": None, "b": None})
    assert (found.a["w"].tolist(), found.b) == ([1.0], {"x": 1})


def test_an_item_without_a_handler_is_rejected(new_manager: NewManager) -> None:
    with pytest.raises(ValueError, match="default"):
        new_manager().save(1, TREE)


def test_an_argument_as_an_item_is_rejected(new_manager: NewManager) -> None:
    manager = new_manager(item_handlers=ocp.PyTreeCheckpointHandler())
    with pytest.raises(ValueError, match="args="):
        manager.save(1, args.PyTreeSave(TREE))


def test_an_item_and_an_argument_are_rejected(our_manager: NewManager) -> None:
    with pytest.raises(store.InvalidRequestError, match="both"):
        our_manager().save(1, TREE, args=args.StandardSave(TREE))  # Orbax drops one


class Entries:
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def log_entry(self, msg: dict[str, Any]) -> None:
        self.entries.append(msg)


@pytest.mark.parametrize("name", ["orbax", "storesvc"])
def test_a_logger_receives_each_save_and_restore(tmp_path: Path, name: str) -> None:
    logger, place = Entries(), f"file://{tmp_path}/store#prod/llama"
    cls: Any = orbax.CheckpointManager if name == "storesvc" else ocp.CheckpointManager
    manager = cls(place if name == "storesvc" else tmp_path / "steps", logger=logger)
    with manager:
        commit(manager, 3, args.StandardSave(TREE))
        manager.restore(3, args=args.StandardRestore(TREE))
    found = [(entry["event_type"], entry["step"]) for entry in logger.entries]
    assert found == [("save", 3), ("restore", 3)]


@pytest.mark.parametrize("name", ["orbax", "storesvc"])
def test_a_logger_of_version_1_receives_each_save(tmp_path: Path, name: str) -> None:
    logger, place = Entries(), f"file://{tmp_path}/store#prod/llama"
    cls: Any = orbax.Checkpointer if name == "storesvc" else training.Checkpointer
    if "logger" not in inspect.signature(cls).parameters:
        pytest.skip("Orbax 0.12.8 added it")
    place_of = {"storesvc": place, "orbax": tmp_path / "steps"}
    with cls(place_of[name], logger=logger) as checkpointer:
        checkpointer.save(3, TREE)
    assert [entry["step"] for entry in logger.entries] == [3]


def test_a_logger_for_a_run_is_rejected_with_advice(runs: Any) -> None:
    for cls in (orbax.CheckpointManager, orbax.Checkpointer):
        with pytest.raises(store.InvalidRequestError, match=r"connect\(step_logger="):
            cls(runs(), logger=Entries())


@pytest.mark.parametrize("cls", [ocp.Checkpointer, ocp.AsyncCheckpointer])
@pytest.mark.parametrize("is_named", [False, True], ids=["default", "named"])
def test_checkpointers_have_the_handlers_of_the_items(
    new_manager: NewManager, cls: Any, *, is_named: bool
) -> None:
    with warnings.catch_warnings(action="ignore"):
        given = cls(ocp.PyTreeCheckpointHandler())
        manager = new_manager(
            checkpointers={"params": given} if is_named else given,
            options=ocp.CheckpointManagerOptions(max_to_keep=2),
        )
        tree = {"w": np.arange(4.0)}
        assert manager.save(1, {"params": tree} if is_named else tree)
        if cls is ocp.Checkpointer:
            assert not manager.is_saving_in_progress()
        manager.wait_until_finished()
        found = manager.restore(1, {"params": tree} if is_named else tree)
    assert (found["params"] if is_named else found)["w"].tolist() == [0, 1, 2, 3]
