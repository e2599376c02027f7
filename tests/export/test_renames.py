"""Rules that rename tensors, the table of Llama, and windows of arrays."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import storesvc_client as store
from storesvc_client._export.elements import windows
from storesvc_client._export.renames import parse_rules, read_rules, renamed
from tests.export.parts import Save
from tests.support.safetensors_files import load_file

PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


class _Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.self_attn = nnx.Dict(
            {
                name: nnx.Linear(4, 6, use_bias=False, rngs=rngs)
                for name in ("q_proj", "k_proj", "v_proj", "o_proj")
            }
        )
        self.mlp = nnx.Dict(
            {
                name: nnx.Linear(4, 8, use_bias=False, rngs=rngs)
                for name in ("gate_proj", "up_proj", "down_proj")
            }
        )
        self.input_layernorm = nnx.RMSNorm(4, rngs=rngs)
        self.post_attention_layernorm = nnx.RMSNorm(4, rngs=rngs)


class _Llama(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.model = nnx.Dict(
            embed_tokens=nnx.Embed(10, 4, rngs=rngs),
            layers=nnx.List([_Block(rngs) for _ in range(2)]),
            norm=nnx.RMSNorm(4, rngs=rngs),
        )
        self.lm_head = nnx.Linear(4, 10, use_bias=False, rngs=rngs)


def names_of_hugging_face(layers: int) -> list[str]:
    """Returns the names in the state dict of a LlamaForCausalLM of transformers."""
    found = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    parts = ("input_layernorm", "post_attention_layernorm", "self_attn.o_proj")
    found += [
        f"model.layers.{at}.{part}.weight"
        for at in range(layers)
        for part in (*PROJECTIONS, *MLP, *parts)
    ]
    return sorted(found)


@pytest.mark.slow
def test_the_table_of_llama_names_the_tensors_as_hugging_face_does(
    saved: Save, tmp_path: Path
) -> None:
    state: Any = nnx.to_pure_dict(nnx.state(_Llama(nnx.Rngs(0))))

    saved("memory://", state).export(f"safetensors:{tmp_path}/x", rename="llama_hf")

    found = load_file(tmp_path / "x" / "model.safetensors")
    assert names_of_hugging_face(2) == sorted(found)
    kernel = state["model"]["layers"][1]["mlp"]["up_proj"]["kernel"]
    np.testing.assert_array_equal(
        np.asarray(kernel).T, found["model.layers.1.mlp.up_proj.weight"]
    )
    embedding = np.asarray(state["model"]["embed_tokens"]["embedding"])
    np.testing.assert_array_equal(embedding, found["model.embed_tokens.weight"])
    head = np.asarray(state["lm_head"]["kernel"])
    np.testing.assert_array_equal(head.T, found["lm_head.weight"])


def test_the_first_rule_that_matches_the_whole_name_applies() -> None:
    rules = parse_rules([["b.*", "first"], ["(a|b)c", r"\1"], ["c", "no"]], "rules")

    names = [renamed(name, rules).name for name in ("bc", "ac", "acc", "c")]

    assert ["first", "a", "acc", "no"] == names


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ({}, "expected a list of rules, got {}"),
        ([["a"]], "rule 0: expected .REGEX, REPLACEMENT"),
        ([["a", "b"], ["(", "b"]], "rule 1: expected a regular expression"),
        ([["a", r"\1"]], "rule 0: expected a regular expression and a replacement"),
        ([["a", "b", {"transpose": [0, 2]}]], "expected a permutation"),
        ([["a", "b", {"transpose": [0], "x": 1}]], "rule 0: expected .REGEX"),
        ([["a", "b", {"transpose": ["0"]}]], "rule 0: expected .REGEX"),
    ],
)
def test_rules_of_another_form_are_rejected(rules: Any, problem: str) -> None:
    with pytest.raises(store.InvalidRequestError, match=problem):
        parse_rules(rules, "rules")


def test_a_missing_table_and_a_damaged_file_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("[" * 100_000)

    with pytest.raises(store.InvalidRequestError, match="the name of a table"):
        read_rules("no_such_table")
    with pytest.raises(store.InvalidRequestError, match="expected JSON"):
        read_rules(tmp_path / "bad.json")


def test_a_transposition_of_other_dimensions_names_the_leaf(
    saved: Save, tmp_path: Path
) -> None:
    opened = saved("memory://", {"w": np.ones(3)})

    with pytest.raises(store.InvalidRequestError, match=r"leaf 'w': expected 2 dimen"):
        opened.export(
            f"safetensors:{tmp_path}/x", rename=[["w", "v", {"transpose": [1, 0]}]]
        )


@given(
    sizes=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4)), max_size=4),
    limit=st.integers(1, 60),
)
def test_windows_cover_an_array_once_in_order(
    sizes: list[tuple[int, int]], limit: int
) -> None:
    shape, chunk = [n for n, _ in sizes], [c for _, c in sizes]
    array = np.arange(math.prod(shape)).reshape(shape)

    parts = [
        array[tuple(slice(*each) for each in region)].reshape(-1)
        for region in windows(shape, chunk, itemsize=1, limit=limit)
    ]

    assert array.reshape(-1).tolist() == [n for part in parts for n in part.tolist()]
    assert all(len(part) <= limit for part in parts)
