"""Saving and restoring an ``EasyDeLState``.

A restore needs what a checkpoint does not hold: the code of the model (a factory)
and the optimizer. Both run abstractly, so that no array exists before its shards
arrive, each on the device where it stays.

Example:
    with store.connect("ckpt.example:7070") as client:
        run = client.run("prod/llama-8b")
        save_state(run, state, metrics={"loss": 2.31})
        state = restore_state(run, model=make_model, tx=tx, mesh=mesh, rules=rules)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, SupportsFloat

from storesvc.format.names import Which
from storesvc_client._run import Run
from storesvc_client._save import Save

if TYPE_CHECKING:
    import optax
    from flax import nnx
    from jax.sharding import Mesh, PartitionSpec

    from storesvc_client.trees.easydel import EasyDeLState

__all__ = ["restore_state", "save_state"]


def save_state(
    run: Run,
    state: "EasyDeLState",
    *,
    metrics: Mapping[str, SupportsFloat] | None = None,
    labels: Mapping[str, str] | None = None,
) -> Save:
    """Starts a save of the state at its own step; see ``Run.save``.

    Args:
        run: The run that the checkpoint is to belong to.
        state: The state. It may be donated as soon as this returns.
        metrics: Numbers to keep with the checkpoint.
        labels: Texts to keep with the checkpoint.
    """
    return run.save(int(state.step), state, metrics=metrics, labels=labels)


def restore_state(
    run: Run,
    which: Which = "latest",
    *,
    model: "Callable[[], nnx.Module]",
    tx: "optax.GradientTransformation",
    mesh: "Mesh | None" = None,
    rules: "Sequence[tuple[str, PartitionSpec]] | None" = None,
) -> "EasyDeLState":
    """Returns the state of a checkpoint, on the mesh given.

    RNG counts and keys that the checkpoint lacks are made anew; those that it holds
    come back as they were.

    Args:
        run: The run of the checkpoint.
        which: A step, or "latest".
        model: Makes the module; it runs under ``nnx.eval_shape``.
        tx: The optimizer that the state was trained with.
        mesh: The devices, in any shape.
        rules: Pairs of a regex, searched in the leaf key, and the PartitionSpec of
            the leaves that it finds; the first match decides.

    Raises:
        NotFoundError: There is no such checkpoint.
        MismatchError: The checkpoint is not of this model and this optimizer.
    """
    # Lazily: `import storesvc_client` must not import jax.
    from storesvc_client.trees.rebuild import (
        abstract_state,
        rebuild_state,
        without_absent_rng,
    )

    # "latest" may move between two calls; a step does not.
    step = run.checkpoint(which).step
    held = run.leaves(step)
    target = abstract_state(model, tx)
    if "step" in held and held["step"].kind == "python_scalar":
        # So `EasyDeLState.create` counts; an array it becomes in the first jit.
        target = target.replace(step=0)
    like, absent = without_absent_rng(target, held)
    restored = run.restore(step, like=like, mesh=mesh, rules=rules)
    return rebuild_state(target, restored, absent, mesh)
