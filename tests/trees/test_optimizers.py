"""Every optimizer of optax: its state is restored, and training continues unchanged."""

import os
import re
from collections.abc import Iterator
from itertools import product
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import storesvc_client as store
from storesvc_client.easydel import restore_state, save_state
from storesvc_client.trees.easydel import EasyDeLState
from tests.support.examples import sampled
from tests.support.leaf_bits import key_data
from tests.trees.optimizers import (
    NOT_MADE,
    annotated_names,
    extra_arguments,
    optimizers,
)

OPTIMIZERS: Final = optimizers()

_PAIRS: Final = [
    *(("bfloat16", "float32"), ("float32", "bfloat16")),
    *(("float32", "float32"), ("bfloat16", "bfloat16")),
]
"""Dtypes of parameters and gradients; ``STORESVC_OPTIMIZERS=all`` runs all of them."""

PAIRS: Final = _PAIRS if os.environ.get("STORESVC_OPTIMIZERS") == "all" else _PAIRS[:1]

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # optax warns of deprecated names
    pytest.mark.filterwarnings("error:::storesvc_client"),
]


class Model(nnx.Module):
    def __init__(self, dtype: str, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 4, param_dtype=jnp.dtype(dtype), rngs=rngs)


@pytest.fixture(scope="module")
def client() -> Iterator[store.Client]:
    with store.connect("memory://") as connected:
        yield connected


def stepped(state: Any, grad_dtype: str) -> Any:
    """Returns the state after an update, compiled as in a training loop."""
    params = state.graphstate
    grads = jax.tree.map(lambda x: (x * 0.5 + 0.25).astype(grad_dtype), params)
    extra = extra_arguments(state.tx, grads, state.opt_state, params)
    if extra is None:
        pytest.skip("optax cannot step it with these dtypes")
    updates, opt_state = state.tx.update(grads, state.opt_state, params, **extra)
    return state.replace(
        step=state.step + 1,
        graphstate=optax.apply_updates(params, updates),
        opt_state=opt_state,
    )


def bits_of(tree: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = key_data(jnp.asarray(leaf))
        kind = f"{type(leaf).__name__} {array.dtype}"
        key = jax.tree_util.keystr(path)
        found[key] = kind, array.shape, jax.device_get(array).tobytes()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtypes"),
    sampled(product(OPTIMIZERS, PAIRS), every=200, checked_every=8),
    ids=lambda x: "-".join(x) if isinstance(x, tuple) else x,
)
def test_every_optimizer_of_optax_is_restored(
    client: store.Client, name: str, dtypes: tuple[str, str]
) -> None:
    make, (param_dtype, grad_dtype) = OPTIMIZERS[name], dtypes
    state: Any = EasyDeLState.create(
        model=Model(param_dtype, rngs=nnx.Rngs(0)), tx=make(), init_opt_state=True
    )
    state = stepped(state, grad_dtype)
    short = re.sub("[._]", "-", name.split(".", 1)[1]).lower()[:40]
    run = client.run(f"tests/{short}-{param_dtype[0]}-{grad_dtype[0]}")

    save = save_state(run, state, rehearse="strict")
    back = restore_state(
        run,
        save.result().step,
        model=lambda: Model(param_dtype, rngs=nnx.Rngs(1)),
        tx=make(),
    )

    assert bits_of(state) == bits_of(back)
    structure: Any = jax.tree.structure(state.opt_state)
    assert structure == jax.tree.structure(back.opt_state)
    assert bits_of(stepped(state, grad_dtype)) == bits_of(stepped(back, grad_dtype))


def test_no_optimizer_of_optax_is_left_out() -> None:
    assert NOT_MADE >= annotated_names() - OPTIMIZERS.keys()
    assert {"optax.adam", "optax.adafactor", "optax.contrib.muon"} <= OPTIMIZERS.keys()
