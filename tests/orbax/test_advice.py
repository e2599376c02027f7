"""Each call of Orbax that a rejection advises works, in a run of the same store."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import args
from orbax.checkpoint import checkpoint_managers as managers

import storesvc_client as store
from storesvc_client import orbax

TREE: Final = {"w": jnp.ones(2), "b": jnp.ones(3)}
Call = Callable[[store.Run], Any]


def manage(run: store.Run, work: Callable[[Any], Any], **options: Any) -> Any:
    """Returns what work does with a manager of a run."""
    manager = orbax.CheckpointManager(run, **options)
    try:
        found = work(manager)
        manager.wait_until_finished()
    finally:
        manager.close()
    return found


def checkpoint(run: store.Run, work: Callable[[Any], Any], **options: Any) -> Any:
    """Returns what work does with a checkpointer of version 1."""
    with orbax.Checkpointer(run, **options) as checkpointer:
        return work(checkpointer)


def save_step(run: store.Run, **options: Any) -> Any:
    return manage(run, lambda m: m.save(0, args=args.StandardSave(TREE)), **options)


def keep(count: int) -> Any:
    return ocp.CheckpointManagerOptions(max_to_keep=count)


def purge_and_save(run: store.Run) -> Any:
    run.delete(0)
    run.purge(0)
    return checkpoint(run, lambda c: c.save(0, TREE))


def save_after_delete(run: store.Run) -> Any:
    manage(run, lambda m: m.delete(0))
    return save_step(run)


def purge_and_save_again(run: store.Run) -> Any:
    run.purge(0)
    return save_step(run)


def set_policy(run: store.Run) -> Any:
    run.retention.set(store.KeepLatest(3))
    return save_next(run, options=keep(3))


def save_next(run: store.Run, **options: Any) -> Any:
    return manage(run, lambda m: m.save(1, args=args.StandardSave(TREE)), **options)


def save_score(run: store.Run) -> Any:
    run.retention.set(None)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, best_fn=lambda metrics: metrics["score"]
    )
    metrics = {"score": -1.5}
    given = args.StandardSave(TREE)
    return manage(
        run, lambda m: m.save(1, args=given, metrics=metrics), options=options
    )


CASES: Final[dict[str, tuple[Call, str, Sequence[Call]]]] = {
    # a call that is rejected, with step 0 in the run; its advice; what this says
    "one array": (
        lambda run: manage(run, lambda m: m.save(1, args=args.ArraySave(jnp.ones(2)))),
        r"use StandardSave\({'name': array}\)",
        [
            lambda run: manage(
                run, lambda m: m.save(1, args=args.StandardSave({"name": jnp.ones(2)}))
            )
        ],
    ),
    "a tree of one leaf": (
        lambda run: manage(
            run, lambda m: m.save(1, args=args.StandardSave(jnp.ones(2)))
        ),
        "use a dict of it",
        [
            lambda run: manage(
                run, lambda m: m.save(1, args=args.StandardSave({"w": jnp.ones(2)}))
            )
        ],
    ),
    "a step again": (
        lambda run: checkpoint(run, lambda c: c.save(0, TREE, overwrite=True)),
        "run.delete and run.purge free a step",
        [purge_and_save],
    ),
    "a deleted step": (
        save_after_delete,
        "run.purge frees it",
        [purge_and_save_again],
    ),
    "another count of steps": (
        lambda run: save_next(run, options=keep(3)),
        "change it by run.retention.set or storectl retain, or leave max_to_keep=",
        [set_policy, lambda run: manage(run, lambda m: m.all_steps())],
    ),
    "a leaf without arguments": (
        lambda run: manage(
            run,
            lambda m: m.restore(
                0,
                args=args.PyTreeRestore(TREE, restore_args={"w": ocp.RestoreArgs()}),
            ),
        ),
        r"give it RestoreArgs\(\)",
        [
            lambda run: manage(
                run,
                lambda m: m.restore(
                    0,
                    args=args.PyTreeRestore(
                        TREE, restore_args=dict.fromkeys(TREE, ocp.RestoreArgs())
                    ),
                ),
            )
        ],
    ),
    "a policy of the caller": (
        lambda run: checkpoint(
            run, lambda c: c.steps, preservation_policy=managers.EveryNStepsClosest(5)
        ),
        "set a policy of the run with run.retention.set, or use LatestN",
        [
            lambda run: checkpoint(
                run, lambda c: c.save(1, TREE), preservation_policy=managers.LatestN(2)
            )
        ],
    ),
    "an argument as an item": (
        lambda run: manage(
            run,
            lambda m: m.save(1, args.StandardSave(TREE)),
            item_handlers=ocp.StandardCheckpointHandler(),
        ),
        "pass it as args=",
        [save_next],
    ),
    "another run": (
        lambda run: manage(run, lambda m: m.restore(0, directory="/elsewhere")),
        "use a manager of the other run",
        [lambda run: manage(run, lambda m: m.restore(0))],
    ),
    "a registry of handlers": (
        lambda run: manage(
            run,
            lambda m: m.all_steps(),
            handler_registry=ocp.handlers.create_default_handler_registry(),
        ),
        "use item_handlers=",
        [
            lambda run: manage(
                run,
                lambda m: m.restore(0),
                item_handlers=ocp.StandardCheckpointHandler(),
            )
        ],
    ),
    "a metric that is computed": (
        lambda run: manage(
            run,
            lambda m: m.all_steps(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=2, best_fn=lambda metrics: -metrics["loss"]
            ),
        ),
        r"compute the value before save\(metrics=\)",
        [save_score],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_rejection_advises_works(
    runs: Callable[[], store.Run], name: str
) -> None:
    refused, advice, calls = CASES[name]
    for call in calls:
        run = runs()
        save_step(run, options=keep(2))
        with pytest.raises((store.StoreError, ValueError), match=advice):
            refused(run)

        assert call(run) not in (None, False)
