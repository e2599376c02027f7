"""Restores a state as EasyDeL's class, or as this library's own."""

from typing import TYPE_CHECKING, Any, Unpack

from storesvc.format.names import Which
from storesvc_client._api.run import Run
from storesvc_client._values.options import (
    Indivisible,
    Missing,
    ModelRestoreKeywords,
    OnMismatch,
    OptState,
)
from storesvc_client.trees.easydel import EasyDeLState
from storesvc_client.trees.nnx import saved_models

if TYPE_CHECKING:
    import optax
    from jax.sharding import Mesh
    from numpy.typing import DTypeLike

    from storesvc_client._foreign.mount import ForeignRun
    from storesvc_client._values.key_patterns import Patterns
    from storesvc_client._values.options import Rules

__all__ = ["restore_state"]


def restore_state(
    run: "Run | ForeignRun",
    which: Which = "latest",
    *,
    model: Any = None,
    tx: "optax.GradientTransformation | None" = None,
    mesh: "Mesh | None" = None,
    rules: "Rules | None" = None,
    indivisible: Indivisible = "error",
    opt_state: OptState = "restore",
    cast: "DTypeLike | None" = None,
    select: "Patterns | None" = None,
    missing: Missing = "error",
    on_mismatch: OnMismatch = "raise",
    state_class: Any = None,
    **options: Unpack[ModelRestoreKeywords],
) -> Any:
    """Returns the state of a checkpoint, on the given mesh.

    RNG counts and keys that the checkpoint lacks are initialised; those that it has are
    restored as they were.

    >>> state = restore_state(run, model=LlamaForCausalLM, tx=optax.adamw(1e-4))

    Args:
        run: Run of the checkpoint, or ``open_foreign("eformer:...")``: a checkpoint
            that EasyDeL wrote, imported or not, has the keys of a state, its config and
            its step. RNG values are new, and a class computes in its own ``dtype``.
        which: A step, "latest", or a tag.
        model: The model: a class, a factory (a callable without arguments), a module,
            or a state; modules and states may be abstract. Factories run under
            ``nnx.eval_shape``. A class whose constructor takes a config, as EasyDeL's
            models do, receives the saved config and dtypes. None returns a dict of
            dicts and lists, with all leaves as they were saved.
        tx: The optimizer that the state was trained with.
        mesh: Mesh of any shape. None: the mesh of the model, else the sharding of each
            leaf of ``model``, or the default device.
        rules: With ``mesh``: ``(pattern, PartitionSpec)`` pairs; the first whose
            regular expression is found in the key of a leaf applies. Or "recorded": the
            saved sharding. None: the rules of the model; of these, axes that do not
            divide a leaf are dropped, as EasyDeL does, which is logged.
        indivisible: As for ``Run.restore``.
        opt_state: "restore" the saved state of the optimizer; "init" initialises it by
            ``tx``, which may be another optimizer; "skip" leaves it out, for inference.
        cast: A floating-point dtype for the parameters (``graphstate``) and for the
            moments that ``tx`` keeps of them; a model given as a class gets it as
            ``param_dtype``. "like": the dtypes of the model. None: the saved dtypes,
            which a factory must have.
        select: Globs or compiled expressions of the keys of leaves that count; the
            checkpoint is restored as if it lacked all others.
        missing: What to do with leaves that the checkpoint lacks, such as LoRA weights,
            a layer, or the count of a schedule: "error"; "init" initialises them by the
            model or ``tx``, and "keep" keeps their values in ``model``, a module or a
            state. With either a parameter may also have become a frozen Variable of
            ``graphother``, or vice versa. If adapters wrap their layers, as EasyDeL's
            do, restore the model without them, and apply them to it.
        on_mismatch: What to do if the config, the structure or the optimizer differs
            from the saved one: "raise" a ``MismatchError``, or "log" a warning. The
            leaves must fit in any case.
        state_class: Class whose ``create`` builds the state. Fields that it adds, such
            as averages of the parameters, are restored with the structure that they
            have in ``model``, if it is a state, or after ``create``, or that they had
            when saved, if they were like a part of the state or of dicts and lists.
            None: the class of the state in ``model``, else ``EasyDeLState`` of this
            library.
        **options: ``distributed``, ``deadline`` and ``progress``, as for
            ``Run.restore``.

    Raises:
        NotFoundError: There is no such checkpoint.
        InvalidRequestError: An argument is out of range, or ``tx`` is None but the
            checkpoint has the state of an optimizer.
        MismatchError: The checkpoint was saved from another model or optimizer.
    """
    if state_class is None and model is not None:
        is_state = hasattr(model, "opt_state") and hasattr(type(model), "create")
        state_class = type(model) if is_state else EasyDeLState
    return saved_models.restore_state(
        run,
        which,
        model=model,
        tx=tx,
        mesh=mesh,
        rules=rules,
        indivisible=indivisible,
        opt_state=opt_state,
        cast=cast,
        select=select,
        missing=missing,
        on_mismatch=on_mismatch,
        state_class=state_class,
        **options,
    )
