"""Options of Orbax that a store cannot follow are rejected by name; errors are kept."""

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from etils import epath
from orbax.checkpoint import args
from orbax.checkpoint import checkpoint_managers as managers

import storesvc_client as store
from storesvc_client import orbax
from storesvc_client.orbax.items import StepRecord
from storesvc_client.orbax.options import (
    metric_name,
    options_retention,
    policy_retention,
)
from storesvc_client.orbax.sequence import split_target
from tests.orbax.conftest import NewManager, commit
from tests.support.stable_ids import stable_id

TREE = {"w": jnp.ones(1)}


def loss(metrics: Any) -> Any:
    return metrics["loss"]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (managers.LatestN(3), store.KeepLatest(3)),
        (managers.LatestN(), None),
        (managers.EveryNSteps(5), store.KeepEvery(steps=5)),
        (managers.EveryNSeconds(60), store.KeepEvery(duration=60)),
        (managers.CustomSteps([4, 2]), store.KeepSteps(2, 4)),
        (managers.LatestDuration(timedelta(1)), store.KeepNewerThan(timedelta(1))),
        (
            managers.BestN(get_metric_fn=loss, reverse=True, n=2),
            store.KeepBest(2, metric="loss", mode="min", without_metric="keep"),
        ),
        (
            managers.AnyPreservationPolicy(
                [managers.LatestN(1), managers.EveryNSteps(2)]
            ),
            store.KeepLatest(1) | store.KeepEvery(steps=2),
        ),
        (
            managers.AnyPreservationPolicy([managers.LatestN(1), managers.LatestN()]),
            None,
        ),
    ],
    ids=stable_id,
)
def test_a_preservation_policy_becomes_a_retention_policy(
    policy: Any, expected: store.RetentionPolicy | None
) -> None:
    assert policy_retention(policy) == expected


class OwnPolicy:
    """A policy of a user."""


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        (managers.EveryNStepsClosest(5), "EveryNStepsClosest"),
        (managers.EveryNSteps(5, exact_interval=False), "exact_interval"),
        (managers.EveryNSteps(5, max_to_keep=2), "max_to_keep"),
        (managers.LatestN(0), "LatestN"),
        (managers.BestN(get_metric_fn=lambda m: -m["loss"], n=1), "get_metric_fn"),
        (managers.AnyPreservationPolicy([]), "AnyPreservationPolicy"),
        (OwnPolicy(), "OwnPolicy"),
    ],
    ids=["closest", "inexact", "at-most", "none", "computed", "no-member", "own"],
)
def test_a_preservation_policy_without_an_equal_is_rejected_by_name(
    policy: Any, named: str
) -> None:
    with pytest.raises(store.InvalidRequestError, match=named):
        policy_retention(policy)


@pytest.mark.parametrize(
    "function",
    [
        lambda metrics: metrics["a"] + metrics["b"],
        lambda metrics: 1.0,
        lambda metrics: min(metrics.values()),
        lambda metrics: float(metrics["loss"]),
    ],
    ids=["sum", "constant", "all", "converted"],
)
def test_a_function_of_other_values_than_one_metric_is_rejected(function: Any) -> None:
    with pytest.raises(store.InvalidRequestError, match="best_fn"):
        metric_name("best_fn", function)


@pytest.mark.parametrize(
    "function", [loss, lambda metrics: metrics.get("loss")], ids=["item", "get"]
)
def test_a_function_of_one_metric_is_its_name(function: Any) -> None:
    assert metric_name("best_fn", function) == "loss"


def test_options_of_two_kinds_are_rejected() -> None:
    options = ocp.CheckpointManagerOptions(
        max_to_keep=1, preservation_policy=managers.LatestN(1)
    )
    with pytest.raises(store.InvalidRequestError, match="max_to_keep"):
        options_retention(options)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"checkpointers": object()}, "checkpointers"),
        ({"handler_registry": object()}, "handler_registry"),
        ({"logger": object()}, "step_logger"),
        (
            {"options": ocp.CheckpointManagerOptions(prevent_write_metrics=True)},
            "prevent_write_metrics",
        ),
    ],
    ids=["checkpointers", "handler_registry", "logger", "options"],
)
def test_an_argument_that_cannot_be_followed_is_rejected_by_name(
    our_manager: NewManager, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(store.InvalidRequestError, match=named):
        our_manager(**arguments)


def test_options_without_effect_are_logged(
    our_manager: NewManager, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="storesvc_client")
    our_manager(options=ocp.CheckpointManagerOptions(todelete_subdir="trash"))
    assert "todelete_subdir= has no effect" in caplog.text


def test_another_policy_of_the_run_is_not_overwritten(
    runs: Callable[[], store.Run],
) -> None:
    run = runs()
    run.retention.set(store.KeepLatest(5))
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with pytest.raises(store.PreconditionError, match=r"latest\(5\).*latest\(2\)"):
        orbax.CheckpointManager(run, options=options)
    assert run.retention.get() == store.KeepLatest(5)


def test_a_deleted_step_is_taken_until_it_is_purged(our_manager: NewManager) -> None:
    manager = our_manager()
    commit(manager, 1, args.StandardSave(TREE))
    manager.delete(1)
    with pytest.raises(orbax.StepExistsError, match="purge"):
        manager.save(1, args=args.StandardSave(TREE))
    manager.directory.run.purge(1)
    assert manager.save(1, args=args.StandardSave(TREE))


def test_a_metric_of_best_fn_that_is_missing_is_rejected(
    our_manager: NewManager,
) -> None:
    options = ocp.CheckpointManagerOptions(best_fn=loss)
    manager = our_manager(options=options)
    with pytest.raises(store.InvalidRequestError, match="'loss'"):
        manager.save(1, args=args.StandardSave(TREE), metrics={"other": 1.0})
    assert manager.all_steps() == []


@pytest.mark.parametrize("length", [1, 3])
def test_arrays_are_never_cut_or_padded(our_manager: NewManager, length: int) -> None:
    manager = our_manager()
    commit(manager, 1, args.StandardSave({"w": jnp.ones(2)}))
    same = args.StandardRestore({"w": jnp.zeros(2)}, strict=False)
    assert manager.restore(1, args=same)["w"].tolist() == [1.0, 1.0]
    target = {"w": jnp.zeros(length)}
    arguments = {"w": ocp.ArrayRestoreArgs(global_shape=(length,), strict=False)}
    for wanted in (
        args.StandardRestore(target, strict=False),
        args.PyTreeRestore(target, restore_args=arguments),
    ):
        with pytest.raises(store.MismatchError, match=rf"\({length},\)"):
            manager.restore(1, args=wanted)


def test_the_error_of_a_save_in_the_background_is_raised_once(
    our_manager: NewManager,
) -> None:
    manager = our_manager()
    run = manager.directory.run
    commit(manager, 1, args.StandardSave(TREE))
    assert manager.all_steps() == [1]
    run.save(2, TREE).result()  # another job takes the step
    manager.save(2, args=args.StandardSave({"w": jnp.zeros(1)}))
    with pytest.raises(store.AlreadyExistsError):
        manager.wait_until_finished()
    manager.wait_until_finished()
    manager.check_for_errors()
    assert manager.all_steps() == [1, 2]


def test_a_text_names_store_and_run(tmp_path: Path) -> None:
    place = f"file://{tmp_path}#prod/llama"
    with orbax.CheckpointManager(place) as manager:
        manager.save(1, args=args.StandardSave(TREE))
    with orbax.CheckpointManager(f"file://{tmp_path}", run="prod/llama") as manager:
        assert manager.all_steps() == [1]
        assert str(manager.directory / 1 / "default") == f"{place}/1/default"


@pytest.mark.parametrize(
    ("place", "run"),
    [
        ("/ckpts", None),
        ("file:///c#a/b", "a/b"),
        ("file:///c#", None),
        ("file:///c#a/", None),
        ("file:///c#a/../b", None),
        ("", None),
    ],
)
def test_a_text_without_a_run_is_rejected(place: str, run: str | None) -> None:
    with pytest.raises(store.InvalidRequestError, match="#"):
        split_target(place, run)


def test_a_plain_path_is_rejected_with_one_that_works(tmp_path: Path) -> None:
    with pytest.raises(store.InvalidRequestError) as caught:
        orbax.CheckpointManager(tmp_path / "prod" / "llama")
    (advice,) = re.findall(r"such as '([^']+)'", str(caught.value))
    assert advice == f"{tmp_path}#prod/llama"
    with orbax.CheckpointManager(advice) as manager:
        assert manager.directory.name == "prod/llama"


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("gs://b/r#ns/run/", ("gs://b/r", "ns/run")),
        (epath.Path("gs://b/r#ns") / "run", ("gs://b/r", "ns/run")),
        (Path("gs://b/r#ns/run"), ("gs://b/r", "ns/run")),
        (Path("file:///s#ns/run"), ("file:///s", "ns/run")),
        ("host:7070#ns/run/checkpoints/", ("host:7070", "ns/run.checkpoints")),
        ("/a#b/s/#ns/run//./x", ("/a#b/s/", "ns/run.x")),
    ],
    ids=stable_id,
)
def test_a_path_names_store_and_run(place: Any, expected: tuple[str, str]) -> None:
    assert split_target(str(place), None) == expected


@pytest.mark.parametrize("cls", [orbax.CheckpointManager, orbax.Checkpointer])
@pytest.mark.parametrize(
    ("form", "name"),
    [
        (lambda root: epath.Path(f"file://{root}/s#t/run"), "t/run"),
        (lambda root: epath.Path(f"{root}/s#t") / "run", "t/run"),
        (lambda root: f"{root}/s#prod/llama/", "prod/llama"),
        (lambda root: f"file://{root}/s#prod/llama/ckpts/", "prod/llama.ckpts"),
        (lambda root: epath.Path(f"{root}/s#prod/llama/ckpts/"), "prod/llama.ckpts"),
    ],
    ids=["epath-file", "epath", "slash", "third", "epath-third"],
)
def test_a_directory_may_be_built_as_programs_do(
    tmp_path: Path, cls: Any, form: Callable[[Path], Any], name: str
) -> None:
    place = form(tmp_path)
    if not isinstance(place, str):
        place.mkdir(parents=True, exist_ok=True)
    with cls(place) as manager:
        assert str(manager.directory) == f"file://{tmp_path}/s#{name}"
    with store.connect(tmp_path / "s") as client:
        client.run(name).save(1, TREE).result()
    with cls(place) as manager:
        assert manager.directory.run.steps() == [1]


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"version": 2},
        {"version": 1, "items": {"a": {"kind": "pickle", "place": "a"}}},
        {"version": 1, "items": {"a": {"kind": "json", "place": 3}}},
        {"version": 1, "items": []},
    ],
    ids=stable_id,
)
def test_a_damaged_record_is_damage(value: Any) -> None:
    with pytest.raises(store.DataLossError, match="prod/run@1 item 'orbax'"):
        StepRecord.parse("prod/run@1", value)
