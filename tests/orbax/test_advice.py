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


def managed(work: Callable[[Any], Any], **options: Any) -> Call:
    """Returns a call that does a work with a manager of a run."""

    def call(run: store.Run) -> Any:
        manager = orbax.CheckpointManager(run, **options)
        try:
            found = work(manager)
            manager.wait_until_finished()
        finally:
            manager.close()
        return found

    return call


def checkpointed(work: Callable[[Any], Any], **options: Any) -> Call:
    """Returns a call that does a work with a checkpointer of version 1."""

    def call(run: store.Run) -> Any:
        with orbax.Checkpointer(run, **options) as checkpointer:
            return work(checkpointer)

    return call


def saving(step: int, tree: Any = TREE, **options: Any) -> Call:
    """Returns a call that saves a step with a manager."""
    given = args.StandardSave(tree)
    return managed(lambda m: m.save(step, args=given), **options)


def in_order(*calls: Callable[[store.Run], Any]) -> Call:
    """Returns a call of several, with the result of the last one."""
    return lambda run: [call(run) for call in calls][-1]


def purge(run: store.Run) -> None:
    run.purge(0)


def delete(run: store.Run) -> None:
    run.delete(0)


def keep(count: int, **more: Any) -> Any:
    return ocp.CheckpointManagerOptions(max_to_keep=count, **more)


ONE_ARRAY: Final = args.ArraySave(jnp.ones(2))
ONE_LEAF: Final = {"w": ocp.RestoreArgs()}
ALL_LEAVES: Final = dict.fromkeys(TREE, ocp.RestoreArgs())
HANDLER: Final = {"item_handlers": ocp.StandardCheckpointHandler()}

CASES: Final[dict[str, tuple[Call, str, Sequence[Call]]]] = {
    # a call that is rejected, with step 0 in the run; its advice; what this says
    "one array": (
        managed(lambda m: m.save(1, args=ONE_ARRAY)),
        r"use StandardSave\({'name': array}\)",
        [saving(1, {"name": jnp.ones(2)})],
    ),
    "a tree of one leaf": (
        saving(1, jnp.ones(2)),
        "use a dict of it",
        [saving(1, {"w": jnp.ones(2)})],
    ),
    "a step again": (
        checkpointed(lambda c: c.save(0, TREE, overwrite=True)),
        "run.delete and run.purge free a step",
        [in_order(delete, purge, checkpointed(lambda c: c.save(0, TREE)))],
    ),
    "a deleted step": (
        in_order(managed(lambda m: m.delete(0)), saving(0)),
        "run.purge frees it",
        [in_order(purge, saving(0))],
    ),
    "another count of steps": (
        saving(1, options=keep(3)),
        "change it by run.retention.set or storectl retain, or leave max_to_keep=",
        [
            in_order(
                lambda run: run.retention.set(store.KeepLatest(3)),
                saving(1, options=keep(3)),
            ),
            managed(lambda m: m.all_steps()),
        ],
    ),
    "a leaf without arguments": (
        managed(lambda m: m.restore(0, args=args.PyTreeRestore(TREE, ONE_LEAF))),
        r"give it RestoreArgs\(\)",
        [managed(lambda m: m.restore(0, args=args.PyTreeRestore(TREE, ALL_LEAVES)))],
    ),
    "a policy of the caller": (
        checkpointed(
            lambda c: c.steps, preservation_policy=managers.EveryNStepsClosest(5)
        ),
        "set a policy of the run with run.retention.set, or use LatestN",
        [
            checkpointed(
                lambda c: c.save(1, TREE), preservation_policy=managers.LatestN(2)
            )
        ],
    ),
    "an argument as an item": (
        managed(lambda m: m.save(1, args.StandardSave(TREE)), **HANDLER),
        "pass it as args=",
        [saving(1)],
    ),
    "another run": (
        managed(lambda m: m.restore(0, directory="/elsewhere")),
        "use a manager of the other run",
        [managed(lambda m: m.restore(0))],
    ),
    "a registry of handlers": (
        managed(
            lambda m: m.all_steps(),
            handler_registry=ocp.handlers.create_default_handler_registry(),
        ),
        "use item_handlers=",
        [managed(lambda m: m.restore(0), **HANDLER)],
    ),
    "a metric that is computed": (
        managed(
            lambda m: m.all_steps(),
            options=keep(2, best_fn=lambda metrics: -metrics["loss"]),
        ),
        r"compute the value before save\(metrics=\)",
        [
            in_order(
                lambda run: run.retention.set(None),
                managed(
                    lambda m: m.save(
                        1, args=args.StandardSave(TREE), metrics={"score": -1.5}
                    ),
                    options=keep(2, best_fn=lambda metrics: metrics["score"]),
                ),
            )
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_rejection_advises_works(
    runs: Callable[[], store.Run], name: str
) -> None:
    refused, advice, calls = CASES[name]
    for call in calls:
        run = runs()
        saving(0, options=keep(2))(run)
        with pytest.raises((store.StoreError, ValueError), match=advice):
            refused(run)

        assert call(run) not in (None, False)
