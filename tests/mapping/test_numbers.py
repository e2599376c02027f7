"""Arithmetic with a number: what NumPy makes, in any region and on any devices."""

import math
from collections.abc import Callable
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import storesvc_client as store
from storesvc.format.dtypes import DTYPES
from storesvc_client._mapping.inverses import invert_document
from storesvc_client._mapping.rules import ARITHMETIC, check_rules
from tests.mapping.drawn import Array, build, build_all, draw_region, plan
from tests.support.examples import examples

FLOATS = [name for name in DTYPES if "float" in name]
NUMBERS = [1.0, -0.1, 3, 128**-0.5, 1e30]
ROOT = {"axis": -1, "power": 0.5}


def apply(operations: list[dict[str, Any]], array: Array) -> Array:
    rule = {"from": "a", "to": "x", "operations": operations}
    (found,) = build_all(plan([rule], {"a": array}), {"a": array}).values()
    return found


def draw_numbers(seed: int, shape: tuple[int, ...], dtype: str) -> Array:
    """Draws numbers of all sizes that a dtype has, 0 and infinities."""
    rng = np.random.default_rng(seed)
    drawn = rng.normal(size=shape) * 2.0 ** rng.integers(-20, 20, shape)
    drawn.flat[:3] = [0, np.inf, -np.inf]
    with np.errstate(all="ignore"):
        return drawn.astype(DTYPES[dtype])


def compute(name: str, array: Array, number: float) -> Array:
    """Returns what NumPy makes of each element by itself."""
    exact = np.float64 if array.dtype == np.float64 else np.float32
    operate: Callable[..., Any] = getattr(np, name)
    with np.errstate(all="ignore"):
        made = [operate(exact(each), exact(number)) for each in array.flat]
        return np.array(made, exact).astype(array.dtype).reshape(array.shape)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ARITHMETIC)
def test_each_element_is_rounded_once_to_its_dtype(name: str, dtype: str) -> None:
    array = draw_numbers(3, (4, 6), dtype)

    for number in NUMBERS:
        found = apply([{name: number}], array)

        assert array.dtype == found.dtype
        assert compute(name, array, number).tobytes() == found.tobytes()


@pytest.mark.parametrize(
    ("operand", "number"),
    [
        (ROOT, math.sqrt(6)),
        ({"axis": 0, "power": -0.5}, 4**-0.5),
        ({"axis": 1, "power": 0.5, "dtype": "bfloat16"}, 2.453125),
        ({"axis": -2, "power": 2}, 16),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_number_may_be_the_size_of_an_axis_to_a_power(
    operand: dict[str, Any], number: float, dtype: str
) -> None:
    array = draw_numbers(4, (4, 6), dtype)

    for name in ("multiply", "divide"):
        found = apply([{name: operand}], array)
        assert compute(name, array, number).tobytes() == found.tobytes()


def test_the_root_of_a_size_of_a_head_is_that_of_numpy() -> None:
    for size in range(1, 1025):
        one = np.ones((1, size), np.float32)
        found = apply([{"multiply": {"axis": 1, "power": -0.5}}], one)
        assert found[0, 0] == np.float32(1 / np.sqrt(size))


@given(
    st.integers(0, 2**32).map(Random),
    st.sampled_from(ARITHMETIC),
    st.sampled_from(FLOATS),
)
@settings(max_examples=examples(60))
def test_a_region_has_the_bits_of_the_whole_and_reads_its_elements(
    random: Random, name: str, dtype: str
) -> None:
    shape = tuple(random.randint(1, 9) for _ in range(random.randint(1, 3)))
    array = np.random.default_rng(random.randrange(2**32)).normal(size=shape)
    array = array.astype(DTYPES[dtype])
    operations = [{name: random.choice([*NUMBERS, ROOT])}, {name: 7.5}]
    (leaf,) = plan(
        [{"from": "a", "to": "x", "operations": operations}], {"a": array}
    ).leaves
    region = draw_region(random, shape)

    whole, _ = build(leaf.expression, [array])
    part, requested = build(leaf.expression, [array], region)

    assert whole[tuple(slice(*each) for each in region)].tobytes() == part.tobytes()
    assert part.size == requested


@pytest.mark.parametrize("spec", [P(), P("a"), P(None, "b"), P("b", "a")], ids=str)
def test_devices_get_the_same_bits_and_read_their_part(run: store.Run, spec: P) -> None:
    rng = np.random.default_rng(0)
    layers = {
        str(n): {"w": jnp.asarray(rng.normal(size=(512, 256)), jnp.bfloat16)}
        for n in range(3)
    }
    run.save(5, layers).result()
    rule = {
        "from": "{n:int}/w",
        "to": "w",
        "operations": [
            {"transpose": [1, 0]},
            {"multiply": {"axis": 0, "power": -0.5}},
            {"add": 1},
            {"stack": {"axis": 1, "by": "n"}},
        ],
    }
    mapping = run.open(5).map({"version": 1, "rules": [rule]})
    mesh = jax.make_mesh((2, 4), ("a", "b"))

    found = mapping.restore(mesh=mesh, rules=[("", P(spec[0] if spec else None))])["w"]

    made = [
        compute("multiply", np.asarray(x["w"]).T, 256**-0.5) for x in layers.values()
    ]
    wanted = np.stack([compute("add", each, 1) for each in made], 1)
    assert wanted.tobytes() == np.asarray(found).tobytes()
    assert mapping.report is not None
    assert mapping.report.read_bytes <= 1.2 * run.open(5).info.stored_bytes


def test_each_array_of_a_list_is_computed_by_itself() -> None:
    arrays = {key: np.full((2, 3), n, np.float32) for n, key in enumerate("ab", 1)}
    operations: list[dict[str, Any]] = [{"add": 1}, {"concatenate": {"axis": 0}}]
    rule = {"from": ["a", "b"], "to": "x", "operations": operations}

    (found,) = build_all(plan([rule], arrays), arrays).values()

    np.testing.assert_array_equal(np.repeat([2, 3], 6).reshape(4, 3), found)


@given(
    st.integers(0, 2**32),
    st.sampled_from(["multiply", "divide"]),
    st.floats(0.01, 100) | st.integers(1, 9000).map(lambda n: n**0.5),
    st.sampled_from(["float32", "bfloat16", "float16", "float64"]),
)
@settings(max_examples=examples(100))
def test_a_factor_that_is_taken_back_leaves_one_unit_in_the_last_place(
    seed: int, name: str, number: float, dtype: str
) -> None:
    array = np.random.default_rng(seed).uniform(0.1, 9, (50,)).astype(DTYPES[dtype])
    rule = {"from": "a", "to": "x", "operations": [{name: number}]}
    rules = check_rules({"version": 1, "rules": [rule]}, name="rules")
    (inverse,) = invert_document(rules)

    back = apply(inverse["operations"], apply([{name: number}], array))

    integers = f"i{array.dtype.itemsize}"
    apart = array.view(integers).astype(int) - back.view(integers).astype(int)
    assert abs(apart).max() <= (0 if math.frexp(number)[0] == 0.5 else 1)


@pytest.mark.parametrize(
    ("dtype", "operand"),
    [
        *[(dtype, 2) for dtype in ("int4", "int8", "int32", "bool", "complex64")],
        *[("float32", number) for number in (0, -0.0, 1e-60)],
        ("float32", {"axis": 2, "power": 1}),
        ("float32", {"axis": 0, "power": 1e30}),
        ("float32", {"axis": 0, "power": -1e30}),
        ("float32", {"axis": 1, "power": 8, "dtype": "float16"}),
        ("float64", {"axis": 2, "power": -0.5}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["multiply", "divide"])
def test_arrays_that_do_not_fit_are_refused(
    name: str, dtype: str, operand: object
) -> None:
    array = np.zeros((8, 6) if dtype != "float64" else (8, 6, 0), DTYPES[dtype])
    rule = {"from": "a", "to": "x", "operations": [{name: operand}]}

    with pytest.raises(store.MismatchError, match=f"{name}: expected .*, got"):
        plan([rule], {"a": array})


@pytest.mark.parametrize(
    "operand",
    [
        *[math.nan, math.inf, -math.inf, 1e39, 10**400, True, None, "2", [2]],
        *[{}, {"axis": 0}, {"axis": 0, "power": "x"}, {"axis": 0.0, "power": 1}],
        {"axis": 0, "power": math.nan},
        {"axis": 0, "power": {"axis": 0, "power": 1}},
        {"axis": 0, "power": 1, "by": 1},
        {"axis": 0, "power": 1, "dtype": "int8"},
        {"axis": 0, "power": 1, "dtype": ["float32"]},
    ],
    ids=lambda operand: str(operand)[:40],
)
@pytest.mark.parametrize("name", ARITHMETIC)
def test_what_is_no_number_is_refused(name: str, operand: object) -> None:
    rule = {"from": "a", "to": "x", "operations": [{name: operand}]}

    with pytest.raises(store.InvalidRequestError, match=f"rule 1: {name}: "):
        plan([rule], {"a": np.zeros((8, 6), np.float32)})
