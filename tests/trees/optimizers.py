"""Every optimizer of optax, made from its public names with the required arguments."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
import optax.contrib

_GIVEN: Final[Mapping[str, Any]] = {
    "b1": 0.9,
    "b2": 0.999,
    "beta": 0.9,
    "decay": 0.9,
    "delta": 0.1,
    "end_value": 0.0,
    "eta": 0.01,
    "every_k_schedule": 2,
    "filter_fn": lambda updates: updates,
    "gamma": 0.55,
    "inner": optax.sgd(0.1),
    "inner_opt": optax.sgd(0.1),
    "key": jax.random.key(0),
    "l2_norm_clip": 1.0,
    "learning_rate": 1e-3,
    "learning_rate_fn": 1e-3,
    "max_consecutive_errors": 3,
    "max_delta": 1.0,
    "max_norm": 1.0,
    "momentum": 0.9,
    "noise_multiplier": 0.1,
    "num_microbatches": 2,
    "opt": optax.adam(1e-3),
    "opt1": optax.sgd(0.1),
    "opt2": optax.adam(1e-3),
    "optimizer": optax.adam(1e-3),
    "regularization": 0.1,
    "rho": 0.9,
    "seed": 0,
    "step_size": 0.1,
    "step_size_fn": optax.constant_schedule(1e-3),
    "sync_period": 3,
    "threshold": 1.0,
    "weight_decay": 0.01,
}
"""Arguments that have no default, by name."""

_MADE: Final[Mapping[str, Callable[[], Any]]] = {
    "MultiSteps": lambda: optax.MultiSteps(
        optax.adam(1e-3), 3
    ).gradient_transformation(),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-3), 3),
    "chain": lambda: optax.chain(optax.clip(1.0), optax.adam(1e-3)),
    "conditionally_mask": lambda: optax.conditionally_mask(
        optax.adam(1e-3), lambda step: step < 9
    ),
    "conditionally_transform": lambda: optax.conditionally_transform(
        optax.adam(1e-3), lambda step: step < 9
    ),
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.01),
    "mechanize": lambda: optax.contrib.mechanize(optax.sgd(0.1)),
    "measure_with_ema": lambda: optax.measure_with_ema(lambda tree: tree, 0.9),
    "monitor": lambda: optax.monitor({"norm": optax.tree.norm}),
    "sam": lambda: optax.contrib.sam(
        optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
    ),
    "scale_by_backtracking_linesearch": lambda: optax.chain(
        optax.sgd(0.1), optax.scale_by_backtracking_linesearch(3)
    ),
    "scale_by_zoom_linesearch": lambda: optax.chain(
        optax.sgd(0.1), optax.scale_by_zoom_linesearch(3)
    ),
    "schedule_free": lambda: optax.contrib.schedule_free(optax.sgd(0.1), 0.1, b1=0.9),
    "snapshot": lambda: optax.snapshot("norm", optax.tree.norm),
    "stateless": lambda: optax.stateless(lambda updates, _: updates),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda x, _: x),
    "flatten": lambda: optax.flatten(optax.adam(1e-3)),
    "freeze": lambda: optax.masked(optax.set_to_zero(), False),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
        optax.linear_schedule(1e-3, 0.0, 9)
    ),
    "inject_stateful_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(1e-3),
    "masked": lambda: optax.masked(
        optax.adam(1e-3), lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)
    ),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.adam(1e-3), "other": optax.sgd(0.1, momentum=0.9)},
        lambda tree: jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "other", tree),
    ),
    "named_chain": lambda: optax.named_chain(
        ("clip", optax.clip(1.0)), ("adam", optax.adam(1e-3))
    ),
    "partition": lambda: optax.partition(
        {"matrix": optax.adam(1e-3), "other": optax.set_to_zero()},
        lambda tree: jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "other", tree),
    ),
    "selective_transform": lambda: optax.selective_transform(
        optax.adam(1e-3), freeze_mask=lambda tree: jax.tree.map(lambda _: False, tree)
    ),
    "split_real_and_imaginary": lambda: optax.contrib.split_real_and_imaginary(
        optax.adam(1e-3)
    ),
    "with_extra_args_support": lambda: optax.with_extra_args_support(optax.adam(1e-3)),
}
"""Names whose arguments are optimizers or functions."""


NOT_MADE: Final = frozenset({"optax.lookahead", "optax.microbatch"})
"""Optimizers left out: one has its own kind of parameters, one takes functions."""


def optimizers() -> dict[str, Callable[[], Any]]:
    """Returns a factory of each optimizer, by its public name."""
    return dict(_found())


def _found() -> Iterator[tuple[str, Callable[[], Any]]]:
    for prefix, module in (("optax", optax), ("optax.contrib", optax.contrib)):
        for name in sorted(dir(module)):
            value = getattr(module, name)
            if name.startswith("_") or not callable(value):
                continue
            make = _MADE.get(name) or _made_by(value)
            if make is not None:
                yield f"{prefix}.{name}", make


def annotated_names() -> set[str]:
    """Returns the public names whose annotation returns an optimizer."""
    return {
        f"{prefix}.{name}"
        for prefix, module in (("optax", optax), ("optax.contrib", optax.contrib))
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and not name.startswith("_")
        and "GradientTransformation"
        in str(inspect.get_annotations(value).get("return", ""))
    }


def _made_by(value: Callable[..., Any]) -> Callable[[], Any] | None:
    """Returns a factory that calls a function with its required arguments, or None if
    the result is not an optimizer."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return None
    needed = [
        each.name
        for each in parameters
        if each.default is each.empty
        and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if not set(needed) <= _GIVEN.keys():
        return None
    arguments = {name: _GIVEN[name] for name in needed}

    def make() -> Any:
        return value(**arguments)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names that will go
            made = make()
    except Exception:  # noqa: BLE001 - of no optimizer
        return None
    return make if isinstance(made, optax.GradientTransformation) else None


def extra_arguments(
    tx: Any, grads: Any, opt_state: Any, params: Any
) -> dict[str, Any] | None:
    """Returns the extra arguments that an update needs; None if optax itself cannot
    update these dtypes."""

    def value_fn(tree: Any) -> Any:
        leaves = jax.tree.leaves(tree)
        return sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in leaves)

    value = value_fn(params)
    for extra in (
        {},
        {"value": value},
        {"value": value, "grad": grads, "value_fn": value_fn},
        {"value_fn": value_fn, "obj_fn": value_fn},
    ):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", FutureWarning)
                jax.eval_shape(partial(tx.update, **extra), grads, opt_state, params)
        except (TypeError, ValueError, KeyError, AttributeError, FutureWarning):
            continue
        return extra
    return None
