"""Tables of families, and the operations that they need; tests/easydel has models."""

from itertools import product
from typing import Any

import numpy as np
import pytest

import storesvc_client as store
from storesvc_client._mapping.families import list_tables, load_table
from storesvc_client._mapping.planning import plan_mapping
from tests.mapping.drawn import build_all, describe_tree, plan
from tests.mapping.test_inverses import check_turn

HEAD = "graphstate/lm_head/kernel/value"
UP = "graphstate/model/layers/{}mlp/experts/up_proj/kernel/value"


@pytest.mark.parametrize("name", list_tables())
def test_each_table_has_a_way_back_in_each_form(name: str) -> None:
    for words in product(["", "-tied"], ["", "-scanned"]):
        there = load_table(name + "".join(words))
        back = load_table(f"{there.name}-inverse")

        made = {str(key) for rule in back.rules for key in rule.targets}
        taken = {
            str(key) for rule in there.rules for key in rule.sources if rule.targets
        }
        assert taken == made
        assert ("lm_head/weight" in made) == (
            "-tied" not in words and not name.startswith("gemma")
        )


def make_model(heads: int = 1) -> dict[str, Any]:
    """Returns the arrays of a model with two layers, with other numbers in each."""
    random = np.random.default_rng(heads)
    layer = {
        "input_layernorm/weight": (4,),
        "self_attn/q_proj/weight": (6, 4),
        "mlp/gate/weight": (3, 4),
    }
    experts = {f"mlp/experts/{n}/up_proj/weight": (5, 4) for n in range(3)}
    norms = {f"self_attn/{name}_norm/weight": (2,) for name in "qk"}
    shapes = {
        "model/embed_tokens/weight": (9, 4),
        "model/norm/weight": (4,),
        **({"lm_head/weight": (9, 4)} if heads else {}),
        **{
            f"model/layers/{n}/{key}": shape
            for n in range(2)
            for key, shape in {**layer, **experts, **norms}.items()
        },
    }
    return {
        key: random.standard_normal(shape, np.float32) for key, shape in shapes.items()
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
    head = model.get("lm_head/weight", model["model/embed_tokens/weight"])
    np.testing.assert_array_equal(head.T, made[HEAD])


def test_a_name_that_no_table_has_is_rejected_with_all_names() -> None:
    for name in ("lama", "llama-inverted", "", "../llama"):
        with pytest.raises(store.InvalidRequestError, match=r"llama, .*-scanned"):
            load_table(name)


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
