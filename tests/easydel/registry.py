"""Every model class that EasyDeL has registered, and a small state of each."""

from dataclasses import dataclass
from typing import Any, Final

import easydel as ed
import jax
import jax.numpy as jnp
import optax
from easydel.infra.base_state import EasyDeLState
from easydel.infra.factory import registry
from flax import nnx

from tests.easydel.scenarios import Dims
from tests.easydel.small_configs import config_class_of, small_config

DIMS: Final[Dims] = (1, 2, 1, 4, 1)
OTHER_DIMS: Final[Dims] = (1, 4, 1, 2, 1)
STEPS: Final = 1


@dataclass(frozen=True, kw_only=True)
class Registered:
    """A model class."""

    name: str
    task: str
    model_class: Any
    config_class: Any

    def config(self, dims: Dims) -> Any:
        """Returns a small config for a mesh."""
        config = small_config(self.config_class)
        config.add_basic_configurations(
            sharding_axis_dims=dims,
            attn_mechanism=ed.AttentionMechanisms.VANILLA,
            attn_dtype=jnp.float32,
            attn_softmax_dtype=jnp.float32,
            moe_method="standard_moe",
        )
        return config

    def model(self, dims: Dims) -> Any:
        """Returns a new model for a mesh."""
        return self.model_class(
            config=self.config(dims),
            dtype=jnp.float32,
            param_dtype=jnp.float32,
            precision=None,
            rngs=nnx.Rngs(0),
        )

    def state(self, dims: Dims) -> Any:
        """Returns a new state after a step, sharded by EasyDeL."""
        made = EasyDeLState.create(
            model=self.model(dims), tx=optimizer(), init_opt_state=True
        )
        return stepped(made.shard_state())


def registered() -> dict[str, Registered]:
    """Returns all model classes by name, sorted."""
    found: dict[str, Registered] = {}
    for task, models in registry._task_registry.items():
        for registration in models.values():
            module = registration.module
            name = module.__name__
            assert found.get(name) is None or found[name].model_class is module, name
            found.setdefault(
                name,
                Registered(
                    name=name,
                    task=str(task.value),
                    model_class=module,
                    config_class=config_class_of(module, registration.config),
                ),
            )
    return dict(sorted(found.items()))


def chosen() -> list[str]:
    """Returns the name of one class of each task."""
    buildable = {n: one for n, one in registered().items() if n not in UNBUILDABLE}
    first_of = {one.task: name for name, one in reversed(buildable.items())}
    return sorted(first_of.values())


def optimizer() -> optax.GradientTransformation:
    """Returns the optimizer of all these states."""
    return optax.adamw(1e-3)


def stepped(state: Any) -> Any:
    """Returns the state after a step with artificial gradients that need no
    communication; another test covers the forward pass of models."""

    def step(state: Any) -> Any:
        grads = jax.tree.map(_gradient, state.graphstate)
        return state.apply_gradients(grads=grads)

    with state.model.mesh:
        return jax.jit(step, out_shardings=state.shardings)(state)


def _gradient(parameter: jax.Array) -> jax.Array:
    if not jnp.issubdtype(parameter.dtype, jnp.floating):
        return parameter
    return parameter * 0.5 + 0.125


_SCORE_BIAS: Final = (
    "TypeError: BaseSequenceClassificationModule.__init__() got an unexpected keyword "
    "argument 'score_bias'"
)
_STATIC: Final = "ValueError: Cannot assign data value of type"

UNBUILDABLE: Final = {
    "CLIPForImageClassification": _STATIC,
    "Exaone4ForSequenceClassification": _SCORE_BIAS,
    "Glm4ForSequenceClassification": _SCORE_BIAS,
    "Glm4MoeForSequenceClassification": _SCORE_BIAS,
    "GlmForSequenceClassification": _SCORE_BIAS,
    "Qwen2VLForConditionalGeneration": (
        "AttributeError: 'Qwen2VLConfig' object has no attribute 'vocab_size'"
    ),
    "Qwen3OmniMoeForConditionalGeneration": (
        "AttributeError: 'Qwen3OmniMoeConfig' object has no attribute 'thinker_config'"
    ),
    "SiglipForImageClassification": _STATIC,
    "SmolLM3ForSequenceClassification": _SCORE_BIAS,
}
"""Classes that EasyDeL 0.3.0 cannot build, and the start of the error."""

NO_FACTORY: Final = dict.fromkeys(
    ("OpenELMForCausalLM", "OpenELMModel"),
    "InvalidRequestError: model=<lambda>: expected code that runs abstractly",
)
"""Classes whose config computes with jax, so that a factory that makes one needs
values; they are restored by the class, from the numbers that were saved."""
