"""Foreign chunks become chunks of ours: each is within one or consists of several."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storesvc.format import grids
from storesvc.format.trees import Leaf, Tree
from storesvc_client._foreign import source
from storesvc_client._foreign.source import plan_units, stored_tree
from storesvc_proto.v1 import tree_pb2 as pb

SMALL = {"MAX_CHUNK_BYTES": 256, "MIN_CHUNK_BYTES": 64, "MIN_STRIDED_BYTES": 16}


def index_of(region: grids.Region) -> Any:
    """Returns the index of a region."""
    return (*(slice(start, stop) for start, stop in region), ...)


def inside_of(region: grids.Region) -> Any:
    """Returns the index of its elements in an array that begins with them."""
    return (*(slice(0, stop - start) for start, stop in region), ...)


def leaf(key: str, shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> Leaf:
    return Leaf(
        key=key,
        path_kinds="k",
        kind=pb.LEAF_KIND_ARRAY,
        dtype="float32",
        shape=shape,
        chunk_shape=chunk_shape,
    )


@st.composite
def foreign_leaves(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    rank = draw(st.integers(0, 3))
    shape = draw(st.tuples(*[st.integers(0, 40)] * rank))
    chunk = draw(st.tuples(*[st.integers(1, 50)] * rank))
    return shape, chunk


@pytest.fixture(scope="module", autouse=True)
def small_chunks() -> Iterator[None]:
    """Shrinks the limits, so that small arrays have many chunks."""
    patch = pytest.MonkeyPatch()
    for name, value in SMALL.items():
        patch.setattr(grids, name, value)
    patch.setattr(source, "MAX_CHUNK_BYTES", SMALL["MAX_CHUNK_BYTES"])
    caches = [grids.choose_chunk_shape, source._chunk_shape]
    for cached in caches:
        cached.cache_clear()
    yield
    patch.undo()
    for cached in caches:
        cached.cache_clear()


@given(st.lists(foreign_leaves(), min_size=1, max_size=4))
def test_units_hold_every_chunk_once_and_each_reads_its_own_elements(
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    foreign = Tree(tuple(leaf(f"x{i}", *shape) for i, shape in enumerate(shapes)))
    stored = stored_tree(foreign)
    wholes = [
        np.arange(math.prod(x.shape), dtype=np.float32).reshape(x.shape) + 1
        for x in foreign.leaves
    ]
    chunks: dict[int, bytes] = {}

    for unit in plan_units(foreign, stored):
        memory = np.zeros(unit.size, np.uint8)
        for read in unit.reads:
            size = math.prod(read.shape) * 4
            view = memory[read.start : read.start + size].view(np.float32)
            view.reshape(read.shape)[inside_of(read.region)] = wholes[read.row][
                index_of(read.region)
            ]
        for start, slab in unit.slabs:
            for ordinal, at, size in slab.rows():
                assert ordinal not in chunks
                chunks[ordinal] = memory[start + at : start + at + size].tobytes()

    assert list(range(stored.chunk_count)) == sorted(chunks)
    for ordinal, data in chunks.items():
        row, within = stored.locate(ordinal)
        grid = stored.grids[row]
        expected = np.zeros(grid.chunk_shape, np.float32)
        region = grid.region(within)
        expected[inside_of(region)] = wholes[row][index_of(region)]
        assert expected.tobytes() == data


@given(foreign_leaves())
def test_each_foreign_chunk_is_within_one_unit(
    shape: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    foreign = Tree((leaf("x", *shape),))
    reads: Counter[int] = Counter()

    for unit in plan_units(foreign, stored_tree(foreign)):
        for read in unit.reads:
            reads.update(foreign.grids[0].covering(read.region))

    assert dict.fromkeys(range(foreign.grids[0].count), 1) == reads


def test_a_step_in_shards_gets_the_chunks_of_a_save_in_these_shards() -> None:
    foreign = Tree((leaf("x", (64, 64), (32, 16)),))

    (stored,) = stored_tree(foreign).leaves

    assert grids.choose_chunk_shape((64, 64), 4, (32, 16)) == stored.chunk_shape
