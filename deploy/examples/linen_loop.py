"""Trains a Linen model, saves to a store, and resumes from it.

Kill it at any moment and run it again: it continues at the newest checkpoint. On
SIGTERM it saves the step and ends.

    python linen_loop.py --store file:///tmp/ckpts
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import storesvc_client as store

parser = argparse.ArgumentParser(description="Train a small Linen model.")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--store", required=True, metavar="TARGET")
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


with store.connect(options.store) as client:
    run = client.run("examples/linen")
    keep = store.KeepLatest(3)  # of the checkpoints
    with run.loop(every=store.Steps(20), keep=keep, create=True) as loop:
        state, start = loop.restore_or(init_state)
        for step in loop.steps(start, options.steps):
            state, loss = train_step(state, batch_of(step))
            loop.after(step, state, metrics={"loss": loss})
print(loop.outcome)
