"""Small random models of transformers, taken to MaxText's tree and back.

``Decoder`` is the published architecture in flax.linen, with the names and the shapes
of MaxText's parameters; its logits equal the logits of transformers only if each
parameter is the right one. ``python -m tests.easydel.maxtext`` prints what the tests
assert.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import logging
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import linen as nn

import storesvc_client as store
from tests.easydel.families import (
    EXPERTS,
    TIED,
    TOLERANCE,
    WIDE,
    WORDS,
    Model,
    assert_same_files,
    read_logits,
)

MODELS: Final[Mapping[str, Model]] = {
    "Qwen2": Model(table="qwen2-maxtext", config="Qwen2Config"),
    "Qwen3": Model(table="qwen3-maxtext", config="Qwen3Config", sizes=WIDE),
    "Qwen3, tied": Model(
        table="qwen3-maxtext-tied", config="Qwen3Config", sizes={**WIDE, **TIED}
    ),
    "Qwen3-MoE": Model(
        table="qwen3_moe-maxtext",
        config="Qwen3MoeConfig",
        sizes={**WIDE, **EXPERTS, "num_experts": 4, "norm_topk_prob": True},
    ),
    "GPT-OSS": Model(
        table="gpt_oss-maxtext",
        config="GptOssConfig",
        sizes={
            **WIDE,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150_000.0},
        },
    ),
}


class Norm(nn.Module):
    """Divides by the root of the mean square."""

    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + self.epsilon) * scale


class Attention(nn.Module):
    """Causal attention of grouped heads, whose positions rotate halves of each head."""

    config: Any
    number: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, length = self.config, x.shape[1]
        kind, size = config.model_type, find_head_dim(config)
        counts = {
            "query": config.num_attention_heads,
            "key": config.num_key_value_heads,
            "value": config.num_key_value_heads,
        }
        has_biases = kind in ("qwen2", "gpt_oss")
        q, k, v = (
            nn.DenseGeneral((count, size), use_bias=has_biases, name=name)(x)
            for name, count in counts.items()
        )
        if not has_biases:
            q = Norm(config.rms_norm_eps, name="query_norm")(q)
            k = Norm(config.rms_norm_eps, name="key_norm")(k)
        steps = np.arange(0, size, 2) / size
        rates = config.rope_parameters["rope_theta"] ** -steps
        angles = jnp.asarray(np.arange(length)[:, None] * rates, jnp.float32)
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]

        def rotate(each: jax.Array) -> jax.Array:
            a, b = jnp.split(each, 2, axis=-1)
            return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

        groups = counts["query"] // counts["key"]
        k, v = (jnp.repeat(each, groups, axis=2) for each in (rotate(k), v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", rotate(q), k) / np.sqrt(size)
        seen = np.tri(length, dtype=bool)
        if kind == "gpt_oss" and self.number % 2 == 0:
            seen &= ~np.tri(length, k=-config.sliding_window, dtype=bool)
        scores = jnp.where(seen, scores, -jnp.inf)
        if kind == "gpt_oss":
            sinks = self.param("sinks", nn.initializers.normal(), counts["query"])
            sinks = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
            scores = jnp.concatenate([scores, sinks], axis=-1)
        weights = nn.softmax(scores, axis=-1)[..., :length]
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return nn.DenseGeneral(
            config.hidden_size, axis=(-2, -1), use_bias=kind == "gpt_oss", name="out"
        )(mixed)


class Mlp(nn.Module):
    """A gated block."""

    config: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        inner, outer = self.config.intermediate_size, self.config.hidden_size
        gate = nn.Dense(inner, use_bias=False, name="wi_0")(x)
        up = nn.Dense(inner, use_bias=False, name="wi_1")(x)
        return nn.Dense(outer, use_bias=False, name="wo")(nn.silu(gate) * up)


class Experts(nn.Module):
    """Gated blocks, of which a router chooses some for each token."""

    config: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, outer = self.config, self.config.hidden_size
        count, inner = find_expert_sizes(config)
        has_biases = config.model_type == "gpt_oss"
        best, chosen = jax.lax.top_k(
            nn.Dense(count, use_bias=has_biases, name="gate")(x),
            config.num_experts_per_tok,
        )
        shares = nn.softmax(best, axis=-1)[..., None] * jax.nn.one_hot(chosen, count)

        def multiply(name: str, each: jax.Array, *sizes: int) -> jax.Array:
            make = nn.initializers.normal()
            made = jnp.einsum(
                "bti,eio->bteo" if each.ndim == 3 else "btei,eio->bteo",
                each,
                self.param(name, make, (count, *sizes)),
            )
            if has_biases:
                made += self.param(f"{name}_bias", make, (count, sizes[-1]))
            return made

        gate = multiply("wi_0", x, outer, inner)
        up = multiply("wi_1", x, outer, inner)
        if has_biases:
            gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)
            hidden = gate * nn.sigmoid(1.702 * gate) * (up + 1)
        else:
            hidden = nn.silu(gate) * up
        made = multiply("wo", hidden, inner, outer)
        return jnp.einsum("bteo,bte->bto", made, shares.sum(-2))


class Layer(nn.Module):
    """A layer of the decoder."""

    config: Any
    number: int = 0

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        config = self.config
        attention, block, kind = {
            "gpt_oss": ("GptOssAttention", "GptOssMlp", Experts),
            "qwen3_moe": ("self_attention", "moe_block", Experts),
        }.get(config.model_type, ("self_attention", "mlp", Mlp))
        normed = Norm(config.rms_norm_eps, name="pre_self_attention_layer_norm")(x)
        x += Attention(config, self.number, name=attention)(normed)
        normed = Norm(config.rms_norm_eps, name="post_self_attention_layer_norm")(x)
        return x + kind(config, name=block)(normed), None


class Pair(nn.Module):
    """Two layers that differ."""

    config: Any

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        for number in range(2):
            x, _ = Layer(self.config, number, name=f"layers_{number}")(x, None)
        return x, None


class Decoder(nn.Module):
    """The layers, and the head if it is not the embedding."""

    config: Any
    is_scanned: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        if self.is_scanned:
            has_pairs = config.model_type == "gpt_oss"
            layers = nn.scan(
                Pair if has_pairs else Layer,
                variable_axes={"params": 1},
                split_rngs={"params": True},
                length=config.num_hidden_layers // (1 + has_pairs),
            )
            x, _ = layers(config, name="layers")(x, None)
        else:
            for number in range(config.num_hidden_layers):
                x, _ = Layer(config, number, name=f"layers_{number}")(x, None)
        x = Norm(config.rms_norm_eps, name="decoder_norm")(x)
        if config.tie_word_embeddings:
            return x
        return nn.Dense(config.vocab_size, use_bias=False, name="logits_dense")(x)


class Transformer(nn.Module):
    """The model."""

    config: Any
    is_scanned: bool

    @nn.compact
    def __call__(self, words: jax.Array) -> jax.Array:
        config = self.config
        embed = nn.Embed(config.vocab_size, config.hidden_size, name="token_embedder")
        x = Decoder(config, self.is_scanned, name="decoder")(embed(words))
        return embed.attend(x) if config.tie_word_embeddings else x


def find_head_dim(config: Any) -> int:
    """Returns the size of a head."""
    found: int = getattr(config, "head_dim", 0)
    return found or config.hidden_size // config.num_attention_heads


def find_expert_sizes(config: Any) -> tuple[int, int]:
    """Returns the number of experts, and their inner size."""
    if config.model_type == "gpt_oss":
        return config.num_local_experts, config.intermediate_size
    return config.num_experts, config.moe_intermediate_size


def load_as_maxtext(path: Path, like: Any) -> Any:
    """Returns the parameters of a checkpoint, with the arguments that MaxText gives to
    Orbax for its ``load_parameters_path``."""
    arguments = ocp.checkpoint_utils.construct_restore_args(like)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
    with ocp.Checkpointer(handler) as reader:
        found = reader.restore(
            path,
            item={"params": like},
            transforms={},
            restore_args={"params": arguments},
        )
    return found["params"]


def compare(model: Model, folder: Path, *, is_scanned: bool) -> float:
    """Takes a model to MaxText and back; returns the largest difference of the logits,
    as a part of the largest one."""
    other = model.make_other()
    other.save_pretrained(folder / "first")
    expected, config = read_logits(other), other.config
    words = f"{model.table}{'-scanned' * is_scanned}"
    files = store.open_foreign(f"safetensors:{folder}/first").open()
    mapped = files.map(f"{words}-head_dim={find_head_dim(config)}")

    own = Transformer(config, is_scanned)
    like = jax.eval_shape(own.init, jax.random.key(0), WORDS)
    params = mapped.restore(like={"params": like})["params"]
    logits = np.asarray(own.apply(params, WORDS))

    with ocp.CheckpointManager(folder / "maxtext") as manager:
        state = {"step": 0, "params": params, "opt_state": {"mu": params}}
        manager.save(0, args=ocp.args.Composite(items=ocp.args.PyTreeSave(state)))
    with store.connect("memory://") as client:
        run = client.run("prod/qwen")
        run.import_from(f"orbax:{folder}/maxtext/0/items", mapping=f"{words}-inverse")
        run.export("latest", f"safetensors:{folder}/back")
        assert_same_files(folder)

        name = f"{words}-head_dim={find_head_dim(config)}"
        run.export("latest", f"orbax:{folder}/again", mapping=name, item="items")
    (step,) = (folder / "again").iterdir()
    again = load_as_maxtext(step / "items", like)
    jax.tree.map(np.testing.assert_array_equal, params, again)
    return float(np.abs(expected - logits).max() / np.abs(expected).max())


def main() -> None:
    """Prints the outcome for each model."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    print(f"{'model':26} {'layers':8} difference seconds")
    for name, model in MODELS.items():
        for is_scanned in (False, True):
            start = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                difference = compare(model, Path(folder), is_scanned=is_scanned)
            print(
                f"{name:26} {'scanned' if is_scanned else 'apart':8} "
                f"{difference:10.1e} {time.monotonic() - start:7.1f}",
                flush=True,
            )
            assert difference <= TOLERANCE
    print("all as they should be")


if __name__ == "__main__":
    main()
