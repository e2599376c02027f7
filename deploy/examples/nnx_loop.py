"""Trains an NNX model, saves to a store, and resumes from it.

Kill it at any moment and run it again: it continues at the newest checkpoint, with the
batches that it had not trained on. On SIGTERM it saves the step and ends.

    python nnx_loop.py --store file:///tmp/ckpts
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import storesvc_client as store

parser = argparse.ArgumentParser(description="Train a small NNX model.")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--store", required=True, metavar="TARGET")
options = parser.parse_args()


class Mlp(nnx.Module):
    """A network with one hidden layer, and with a random stream."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(8, 64, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.dropout(nnx.tanh(self.hidden(x))))


@nnx.jit
def train_step(model: Mlp, optimizer: nnx.Optimizer, batch: np.ndarray) -> jax.Array:
    """Trains the model in place, and returns the loss of the step."""

    def loss_of(model: Mlp) -> jax.Array:
        return jnp.mean((model(batch) - batch.sum(axis=1, keepdims=True)) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


model = Mlp(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
data = np.random.default_rng(1)
with store.connect(options.store) as client:
    run = client.run("examples/nnx")
    every, keep = store.Steps(20) | store.Minutes(15), store.KeepLatest(3)
    with run.loop(every=every, keep=keep, create=True) as loop:
        trained, start = loop.restore_or((model, optimizer), data=data)
        for step in loop.steps(start, options.steps):
            loss = train_step(model, optimizer, data.normal(size=(32, 8)))
            loop.after(step, trained, metrics={"loss": loss}, items={"data": data})
print(loop.outcome)
