"""Small configs of any EasyDeL model, by one rule.

Arguments that are counts or sizes, by their names, get small values; all others keep
the defaults of their class.
"""

import inspect
import re
from typing import Any, Final

_SMALL: Final[tuple[tuple[str, int], ...]] = (
    (r"num_hidden_layers|n_layers?|num_layers|depth|(en|de)coder_layers", 2),
    (r"num_transformer_layers|num_hidden_layers_.*", 2),
    (r"vocab_size|vocab_size_per_layer_input", 256),
    (r"(.*_)?num_(attention|key|value|key_value|local_attention)_heads", 4),
    (r"n_heads?|num_heads|(en|de)coder_attention_heads|mamba_n_heads", 4),
    (r"index_n_heads|linear_num_(key|value)_heads|number_rep_kv", 4),
    (r"hidden_size|d_model|n_embd|embed_dim|model_dim|out_hidden_size", 64),
    (r"projection_dim|vision_output_dim|projector_(in|out)put_dim", 64),
    (r"attention_hidden_size|output_hidden_size|vision_hidden_size", 64),
    (r"(.*_)?intermediate_size(_mlp)?|(.*_)?ffn_dim|mlp_dim|mamba_d_ssm", 128),
    (r"head_dim|global_head_dim|linear_(key|value)_head_dim|v_head_dim", 16),
    (r"qk_(rope|nope)_head_dim|kv_lora_rank|q_lora_rank|(q|kv)_lora_dim", 16),
    (r"vhead_dim|index_head_dim|hidden_size_per_layer_input|rotary_dim", 16),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok|n_group|topk_group|index_topk|moe_topk", 2),
    (r"max_position_embeddings|n_positions|max_seq_len|context_length", 64),
    (r"max_(source|target)_positions|max_context_length|block_size", 64),
    (r"classifier_proj_size|position_embedding_size|state_size", 16),
)
"""Patterns of names, and the numbers that they get."""

_RULES: Final = [(re.compile(pattern), value) for pattern, value in _SMALL]

_TOKEN: Final = re.compile(r".*token_(id|index)|.*_token|.*_token_ids?")


def config_class_of(model_class: Any, registered: Any) -> Any:
    """Returns the config class of a model's constructor. Some models are registered
    with the config of a larger model that contains them."""
    annotation = inspect.signature(model_class.__init__).parameters["config"].annotation
    return annotation if _is_config_class(annotation) else registered


def small_config(config_class: Any, **changes: Any) -> Any:
    """Returns a config of a class whose model takes little memory.

    Args:
        config_class: Config class of EasyDeL.
        changes: Arguments that override the rule.
    """
    parameters = _parameters(config_class)
    arguments: dict[str, Any] = {}
    for name, parameter in parameters.items():
        value = _small(name, parameter.default)
        if value is not None:
            arguments[name] = value
    for name, named in (getattr(config_class, "sub_configs", None) or {}).items():
        # the named class may be arbitrary, and the default may lack this part
        made = type(getattr(config_class(), name))
        part = made if _is_config_class(made) else named
        if name in parameters and _is_config_class(part):
            arguments[name] = small_config(part).to_dict()
    config = config_class(**{**arguments, **changes})
    _shrink_sections(config)
    return config


def _parameters(config_class: Any) -> dict[str, inspect.Parameter]:
    """Returns the arguments of a class, including the ones that it passes on."""
    found: dict[str, inspect.Parameter] = {}
    for base in config_class.__mro__:
        if base.__name__ == "EasyDeLBaseConfig":
            break
        if "__init__" in vars(base):
            parameters = inspect.signature(base.__init__).parameters
            found = {**parameters, **found}
    return found


def _small(name: str, default: Any) -> Any:
    """Returns the small value of an argument; None if it keeps its default."""
    rule = next((value for rule, value in _RULES if rule.fullmatch(name)), None)
    if default is None:
        return rule if name == "head_dim" else None
    if not isinstance(default, int) or isinstance(default, bool):
        return None
    if _TOKEN.fullmatch(name):
        return default % 200 if default >= 256 else None
    return None if rule is None else min(rule, default)


def _shrink_sections(config: Any) -> None:
    """Fits the sections of rotary embeddings to the small head."""
    for name, value in list(vars(config).items()):
        if isinstance(value, dict) and "mrope_section" in value:
            share = value.get("partial_rotary_factor") or getattr(
                config, "partial_rotary_factor", 1.0
            )
            half = int(config.head_dim * share) // 2
            sections = value["mrope_section"]
            small = [max(1, half * each // sum(sections)) for each in sections]
            small[-1] += half - sum(small)
            setattr(config, name, {**value, "mrope_section": small})
        elif _is_config_class(type(value)):
            _shrink_sections(value)


def _is_config_class(annotation: Any) -> bool:
    return inspect.isclass(annotation) and hasattr(
        annotation, "add_basic_configurations"
    )
