"""Trains a Linen model as `linen_loop.py` does, with Orbax instead of a store.

It is here to be compared: it saves every 20 steps in the background, keeps three
checkpoints, resumes at the newest one, and on SIGTERM saves the step and ends.

    python orbax_loop.py --directory /tmp/orbax
"""

import argparse
import signal
from functools import partial

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from flax.training.train_state import TrainState

parser = argparse.ArgumentParser(description="Train a small Linen model.")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--directory", required=True)
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


# manager.reached_preemption sees SIGTERM in jobs of jax.distributed only.
stops: list[object] = []
signal.signal(signal.SIGTERM, lambda *caught: stops.append(caught))
how = ocp.CheckpointManagerOptions(save_interval_steps=20, max_to_keep=3)
with ocp.CheckpointManager(options.directory, options=how) as manager:
    state, newest = init_state(), manager.latest_step()
    if newest is not None:
        state = manager.restore(newest, args=ocp.args.StandardRestore(state))
    for step in range(0 if newest is None else newest + 1, options.steps):
        state, loss = train_step(state, batch_of(step))
        is_last = bool(stops) or step == options.steps - 1
        if is_last or manager.should_save(step):
            save = ocp.args.StandardSave(state)
            about = {"loss": float(loss)}
            manager.save(step, args=save, custom_metadata=about, force=is_last)
        if stops:
            break
print(f"saved step {manager.latest_step()}")
