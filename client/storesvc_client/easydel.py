"""Saving and restoring models: an ``EasyDeLState``, or a module alone.

A restore needs what a checkpoint does not hold, the code: the model as a class or a
factory, and the optimizer. Both run abstractly, so that no array exists before its
shards arrive, each on the device where it stays. What was saved of the model's
structure is compared with that code, and a difference is refused by its name.

Example:
    with store.connect("ckpt.example:7070") as client:
        run = client.run("prod/llama-8b")
        save_state(run, state, metrics={"loss": 2.31})
        state = restore_state(run, model=make_model, tx=tx, mesh=mesh, rules=rules)
"""

from typing import TYPE_CHECKING, Any, Literal, Unpack

from storesvc.format.names import Which
from storesvc_client._api.run import Run
from storesvc_client._values.options import ModelRestoreKeywords, OnMismatch
from storesvc_client.trees.easydel import EasyDeLState
from storesvc_client.trees.nnx import saved_models
from storesvc_client.trees.nnx.saved_models import (
    restore_model,
    save_model,
    save_state,
)

if TYPE_CHECKING:
    import optax
    from jax.sharding import Mesh
    from numpy.typing import DTypeLike

    from storesvc_client._values.options import Rules

__all__ = ["restore_model", "restore_state", "save_model", "save_state"]


def restore_state(
    run: Run,
    which: Which = "latest",
    *,
    model: Any = None,
    tx: "optax.GradientTransformation | None" = None,
    mesh: "Mesh | None" = None,
    rules: "Rules | None" = None,
    opt_state: Literal["restore", "skip"] = "restore",
    cast: "DTypeLike | None" = None,
    missing: Literal["error", "init"] = "error",
    on_mismatch: OnMismatch = "raise",
    state_class: Any = None,
    **options: Unpack[ModelRestoreKeywords],
) -> Any:
    """Returns the state of a checkpoint, on the mesh given.

    RNG counts and keys that the checkpoint lacks are made anew; those that it holds
    come back as they were.

    Args:
        run: The run of the checkpoint.
        which: A step, "latest", or a tag.
        model: The model: a class, a factory (a callable that takes nothing), a
            module, or a state; modules and states may be abstract. Factories run
            under ``nnx.eval_shape``. A class whose constructor takes a config, such
            as those of EasyDeL, gets the config and the dtypes that were saved. None
            returns a dict of dicts and lists, with all leaves as they were saved.
        tx: The optimizer that the state was trained with.
        mesh: The devices, in any shape. None: the mesh that the model names, and
            else the sharding of each leaf of ``model``, or the default device.
        rules: With ``mesh``: pairs of a regex, searched in the leaf key, and the
            PartitionSpec of the leaves that it finds; the first match decides, and
            axes that do not divide a leaf are dropped, which is logged. Or
            "recorded", as it was saved. None: the rules that the model knows.
        opt_state: Whether to restore the optimizer's state; inference skips it.
        cast: A floating-point dtype for the parameters, ``graphstate``, and for the
            moments that ``tx`` keeps of them; it is the ``param_dtype`` of a model
            that comes as a class. None: as they were saved.
        missing: Whether Variables that the checkpoint lacks, such as those of LoRA,
            are an error or are initialised by the model. With "init" a parameter
            may also have become a frozen Variable of ``graphother``, or vice versa.
            Where adapters wrap their layers, as EasyDeL's do, restore the model
            without them, and apply them to it.
        on_mismatch: What to do if the config, the structure or the optimizer differs
            from the saved one: "raise" a ``MismatchError``, or "log" a warning. The
            leaves must fit in any case.
        state_class: The class to build by its ``create``; None: this library's
            ``EasyDeLState``.
        options: As of ``Run.restore``: ``distributed``, ``deadline`` and
            ``progress``.

    Raises:
        NotFoundError: There is no such checkpoint.
        InvalidRequestError: An argument is not usable; ``tx`` is None though the
            checkpoint holds the state of an optimizer.
        MismatchError: The checkpoint is not of this model and this optimizer.
    """
    if state_class is None and model is not None:
        state_class = EasyDeLState
    return saved_models.restore_state(
        run,
        which,
        model=model,
        tx=tx,
        mesh=mesh,
        rules=rules,
        opt_state=opt_state,
        cast=cast,
        missing=missing,
        on_mismatch=on_mismatch,
        state_class=state_class,
        **options,
    )
