"""Defines a small decoder-only language model over bytes, and its placement."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec

__all__ = ["RULES", "WINDOW", "ByteModel", "loss_of", "make_model", "make_optimizer"]

WINDOW = 64
"""Length of the context in bytes."""

_WIDTH = 64
_HEADS = 4
_LAYERS = 2
_DROPOUT = 0.1

_P = PartitionSpec
RULES: list[tuple[str, PartitionSpec]] = [
    ("embedding", _P("tp", "fsdp")),
    ("attention/(query|key|value)/kernel", _P("fsdp", "tp")),
    ("attention/out/kernel", _P("tp", None, "fsdp")),
    ("up/kernel", _P("fsdp", "tp")),
    ("down/kernel", _P("tp", "fsdp")),
    (".*", _P()),
]
"""Pairs of a regular expression, searched in the leaf key, and a placement. The moments
of the optimizer contain the names of their parameters, and so match the same rules."""


class Block(nnx.Module):
    """Attention, then a wide layer, each added to its input."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(_WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            _HEADS, _WIDTH, dropout_rate=_DROPOUT, decode=False, rngs=rngs
        )
        self.norm = nnx.LayerNorm(_WIDTH, rngs=rngs)
        self.up = nnx.Linear(_WIDTH, 4 * _WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * _WIDTH, _WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(_DROPOUT, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns the layer's output, of the shape of ``x``."""
        x = x + self.attention(self.attention_norm(x), mask=mask, deterministic=False)
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm(x)))))


class ByteModel(nnx.Module):
    """A transformer with tied input and output embeddings."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        small = nnx.initializers.normal(0.1)
        self.embed = nnx.Embed(256, _WIDTH, embedding_init=small, rngs=rngs)
        self.positions = nnx.Param(small(rngs.params(), (WINDOW, _WIDTH)))
        self.layers = nnx.List([Block(rngs=rngs) for _ in range(_LAYERS)])
        self.norm = nnx.LayerNorm(_WIDTH, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        """Returns the logits of the byte after each prefix: (batch, window, 256)."""
        x = self.embed(text) + self.positions[...]
        mask = nnx.make_causal_mask(text)
        for layer in self.layers:
            x = layer(x, mask)
        return self.embed.attend(self.norm(x))


def make_model() -> ByteModel:
    """Returns a new model with fixed seeds; dropout has its own RNG stream."""
    return ByteModel(rngs=nnx.Rngs(params=0, dropout=1))


def make_optimizer() -> optax.GradientTransformation:
    """Returns AdamW with warm-up and cosine decay."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0, peak_value=1e-2, warmup_steps=10, decay_steps=80, end_value=1e-3
    )
    return optax.adamw(schedule, weight_decay=0.01)


def loss_of(model: ByteModel, batch: jax.Array) -> jax.Array:
    """Returns the mean cross entropy of the batch, in nats a byte."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(batch[:, :-1]), batch[:, 1:]
    )
    return jnp.mean(losses)
