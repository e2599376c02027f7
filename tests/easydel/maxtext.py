"""Small random models of transformers, taken to MaxText's tree and back.

``Decoder`` is the published architecture in flax.linen, with the names and the shapes
of MaxText's parameters; its logits equal the logits of transformers only if each
parameter is the right one. ``python -m tests.easydel.maxtext`` prints what the tests
assert.

What is stated of DeepSeek-V3 is in these files of MaxText (commit e591f30):
``layers/attention_mla.py``, ``layers/embeddings.py`` (``YarnRotaryEmbedding``),
``layers/moe.py`` (``GateLogit``, ``RoutedMoE``, ``RoutedAndSharedMoE``),
``models/deepseek.py`` and ``layers/decoders.py``.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import logging
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import linen as nn
from numpy.typing import NDArray

import storesvc_client as store
from tests.easydel.families import (
    EXPERTS,
    LATENT,
    TIED,
    TOLERANCE,
    WIDE,
    WORDS,
    Model,
    read_logits,
)
from tests.support.safetensors_files import load_file

ROPES: Final = {
    kind: {"rope_type": "default", "rope_theta": theta}
    for kind, theta in [("sliding_attention", 10_000.0), ("full_attention", 1e6)]
}
YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
"""Settings of DeepSeek-V3 for the rotary embedding of long contexts."""

ROUTED: Final = {
    **LATENT,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "v_head_dim": 12,
}
MODELS: Final[Mapping[str, Model]] = {
    "Llama 3": Model(table="llama3-maxtext", config="LlamaConfig"),
    "Llama 3.1": Model(table="llama3.1-maxtext", config="LlamaConfig", sizes=WIDE),
    "Llama 3.1, tied": Model(
        table="llama3.1-maxtext-tied", config="LlamaConfig", sizes=TIED
    ),
    "Mistral": Model(
        table="mistral-maxtext", config="MistralConfig", sizes={"head_dim": 64}
    ),
    "Mixtral": Model(
        table="mixtral-maxtext", config="MixtralConfig", sizes={"num_local_experts": 4}
    ),
    "Gemma": Model(
        table="gemma-maxtext",
        config="GemmaConfig",
        sizes={**WIDE, **TIED, "hidden_size": 36},
    ),
    "Gemma 2": Model(
        table="gemma2-maxtext",
        config="Gemma2Config",
        sizes={
            **TIED,
            "head_dim": 24,
            "query_pre_attn_scalar": 24,
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "attn_implementation": "eager",
        },
    ),
    "Gemma 3": Model(
        table="gemma3_text-maxtext",
        config="Gemma3TextConfig",
        sizes={
            **WIDE,
            **TIED,
            "hidden_size": 36,
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 12,
            "sliding_window": 5,
            "rope_parameters": ROPES,
        },
    ),
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
    "DeepSeek-V3": Model(
        table="deepseek_v3-maxtext",
        config="DeepseekV3Config",
        sizes={
            **ROUTED,
            "first_k_dense_replace": 3,
            "num_hidden_layers": 5,
            "max_position_embeddings": 163_840,
            "rope_parameters": YARN,
        },
    ),
    "DeepSeek-V3, whole queries": Model(  # like Moonlight
        table="deepseek_v3-maxtext",
        config="DeepseekV3Config",
        sizes={
            **ROUTED,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}


ROUNDED: Final = {
    *("Llama 3", "Llama 3.1, tied", "Mixtral"),  # heads of 8
    *("Gemma", "Gemma 2", "Gemma 3"),  # embeddings
}
"""Models that are multiplied by what is no power of two."""

FOLDED: Final = ("llama", "mistral", "mixtral", "gemma", "gemma2")
"""Types of models whose queries are divided by the root of the size of a head."""

BLOCKS: Final = {"gpt_oss": 2, "gemma3_text": 6}
"""Layers of a block, by the types of models that are scanned in blocks."""


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
        is_local = {
            "gpt_oss": self.number % 2 == 0,
            "gemma2": self.number % 2 == 0,
            "gemma3_text": self.number % 6 < 5,
        }.get(kind, False)
        q, k, v = (
            nn.DenseGeneral((count, size), use_bias=has_biases, name=name)(x)
            for name, count in counts.items()
        )
        if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
            q = Norm(config.rms_norm_eps, name="query_norm")(q)
            k = Norm(config.rms_norm_eps, name="key_norm")(k)
        steps = np.arange(0, size, 2) / size
        rope = config.rope_parameters
        if kind == "gemma3_text":
            rope = rope["sliding_attention" if is_local else "full_attention"]
        rates = rope["rope_theta"] ** -steps
        angles = jnp.asarray(np.arange(length)[:, None] * rates, jnp.float32)
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]

        def rotate(each: jax.Array) -> jax.Array:
            if config.has_pairs:
                a, b = each[..., ::2], each[..., 1::2]
                turned = [a * cos - b * sin, b * cos + a * sin]
                return jnp.stack(turned, axis=-1).reshape(each.shape)
            a, b = jnp.split(each, 2, axis=-1)
            return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

        groups = counts["query"] // counts["key"]
        k, v = (jnp.repeat(each, groups, axis=2) for each in (rotate(k), v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", rotate(q), k)
        if kind not in FOLDED:
            scores /= np.sqrt(size)
        if kind == "gemma2":
            scores = 50 * jnp.tanh(scores / 50)
        seen = np.tri(length, dtype=bool)
        if is_local:
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


class LatentAttention(nn.Module):
    """Causal attention whose keys and values are made of a short vector.

    The last dimensions of a head, in pairs, have positions; in keys, all heads share
    them. The result of a rotation is in halves, as MaxText leaves it.
    """

    config: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, length = self.config, x.shape[1]
        plain, turned = config.qk_nope_head_dim, config.qk_rope_head_dim
        rates, growth = find_rates(config)
        angles = jnp.asarray(np.arange(length)[:, None] * rates, jnp.float32)
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]

        def rotate(each: jax.Array) -> jax.Array:
            a, b = each[..., ::2], each[..., 1::2]
            return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

        def project(name: str, each: jax.Array, *sizes: int) -> jax.Array:
            return nn.DenseGeneral(sizes, use_bias=False, name=name)(each)

        def norm(name: str, each: jax.Array) -> jax.Array:
            return Norm(config.rms_norm_eps, name=name)(each)

        heads = config.num_attention_heads
        if config.q_lora_rank is None:
            q = project("query", x, heads, plain + turned)
        else:
            short = norm("q_norm", project("wq_a", x, config.q_lora_rank))
            q = project("wq_b", short, heads, plain + turned)
        q = jnp.concatenate([q[..., :plain], rotate(q[..., plain:])], axis=-1)
        q *= (plain + turned) ** -0.5 * growth**2
        rank = config.kv_lora_rank
        both = project("wkv_a", x, rank + turned)
        made = project(
            "wkv_b", norm("kv_norm", both[..., :rank]), heads, plain + config.v_head_dim
        )
        shared = jnp.repeat(rotate(both[..., None, rank:]), heads, axis=2)
        k = jnp.concatenate([made[..., :plain], shared], axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        scores = jnp.where(np.tri(length, dtype=bool), scores, -jnp.inf)
        weights = nn.softmax(scores, axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, made[..., plain:])
        return nn.DenseGeneral(
            config.hidden_size, axis=(-2, -1), use_bias=False, name="out"
        )(mixed)


class Mlp(nn.Module):
    """A gated block."""

    config: Any
    shared: int = 0
    """Number of shared experts that it is; 0: it is none."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        inner, outer = self.config.intermediate_size, self.config.hidden_size
        if self.shared:
            inner = self.shared * self.config.moe_intermediate_size
        gate = nn.Dense(inner, use_bias=False, name="wi_0")(x)
        up = nn.Dense(inner, use_bias=False, name="wi_1")(x)
        is_gemma = self.config.model_type.startswith("gemma")
        gate = nn.gelu(gate) if is_gemma else nn.silu(gate)
        return nn.Dense(outer, use_bias=False, name="wo")(gate * up)


class Gate(nn.Module):
    """The share of each expert in a token of DeepSeek-V3. A bias takes part in the
    choice, of some groups and of experts in them, but in no share."""

    config: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, count = self.config, self.config.n_routed_experts
        make = nn.initializers.normal()
        kernel = self.param("kernel", make, (config.hidden_size, count))
        scores = nn.sigmoid(x @ kernel)
        wanted = scores + self.param("bias", make, (count,))
        groups = wanted.reshape(*x.shape[:2], config.n_group, -1)
        sums = jax.lax.top_k(groups, 2)[0].sum(-1)
        best = jax.lax.top_k(sums, config.topk_group)[1]
        is_open = jax.nn.one_hot(best, config.n_group).sum(-2)
        is_open = jnp.repeat(is_open, count // config.n_group, axis=-1)
        wanted = jnp.where(is_open > 0, wanted, -jnp.inf)
        chosen = jax.lax.top_k(wanted, config.num_experts_per_tok)[1]
        shares: jax.Array = scores * jax.nn.one_hot(chosen, count).sum(-2)
        shares *= config.routed_scaling_factor / (shares.sum(-1, keepdims=True) + 1e-20)
        return shares


class Experts(nn.Module):
    """Gated blocks, of which a router chooses some for each token."""

    config: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, outer = self.config, self.config.hidden_size
        count, inner = find_expert_sizes(config)
        has_biases = config.model_type == "gpt_oss"
        if config.model_type == "deepseek_v3":
            shares = Gate(config, name="gate")(x)
        else:
            best, chosen = jax.lax.top_k(
                nn.Dense(count, use_bias=has_biases, name="gate")(x),
                config.num_experts_per_tok,
            )
            weights = nn.softmax(best, axis=-1)[..., None]
            shares = (weights * jax.nn.one_hot(chosen, count)).sum(-2)

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
        return jnp.einsum("bteo,bte->bto", made, shares)


class RoutedAndSharedExperts(nn.Module):
    """Experts for some tokens, and those for all."""

    config: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        shared = Mlp(config, config.n_shared_experts, name="shared_experts")
        return Experts(config, name="MoeBlock_0")(x) + shared(x)


class Layer(nn.Module):
    """A layer of the decoder, which is two of Gemma 2."""

    config: Any
    number: int = 0

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        if self.config.model_type != "gemma2":
            return self.apply_one(x, self.number), None
        for number, suffix in enumerate(("_local", "_global")):
            x = self.apply_one(x, number, suffix)
        return x, None

    def apply_one(self, x: jax.Array, number: int, suffix: str = "") -> jax.Array:
        """Returns what a layer makes."""
        config, kind = self.config, self.config.model_type
        block_class: type[nn.Module]
        attention, block, block_class = {
            "gpt_oss": ("GptOssAttention", "GptOssMlp", Experts),
            "mixtral": ("self_attention", "MoeBlock_0", Experts),
            "qwen3_moe": ("self_attention", "moe_block", Experts),
        }.get(kind, ("self_attention", "mlp", Mlp))
        if kind == "deepseek_v3" and number >= config.first_k_dense_replace:
            block, block_class = "DeepSeekMoeBlock_0", RoutedAndSharedExperts
        first, second = (
            "pre_self_attention_layer_norm",
            "post_self_attention_layer_norm",
        )
        if kind.startswith("gemma"):
            first, second = "pre_self_attention_norm", "pre_ffw_norm"

        def norm(name: str, each: jax.Array) -> jax.Array:
            return Norm(config.rms_norm_eps, name=f"{name}{suffix}")(each)

        has_four = kind in ("gemma2", "gemma3_text")
        made = norm(first, x)
        if kind == "deepseek_v3":
            made = LatentAttention(config, name=attention)(made)
        else:
            made = Attention(config, number, name=attention + suffix)(made)
        x += norm("post_self_attention_norm", made) if has_four else made
        made = block_class(config, name=block + suffix)(norm(second, x))
        return x + (norm("post_ffw_norm", made) if has_four else made)


class Block(nn.Module):
    """Layers that differ."""

    config: Any
    number: int = 0

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        for number in range(BLOCKS[self.config.model_type]):
            x, _ = Layer(self.config, number, name=f"layers_{number}")(x, None)
        return x, None


class Decoder(nn.Module):
    """The layers, and the head if it is not the embedding."""

    config: Any
    is_scanned: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, kind = self.config, self.config.model_type
        count = config.num_hidden_layers // (2 if kind == "gemma2" else 1)
        groups = {"layers": range(count)}
        if kind == "deepseek_v3":
            dense = config.first_k_dense_replace
            groups = {"dense_layers": range(dense), "moe_layers": range(dense, count)}
        for name, numbers in groups.items():
            if self.is_scanned:
                layers = nn.scan(
                    Block if kind in BLOCKS else Layer,
                    variable_axes={"params": 1},
                    split_rngs={"params": True},
                    length=len(numbers) // BLOCKS.get(kind, 1),
                )
                x, _ = layers(config, numbers[0], name=name)(x, None)
                continue
            for at, number in enumerate(numbers):
                x, _ = Layer(config, number, name=f"{name}_{at}")(x, None)
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
        if not config.tie_word_embeddings:
            return x
        logits = embed.attend(x)
        if config.model_type.startswith("gemma"):
            logits /= np.sqrt(
                config.hidden_size
            )  # MaxText's normalize_embedding_logits
        if config.model_type == "gemma2":
            logits = 30 * jnp.tanh(logits / 30)
        return logits


def find_head_dim(config: Any) -> int:
    """Returns the size of a head."""
    found: int = getattr(config, "head_dim", 0)
    return found or config.hidden_size // config.num_attention_heads


def find_rates(config: Any) -> tuple[NDArray[np.float64], float]:
    """Returns how fast each pair of dimensions turns, and by what YaRN multiplies
    queries and keys."""
    rope, size = config.rope_parameters, config.qk_rope_head_dim
    pairs = np.arange(size // 2)
    rates = rope["rope_theta"] ** (-2 * pairs / size)
    if rope["rope_type"] != "yarn":
        return rates, 1.0

    def find_pair(turns: float) -> float:
        """Returns the pair that turns so many times in the context of the training."""
        wave = rope["original_max_position_embeddings"] / (turns * 2 * math.pi)
        found: float = size * math.log(wave) / (2 * math.log(rope["rope_theta"]))
        return found

    first = max(math.floor(find_pair(rope["beta_fast"])), 0)
    last = min(math.ceil(find_pair(rope["beta_slow"])), size - 1)
    slow = np.clip((pairs - first) / (last - first), 0, 1)
    growth = 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1
    return rates * (slow / rope["factor"] + 1 - slow), growth


def find_sizes(config: Any) -> tuple[str, str]:
    """Returns the sizes that a table needs, as a part of its name, on the way there and
    on the way back."""
    if config.model_type == "deepseek_v3":
        dense = f"-first_k_dense_replace={config.first_k_dense_replace}"
        return f"-num_attention_heads={config.num_attention_heads}{dense}", dense
    return f"-head_dim={find_head_dim(config)}", ""


def find_expert_sizes(config: Any) -> tuple[int, int]:
    """Returns the number of experts, and their inner size."""
    if config.model_type in ("gpt_oss", "mixtral"):
        return config.num_local_experts, config.intermediate_size
    if config.model_type == "deepseek_v3":
        return config.n_routed_experts, config.moe_intermediate_size
    return config.num_experts, config.moe_intermediate_size


def measure_way_back(folder: Path) -> tuple[int, float]:
    """Returns how far an exported file is from the first one: the kernels in units in
    the last place, and the norms."""
    first, back = (
        load_file(folder / name / "model.safetensors") for name in ("first", "back")
    )
    assert first.keys() == back.keys()
    units, norms = 0, 0.0
    for key, array in first.items():
        apart = array.view(np.int32).astype(np.int64) - back[key].view(np.int32)
        if "norm" in key:
            norms = max(norms, float(np.abs(array - back[key]).max()))
        else:
            units = max(units, int(np.abs(apart).max()))
    return units, norms


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


def compare(
    model: Model, folder: Path, *, is_scanned: bool
) -> tuple[float, int, float]:
    """Takes a model to MaxText and back; returns the largest difference of the logits,
    as a part of the largest one, and what ``measure_way_back`` returns."""
    other = model.make_other()
    other.save_pretrained(folder / "first")
    expected, config = read_logits(other), other.config
    config.has_pairs = "llama3.1" in model.table
    words = f"{model.table}{'-scanned' * is_scanned}"
    there, back = (f"{words}{sizes}" for sizes in find_sizes(config))
    files = store.open_foreign(f"safetensors:{folder}/first").open()
    mapped = files.map(there)

    own = Transformer(config, is_scanned)
    like = jax.eval_shape(own.init, jax.random.key(0), WORDS)
    params = mapped.restore(like={"params": like})["params"]
    logits = np.asarray(own.apply(params, WORDS))

    with ocp.CheckpointManager(folder / "maxtext") as manager:
        state = {"step": 0, "params": params, "opt_state": {"mu": params}}
        manager.save(0, args=ocp.args.Composite(items=ocp.args.PyTreeSave(state)))
    with store.connect("memory://") as client:
        run = client.run("prod/qwen")
        run.import_from(f"orbax:{folder}/maxtext/0/items", mapping=f"{back}-inverse")
        run.export("latest", f"safetensors:{folder}/back")
        run.export("latest", f"orbax:{folder}/again", mapping=there, item="items")
    (step,) = (folder / "again").iterdir()
    again = load_as_maxtext(step / "items", like)
    units, norms = measure_way_back(folder)
    rounds = 2**-22 if units else 0
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rounds), params, again)
    difference = np.abs(expected - logits).max() / np.abs(expected).max()
    return float(difference), units, norms


def main() -> None:
    """Prints the outcome for each model, or for those that are named."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    print(f"{'model':26} {'layers':8} difference units norms    seconds")
    for name in sys.argv[1:] or MODELS:
        for is_scanned in (False, True):
            start = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                found = compare(MODELS[name], Path(folder), is_scanned=is_scanned)
            difference, units, norms = found
            print(
                f"{name:26} {'scanned' if is_scanned else 'apart':8} "
                f"{difference:10.1e} {units:5} {norms:8.1e} "
                f"{time.monotonic() - start:7.1f}",
                flush=True,
            )
            assert difference <= TOLERANCE
            assert units == (name in ROUNDED)
            assert norms <= (2**-24 if "Gemma" in name else 0)  # half a unit of 1
    print("all as they should be")


if __name__ == "__main__":
    main()
