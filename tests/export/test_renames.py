"""Rules that rename tensors, the table of Llama, and windows of arrays."""

import ast
import itertools
import logging
import math
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import storesvc_client as store
import storesvc_client.nnx
from storesvc_client._export.elements import parse_table, read_table, windows
from storesvc_client.easydel import save_model, save_state
from storesvc_client.trees.easydel import EasyDeLState
from tests.export.parts import Save
from tests.support.examples import sampled
from tests.support.safetensors_files import load_file

WIDTH, QUERIES, KEYS, INNER, WORDS, LAYERS = 4, 6, 2, 8, 10, 2


class _Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, *, bias: bool) -> None:
        def linear(*shape: int) -> nnx.Linear:
            return nnx.Linear(*shape, use_bias=bias, rngs=rngs)

        self.self_attn = nnx.Dict(
            q_proj=linear(WIDTH, QUERIES),
            k_proj=linear(WIDTH, KEYS),
            v_proj=linear(WIDTH, KEYS),
            o_proj=linear(QUERIES, WIDTH),
        )
        self.mlp = nnx.Dict(
            gate_proj=linear(WIDTH, INNER),
            up_proj=linear(WIDTH, INNER),
            down_proj=linear(INNER, WIDTH),
        )
        self.input_layernorm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.post_attention_layernorm = nnx.RMSNorm(WIDTH, rngs=rngs)


class _Llama(nnx.Module):
    """A Llama with grouped queries; with a tied head it has no other one."""

    def __init__(self, *, bias: bool = False, tied: bool = False) -> None:
        rngs = nnx.Rngs(0)
        self.model = nnx.Dict(
            embed_tokens=nnx.Embed(WORDS, WIDTH, rngs=rngs),
            layers=nnx.List([_Block(rngs, bias=bias) for _ in range(LAYERS)]),
            norm=nnx.RMSNorm(WIDTH, rngs=rngs),
        )
        if not tied:
            self.lm_head = nnx.Linear(WIDTH, WORDS, use_bias=False, rngs=rngs)


def _llama(**options: bool) -> Any:
    """Returns a Llama with numbers of its own in each parameter, without computing."""
    module = nnx.eval_shape(lambda: _Llama(**options))
    count = itertools.count(1)
    state = jax.tree.map(
        lambda leaf: next(count) + np.arange(leaf.size, dtype="f4").reshape(leaf.shape),
        nnx.state(module),
    )
    nnx.update(module, state)
    return module


def _shapes_of_hugging_face(
    *, bias: bool = False, tied: bool = False
) -> dict[str, tuple[int, ...]]:
    """Returns the state dict of a LlamaForCausalLM of transformers: each shape."""
    matrices = {
        "self_attn.q_proj": (QUERIES, WIDTH),
        "self_attn.k_proj": (KEYS, WIDTH),
        "self_attn.v_proj": (KEYS, WIDTH),
        "self_attn.o_proj": (WIDTH, QUERIES),
        "mlp.gate_proj": (INNER, WIDTH),
        "mlp.up_proj": (INNER, WIDTH),
        "mlp.down_proj": (WIDTH, INNER),
    }
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (WORDS, WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    if not tied:
        found["lm_head.weight"] = (WORDS, WIDTH)
    for layer in (f"model.layers.{at}" for at in range(LAYERS)):
        for name, shape in matrices.items():
            found[f"{layer}.{name}.weight"] = shape
            if bias:
                found[f"{layer}.{name}.bias"] = shape[:1]
        found[f"{layer}.input_layernorm.weight"] = (WIDTH,)
        found[f"{layer}.post_attention_layernorm.weight"] = (WIDTH,)
    return found


def _optimizer(model: Any) -> Any:
    return nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def _state(model: Any) -> Any:
    return EasyDeLState.create(
        model=model, tx=optax.sgd(0.1, momentum=0.9), init_opt_state=True
    )


LAYOUTS: dict[str, tuple[str | None, Callable[[store.Run, Any], store.Save]]] = {
    "pure dict": (None, lambda run, m: run.save(1, nnx.to_pure_dict(nnx.state(m)))),
    "nnx.State": (None, lambda run, m: run.save(1, nnx.state(m))),
    "params": ("params/**", lambda run, m: run.save(1, {"params": nnx.state(m)})),
    "imported eformer": (
        "model/**",
        lambda run, m: run.save(
            1, {"model": nnx.to_pure_dict(nnx.state(m)), "tx": {"count": np.int32(1)}}
        ),
    ),
    "average": (
        "ema/**",
        lambda run, m: run.save(1, {"params": nnx.state(m), "ema": nnx.state(m)}),
    ),
    "loop": ("0/**", lambda run, m: run.save(1, (m, _optimizer(m)))),
    "nnx.save": (
        "graphstate/**",
        lambda run, m: storesvc_client.nnx.save(run, 1, m, _optimizer(m)),
    ),
    "save_model": ("graphstate/**", lambda run, m: save_model(run, 1, m)),
    "save_state": ("graphstate/**", lambda run, m: save_state(run, _state(m))),
}
"""The selection of an export, and the way in which a Llama is saved."""


@pytest.mark.parametrize(
    ("layout", "options"),
    sampled(product(LAYOUTS, [{}, {"bias": True}, {"tied": True}]), every=4),
)
def test_the_table_of_llama_names_every_tensor_as_hugging_face_does(
    layout: str, options: dict[str, bool], run: store.Run, tmp_path: Path
) -> None:
    model = _llama(**options)
    select, save = LAYOUTS[layout]
    save(run, model).result()

    report = run.export(
        "latest", f"safetensors:{tmp_path}/x", select=select, rename="llama_hf"
    )

    found = load_file(tmp_path / "x" / "model.safetensors")
    expected = _shapes_of_hugging_face(**options)
    assert expected == {name: array.shape for name, array in found.items()}
    assert len(expected) == report.renamed_count == report.leaf_count
    saved = nnx.to_pure_dict(nnx.state(model))
    kernel = saved["model"]["layers"][1]["self_attn"]["o_proj"]["kernel"]
    np.testing.assert_array_equal(
        kernel.T, found["model.layers.1.self_attn.o_proj.weight"]
    )
    embedding = saved["model"]["embed_tokens"]["embedding"]
    np.testing.assert_array_equal(embedding, found["model.embed_tokens.weight"])


def _advised(error: BaseException) -> Any:
    """Returns the select= that the message of an error advises."""
    found = re.search(r"select=(\[[^]]*\]|'[^']*')", str(error))
    assert found is not None, error
    return ast.literal_eval(found[1])


MORE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a step": (lambda m: {**m, "step": np.int32(1)}, "'step': expected a parameter of"),
    "an optimizer": (
        lambda m: {"params": m, "mu": {"params": m}},
        "'mu/params/lm_head/kernel': expected a Llama once, got that of 'params', too",
    ),
    "adapters": (
        lambda m: {"params": m, "lora": {"model": {"a": np.ones(3)}}},
        "'lora/model/a': expected a parameter of a Llama",
    ),
}


@pytest.mark.parametrize("more", MORE)
def test_leaves_that_the_table_of_a_model_lacks_are_rejected_with_a_call_that_works(
    more: str, saved: Save, tmp_path: Path
) -> None:
    wrap, problem = MORE[more]
    opened = saved("memory://", wrap(nnx.to_pure_dict(nnx.state(_llama()))))
    target = f"safetensors:{tmp_path}/x"

    with pytest.raises(store.PreconditionError, match=problem) as rejected:
        opened.export(target, rename="llama_hf")
    assert not (tmp_path / "x").exists()
    opened.export(target, rename="llama_hf", select=_advised(rejected.value))
    found = load_file(tmp_path / "x" / "model.safetensors")
    assert _shapes_of_hugging_face().keys() == found.keys()


def test_leaves_between_parameters_are_rejected_and_rules_may_name_them(
    saved: Save, tmp_path: Path
) -> None:
    model = nnx.to_pure_dict(nnx.state(_llama()))
    model["model"]["norm"]["lora_a"] = np.ones(3)
    opened = saved("memory://", model)

    with pytest.raises(store.PreconditionError, match="or give rules that name it"):
        opened.export(f"safetensors:{tmp_path}/x", rename="llama_hf")


class _Config:
    """The config of a model."""

    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)


def test_a_head_that_a_tied_model_does_not_use_is_rejected(
    run: store.Run, tmp_path: Path
) -> None:
    model = _llama()
    model.config = nnx.static(_Config(tie_word_embeddings=True))
    save_model(run, 1, model, rehearse="off").result()
    target = f"safetensors:{tmp_path}/x"

    with pytest.raises(
        store.PreconditionError, match=r"no lm_head\.weight"
    ) as rejected:
        run.export(1, target, rename="llama_hf", select="graphstate/**")
    run.export(1, target, rename="llama_hf", select=_advised(rejected.value))
    found = load_file(tmp_path / "x" / "model.safetensors")
    assert _shapes_of_hugging_face(tied=True).keys() == found.keys()


@pytest.mark.parametrize(
    "table", ["llama_hf", [["nothing", "x"]], {"model": "m", "rules": [["no", "x"]]}]
)
@pytest.mark.parametrize("target", ["safetensors:{}/x", "npz:{}/x.npz"])
def test_a_table_of_which_no_rule_matches_is_rejected(
    target: str, table: Any, saved: Save, tmp_path: Path
) -> None:
    opened = saved("memory://", {"a": {"b": np.ones(3)}})

    with pytest.raises(store.InvalidRequestError, match=r"got 'a\.b' and no match"):
        opened.export(target.format(tmp_path), rename=table)
    assert [] == list(tmp_path.iterdir())


def test_a_rule_without_effect_is_logged_if_leaves_keep_their_names(
    saved: Save, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened = saved("memory://", {"a": np.ones(3), "b": np.ones(3)})

    with caplog.at_level(logging.WARNING):
        report = opened.export(f"npz:{tmp_path}/1.npz", rename=[["a", "c"], ["B", "d"]])
        opened.export(f"npz:{tmp_path}/2.npz", rename=[["a", "c"], ["b|B", "d"]])

    assert (2, 1) == (report.leaf_count, report.renamed_count)
    (message,) = (r.getMessage() for r in caplog.records if "rename" in r.getMessage())
    assert "rename=: no leaf has a name that rule 1 matches: 'B'" in message


def test_the_first_rule_that_matches_the_whole_name_applies() -> None:
    table = parse_table([["b.*", "first"], ["(a|b)c", r"\1"], ["c", "no"]], "rules")

    names = [table.rename(name).name for name in ("bc", "ac", "acc", "c")]

    assert ["first", "a", "acc", "no"] == names


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ({}, "expected a list of rules, or .*, got {}"),
        ([], "expected a list of rules, or .*, got .."),
        ({"model": "m", "rules": [["a", "b"]], "x": 1}, "expected a list of rules"),
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
        parse_table(rules, "rules")


def test_a_missing_table_and_a_damaged_file_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("[" * 100_000)

    with pytest.raises(store.InvalidRequestError, match="the name of a table"):
        read_table("no_such_table")
    with pytest.raises(store.InvalidRequestError, match="expected JSON"):
        read_table(tmp_path / "bad.json")


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
