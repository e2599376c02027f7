"""Small random models of transformers, taken to EasyDeL and back by the tables.

``python -m tests.easydel.families`` prints what the tests assert, a line a model.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import inspect
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import easydel as ed
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx
from flax.traverse_util import flatten_dict
from numpy.typing import NDArray

import storesvc_client as store
from storesvc_client.easydel import save_model
from tests.support.safetensors_files import load_file

SIZES: Final = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
EXPERTS: Final = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: Final = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
WIDE: Final = {"head_dim": 16}
TIED: Final = {"tie_word_embeddings": True}
WORDS: Final = np.random.default_rng(7).integers(3, 96, (2, 12))

TOLERANCE: Final = 2e-5
"""Maximum difference of logits, as a part of the largest one: both compute in float32,
in another order."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model, and the table that names its parameters."""

    table: str
    config: str
    """Name of the config class; that of the model begins in the same way."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    scans: bool = True
    """False if its layers differ."""
    computes: bool = True
    """False if EasyDeL 0.3.0 makes other logits of the same parameters."""

    @property
    def model_class(self) -> str:
        """Name of the class in both libraries."""
        stem = self.config.removesuffix("Config").removesuffix("Text")
        return f"{stem}ForCausalLM"

    def make_other(self) -> Any:
        """Returns a random model of transformers."""
        torch.manual_seed(3)
        config = getattr(transformers, self.config)(**{**SIZES, **self.sizes})
        made = getattr(transformers, self.model_class)(config).float().eval()
        with torch.no_grad():
            biases = [
                each for key, each in made.named_buffers() if key.endswith("bias")
            ]
            for tensor in (*made.parameters(), *biases):  # norms, too, have numbers
                tensor.add_(torch.randn_like(tensor), alpha=0.1)
        return made

    def make_own(self, settings: Mapping[str, Any]) -> Any:
        """Returns a model of EasyDeL with other numbers, and with the settings of the
        one of transformers: the defaults of the two differ."""
        config_class = getattr(ed, self.config)
        known = inspect.signature(config_class.__init__).parameters.keys()
        shared = {key: settings[key] for key in known & settings.keys() - {"dtype"}}
        config = config_class(**{**shared, **SIZES, **self.sizes})
        config.add_basic_configurations(
            sharding_axis_dims=(1, 1, 1, 1, 1),
            attn_mechanism=ed.AttentionMechanisms.VANILLA,
            attn_dtype=jnp.float32,
            attn_softmax_dtype=jnp.float32,
            moe_method="dense_moe",
        )
        made = getattr(ed, self.model_class)(
            config=config,
            dtype=jnp.float32,
            param_dtype=jnp.float32,
            precision=None,
            rngs=nnx.Rngs(0),
        )
        with patch.object(jnp, "bfloat16", jnp.float32):
            _ = made.model.frequencies  # are cached; EasyDeL rounds them
        return made


MODELS: Final[Mapping[str, Model]] = {
    "Llama": Model(table="llama", config="LlamaConfig"),
    "Llama, biases": Model(
        table="llama",
        config="LlamaConfig",
        sizes={"attention_bias": True, "mlp_bias": True},
    ),
    "Llama, tied": Model(table="llama-tied", config="LlamaConfig", sizes=TIED),
    "Mistral": Model(table="mistral", config="MistralConfig", sizes=WIDE),
    "Qwen2": Model(table="qwen2", config="Qwen2Config"),
    "Qwen2, tied": Model(table="qwen2-tied", config="Qwen2Config", sizes=TIED),
    "Qwen3": Model(table="qwen3", config="Qwen3Config", sizes=WIDE),
    "Qwen3-MoE": Model(
        table="qwen3_moe",
        config="Qwen3MoeConfig",
        sizes={**WIDE, **EXPERTS, "num_experts": 4, "norm_topk_prob": True},
    ),
    "Mixtral": Model(
        table="mixtral", config="MixtralConfig", sizes={"num_local_experts": 4}
    ),
    "Gemma 2": Model(table="gemma2", config="Gemma2Config", sizes={**WIDE, **TIED}),
    "Gemma 3": Model(
        table="gemma3_text", config="Gemma3TextConfig", sizes={**WIDE, **TIED}
    ),
    "GPT-OSS": Model(
        table="gpt_oss",
        config="GptOssConfig",
        sizes={**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2},
        computes=False,  # has a second softmax behind that of the router
    ),
    "DeepSeek-V3": Model(
        table="deepseek_v3",
        config="DeepseekV3Config",
        sizes={**LATENT, "first_k_dense_replace": 1},
        scans=False,
        computes=False,  # takes the weights of experts from the biased scores
    ),
    "DeepSeek-V3, experts only": Model(
        table="deepseek_v3",
        config="DeepseekV3Config",
        sizes={**LATENT, "first_k_dense_replace": 0},
        computes=False,
    ),
    "Phi-3": Model(table="phi3", config="Phi3Config"),
    "Gemma": Model(table="gemma", config="GemmaConfig", sizes={**WIDE, **TIED}),
    "SmolLM3": Model(table="smollm3", config="SmolLM3Config"),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A comparison of a model with the one of transformers."""

    difference: float
    """Largest difference of the logits, as a part of the largest one."""
    converted: bool
    """Whether EasyDeL's own converter makes the same bits."""
    back: bool
    """Whether the logits of the exported model have the same bits as the first ones."""
    scanned: bool | None
    """The same, from stacked layers; None if they cannot be stacked."""


def read_logits(model: Any) -> NDArray[np.float32]:
    """Returns the logits of a model of transformers."""
    with torch.no_grad():
        found: NDArray[np.float32] = model(torch.tensor(WORDS)).logits.numpy()
    return found


def convert(model: Any, file: Path) -> dict[str, Any]:
    """Returns the parameters that EasyDeL's converter makes of a file, by key."""
    tensors = {name: torch.from_numpy(each) for name, each in load_file(file).items()}
    made = flatten_dict(model.pure_transform_fn(tensors))
    return {
        "/".join(["graphstate", *map(str, path), "value"]): np.asarray(each)
        for path, each in made.items()
    }


def export(run: store.Run, table: str, folder: Path, other: Any) -> NDArray[np.float32]:
    """Returns the logits of a checkpoint that is exported for transformers."""
    run.export("latest", f"safetensors:{folder}", mapping=table)
    other.config.save_pretrained(folder)
    back, found = type(other).from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    return read_logits(back.float().eval())


def compare(model: Model, client: store.Client, folder: Path) -> Outcome:
    """Takes a model to EasyDeL and back."""
    other = model.make_other()
    own = model.make_own(other.config.to_dict())
    other.save_pretrained(folder / "first")
    expected = read_logits(other)
    opened = store.open_foreign(f"safetensors:{folder}/first").open()
    mapped = opened.map(model.table)

    like = {"graphstate": nnx.state(own, nnx.Param)}
    restored = mapped.restore(like=like)
    nnx.update(own, restored["graphstate"])
    with own.mesh:
        logits = np.asarray(own(input_ids=jnp.asarray(WORDS)).logits)
    leaves = {leaf.key: array for leaf, array in mapped.read([*mapped.leaves])}
    converted = convert(own, folder / "first" / "model.safetensors")
    head = "graphstate/lm_head/kernel/value"  # the converter makes none of a tied model
    assert leaves.keys() - converted.keys() <= {head}

    run = client.run(f"{model.table}/apart")
    save_model(run, 1, own).result()
    back = export(run, f"{model.table}-inverse", folder / "back", other)
    assert_same_files(folder)
    scanned = None
    if model.scans:
        stacked = client.run(f"{model.table}/stacked")
        tree = opened.map(f"{model.table}-scanned").restore()
        stacked.save(1, tree).result()
        name = f"{model.table}-scanned-inverse"
        found = export(stacked, name, folder / "scanned", other)
        scanned = np.array_equal(expected, found)
    return Outcome(
        difference=float(np.abs(expected - logits).max() / np.abs(expected).max()),
        converted=all(
            np.array_equal(leaves[key], converted[key])
            for key in leaves.keys() & converted.keys()
        ),
        back=np.array_equal(expected, back),
        scanned=scanned,
    )


def assert_same_files(folder: Path) -> None:
    """Checks that an exported file has the tensors of the first one, bit by bit."""
    first, back = (
        load_file(folder / name / "model.safetensors") for name in ("first", "back")
    )
    assert first.keys() == back.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, back[name])


def main() -> None:
    """Prints the outcome for each model, or for those that are named."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    print(f"{'model':26} {'table':12} difference converter back  scanned seconds")
    for name in sys.argv[1:] or MODELS:
        start, model = time.monotonic(), MODELS[name]
        with (
            tempfile.TemporaryDirectory() as folder,
            store.connect("memory://") as client,
        ):
            found = compare(model, client, Path(folder))
        difference = f"{found.difference:10.1e}" if model.computes else "other code"
        print(
            f"{name:26} {model.table:12} {difference} {found.converted!s:9} "
            f"{found.back!s:5} {found.scanned!s:7} {time.monotonic() - start:7.1f}",
            flush=True,
        )
        assert found.difference <= TOLERANCE or not model.computes
        assert found.converted
        assert found.back
        assert found.scanned is (True if model.scans else None)
    print("all as they should be")


if __name__ == "__main__":
    main()
