"""Trains an NNX model without checkpoints, to be compared with `nnx_loop.py`."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

parser = argparse.ArgumentParser(description="Train a small NNX model.")
parser.add_argument("--steps", type=int, default=200)
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
for _ in range(options.steps):
    loss = train_step(model, optimizer, data.normal(size=(32, 8)))
