"""Operations that compute make what PEFT and transformers make, in any region."""

import math
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import storesvc_client as store
from storesvc_client._mapping import arithmetic
from storesvc_client._mapping.inverses import invert_rules
from tests.mapping.drawn import (
    Array,
    Arrays,
    build,
    build_all,
    describe_tree,
    draw_region,
    plan,
)
from tests.mapping.oracles import LORA, PLACE
from tests.support.examples import examples

randoms = st.integers(0, 2**32).map(Random)


@pytest.fixture(scope="module")
def oracles() -> Arrays:
    """The arrays of ``oracles.npz``."""
    with np.load(PLACE) as found:
        return dict(found)


def view(array: Array, dtype: str) -> Array:
    return array.view(dtype) if array.dtype.kind == "u" else array


def make(rule: dict[str, Any], **arrays: Array) -> Array:
    (found,) = build_all(plan([rule | {"to": "x"}], arrays), arrays).values()
    return found


def draw_adapter(random: Random) -> tuple[dict[str, Array], Array]:
    """Draws weights and an adapter, with what NumPy makes of them, nearly."""
    rng = np.random.default_rng(random.randrange(2**32))
    lead = [random.randint(1, 3) for _ in range(random.randint(0, 2))]
    rows, columns, rank = (random.randint(1, 9) for _ in range(3))
    shapes = [(rows, columns), (rank, columns), (rows, rank)]
    drawn = [rng.normal(size=(*lead, *each)).astype(np.float32) for each in shapes]
    base, a, b = drawn
    return {"base": base, "a": a, "b": b}, base + b @ a * np.float32(0.5)


@pytest.mark.parametrize("name", LORA)
@pytest.mark.parametrize("kind", ["linear", "conv1d", "embedding"])
def test_a_merged_adapter_has_the_bits_that_peft_makes(
    oracles: Arrays, kind: str, name: str
) -> None:
    case, (base, adapter) = f"lora/{kind}/{name}", LORA[name]
    dtypes = {"base": base, "a": adapter, "b": adapter}
    arrays = {key: view(oracles[f"{case}/{key}"], dtypes[key]) for key in dtypes}
    merge: dict[str, Any] = {"scale": float(oracles[f"{case}/scale"])}
    if kind != "linear":
        merge["fan_in_fan_out"] = True

    found = make({"from": [*arrays], "operations": [{"lora_merge": merge}]}, **arrays)

    merged = view(oracles[f"{case}/merged"], base)
    assert merged.dtype == found.dtype
    if (kind, name) != ("embedding", "mixed"):
        np.testing.assert_array_equal(merged.view("u1"), found.view("u1"))
        return
    # PEFT rounds the change of an embedding, and it alone, before it is added
    wide, start, near = (x.astype(np.float64) for x in (merged, arrays["base"], found))
    largest = np.max(np.abs([start, near, wide - start]), 0)
    unit = 2.0 ** (np.floor(np.log2(largest)) - 7)
    assert (abs(wide - near) <= unit).all()
    assert (wide == near).mean() > 0.8


@given(randoms)
@settings(max_examples=examples(60))
def test_each_region_of_merged_weights_has_the_same_bits(random: Random) -> None:
    arrays, nearly = draw_adapter(random)
    rule = {
        "from": [*arrays],
        "to": "x",
        "operations": [{"lora_merge": {"scale": 0.5}}],
    }
    (leaf,) = plan([rule], arrays).leaves
    ordered = [arrays[key] for key in sorted(arrays)]
    whole, _ = build(leaf.expression, ordered)
    region = draw_region(random, leaf.leaf.shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arithmetic, "BLOCK_ELEMENTS", random.choice([1, 10, 1000]))
        part, requested = build(leaf.expression, ordered, region)

    np.testing.assert_allclose(nearly, whole, rtol=1e-4, atol=1e-4)
    assert whole[tuple(slice(*each) for each in region)].tobytes() == part.tobytes()
    rank, (rows, columns) = arrays["a"].shape[-2], part.shape[-2:]
    outer = math.prod(part.shape[:-2])
    assert outer * (rows * columns + rank * (rows + columns)) == requested


def test_a_transpose_before_a_merge_turns_all_three() -> None:
    arrays, nearly = draw_adapter(Random(3))
    arrays = {key: np.swapaxes(each, -1, -2) for key, each in arrays.items()}
    turn = {"transpose": [*range(nearly.ndim - 2), nearly.ndim - 1, nearly.ndim - 2]}
    operations = [turn, {"lora_merge": {"scale": 0.5}}, turn]

    found = make({"from": [*arrays], "operations": operations}, **arrays)

    np.testing.assert_allclose(np.swapaxes(nearly, -1, -2), found, rtol=1e-4)


@pytest.mark.parametrize(
    "spec", [P(), P("a"), P(None, "b"), P("b", "a")], ids=["none", "a", "b", "ba"]
)
def test_devices_get_the_same_bits_and_read_their_part(run: store.Run, spec: P) -> None:
    rng = np.random.default_rng(0)
    layers = {
        str(n): {
            "base": jnp.asarray(rng.normal(size=(512, 256)), jnp.bfloat16),
            "lora_a": jnp.asarray(rng.normal(size=(512, 8)), jnp.float32),
            "lora_b": jnp.asarray(rng.normal(size=(8, 256)), jnp.float32),
        }
        for n in range(3)
    }
    run.save(5, layers).result()
    turn = {"transpose": [1, 0]}
    rule = {
        "from": [f"{{n:int}}/{name}" for name in ("base", "lora_a", "lora_b")],
        "to": "w",
        "operations": [
            turn,  # to (out, in), a (rank, in), b (out, rank)
            {"lora_merge": {"scale": 2}},
            turn,
            {"stack": {"axis": 0, "by": "n"}},
        ],
    }
    mapping = run.open(5).map({"version": 1, "rules": [rule]})
    mesh = jax.make_mesh((2, 4), ("a", "b"))

    found = mapping.restore(mesh=mesh, rules=[("", P(None, *spec))])["w"]

    ((_, whole),) = mapping.read(["w"])
    assert (3, 512, 256) == found.shape
    assert whole.tobytes() == np.asarray(found).tobytes()
    one = layers["1"]
    product = np.asarray(one["lora_a"], np.float64) @ np.asarray(one["lora_b"])
    nearly = np.asarray(one["base"], np.float64) + 2 * product
    np.testing.assert_allclose(nearly, whole[1].astype(np.float64), rtol=0.01, atol=0.1)
    assert mapping.report is not None
    assert mapping.report.read_bytes <= 1.2 * run.open(5).info.stored_bytes


def test_one_rule_merges_all_layers_of_a_state_dict_of_peft() -> None:
    arrays, wanted = dict[str, Array](), dict[str, Array]()
    names = {"base": "base_layer", "a": "lora_A/default", "b": "lora_B/default"}
    for seed, layer in enumerate(("layers/0/q_proj", "layers/1/up_proj")):
        drawn, wanted[f"m/{layer}/weight"] = draw_adapter(Random(seed))
        arrays |= {f"m/{layer}/{names[x]}/weight": each for x, each in drawn.items()}
    arrays["m/norm/weight"] = wanted["m/norm/weight"] = np.ones(3, np.float32)
    rule = {
        "from": [f"{{rest*}}/{name}/weight" for name in names.values()],
        "to": "{rest}/weight",
        "operations": [{"lora_merge": {"scale": 0.5}}],
    }

    found = build_all(plan([rule], arrays, otherwise="keep"), arrays)

    assert wanted.keys() == found.keys()
    for key, array in wanted.items():
        np.testing.assert_allclose(array, found[key], rtol=1e-4, atol=1e-4)


def test_a_magnitude_of_dora_has_no_rule() -> None:
    arrays, _ = draw_adapter(Random(3))
    keys = {"base": "q/w", "a": "q/lora_A/w", "b": "q/lora_B/w"}
    stored = {keys[key]: each for key, each in arrays.items()}
    stored["q/lora_magnitude_vector/w"] = np.ones(3, np.float32)
    merge = [{"lora_merge": {"scale": 1}}]
    rule = {"from": [*keys.values()], "to": "q/w", "operations": merge}

    with pytest.raises(store.MismatchError, match="none for q/lora_magnitude_vector"):
        plan([rule], stored)


def test_blocks_of_float8_are_those_that_transformers_makes(oracles: Arrays) -> None:
    arrays = {
        "values": view(oracles["fp8/values"], "float8_e4m3fn"),
        "scales": oracles["fp8/scales"],
    }
    operation = {"dequantize": {"block": [8, 8], "to": "bfloat16"}}

    found = make({"from": [*arrays], "operations": [operation]}, **arrays)

    assert view(oracles["fp8/made"], "bfloat16").tobytes() == found.tobytes()


def test_blocks_of_mxfp4_are_those_that_transformers_makes(oracles: Arrays) -> None:
    arrays = {key: oracles[f"mxfp4/{key}"] for key in ("blocks", "scales")}
    operation = {"dequantize_mxfp4": {"to": "bfloat16"}}

    found = make({"from": [*arrays], "operations": [operation]}, **arrays)

    assert view(oracles["mxfp4/made"], "bfloat16").tobytes() == found.tobytes()


@given(randoms, st.sampled_from(["dequantize", "dequantize_mxfp4"]))
@settings(max_examples=examples(60))
def test_a_region_of_dequantized_weights_is_made_of_its_blocks(
    random: Random, name: str
) -> None:
    rng = np.random.default_rng(random.randrange(2**32))
    shape = [random.randint(1, 9) for _ in range(random.randint(1, 3))]
    if name == "dequantize":
        block = [random.randint(1, 4) for _ in shape]
        values = rng.normal(size=shape).astype(ml_dtypes.float8_e5m2)
        counts = [-(-n // size) for n, size in zip(shape, block, strict=True)]
        scales = rng.normal(size=counts).astype(np.float32)
        index = (np.arange(n) // size for n, size in zip(shape, block, strict=True))
        wanted = values.astype(np.float32) * scales[np.ix_(*index)]
        operation: dict[str, Any] = {"block": block, "to": "float32"}
    else:
        values = rng.integers(0, 256, [*shape, 16], np.uint8)
        scales = rng.integers(100, 150, shape, np.uint8)
        halves = np.stack([values & 15, values >> 4], -1).astype(np.int64)
        numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[halves % 8]
        signed = np.where(halves < 8, numbers, -numbers)
        factor = 2.0 ** (scales.astype(np.float64) - 127)
        wanted = signed * factor[..., None, None]
        wanted = wanted.reshape(*shape[:-1], -1).astype(np.float32)
        operation = {"to": "float32"}
    arrays = {"a": values, "b": scales}
    rule = {"from": ["a", "b"], "to": "x", "operations": [{name: operation}]}
    (leaf,) = plan([rule], arrays).leaves
    region = draw_region(random, leaf.leaf.shape)

    whole, _ = build(leaf.expression, [values, scales])
    part, requested = build(leaf.expression, [values, scales], region)

    np.testing.assert_array_equal(wanted, whole)
    np.testing.assert_array_equal(wanted[tuple(slice(*x) for x in region)], part)
    blocks = 1 if name == "dequantize" else 2
    assert requested <= 2 * part.size + blocks * 34 * part[..., 0].size


W = np.zeros((8, 6), np.float32)
SMALL = np.zeros((8, 6), ml_dtypes.float8_e4m3fn)
BYTES = np.zeros((8, 2, 16), np.uint8)
MERGE = {"lora_merge": {"scale": 1}}
BLOCKS = {"dequantize": {"block": [4, 4], "to": "bfloat16"}}
PACKED = {"dequantize_mxfp4": {"to": "bfloat16"}}


@pytest.mark.parametrize(
    ("operation", "arrays", "expected"),
    [
        (MERGE, [W, W[:2].T, W[:, :2].T], "expected base .out, in., a .rank, in."),
        (MERGE, [W[0], W[:2], W[:, :2]], "expected base .out, in., a .rank, in."),
        (MERGE, [W, W[:0], W[:, :0]], "expected base .out, in., a .rank, in."),
        (MERGE, [W, SMALL[:2], W[:, :2]], "expected arrays of float32, bfloat16"),
        (BLOCKS, [SMALL, W], r"expected scales \[2, 2\] of values \[8, 6\]"),
        (BLOCKS, [W, W[:2, :2]], "expected values of float8 or int8"),
        (
            {"dequantize": {"block": [4], "to": "float32"}},
            [SMALL, W],
            "expected a block of 2 sizes of at least 1",
        ),
        (
            {"dequantize": {"block": [4, 0], "to": "float32"}},
            [SMALL, W],
            "expected a block of 2 sizes of at least 1",
        ),
        (PACKED, [BYTES, BYTES[..., :1]], r"expected blocks \(..., count, 16\)"),
        (PACKED, [BYTES[..., :8], BYTES[..., 0]], "expected blocks"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    operation: dict[str, Any], arrays: list[Array], expected: str
) -> None:
    named = dict(zip("abc", arrays, strict=False))
    rule = {"from": [*named], "to": "x", "operations": [operation]}

    with pytest.raises(store.MismatchError, match=expected):
        plan([rule], named)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"operations": [MERGE]}, "lora_merge: expected 3 keys in from, got 2"),
        ({"operations": [{"lora_merge": {}}]}, "got no scale"),
        ({"operations": [{"lora_merge": {"scale": math.nan}}]}, "a number from"),
        ({"operations": [{"lora_merge": {"scale": 2**200}}]}, "a number from"),
        ({"operations": [{"dequantize": {"to": "int8"}}]}, "got no block"),
        (
            {"operations": [{"lora_merge": {"scale": 1, "fan_in_fan_out": 1}}]},
            "expected true or false",
        ),
    ],
)
def test_rules_that_cannot_fit_are_refused(rule: dict[str, Any], expected: str) -> None:
    with pytest.raises(store.InvalidRequestError, match=expected):
        plan([{"from": ["a", "b"], "to": "x"} | rule], {"a": W, "b": W})


def test_what_computes_has_no_way_back() -> None:
    arrays = {"a": W, "b": W[:2], "c": W[:, :2]}
    rule = {"from": [*arrays], "to": "x", "operations": [MERGE]}

    mapped = plan([rule], arrays)

    with pytest.raises(store.InvalidRequestError, match="lora_merge computes, and"):
        invert_rules(mapped, describe_tree(arrays))
