"""States of other libraries are saved and restored in one line each."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from flax.training import dynamic_scale
from flax.training.train_state import TrainState

import storesvc_client as store

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
TX = optax.adamw(optax.cosine_decay_schedule(0.1, 100))


class Trained(NamedTuple):
    """A state, and a function that trains it for a step."""

    state: Any
    step: Callable[[Any], tuple[Any, Any]]
    """Returns the next state and the loss."""


def train_state() -> Trained:
    """A ``TrainState`` of Flax, with the scale of its losses in another field."""

    class State(TrainState):
        scale: dynamic_scale.DynamicScale
        statistics: Any

    model = linen.Sequential([linen.Dense(8), linen.relu, linen.Dense(1)])
    state_class: Any = State
    state = state_class.create(
        apply_fn=model.apply,
        params=model.init(jax.random.key(0), X),
        tx=TX,
        scale=dynamic_scale.DynamicScale(scale=2.0**10),
        statistics={"mean": jnp.zeros(4), "count": 0},
    )

    def step(state: Any) -> tuple[Any, Any]:
        def loss(params: Any) -> Any:
            return jnp.mean((state.apply_fn(params, X) - 1) ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        statistics = {
            "mean": state.statistics["mean"] + X.mean(axis=0),
            "count": state.statistics["count"] + 1,
        }
        return state.apply_gradients(grads=grads, statistics=statistics), value

    return Trained(state, step)


def equinox_module() -> Trained:
    """A module of equinox with its optimizer: static fields are no leaves."""
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(4, 1, 8, 2, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_inexact_array)

    def step(state: Any) -> tuple[Any, Any]:
        arrays, opt_state = state

        def loss(arrays: Any) -> Any:
            return jnp.mean((jax.vmap(eqx.combine(arrays, static))(X) - 1) ** 2)

        value, grads = jax.value_and_grad(loss)(arrays)
        updates, opt_state = TX.update(grads, opt_state, arrays)
        return (optax.apply_updates(arrays, updates), opt_state), value

    return Trained((arrays, TX.init(arrays)), step)


def haiku_params() -> Trained:
    """Parameters and state of haiku: dicts whose keys contain slashes."""
    hk = pytest.importorskip("haiku")

    def forward(x: Any) -> Any:
        x = hk.BatchNorm(True, True, 0.9)(hk.Linear(8)(x), is_training=True)
        return hk.nets.MLP([8, 1])(x)

    model = hk.transform_with_state(forward)
    params, statistics = model.init(jax.random.key(0), X)

    def step(state: Any) -> tuple[Any, Any]:
        params, statistics, opt_state = state

        def loss(params: Any) -> Any:
            y, after = model.apply(params, statistics, None, X)
            return jnp.mean((y - 1) ** 2), after

        (value, after), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = TX.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), after, opt_state), value

    return Trained((params, statistics, TX.init(params)), step)


def averaged() -> Trained:
    """Parameters with their exponential moving average, of optax."""
    ema = optax.ema(0.9)
    params = {"w": jnp.ones((4, 1)), "b": jnp.zeros(1)}

    def step(state: Any) -> tuple[Any, Any]:
        def loss(params: Any) -> Any:
            return jnp.mean((X @ params["w"] + params["b"] - 1) ** 2)

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt = TX.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        average, averages = ema.update(params, state["averages"])
        return {
            "params": params,
            "opt": opt,
            "averages": averages,
            "ema": average,
        }, value

    state = {
        "params": params,
        "opt": TX.init(params),
        "averages": ema.init(params),
        "ema": params,
    }
    return Trained(state, step)


STATES = [averaged, train_state, equinox_module, haiku_params]


@pytest.mark.slow
@pytest.mark.parametrize("make", STATES, ids=lambda make: make.__name__)
def test_a_state_is_saved_and_restored_in_one_line(
    run: store.Run, make: Callable[[], Trained]
) -> None:
    state, step = make()
    for _ in range(3):
        state, _ = step(state)
    expected = []

    run.save(3, state).result()
    saved = state
    for _ in range(3):
        state, loss = step(state)
        expected.append(float(loss))

    fresh, step = make()
    state = run.restore(like=fresh)

    structures: list[Any] = [jax.tree.structure(fresh), jax.tree.structure(state)]
    assert structures[0] == structures[1]
    for before, after in zip(
        jax.tree.leaves(saved), jax.tree.leaves(state), strict=True
    ):
        assert type(before) is type(after)
        assert np.asarray(before).tobytes() == np.asarray(after).tobytes()
    found = []
    for _ in range(3):
        state, loss = step(state)
        found.append(float(loss))
    assert expected == found


@pytest.mark.slow
def test_the_keys_of_haiku_keep_their_slashes(run: store.Run) -> None:
    params = haiku_params().state[0]
    run.save(1, params).result()

    assert params.keys() == run.restore().keys()
    assert {"linear", "batch_norm", "mlp/~/linear_0"} < run.restore().keys()


@pytest.mark.slow
def test_an_equinox_module_is_saved_by_its_arrays(run: store.Run) -> None:
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(4, 1, 8, 2, key=jax.random.key(0))
    with pytest.raises(store.UnsupportedLeafError, match="activation"):
        run.save(1, model)
    run.save(1, eqx.filter(model, eqx.is_array)).result()
    abstract = eqx.filter_eval_shape(
        lambda: eqx.nn.MLP(4, 1, 8, 2, key=jax.random.key(1))
    )
    arrays, static = eqx.partition(abstract, lambda x: hasattr(x, "shape"))

    found = eqx.combine(run.restore(like=arrays), static)

    assert bool(eqx.tree_equal(model, found))
    assert np.array_equal(model(X[0]), found(X[0]))


def test_the_average_alone_is_restored_for_inference(run: store.Run) -> None:
    state, step = averaged()
    for _ in range(3):
        state, _ = step(state)
    run.save(3, state).result()

    found = run.restore(select="ema/**")["ema"]

    assert found.keys() == state["ema"].keys()
    assert np.array_equal(state["ema"]["w"], found["w"])
    assert not np.array_equal(state["params"]["w"], found["w"])
