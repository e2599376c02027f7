"""States of small, real EasyDeL models, each with a special feature."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import easydel as ed
import jax
import jax.numpy as jnp
import numpy as np
import optax
from easydel.infra.base_state import EasyDeLState
from flax import nnx
from jax.tree_util import keystr, tree_map_with_path

Dims: TypeAlias = tuple[int, int, int, int, int]
"""Devices along the axes of EasyDeL's meshes: dp, fsdp, ep, tp, sp."""

SIZES: Final = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "head_dim": 16,
}
STEPS: Final = 3
"""Odd number of steps, so that MultiSteps is saved between two updates."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A model, an optimizer, and two meshes to move between."""

    tx: Callable[[], optax.GradientTransformation] = lambda: optax.adamw(1e-3)
    config_class: Callable[..., Any] = ed.LlamaConfig
    model_class: Any = ed.LlamaForCausalLM
    sizes: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    param_dtype: Any = jnp.float32
    lora: tuple[int, str] | None = None
    """Rank, and a pattern of the layers."""
    dims: Dims = (1, 2, 1, 4, 1)
    other_dims: Dims = (1, 4, 1, 2, 1)

    def config(self, dims: Dims, **sizes: Any) -> Any:
        """Returns the model's configuration for a mesh."""
        config = self.config_class(**{**SIZES, **self.sizes, **sizes})
        config.add_basic_configurations(
            sharding_axis_dims=dims,
            attn_mechanism=ed.AttentionMechanisms.VANILLA,
            attn_dtype=jnp.float32,
            attn_softmax_dtype=jnp.float32,
            **self.options,
        )
        return config

    def model(
        self, dims: Dims, *, seed: int = 0, param_dtype: Any = None, **sizes: Any
    ) -> Any:
        """Returns a new model for a mesh, not yet sharded."""
        model = self.model_class(
            config=self.config(dims, **sizes),
            dtype=jnp.float32,
            param_dtype=self.param_dtype if param_dtype is None else param_dtype,
            precision=None,
            rngs=nnx.Rngs(seed),
        )
        if self.lora is None:
            return model
        return model.apply_lora_to_layers(*self.lora, rngs=nnx.Rngs(seed + 1))

    def state(self, dims: Dims, *, seed: int = 0) -> Any:
        """Returns a new state, sharded by EasyDeL."""
        made = EasyDeLState.create(
            model=self.model(dims, seed=seed), tx=self.tx(), init_opt_state=True
        )
        return made.shard_state()


def ids() -> jax.Array:
    """Returns a batch."""
    return jnp.asarray(np.random.default_rng(0).integers(0, 256, (8, 16)))


def stepper(state: Any) -> Callable[[Any], tuple[Any, jax.Array]]:
    """Returns a train step for states like this one: it returns the next state, and
    the logits before the step.

    The new state has the shardings of the given one, as with EasyDeL's trainers.
    """

    def loss(graphstate: Any, state: Any) -> tuple[jax.Array, jax.Array]:
        logits = state.merge(graphstate)(input_ids=ids()).logits
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1].astype(jnp.float32), ids()[:, 1:]
        )
        return losses.mean(), logits

    def step(state: Any) -> tuple[Any, jax.Array]:
        grads, logits = jax.grad(loss, has_aux=True)(state.graphstate, state)
        return state.apply_gradients(grads=grads), logits

    mesh = state.model.mesh
    jitted = jax.jit(step, out_shardings=(state.shardings, None))

    def stepped(state: Any) -> tuple[Any, jax.Array]:
        with mesh:
            after, logits = jitted(state)
        return after, logits

    return stepped


def _kind(params: Any) -> Any:
    def of(path: Any, _: Any) -> str:
        return "mlp" if "mlp" in keystr(path) else "rest"

    return tree_map_with_path(of, params)


def _multi_steps() -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0, 1e-3, 2, 100)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    return optax.MultiSteps(inner, 2).gradient_transformation()


def _injected() -> optax.GradientTransformation:
    rate = optax.constant_schedule(1e-3)
    return optax.inject_hyperparams(optax.adamw)(learning_rate=rate)


def _noisy() -> optax.GradientTransformation:
    kinds = {"mlp": optax.adam(1e-3), "rest": optax.sgd(1e-2, momentum=0.9)}
    noise = optax.add_noise(1e-3, 0.5, jax.random.key(3))
    return optax.chain(noise, optax.multi_transform(kinds, _kind))


SCENARIOS: Final[Mapping[str, Scenario]] = {
    "bfloat16": Scenario(param_dtype=jnp.bfloat16),
    # as text, layer 10 sorts before layer 2
    "twelve-layers": Scenario(sizes={"num_hidden_layers": 12}),
    "tied-embeddings": Scenario(
        sizes={"tie_word_embeddings": True}, tx=lambda: optax.lion(1e-3)
    ),
    "accumulated-gradients": Scenario(tx=_multi_steps),
    "injected-hyperparameters": Scenario(tx=_injected),
    "two-optimizers-and-noise": Scenario(tx=_noisy),
    "factored-moments": Scenario(
        tx=lambda: optax.adafactor(1e-3, min_dim_size_to_factor=32)
    ),
    "optimizer-without-state": Scenario(tx=lambda: optax.sgd(1e-2)),
    "lora": Scenario(lora=(4, ".*(q_proj|v_proj).*")),
    "qwen2": Scenario(config_class=ed.Qwen2Config, model_class=ed.Qwen2ForCausalLM),
    "mixtral": Scenario(
        config_class=ed.MixtralConfig,
        model_class=ed.MixtralForCausalLM,
        sizes={"num_local_experts": 4, "num_experts_per_tok": 2},
        # the fused implementation needs XLA features that CPUs lack
        options={"moe_method": "standard_moe"},
        dims=(2, 1, 1, 4, 1),
        other_dims=(4, 1, 1, 2, 1),
    ),
}
