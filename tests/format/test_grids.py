"""Chunk grids: sizes, alignment, and cover."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storesvc.format.grids import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    MIN_STRIDED_BYTES,
    Grid,
    choose_chunk_shape,
)


@st.composite
def sharded(draw: st.DrawFn) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """A shape, the bytes of an element, and the shape of its shards."""
    rank = draw(st.integers(0, 4))
    shards = [draw(st.integers(0, 5000)) for _ in range(rank)]
    counts = [draw(st.sampled_from([1, 1, 2, 4, 8])) for _ in range(rank)]
    shape = tuple(n * c for n, c in zip(shards, counts, strict=True))
    return shape, draw(st.sampled_from([1, 2, 4, 8, 16])), tuple(shards)


@given(sharded())
def test_chunks_are_neither_too_large_nor_needlessly_small(
    case: tuple[tuple[int, ...], int, tuple[int, ...]],
) -> None:
    shape, itemsize, shards = case
    grid = Grid(shape, choose_chunk_shape(shape, itemsize, shards), itemsize)

    assert all(n >= 1 for n in grid.chunk_shape)
    assert grid.chunk_bytes <= MAX_CHUNK_BYTES
    whole = math.prod(max(1, n) for n in shape) * itemsize
    assert grid.chunk_bytes * 4 >= min(MIN_STRIDED_BYTES, whole)
    if shards and shards[1:] == shape[1:]:
        assert grid.chunk_bytes * 4 >= min(MIN_CHUNK_BYTES, whole)


def test_a_chunk_is_one_run_of_its_shard() -> None:
    # fsdp over the first dimension, tp over the second: the usual kernels
    assert (1024, 4096) == choose_chunk_shape((32768, 4096), 4, (4096, 4096))
    assert (4096, 1024) == choose_chunk_shape((8192, 8192), 4, (8192, 1024))


def test_small_shards_share_a_chunk() -> None:
    assert (512, 512) == choose_chunk_shape((512, 512), 4, (64, 512))
    assert (512, 512) == choose_chunk_shape((512, 512), 4, (512, 64))


@pytest.mark.parametrize(
    ("shape", "itemsize", "shards"),
    [
        ((2048, 2560), 4, (2048, 320)),  # the last dimension over 8 devices
        ((4096, 4096), 2, (2048, 1024)),  # both dimensions, over 2 x 4 devices
        ((24, 512, 1024), 2, (24, 64, 1024)),  # a stack of layers
        ((4, 1024, 1536), 2, (4, 1024, 192)),
    ],
)
def test_shards_of_a_megabyte_whose_rows_alternate_share_no_chunk(
    shape: tuple[int, ...], itemsize: int, shards: tuple[int, ...]
) -> None:
    assert shards == choose_chunk_shape(shape, itemsize, shards)


def test_padding_at_the_edge_costs_less_than_a_row_of_chunks() -> None:
    shape = (100_003, 1024)
    grid = Grid(shape, choose_chunk_shape(shape, 4, shape), 4)

    assert grid.count * grid.chunk_bytes < grid.leaf_bytes * 1.01


@given(st.data())
def test_the_chunks_that_cover_a_region_are_those_that_hold_it(
    data: st.DataObject,
) -> None:
    rank = data.draw(st.integers(0, 3))
    shape = tuple(data.draw(st.integers(0, 12)) for _ in range(rank))
    chunk = tuple(data.draw(st.integers(1, 5)) for _ in range(rank))
    grid = Grid(shape, chunk, 1)
    region = tuple(
        tuple(sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))))
        for n in shape
    )
    owner = np.full(shape, -1)
    for number in range(grid.count):
        owner[tuple(slice(*bounds) for bounds in grid.region(number))] = number

    wanted = owner[tuple(slice(*bounds) for bounds in region)]

    assert sorted(set(wanted.ravel().tolist())) == list(grid.covering(region))  # type: ignore[arg-type]  # sorted() loses the pair
