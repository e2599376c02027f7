"""Checkpoints that EasyDeL itself wrote become states, imported or where they are."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from easydel.infra.base_state import EasyDeLState
from flax import nnx

import storesvc_client as store
import storesvc_client.nnx
from storesvc_client.easydel import restore_model, restore_state
from tests.easydel.digests import digests
from tests.easydel.scenarios import Scenario
from tests.support.examples import sampled

SCENARIO = Scenario(sizes={"num_hidden_layers": 1})
ROUTES = {
    "class": SCENARIO.model_class,
    "factory": partial(SCENARIO.model, SCENARIO.dims),
}


@pytest.fixture(scope="module")
def state() -> Any:
    """A state after a step, with other parameters than the factory makes."""
    made = SCENARIO.state(SCENARIO.dims, seed=3)
    return made.apply_gradients(grads=made.graphstate)


@pytest.fixture(scope="module")
def old(state: Any, tmp_path_factory: pytest.TempPathFactory) -> store.ForeignRun:
    """The state as EasyDeL saved it."""
    folder = tmp_path_factory.mktemp("old")
    state.save_state(folder / "run-7", step=7, float_dtype=jnp.float32)
    return store.open_foreign(f"eformer:{folder}")


CASES = [("class", False), ("class", True), ("factory", False), ("factory", True)]


@pytest.mark.parametrize(("route", "is_imported"), sampled(CASES, every=3))
def test_a_state_that_easydel_saved_is_restored_and_trained_on(
    route: str, is_imported: bool, state: Any, old: store.ForeignRun, run: store.Run
) -> None:
    source: Any = old
    if is_imported:
        run.import_from(old)
        source = run
    mesh = SCENARIO.config(SCENARIO.dims).mesh

    back = restore_state(
        source,
        7,
        model=ROUTES[route],
        tx=SCENARIO.tx(),
        mesh=mesh,
        state_class=EasyDeLState,
    )

    assert (EasyDeLState, 7) == (type(back), back.step)
    assert digests(state.graphstate) == digests(back.graphstate)
    assert digests(state.opt_state) == digests(back.opt_state)
    assert 8 == back.apply_gradients(grads=back.graphstate).step
    model = restore_model(source, model=ROUTES[route], mesh=mesh, cast="bfloat16")
    assert {jnp.dtype("bfloat16")} == {
        x.dtype for x in jax.tree.leaves(model.graphstate)
    }


def test_a_module_and_its_optimizer_take_what_easydel_saved(
    old: store.ForeignRun, run: store.Run, state: Any
) -> None:
    run.import_from(old)
    model = ROUTES["factory"]()
    optimizer = nnx.Optimizer(model, SCENARIO.tx(), wrt=nnx.Param)

    storesvc_client.nnx.restore_into(run, model, optimizer)

    assert digests(state.graphstate) == digests(model.graphstate)
    moments = jax.tree.leaves(optimizer.opt_state)
    assert [*digests(state.opt_state).values()] == [*digests(moments).values()]
    assert 7 == optimizer.step.get_value()
