"""Assignment of chunks to writers: each chunk has one, and the load is balanced."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storesvc.format.grids import MAX_CHUNK_BYTES, Grid, choose_chunk_shape
from storesvc_client._job.assignment import (
    SLACK_BYTES,
    Held,
    assign_chunks,
    holders_of_chunks,
    shared_chunk_shape,
)

MIB = 1 << 20


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], int, Held]:
    """Draws a shape, an itemsize, and the holders of each shard."""
    counts = draw(st.lists(st.integers(1, 4), max_size=3))
    shards = [draw(st.integers(1, 5) | st.integers(1, 3000)) for _ in counts]
    shape = tuple(n * c for n, c in zip(shards, counts, strict=True))
    processes = st.frozensets(st.integers(0, 3), min_size=1)
    size = int(np.prod(counts, dtype=int))
    holders = draw(st.lists(processes, min_size=size, max_size=size))
    held = Held(shard_shape=tuple(shards), counts=tuple(counts), holders=tuple(holders))
    return shape, draw(st.sampled_from([1, 4, 8])), held


@given(layouts())
def test_every_chunk_has_a_holder_and_a_bounded_size(
    layout: tuple[tuple[int, ...], int, Held],
) -> None:
    shape, itemsize, held = layout
    if np.prod(shape, dtype=float) * itemsize > 1 << 30:
        return

    chunk_shape = shared_chunk_shape(shape, itemsize, held)
    grid = Grid(shape, chunk_shape, itemsize)
    holders = holders_of_chunks(grid, held)

    assert grid.chunk_bytes <= MAX_CHUNK_BYTES
    assert grid.count == len(holders)
    assert all(holders)
    for chunk, of in enumerate(holders):
        assert of <= held_by_hand(held, grid.region(chunk))


def held_by_hand(held: Held, region: Sequence[tuple[int, int]]) -> frozenset[int]:
    """Returns the processes that hold the corners of a region, and so all shards
    between them."""
    found = frozenset(range(4))
    cells = [
        sorted({start // shard, (stop - 1) // shard})
        for (start, stop), shard in zip(region, held.shard_shape, strict=True)
    ]
    for at in np.ndindex(*map(len, cells)):
        index = tuple(cells[dim][n] for dim, n in enumerate(at))
        number = int(np.ravel_multi_index(index, held.counts)) if index else 0
        found &= held.holders[number]
    return found


def test_large_shards_are_split_and_small_ones_merged_per_process() -> None:
    pairs = tuple(frozenset({n // 2}) for n in range(8))

    large = shared_chunk_shape(
        (8 * 4096, 4096),
        4,
        Held(shard_shape=(4096, 4096), counts=(8, 1), holders=pairs),
    )
    small = shared_chunk_shape(
        (8 * 128, 1024), 4, Held(shard_shape=(128, 1024), counts=(8, 1), holders=pairs)
    )

    assert (1024, 4096) == large
    assert (64, 1024) == small


LEAVES = ((4096, 4096), (4096, 14336), (12288, 4096), (768, 3072), (384, 512))


@pytest.mark.parametrize(("before", "after"), [(3, 2), (4, 2), (8, 6), (12, 16)])
def test_chunks_are_the_same_for_another_number_of_processes(
    before: int, after: int
) -> None:
    def chunk_shape(shape: tuple[int, int], count: int) -> tuple[int, ...]:
        holders = tuple(frozenset({n}) for n in range(count))
        shards = (shape[0] // count, shape[1])
        return shared_chunk_shape(shape, 4, Held(shards, (count, 1), holders))

    leaves = [each for each in LEAVES if not each[0] % before and not each[0] % after]
    same = [
        each for each in leaves if chunk_shape(each, before) == chunk_shape(each, after)
    ]
    assert sum(a * b for a, b in same) >= 0.95 * sum(a * b for a, b in leaves)


@pytest.mark.parametrize("shape", [(128, 4096, 1536), (4096, 4096), (1939, 2142, 16)])
def test_chunks_of_a_leaf_that_is_divided_along_its_last_dimension_are_large(
    shape: tuple[int, ...],
) -> None:
    holders = tuple(frozenset({n}) for n in range(8))
    shards, counts = (*shape[:-1], shape[-1] // 8), (*[1] * (len(shape) - 1), 8)

    chunk_shape = shared_chunk_shape(shape, 2, Held(shards, counts, holders))

    grid = Grid(shape, chunk_shape, 2)
    assert grid.chunk_bytes >= 1 * MIB
    assert all(holders_of_chunks(grid, Held(shards, counts, holders)))


def test_one_holder_of_all_shards_gets_the_chunks_of_a_single_process_save() -> None:
    alone = (frozenset({0}),) * 4
    for shard in ((64, 1024), (4096, 1024), (1000, 777)):
        held = Held(shard_shape=shard, counts=(4, 1), holders=alone)
        shape = (4 * shard[0], shard[1])

        assert choose_chunk_shape(shape, 4, shard) == shared_chunk_shape(shape, 4, held)


@given(
    st.lists(
        st.tuples(
            st.frozensets(st.integers(0, 5), min_size=1), st.integers(1, 16 * MIB)
        )
    )
)
def test_each_chunk_has_a_writer_that_holds_it(
    chunks: list[tuple[frozenset[int], int]],
) -> None:
    holders, sizes = [of for of, _ in chunks], [size for _, size in chunks]

    writers = assign_chunks(holders, sizes, count=6)

    assert len(chunks) == len(writers)
    assert all(
        writer in of for writer, of in zip(writers.tolist(), holders, strict=True)
    )


@given(st.lists(st.integers(1, 16 * MIB), max_size=200), st.integers(1, 8))
def test_replicated_chunks_are_spread_evenly_over_the_writers(
    sizes: list[int], count: int
) -> None:
    everyone = frozenset(range(count))

    writers = assign_chunks([everyone] * len(sizes), sizes, count=count)

    load = np.bincount(writers, sizes, minlength=count)
    assert load.max() - load.min() <= SLACK_BYTES + max(sizes, default=0)


def test_busy_writers_get_fewer_replicated_chunks() -> None:
    holders = [frozenset({0}), *[frozenset({0, 1})] * 4]

    writers = assign_chunks(holders, [40 * MIB, *[8 * MIB] * 4], count=2)

    assert [0, 1, 1, 1, 1] == writers.tolist()
