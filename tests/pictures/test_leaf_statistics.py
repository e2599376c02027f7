"""Statistics of a leaf agree with NumPy for every dtype, and no NaN spoils them."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

import storesvc_client as store
from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import Grid, Region, part, whole
from storesvc_client._pictures import leaf_statistics as module
from storesvc_client._pictures.leaf_statistics import (
    LeafStatistics,
    leaf_statistics,
    sampled_chunks,
)
from tests.pictures.models import leaf
from tests.pictures.parsed import SVG, boxes, filled, parsed, texts, titles

BLUE = "#2b83ea"
WIDE = st.floats(allow_nan=True, allow_infinity=True)


def statistics_of(
    array: NDArray[Any], chunk: Sequence[int] = (), chunks: Sequence[int] = ()
) -> LeafStatistics:
    """Returns the statistics of an array that is read chunk by chunk."""
    info = leaf("w", array.shape, array.dtype.name, chunk_shape=chunk)
    grid = Grid(info.shape, info.chunk_shape, array.dtype.itemsize)

    def blocks() -> Iterator[tuple[Region, NDArray[Any]]]:
        for number in chunks or range(grid.count):
            region = grid.region(number)
            yield region, part(array, whole(array.shape), region)

    return leaf_statistics(info, blocks())


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype_has_the_statistics_that_numpy_computes(dtype: str) -> None:
    rng = np.random.default_rng(5)
    drawn = rng.integers(-1, 2, (6, 50))
    if dtype.startswith(("bool", "uint", "int1")):
        drawn = -np.abs(drawn) if dtype == "int1" else np.abs(drawn)
    if dtype == "float8_e8m0fnu":  # it has only powers of two
        drawn = 2 ** np.abs(drawn)
    array = drawn.astype(DTYPES[dtype])

    found = statistics_of(array, chunk=(4, 7))

    values = np.abs(array) if array.dtype.kind == "c" else array.astype(np.float64)
    assert (300, 0, 0) == (found.count, found.nan_count, found.inf_count)
    assert int((values == 0).sum()) == found.zero_count
    assert float(values.min()) == found.minimum
    assert float(values.max()) == found.maximum
    assert values.mean() == pytest.approx(found.mean)
    assert values.std() == pytest.approx(found.std)
    assert found.linear is not None
    assert found.symlog is not None
    assert 300 == sum(found.linear.counts) == sum(found.symlog.counts)


@given(hnp.arrays(np.float64, st.integers(1, 60), elements=WIDE), st.integers(1, 60))
@example(np.array([1e308, -1e308, 1e308]), 1)
@example(np.array([5e-324, 0.0, -0.0, -5e-324]), 2)
@example(np.array([np.nan, np.inf, -np.inf]), 1)
@example(np.array([-3.0, -3.0]), 1)
@example(np.array([5e-324, -1.0]), 1)
@example(np.array([-3.31381845e226]), 1)
@example(np.array([1e-310, 1e300]), 1)
@example(np.array([8e-259, 0.0]), 1)
@example(np.array([2.3e-309, 0.0]), 1)
@example(np.array([0.0, 8e-259]), 1)
@example(np.array([1e-200, 3e-200, 0.0, 0.0]), 2)
def test_no_value_of_float64_spoils_the_statistics(
    array: NDArray[np.float64], chunk: int
) -> None:
    found = statistics_of(array, chunk=(chunk,))

    finite = array[np.isfinite(array)]
    assert int(np.isnan(array).sum()) == found.nan_count
    assert int(np.isinf(array).sum()) == found.inf_count
    assert int((array == 0).sum()) == found.zero_count
    if not len(finite):
        assert [None] * 3 == [found.minimum, found.mean, found.std]
        assert found.linear is None
        return
    assert (finite.min(), finite.max()) == (found.minimum, found.maximum)
    exact = [np.longdouble(value) for value in finite]
    mean = sum(exact) / len(exact)
    std = np.sqrt(sum((value - mean) ** 2 for value in exact) / len(exact))
    peak = float(np.abs(finite).max())
    assert float(mean) == pytest.approx(found.mean, rel=1e-9, abs=peak * 1e-14)
    assert float(std) == pytest.approx(found.std, rel=1e-9, abs=peak * 1e-14)
    for histogram in (found.linear, found.symlog):
        assert histogram is not None
        assert len(finite) == sum(histogram.counts)
        assert (finite.min(), finite.max()) == (histogram.edges[0], histogram.edges[-1])
        assert all(low <= high for low, high in pairwise(histogram.edges))
        assert min(histogram.counts) >= 0
    parsed(found.histogram(scale="linear").svg)
    parsed(found.histogram().svg)


@given(
    hnp.arrays(
        np.int64,
        st.integers(1, 40),
        elements=st.integers(-(2**63), 2**63 - 1) | st.integers(-9, 9),
    )
)
def test_the_ends_of_large_integers_are_exact(array: NDArray[np.int64]) -> None:
    found = statistics_of(array, chunk=(7,))

    assert (int(array.min()), int(array.max())) == (found.minimum, found.maximum)
    assert int((array == 0).sum()) == found.zero_count


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_linear_histogram_agrees_with_numpy(dtype: str) -> None:
    values = np.random.default_rng(1).normal(size=20_000).astype(DTYPES[dtype])

    found = statistics_of(values).linear

    assert found is not None
    expected, edges = np.histogram(values.astype(np.float64), 64)
    assert edges == pytest.approx(np.array(found.edges), abs=1e-9)
    # exact for 16 bits; else each counter is spread evenly over its values
    most = 0 if dtype == "bfloat16" else 30
    assert np.abs(expected - np.array(found.counts)).max() <= most


def test_a_symmetric_log_histogram_shows_every_magnitude_of_both_signs() -> None:
    powers = 10.0 ** np.arange(-6, 1)

    found = statistics_of(np.concatenate([powers, -powers])).symlog

    assert found is not None
    assert 7 == sum(found.counts[:32]) == sum(found.counts[32:])
    assert max(found.counts) <= 2  # a linear one has 10 of 14 in the middle


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zeros_do_not_widen_a_symmetric_log_scale(dtype: str) -> None:
    values = np.linspace(1, 10, 100).astype(DTYPES[dtype])

    found = statistics_of(np.concatenate([np.zeros_like(values), values])).symlog

    assert found is not None
    assert found.unit is not None
    assert 1 <= found.unit < 1.2
    assert 100 == found.counts[0]


def test_values_that_are_not_finite_are_only_counted() -> None:
    values = np.array([1, 2, 3, np.nan, np.inf, -np.inf, np.nan], np.float32)
    array = np.stack([values, values])

    found = statistics_of(array)

    assert (4, 4, 14) == (found.nan_count, found.inf_count, found.count)
    assert (1.0, 3.0, 2.0) == (found.minimum, found.maximum, found.mean)
    assert found.means is not None
    assert (1.0, 2.0, 3.0, None, None, None, None) == found.means[0]


def test_complex_leaves_have_the_statistics_of_the_modulus() -> None:
    array = np.array([3 + 4j, 0, complex(np.nan, 1), complex(np.inf, 1)], np.complex64)

    found = statistics_of(array)

    assert (0.0, 5.0, 2.5) == (found.minimum, found.maximum, found.mean)
    assert (1, 1, 1) == (found.nan_count, found.inf_count, found.zero_count)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (1, 1), (2, 3, 4)])
def test_leaves_of_any_rank_have_statistics(shape: tuple[int, ...]) -> None:
    found = statistics_of(np.ones(shape, np.float32))

    assert math.prod(shape) == found.count
    assert (1.0 if found.count else None) == found.mean
    assert (len(shape) >= 2 and found.count > 0) == (found.means is not None)
    parsed(found.histogram().svg)
    parsed(found.heatmap().svg)


def test_block_means_agree_with_those_of_the_whole_array() -> None:
    array = np.random.default_rng(2).normal(size=(3, 100, 256)).astype(np.float32)

    found = statistics_of(array, chunk=(2, 30, 100)).means

    assert found is not None
    rows = np.arange(100) * 64 // 100
    columns = np.arange(256) // 4
    expected = [
        [array[:, rows == row][:, :, columns == column].mean() for column in range(64)]
        for row in range(64)
    ]
    assert np.array(expected) == pytest.approx(np.array(found), abs=1e-6)


def test_the_mean_of_a_block_is_that_of_its_finite_values() -> None:
    array = np.ones((128, 2))
    array[::2] = [np.nan, np.inf]

    found = statistics_of(array).means

    assert found is not None
    assert {(1.0, 1.0)} == {*found}


def test_large_blocks_are_converted_part_by_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    array = np.random.default_rng(3).normal(size=(3, 5, 40)).astype(np.float32)
    whole_array = statistics_of(array)

    monkeypatch.setattr(module, "_PART", 7)
    in_parts = statistics_of(array)

    assert whole_array.linear == in_parts.linear
    assert whole_array.means is not None
    assert in_parts.means is not None
    assert np.array(whole_array.means) == pytest.approx(np.array(in_parts.means))
    assert whole_array.std == pytest.approx(in_parts.std)
    assert 600 == in_parts.count


def test_all_chunks_are_read_if_the_budget_allows() -> None:
    info = leaf("w", (100,), "float32", chunk_shape=(10,))

    assert [*range(10)] == sampled_chunks(info, 40, 400)
    assert [] == sampled_chunks(leaf("w", (0,), "float32"), 4, 0)


def test_a_sample_is_evenly_distributed_and_within_the_budget() -> None:
    info = leaf("w", (1000,), "float32", chunk_shape=(10,))

    assert [12, 37, 62, 87] == sampled_chunks(info, 40, 199)


def test_a_budget_below_one_chunk_is_rejected() -> None:
    info = leaf("w", (1000,), "float32", chunk_shape=(10,))

    with pytest.raises(
        store.InvalidRequestError, match=r"at least one chunk, 40 .*got 39"
    ):
        sampled_chunks(info, 40, 39)


def test_a_sample_says_what_was_read() -> None:
    array = np.arange(40, dtype=np.float32)

    every, some = statistics_of(array, (10,)), statistics_of(array, (10,), [1, 3])

    assert (False, "all 40 elements") == (every.is_sample, every.sample)
    assert some.is_sample
    assert "sample of 20 elements in 2 of 4 chunks" == some.sample
    assert (10, 39) == (some.minimum, some.maximum)
    assert "<LeafStatistics of w, all 40 elements>" == repr(every)
    assert any(some.sample in text for text in texts(parsed(some.histogram().svg)))


def test_a_histogram_has_a_bar_for_each_bin_with_values() -> None:
    found = statistics_of(np.array([0.0, 0.0, 0.0, 64.0], np.float32))

    root = parsed(found.histogram(scale="linear").svg)

    tall, short = filled(root, "rect", BLUE)
    assert float(tall.attrib["height"]) == pytest.approx(
        3 * float(short.attrib["height"]), abs=0.1
    )
    assert ["0 to 1\n3 of 4", "63 to 64\n1 of 4"] == titles(root)


def test_equal_values_are_one_bar_in_the_middle() -> None:
    (bar,) = filled(parsed(statistics_of(np.full(5, 7)).histogram().svg), "rect", BLUE)

    ((left, _, right, _),) = boxes(bar)
    assert 260 == pytest.approx((left + right) / 2, abs=1)
    assert "7\n5 of 5" == bar.findtext(f"{SVG}title")


def test_a_scale_that_does_not_exist_is_rejected() -> None:
    with pytest.raises(
        store.InvalidRequestError, match=r"'linear' or 'symlog', got 'l"
    ):
        statistics_of(np.ones(1)).histogram(scale="log")  # type: ignore[arg-type]


def test_without_finite_values_pictures_say_so() -> None:
    found = statistics_of(np.full((2, 2), np.nan))

    assert ["no finite values"] == texts(parsed(found.histogram().drawing))
    assert ["no finite values"] == texts(parsed(found.heatmap().drawing))
    flat = statistics_of(np.ones(3)).heatmap()
    assert ["a heatmap needs two dimensions"] == texts(parsed(flat.drawing))


def test_a_heatmap_has_a_hue_for_each_sign_and_crosses_where_nothing_was_read() -> None:
    array = np.array([[1.0, 1.0, 0.0], [-1.0, -0.5, 0.0]])

    root = parsed(statistics_of(array, (2, 1)).heatmap().svg)
    some = parsed(statistics_of(array, (2, 1), [0, 1]).heatmap().svg)

    cells = root.iter(f"{SVG}path")
    squares = {
        (path.get("fill"), path.get("fill-opacity")): path.attrib["d"].count("M")
        for path in cells
    }
    assert {("#d9653b", "1"): 2, (BLUE, "1"): 1, (BLUE, "0.5"): 1} == squares
    (crosses,) = (one for one in some.iter(f"{SVG}path") if one.get("fill") == "none")
    assert 2 == crosses.attrib["d"].count("M") == crosses.attrib["d"].count("m")


def test_a_heatmap_of_a_large_leaf_has_few_elements() -> None:
    array = np.random.default_rng(4).normal(size=(300, 300))

    root = parsed(statistics_of(array).heatmap().svg)

    assert len([*root.iter()]) < 80
    assert "64 x 64 blocks of [300,300], all 90,000 elements" in texts(root)
