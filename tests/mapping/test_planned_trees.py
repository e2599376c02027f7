"""Drawn rules make of drawn trees what NumPy makes of the same arrays."""

import math
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storesvc.format.grids import Region, whole
from storesvc_client._mapping import expressions
from storesvc_client._values import places
from tests.mapping.drawn import Array, DrawnMapping, build, build_all, draw_region, plan
from tests.support.examples import examples, soaked

randoms = st.integers(0, 2**32).map(Random)


@given(randoms)
@settings(max_examples=examples(150))
def test_rules_make_what_numpy_makes(random: Random) -> None:
    check_drawn_mapping(random)


@pytest.mark.parametrize("part", soaked(range(5), every=5))
@given(randoms)
@settings(max_examples=300)
def test_many_rules_make_what_numpy_makes(part: int, random: Random) -> None:
    del part
    check_drawn_mapping(random)


def check_drawn_mapping(random: Random) -> None:
    drawn = DrawnMapping(random)

    mapped = plan(drawn.rules, drawn.arrays)

    found = build_all(mapped, drawn.arrays)
    assert drawn.wanted.keys() == found.keys()
    ordered = [drawn.arrays[key] for key in sorted(drawn.arrays)]
    repeats = "'repeat'" in str(drawn.rules)
    for each in mapped.leaves:
        key, shape = each.leaf.key, each.leaf.shape
        assert drawn.wanted[key].dtype.name == each.leaf.dtype
        assert shape == drawn.wanted[key].shape
        np.testing.assert_array_equal(drawn.wanted[key], found[key])
        if math.prod(shape):
            region = draw_region(random, shape)
            part, requested = build(each.expression, ordered, region)
            np.testing.assert_array_equal(cut(drawn.wanted[key], region), part)
            assert repeats or requested <= part.size


def cut(array: Array, region: Region) -> Array:
    index: tuple[Any, ...] = tuple(slice(*each) for each in region)
    found: Array = array[(*index, ...)]
    return found


@pytest.mark.parametrize("runs", [1, 2, 5])
@given(randoms)
@settings(max_examples=examples(30))
def test_a_region_of_too_many_ranges_is_covered_by_fewer(
    runs: int, random: Random
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expressions, "MAX_RUNS", runs)
        drawn = DrawnMapping(random)
        mapped = plan(drawn.rules, drawn.arrays)
        ordered = [drawn.arrays[key] for key in sorted(drawn.arrays)]
        for each in mapped.leaves:
            if math.prod(each.leaf.shape):
                region = draw_region(random, each.leaf.shape)
                part, _ = build(each.expression, ordered, region)
                wanted = cut(drawn.wanted[each.leaf.key], region)
                np.testing.assert_array_equal(wanted, part)


def test_a_rename_passes_its_leaf_on_as_it_is_stored() -> None:
    arrays = {"a/w": np.ones((4, 6), np.float32)}

    (found,) = plan([{"from": "a/{x}", "to": "b/{x}"}], arrays).leaves

    assert "b/w" == found.leaf.key
    assert isinstance(found.expression, expressions.Source)
    assert (2, 3) == found.leaf.chunk_shape


@pytest.mark.parametrize(
    "operation",
    [
        {"permute_heads": {"axis": 1, "heads": 32, "from": "halves"}},
        {"permute_heads": {"axis": 1, "heads": 32, "from": "interleaved"}},
        {"permute_heads": {"axis": 0, "heads": 8, "from": "halves"}},
        {"deinterleave": {"axis": 1, "parts": 2}},
    ],
)
def test_many_small_ranges_go_to_their_place_in_one_copy(operation: Any) -> None:
    """However many heads or parts there are."""
    name, *_ = operation
    to = ["x", "y"] if name == "deinterleave" else "x"
    rule = {"from": "w", "to": to, "operations": [operation]}

    for each in plan([rule], {"w": np.zeros((64, 4096), np.float16)}).leaves:
        place = places.Place.of_array(each.leaf.shape, 2)
        region = whole(each.leaf.shape)
        ((one, _, _),) = each.expression.destinations(region, place)
        assert isinstance(one, expressions.Reshape)
        assert one.axis_sizes


def test_a_default_is_made_of_nothing() -> None:
    rule = {"default": {"shape": [2, 3], "dtype": "bfloat16", "value": 0.5}, "to": "x"}

    mapped = plan([rule], {})

    assert [(2, 3), "bfloat16"] == [mapped.tree.leaves[0].shape, "bfloat16"]
    values, requested = build(mapped.leaves[0].expression, [], ((0, 1), (0, 3)))
    assert 0 == requested
    assert [[0.5] * 3] == values.tolist()


def test_tied_leaves_are_made_of_the_same_one() -> None:
    arrays = {"embed": np.arange(6.0).reshape(2, 3)}
    rule = {"from": "embed", "to": ["in", "out"], "operations": [{"transpose": [1, 0]}]}

    found = build_all(plan([rule], arrays), arrays)

    np.testing.assert_array_equal(arrays["embed"].T, found["in"])
    np.testing.assert_array_equal(arrays["embed"].T, found["out"])


@given(randoms)
@settings(max_examples=examples(60))
def test_elements_are_copied_in_any_order_of_axes(random: Random) -> None:
    shape = [random.choice([1, 2, 5, 130, 300]) for _ in range(random.randint(0, 3))]
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    array = array.transpose(random.sample(range(len(shape)), len(shape)))
    if shape and random.random() < 0.5:
        array = array[..., ::2]
    into = np.zeros(array.shape, random.choice([np.float32, np.float64]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(places, "PACKED_BYTES", random.choice([0, 256 << 10]))
        patch.setattr(places, "ALIASED_BYTES", random.choice([1, 1 << 10]))
        places.copy_elements(into, array)

    np.testing.assert_array_equal(array, into)


def test_the_time_of_a_plan_grows_with_its_operations_alone() -> None:
    """Each of these would double it otherwise, and a document may have 32."""
    operations = [{"transpose": [1, 0]}, {"reshape": [-1, 2]}] * 16
    rule = {"from": "w", "to": "v", "operations": operations}

    mapped = plan([rule], {"w": np.ones((4, 2), np.float32)})

    assert (4, 2) == mapped.leaves[0].leaf.shape
