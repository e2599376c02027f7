"""An EasyDeLState through a store: saved on one mesh, rebuilt on another."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import storesvc_client as store
from storesvc_client.easydel import restore_state, save_state
from storesvc_client.trees.easydel import EasyDeLState
from storesvc_client.trees.flattening import named_leaves

RULES = [("(fc1|mu|nu).*kernel", P("a", "b")), ("", P())]


class Model(nnx.Module):
    """Layers, dropout with a stream of its own, and statistics."""

    def __init__(self, *, width: int = 8, rngs: nnx.Rngs) -> None:
        self.fc1 = nnx.Linear(4, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(12)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the output, of shape (batch, width)."""
        x = self.dropout(self.norm(self.fc1(x)))
        for layer in self.layers:
            x = layer(x)
        return x


def make_model() -> Model:
    return Model(rngs=nnx.Rngs(params=0, dropout=1))


TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
BATCH = jnp.linspace(-1, 1, 16 * 4).reshape(16, 4)


def advance(state: EasyDeLState) -> EasyDeLState:
    def loss(graphstate: Any) -> tuple[jax.Array, Any]:
        model = state.merge(graphstate)
        value = jnp.mean(model(BATCH) ** 2)
        return value, nnx.state(model, nnx.Not(nnx.Param))

    grads, graphother = jax.grad(loss, has_aux=True)(state.graphstate)
    return state.apply_gradients(grads=grads).replace(graphother=graphother)


@pytest.fixture(scope="module")
def state() -> EasyDeLState:
    """A state that was trained for two steps."""
    made = EasyDeLState.create(
        step=jnp.zeros((), jnp.int32), model=make_model(), tx=TX, init_opt_state=True
    )
    return advance(advance(made))


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))


def leaves(state: Any) -> dict[str, tuple[Any, bytes]]:
    """The dtype and the bytes of each leaf, by key."""

    def raw(value: Any) -> bytes:
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        return np.asarray(value).tobytes()

    named, _ = named_leaves(state)
    return {leaf.key: (leaf.value.dtype, raw(leaf.value)) for leaf in named}


def test_a_state_is_rebuilt_bit_by_bit_and_goes_on_alike(
    run: store.Run, state: EasyDeLState
) -> None:
    saved = save_state(run, state, metrics={"loss": 1.5}).result()
    assert (2, {"loss": 1.5}) == (saved.step, saved.metrics)

    back = restore_state(run, model=make_model, tx=TX)

    assert leaves(state) == leaves(back)
    assert leaves(advance(state)) == leaves(advance(back))
    assert len(back.model.layers) == 12


def test_a_state_is_rebuilt_on_a_mesh(
    run: store.Run, state: EasyDeLState, mesh: Mesh
) -> None:
    save_state(run, state).result()

    back = restore_state(run, 2, model=make_model, tx=TX, mesh=mesh, rules=RULES)

    assert leaves(state) == leaves(back)
    placed: Any = back
    kernel = placed.graphstate["fc1"]["kernel"].get_value()
    assert (mesh, P("a", "b")) == (kernel.sharding.mesh, kernel.sharding.spec)
    moment = placed.opt_state[1][0].mu["fc1"]["kernel"].get_value()
    assert P("a", "b") == moment.sharding.spec


def test_rng_that_a_checkpoint_lacks_is_made_anew_and_nothing_else(
    run: store.Run, state: EasyDeLState
) -> None:
    without, _ = nnx.split_state(state.graphother, nnx.Not(nnx.RngState), ...)
    save_state(run, state.replace(graphother=without)).result()

    back = restore_state(run, model=make_model, tx=TX)

    expected, actual = leaves(state), leaves(back)
    assert set(expected) == set(actual)
    fresh = {key for key in expected if "rngs" in key}
    assert fresh
    assert {k: v for k, v in expected.items() if k not in fresh} == {
        k: v for k, v in actual.items() if k not in fresh
    }
    assert {expected[k][0] for k in fresh} == {actual[k][0] for k in fresh}
    advance(back)


def test_a_step_that_was_a_python_number_comes_back_as_one(run: store.Run) -> None:
    made = EasyDeLState.create(step=7, model=make_model(), tx=TX, init_opt_state=True)
    save_state(run, made).result()

    back = restore_state(run, model=make_model, tx=TX)

    assert 7 == back.step


def test_another_model_or_optimizer_is_refused_with_its_leaves(
    run: store.Run, state: EasyDeLState
) -> None:
    save_state(run, state).result()

    with pytest.raises(store.MismatchError, match=r"fc1/kernel.*\(4, 16\).*\(4, 8\)"):
        restore_state(
            run, model=lambda: Model(width=16, rngs=nnx.Rngs(0, dropout=1)), tx=TX
        )
    with pytest.raises(store.MismatchError, match="opt_state"):
        restore_state(run, model=make_model, tx=optax.sgd(1e-2, momentum=0.9))


def test_an_unknown_step_is_not_found(run: store.Run, state: EasyDeLState) -> None:
    save_state(run, state).result()

    with pytest.raises(store.NotFoundError, match="nearest"):
        restore_state(run, 5, model=make_model, tx=TX)
