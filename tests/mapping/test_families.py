"""Tables of families, and the operations that they need; tests/easydel has models."""

import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import storesvc_client as store
from storesvc_client._mapping.families import list_tables, load_table
from storesvc_client._mapping.planning import plan_mapping
from storesvc_client._mapping.rules import parse_rules
from tests.mapping.drawn import build_all, describe_tree, plan
from tests.mapping.test_inverses import check_turn

Arrays = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]

HEAD = "graphstate/lm_head/kernel/value"
UP = "graphstate/model/layers/{}mlp/experts/up_proj/kernel/value"


@pytest.mark.parametrize("name", list_tables())
def test_each_table_has_a_way_back_in_each_form(name: str) -> None:
    size = "-head_dim=2" if "maxtext" in name else ""
    if name == "deepseek_v3-maxtext":
        size = "-num_attention_heads=2-first_k_dense_replace=2"
    for words in product(["", "-tied"], ["", "-scanned"]):
        there = load_table(name + "".join(words) + size)
        back = load_table(f"{there.name}-inverse")

        made = {str(key) for rule in back.rules for key in rule.targets}
        taken = {
            str(key) for rule in there.rules for key in rule.sources if rule.targets
        }
        assert taken == made
        assert ("lm_head/weight" in made) == (
            "-tied" not in words and not name.startswith("gemma")
        )


QWEN: dict[str, tuple[int, ...]] = {
    "input_layernorm/weight": (4,),
    "self_attn/q_proj/weight": (6, 4),
    "mlp/gate/weight": (3, 4),
    **{f"mlp/experts/{n}/up_proj/weight": (5, 4) for n in range(3)},
    **{f"self_attn/{name}_norm/weight": (2,) for name in "qk"},
}
"""Shapes of a layer."""


def make_model(heads: int = 1, layers: int = 2, shapes: Shapes = QWEN) -> Arrays:
    """Returns the arrays of a model, with other numbers in each."""
    random = np.random.default_rng(heads)
    all_shapes = {
        "model/embed_tokens/weight": (9, 4),
        "model/norm/weight": (4,),
        **({"lm_head/weight": (9, 4)} if heads else {}),
        **{
            f"model/layers/{n}/{key}": shape
            for n in range(layers)
            for key, shape in shapes.items()
        },
    }
    return {
        key: random.standard_normal(shape, np.float32)
        for key, shape in all_shapes.items()
    }


@pytest.mark.parametrize("words", ["", "-tied", "-scanned", "-tied-scanned"])
def test_a_table_and_its_inverse_return_every_bit(words: str) -> None:
    model = make_model(heads="tied" not in words)
    mapped = plan_mapping(
        load_table(f"qwen3_moe{words}"), describe_tree(model), name="files"
    )
    made = build_all(mapped, model)
    state: dict[str, Any] = {
        **made,
        "step": np.int32(3),
        "opt_state/0/mu/model/norm/kernel/value": np.ones(4),
        "graphother/model/rngs/default/count/value": np.uint32(1),
    }
    back = build_all(
        plan_mapping(
            load_table(f"qwen3_moe{words}-inverse"), describe_tree(state), name="state"
        ),
        state,
    )

    assert model.keys() == back.keys()
    for key, array in model.items():
        np.testing.assert_array_equal(array, back[key])
    names = (f"model/layers/1/mlp/experts/{n}/up_proj/weight" for n in range(3))
    up = np.stack([model[each].T for each in names])
    found = made[UP.format("")][1] if "scanned" in words else made[UP.format("1/")]
    np.testing.assert_array_equal(up, found)
    head = model["model/embed_tokens/weight" if "tied" in words else "lm_head/weight"]
    np.testing.assert_array_equal(head.T, made[HEAD])


def test_a_name_that_no_table_has_is_rejected_with_all_names() -> None:
    for name in ("lama", "llama-inverted", "", "../llama"):
        with pytest.raises(store.InvalidRequestError, match=r"llama, .*-scanned"):
            load_table(name)


LAYERS = "params/params/decoder/layers"
ATTENTION: dict[str, tuple[int, ...]] = {
    "self_attn/q_proj/weight": (6, 4),
    "self_attn/k_proj/weight": (2, 4),
    "self_attn/v_proj/weight": (2, 4),
    "self_attn/o_proj/weight": (4, 6),
    "input_layernorm/weight": (4,),
    "post_attention_layernorm/weight": (4,),
}
QWEN_MAXTEXT = {
    **QWEN,
    **ATTENTION,
    **{f"mlp/experts/{n}/gate_proj/weight": (5, 4) for n in range(3)},
    **{f"mlp/experts/{n}/down_proj/weight": (4, 5) for n in range(3)},
}
GPT_OSS = {
    **ATTENTION,
    "self_attn/q_proj/bias": (6,),
    "self_attn/k_proj/bias": (2,),
    "self_attn/v_proj/bias": (2,),
    "self_attn/o_proj/bias": (4,),
    "self_attn/sinks": (3,),
    "mlp/router/weight": (3, 4),
    "mlp/router/bias": (3,),
    "mlp/experts/gate_up_proj": (3, 4, 10),
    "mlp/experts/gate_up_proj_bias": (3, 10),
    "mlp/experts/down_proj": (3, 5, 4),
    "mlp/experts/down_proj_bias": (3, 4),
}
DENSE = {
    "self_attn/q_proj/weight": (8, 4),
    "self_attn/k_proj/weight": (4, 4),
    "self_attn/v_proj/weight": (4, 4),
    "self_attn/o_proj/weight": (4, 8),
    "input_layernorm/weight": (4,),
    "post_attention_layernorm/weight": (4,),
    "mlp/gate_proj/weight": (5, 4),
    "mlp/up_proj/weight": (5, 4),
    "mlp/down_proj/weight": (4, 5),
}
GEMMA = {
    **DENSE,
    "pre_feedforward_layernorm/weight": (4,),
    "post_feedforward_layernorm/weight": (4,),
}


def map_model(table: str, model: Arrays) -> Arrays:
    """Returns the leaves that a table makes."""
    return build_all(
        plan_mapping(load_table(table), describe_tree(model), name="files"), model
    )


@pytest.mark.parametrize(
    ("table", "shapes", "size"),
    [
        ("qwen3_moe-maxtext", QWEN_MAXTEXT, 2),
        ("gpt_oss-maxtext", GPT_OSS, 2),
        ("llama3.1-maxtext", DENSE, 4),  # the root is a power of two
    ],
)
@pytest.mark.parametrize("words", ["", "-tied", "-scanned", "-tied-scanned"])
def test_a_table_of_maxtext_and_its_inverse_return_every_bit(
    table: str, shapes: Shapes, size: int, words: str
) -> None:
    model = make_model("tied" not in words, 4, shapes)
    name = f"{table}{words}"

    made = map_model(f"{name}-head_dim={size}", model)
    assert (f"{LAYERS.removesuffix('layers')}logits_dense/kernel" in made) == (
        "tied" not in words
    )
    state = {
        **made,
        "step": np.int32(3),
        "opt_state/mu/decoder/decoder_norm/scale": np.ones(4),
        "nnx_aux/rngs/count": np.uint32(1),
    }
    for back in (f"{name}-inverse", f"{name}-inverse-head_dim={size}"):
        found = map_model(back, state)

        assert model.keys() == found.keys()
        for key, array in model.items():
            np.testing.assert_array_equal(array, found[key])


def test_kernels_of_maxtext_have_an_axis_of_heads_and_one_of_layers() -> None:
    model = make_model(shapes=QWEN_MAXTEXT)
    made = map_model("qwen3_moe-maxtext-scanned-head_dim=2", model)

    def take(key: str, *shape: int) -> list[NDArray[Any]]:
        arrays = (model[f"model/layers/{n}/{key}/weight"] for n in range(2))
        return [each.T.reshape(shape) for each in arrays]

    for key, expected in {
        "self_attention/query/kernel": np.stack(take("self_attn/q_proj", 4, 3, 2), 1),
        "self_attention/out/kernel": np.stack(take("self_attn/o_proj", 3, 2, 4), 1),
        "moe_block/wo": np.stack(
            [take(f"mlp/experts/{n}/down_proj", 5, 4) for n in range(3)]
        ),
    }.items():
        np.testing.assert_array_equal(expected, made[f"{LAYERS}/{key}"])


def test_layers_of_gpt_oss_are_scanned_in_pairs() -> None:
    model = make_model(layers=4, shapes=GPT_OSS)
    made = map_model("gpt_oss-maxtext-scanned-head_dim=2", model)

    both = (model[f"model/layers/{n}/mlp/experts/gate_up_proj"] for n in (1, 3))
    np.testing.assert_array_equal(
        np.stack([each[..., 1::2] for each in both], 1),
        made[f"{LAYERS}/layers_1/GptOssMlp/wi_1"],
    )


def test_queries_of_llama_are_divided_and_those_of_llama_3_1_are_in_pairs() -> None:
    model = make_model(shapes=DENSE)
    queries = model["model/layers/0/self_attn/q_proj/weight"].T.reshape(4, 4, 2)
    wide = model["model/layers/1/self_attn/q_proj/weight"].T.reshape(4, 2, 4)

    for table, size, key, expected in [
        ("llama3", 2, "layers_0", queries * np.float32(1 / np.sqrt(2))),
        ("mistral", 4, "layers_1", wide / 2),
        ("llama3.1", 4, "layers_1", wide[..., [0, 2, 1, 3]] / 2),
    ]:
        made = map_model(f"{table}-maxtext-head_dim={size}", model)
        found = made[f"params/params/decoder/{key}/self_attention/query/kernel"]
        np.testing.assert_array_equal(expected, found)


@pytest.mark.parametrize("words", ["", "-scanned"])
def test_layers_of_gemma_2_are_local_and_global_in_turn(words: str) -> None:
    model = make_model(heads=0, layers=4, shapes=GEMMA)
    norms = [model[f"model/layers/{n}/input_layernorm/weight"] + 1 for n in range(4)]

    made = map_model(f"gemma2-maxtext{words}-head_dim=4", model)
    back = map_model(f"gemma2-maxtext{words}-inverse", made)

    for kind, wanted in [("local", norms[::2]), ("global", norms[1::2])]:
        key = f"pre_self_attention_norm_{kind}/scale"
        keys = [f"{LAYERS}/{key}"] if words else [f"{LAYERS}_{n}/{key}" for n in (0, 1)]
        found = made[keys[0]].T if words else [made[key] for key in keys]
        np.testing.assert_array_equal(wanted, found)
    np.testing.assert_array_equal(
        model["model/embed_tokens/weight"] * 2,
        made["params/params/token_embedder/embedding"],
    )
    assert model.keys() == back.keys()
    for key, array in model.items():
        np.testing.assert_allclose(array, back[key], rtol=2**-23, atol=2**-23)


@pytest.mark.parametrize(
    ("table", "layers", "expected"),
    [
        ("gemma2-maxtext", 3, "a multiple of 2 for the size of axis 0, got 3"),
        ("gemma2-maxtext-scanned", 3, "a multiple of 2 for the size of axis 1, got 3"),
        ("gemma3_text-maxtext-scanned", 8, r"reshape: .* \[4, 8\]"),
    ],
)
def test_layers_that_do_not_fill_blocks_are_rejected(
    table: str, layers: int, expected: str
) -> None:
    norms: Shapes = {f"self_attn/{name}_norm/weight": (4,) for name in "qk"}
    shapes = GEMMA if "gemma2" in table else {**GEMMA, **norms}
    model = describe_tree(make_model(heads=0, layers=layers, shapes=shapes))

    with pytest.raises(store.MismatchError, match=expected):
        plan_mapping(load_table(f"{table}-head_dim=4"), model, name="files")


def test_another_size_of_a_head_than_the_model_has_is_rejected() -> None:
    tree = describe_tree(make_model(shapes=QWEN_MAXTEXT))

    for size in (1, 3):
        with pytest.raises(store.MismatchError, match=rf"layer = 0: .* got \[{size}\]"):
            plan_mapping(
                load_table(f"qwen3_moe-maxtext-head_dim={size}"), tree, name="files"
            )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3-maxtext", "'qwen3-maxtext-head_dim=128'; got 'qwen3-maxtext'"),
        ("llama-maxtext-head_dim=64", "qwen3-maxtext, .* such as -head_dim=128"),
        ("qwen3-head_dim=64", "-head_dim=128 behind one of maxtext; got 'qwen3-head"),
        ("qwen3-maxtext-head_dim=0", "such as -head_dim=128 behind one"),
        ("qwen3-maxtext-head_dim=8-head_dim=4", "such as -head_dim=128 behind one"),
        ("qwen3-maxtext-num_attention_heads=8", "sizes such as -head_dim=128"),
        ("deepseek_v3-maxtext-head_dim=8", "sizes such as -head_dim=128"),
        (
            "deepseek_v3-maxtext",
            "num_attention_heads and first_k_.*-num_attention_heads=128-first_k_dense",
        ),
        (
            "deepseek_v3-maxtext-scanned-inverse",
            "first_k_dense_replace of .* 'deepseek_v3-.*-inverse-first_k_dense_repl",
        ),
    ],
)
def test_a_size_is_given_once_and_to_a_table_that_needs_it(
    name: str, expected: str
) -> None:
    with pytest.raises(store.InvalidRequestError, match=expected):
        load_table(name)


LATENT = {
    "input_layernorm/weight": (4,),
    "post_attention_layernorm/weight": (4,),
    "self_attn/q_a_proj/weight": (3, 4),
    "self_attn/q_a_layernorm/weight": (3,),
    "self_attn/q_b_proj/weight": (10, 3),
    "self_attn/kv_a_proj_with_mqa/weight": (5, 4),
    "self_attn/kv_a_layernorm/weight": (3,),
    "self_attn/kv_b_proj/weight": (14, 3),
    "self_attn/o_proj/weight": (4, 8),
}
MLP = {"gate_proj/weight": (6, 4), "up_proj/weight": (6, 4), "down_proj/weight": (4, 6)}
DENSE_LAYER = {f"mlp/{key}": shape for key, shape in MLP.items()}
EXPERT_LAYER = {
    "mlp/gate/weight": (3, 4),
    "mlp/gate/e_score_correction_bias": (3,),
    **{f"mlp/shared_experts/{key}": shape for key, shape in MLP.items()},
    **{f"mlp/experts/{n}/{key}": MLP[key] for n in range(3) for key in MLP},
}
DEEPSEEK = "deepseek_v3-maxtext{}-num_attention_heads=2-first_k_dense_replace={}"
DEEPSEEK_BACK = "deepseek_v3-maxtext{}-inverse-first_k_dense_replace={}"


def make_deepseek(dense: int, layers: int = 5) -> Arrays:
    """Returns the arrays of a model whose first layers have no experts."""
    model = make_model(1, layers, {**LATENT, **DENSE_LAYER, **EXPERT_LAYER})
    for number in range(layers):
        for key in EXPERT_LAYER if number < dense else DENSE_LAYER:
            del model[f"model/layers/{number}/{key}"]
    return model


@pytest.mark.parametrize("words", ["", "-scanned"])
@pytest.mark.parametrize("dense", [1, 3, 4])
def test_layers_of_deepseek_with_and_without_experts_are_numbered_from_0(
    dense: int, words: str
) -> None:
    model = make_deepseek(dense)

    made = map_model(DEEPSEEK.format(words, dense), model)
    back = map_model(DEEPSEEK_BACK.format(words, dense), made)

    assert model.keys() == back.keys()
    for key, array in model.items():
        np.testing.assert_array_equal(array, back[key])
    stem = "params/params/decoder"
    for kind, numbers in [("dense", range(dense)), ("moe", range(dense, 5))]:
        arrays = [
            model[f"model/layers/{n}/self_attn/kv_b_proj/weight"] for n in numbers
        ]
        wanted = [each.T.reshape(3, 2, 7) for each in arrays]
        key = "self_attention/wkv_b/kernel"
        found = (
            np.unstack(made[f"{stem}/{kind}_layers/{key}"], axis=1)
            if words
            else [made[f"{stem}/{kind}_layers_{n}/{key}"] for n in range(len(wanted))]
        )
        np.testing.assert_array_equal(wanted, found)


@pytest.mark.parametrize("words", ["", "-scanned"])
@pytest.mark.parametrize("number", [1, 3, 5, 9])
def test_a_wrong_dense_layer_count_is_rejected(number: int, words: str) -> None:
    """Too few of them, too many, as many as there are layers, more."""
    model = make_deepseek(2)
    made = map_model(DEEPSEEK.format(words, 2), model)

    with pytest.raises(
        store.MismatchError, match=f"layer = 0 to {number - 1}, each|mlp"
    ):
        map_model(DEEPSEEK.format(words, number), model)
    with pytest.raises(store.MismatchError, match=f"layer = 0 to {number - 1}, each"):
        map_model(DEEPSEEK_BACK.format(words, number), made)


def test_a_multi_token_prediction_layer_is_rejected_by_name() -> None:
    model = make_deepseek(2)
    model["model/layers/4/eh_proj/weight"] = np.zeros((4, 8), np.float32)

    with pytest.raises(
        store.MismatchError, match="got none for model/layers/4/eh_proj/"
    ):
        map_model(DEEPSEEK.format("", 2), model)


def test_the_documented_rules_make_what_the_deepseek_table_takes() -> None:
    text = (Path(__file__).parents[2] / "docs" / "interop.md").read_text("utf-8")
    (block,) = re.findall("```toml\n(.*?)```", text, re.DOTALL)
    rules = parse_rules(block.replace("61", "5").encode(), name="docs", is_toml=True)
    model = make_deepseek(2)
    files: Arrays = {"model/layers/5/eh_proj/weight": np.zeros((4, 8), np.float32)}
    for key, array in model.items():
        files[key] = array.astype(ml_dtypes.bfloat16)
        if "proj" in key:
            files[key] = array.astype(ml_dtypes.float8_e4m3fn)
            files[f"{key}_scale_inv"] = np.full((1, 1), 0.5, np.float32)

    imported = build_all(plan_mapping(rules, describe_tree(files), name="files"), files)
    made = map_model(DEEPSEEK.format("", 2), imported)

    assert model.keys() == imported.keys()
    assert {"bfloat16"} == {array.dtype.name for array in made.values()}
    key = "model/layers/2/mlp/experts/1/up_proj/weight"
    block = "params/params/decoder/moe_layers_0/DeepSeekMoeBlock_0/MoeBlock_0"
    experts = made[f"{block}/wi_1"]
    wanted = files[key].astype(np.float32).T / 2
    np.testing.assert_array_equal(wanted, experts[1].astype(np.float32))


def test_a_table_has_no_way_back_from_layers_that_differ() -> None:
    model = make_model()
    del model["model/layers/0/mlp/gate/weight"]

    with pytest.raises(store.MismatchError, match="expected layer = 0 to 1"):
        plan_mapping(
            load_table("qwen3_moe-scanned"), describe_tree(model), name="files"
        )


def test_a_tie_is_another_leaf_of_the_new_tree() -> None:
    """Its way back does not leave the head out unasked, as it may differ by then."""
    embed = {"embed": np.arange(12, dtype=np.float32).reshape(4, 3)}
    tie = {"tie": "new/embed", "to": "new/head", "operations": [{"transpose": [1, 0]}]}
    others = [{"from": "embed", "to": "new/embed"}]

    made = build_all(plan([tie, *others], embed), embed)
    with pytest.raises(store.InvalidRequestError, match="without this rule") as refused:
        check_turn({"version": 1, "rules": [tie, *others]}, embed)

    np.testing.assert_array_equal(embed["embed"].T, made["new/head"])
    assert '{from = "new/head", drop = true}' in str(refused.value)
    inverse = check_turn({"version": 1, "rules": others}, embed)
    drop = {"from": "new/head", "drop": True}
    back = build_all(plan([*inverse["rules"], drop], made), made)
    np.testing.assert_array_equal(embed["embed"], back["embed"])


def test_a_tie_to_no_leaf_is_rejected() -> None:
    rules = [{"from": "a", "to": "b"}, {"tie": "a", "to": "c"}]

    with pytest.raises(store.MismatchError, match="that another rule makes, got 'a'"):
        plan(rules, {"a": np.ones(2)})


def test_parts_that_do_not_divide_an_axis_are_rejected() -> None:
    rule = {
        "from": "a",
        "to": ["b", "c"],
        "operations": [{"deinterleave": {"axis": 0, "parts": 2}}],
    }

    with pytest.raises(store.MismatchError, match=r"a multiple of 2 .* got 3"):
        plan([rule], {"a": np.ones(3)})
