"""Trains a Linen model without checkpoints, to be compared with `linen_loop.py`."""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

parser = argparse.ArgumentParser(description="Train a small Linen model.")
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

model = nn.Sequential([nn.Dense(64), nn.tanh, nn.Dense(1)])


@jax.jit
def init_state() -> TrainState:
    """Returns the state before the first step."""
    params = model.init(jax.random.key(0), jnp.zeros((1, 8)))
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))


def batch_of(step: int) -> jax.Array:
    """Returns the batch of a step; the same one after a resume."""
    return jax.random.normal(jax.random.fold_in(jax.random.key(1), step), (32, 8))


@partial(jax.jit, donate_argnums=0)
def train_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
    """Returns the state after a step, and its loss."""

    def loss_of(params: dict) -> jax.Array:
        found = state.apply_fn(params, batch)
        return jnp.mean((found - batch.sum(axis=1, keepdims=True)) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


state = init_state()
for step in range(options.steps):
    state, loss = train_step(state, batch_of(step))
