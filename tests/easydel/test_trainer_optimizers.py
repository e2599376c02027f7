"""Every optimizer and schedule of EasyDeL's trainers continues after a restore."""

import os
import warnings
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any, Final

import easydel as ed
import jax
import jax.numpy as jnp
import pytest
from easydel.infra.base_state import EasyDeLState
from easydel.infra.etils import EasyDeLOptimizers, EasyDeLSchedulers

import storesvc_client as store
from storesvc_client.easydel import restore_state, save_state
from tests.easydel.digests import digests
from tests.easydel.scenarios import Scenario
from tests.easydel.test_real_states import with_leaves_of
from tests.support.examples import sampled

DTYPES: Final = [("bfloat16", "float32"), ("float32", "bfloat16")]
"""Dtypes of parameters and gradients."""

EVERY: Final = list(product(EasyDeLOptimizers, EasyDeLSchedulers, DTYPES))
IS_ALL: Final = os.environ.get("STORESVC_OPTIMIZERS") == "all"

CASES: Final = EVERY if IS_ALL else sampled(EVERY[::5], every=2)
"""Cases: each optimizer once or twice, each schedule and each pair of dtypes with some
of them, half of them quick; ``STORESVC_OPTIMIZERS=all`` runs all combinations."""

UNSTEPPABLE: Final = {"mars"}
"""Optimizers that eformer 0.0.99 cannot step: their state lacks a gradient."""


@pytest.fixture(scope="module")
def client() -> Iterator[store.Client]:
    with store.connect("memory://") as connected:
        yield connected


def optimizer(name: EasyDeLOptimizers, schedule: EasyDeLSchedulers) -> Any:
    """Returns the optimizer that the trainer makes of its arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = ed.TrainingArguments(
            model_name="none",
            optimizer=name,
            scheduler=schedule,
            learning_rate=1e-3,
            learning_rate_end=1e-4,
            warmup_steps=0 if schedule == EasyDeLSchedulers.NONE else 2,
            gradient_accumulation_steps=1,
            clip_grad=1.0,
            weight_decay=0.01,
            max_training_steps=20,
        )
        return arguments.get_optimizer_and_scheduler(20)[0]


@cache
def model(param_dtype: str) -> Any:
    """One model for all optimizers."""
    scenario = Scenario(param_dtype=jnp.dtype(param_dtype))
    return scenario.model(scenario.dims, num_hidden_layers=1)


def stepped(state: Any, grad_dtype: str) -> Any:
    """Returns the state after a step; the moments have the dtype that results."""

    def step(state: Any) -> Any:
        grads = jax.tree.map(
            lambda x: (x * 0.5 + 0.125).astype(grad_dtype), state.graphstate
        )
        return state.apply_gradients(grads=grads)

    with state.model.mesh:
        return jax.jit(step)(state)


@pytest.mark.parametrize(
    ("name", "schedule", "dtypes"),
    CASES,
    ids=lambda value: str(getattr(value, "value", value)),
)
def test_an_optimizer_of_the_trainer_goes_on_as_it_would_have(
    client: store.Client,
    name: EasyDeLOptimizers,
    schedule: EasyDeLSchedulers,
    dtypes: tuple[str, str],
) -> None:
    param_dtype, grad_dtype = dtypes
    state = EasyDeLState.create(
        model=model(param_dtype), tx=optimizer(name, schedule), init_opt_state=True
    ).shard_state()
    if name.value not in UNSTEPPABLE:
        state = stepped(state, grad_dtype)
    run = client.run(f"tests/{name.value}-{schedule.value or 'none'}-{param_dtype}")

    save = save_state(run, state, rehearse="strict")
    back = restore_state(
        run,
        save.result().step,
        model=ed.LlamaForCausalLM,
        tx=optimizer(name, schedule),
        mesh=state.model.mesh,
        state_class=EasyDeLState,
    )

    assert digests(state) == digests(back)
    if name.value not in UNSTEPPABLE:
        # other shardings change the order in which a matrix product is summed
        moved = with_leaves_of(state, back)
        assert digests(stepped(moved, grad_dtype)) == digests(stepped(back, grad_dtype))
