"""Leaf tables: what is packed is unpacked, and nothing else gets through."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storesvc.format.chunks import InvalidChunksError, unpack_sums
from storesvc.format.dtypes import DTYPES
from storesvc.format.trees import (
    MAX_STRUCTURE_BYTES,
    InvalidTreeError,
    Leaf,
    SavedSharding,
    Tree,
    pack_leaves,
    unpack_leaves,
)
from storesvc_proto.v1 import tree_pb2 as pb

SHARDINGS = st.none() | st.builds(
    SavedSharding,
    axis_names=st.just(("a", "b")),
    axis_sizes=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    spec=st.sampled_from([(), ((),), (("a",),), (("b", "a"),), (("a",), ("b",))]),
)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    keys = draw(st.sets(st.text("abc", min_size=1, max_size=3), max_size=6))
    leaves = []
    for key in sorted(keys):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        leaves.append(
            Leaf(
                key=key,
                path_kinds="k",
                kind=pb.LEAF_KIND_ARRAY,
                dtype=draw(st.sampled_from(sorted(DTYPES))),
                shape=shape,
                chunk_shape=tuple(draw(st.integers(1, 4)) for _ in shape),
                sharding=draw(SHARDINGS) if len(shape) > 1 else None,
            )
        )
    return Tree(tuple(leaves), draw(st.binary(max_size=3)))


@given(tree=trees())
def test_a_packed_tree_is_unpacked(tree: Tree) -> None:
    table = pb.LeafTable.FromString(b"".join(pack_leaves(tree)))

    assert tree == unpack_leaves(table)


LEAF = Leaf(
    key="x",
    path_kinds="k",
    kind=pb.LEAF_KIND_ARRAY,
    dtype="int8",
    shape=(3,),
    chunk_shape=(3,),
)


def test_a_tree_of_many_parts_is_unpacked() -> None:
    keys = sorted(f"leaf-{i}" for i in range(10_000))
    tree = Tree(tuple(replace(LEAF, key=key) for key in keys))
    parts = list(pack_leaves(tree))

    assert len(parts) > 1
    assert tree == unpack_leaves(pb.LeafTable.FromString(b"".join(parts)))


def test_a_structure_of_many_parts_is_unpacked() -> None:
    tree = Tree((), bytes(range(256)) * (3 << 12))
    parts = list(pack_leaves(tree))

    assert len(parts) > 2
    assert tree == unpack_leaves(pb.LeafTable.FromString(b"".join(parts)))


def test_a_structure_past_the_limit_is_rejected() -> None:
    table = pb.LeafTable(structure=[b"x" * MAX_STRUCTURE_BYTES, b"x"])

    with pytest.raises(InvalidTreeError, match="structure: expected at most"):
        unpack_leaves(table)


def table() -> pb.LeafTable:
    """A good one, of a kernel and a PRNG key."""
    return pb.LeafTable(
        key=["a/0/kernel", "rng"],
        path_kinds=["kia", "k"],
        kind=[pb.LEAF_KIND_ARRAY, pb.LEAF_KIND_PRNG_KEY],
        dtype=[0, 1],
        dtypes=["float32", "uint32"],
        rank=[2, 1],
        shape=[4, 6, 2],
        chunk_shape=[4, 3, 2],
        sharding=[0, 0],
        prng_impl=[0, 1],
        prng_impls=["threefry2x32"],
    )


def set_to(column: str, row: int, value: object) -> Callable[[pb.LeafTable], None]:
    def change(changed: pb.LeafTable) -> None:
        getattr(changed, column)[row] = value

    return change


def in_order(
    *changes: Callable[[pb.LeafTable], None],
) -> Callable[[pb.LeafTable], None]:
    def change(changed: pb.LeafTable) -> None:
        for each in changes:
            each(changed)

    return change


def longer(column: str, value: object) -> Callable[[pb.LeafTable], None]:
    return lambda changed: getattr(changed, column).append(value)


BROKEN = {
    "a column is short": (longer("key", "z"), "column path_kinds: expected 3 rows"),
    "keys are not in order": (set_to("key", 1, "a"), "ascending"),
    "a key is no key": (set_to("key", 1, "x%zz"), "not an escape"),
    "a key is an ancestor": (set_to("key", 1, "a/0/kernel/x"), "is below the leaf"),
    "kinds do not fit": (set_to("path_kinds", 0, "ki"), "do not fit its key"),
    "kinds are unknown": (set_to("path_kinds", 0, "kix"), "do not fit its key"),
    "an index is no integer": (set_to("path_kinds", 0, "iia"), "do not fit its key"),
    "the kind is unknown": (set_to("kind", 0, 99), "expected a known kind, got 99"),
    "no kind": (set_to("kind", 0, 0), "expected a known kind, got 0"),
    "no such dtype": (set_to("dtype", 0, 2), "column dtype: index 2 has no entry"),
    "the dtype is unknown": (set_to("dtypes", 0, "object"), "dtypes of the format"),
    "shapes are short": (set_to("rank", 0, 3), "expected 4 entries each"),
    "a size is negative": (set_to("shape", 0, -1), "negative or 0"),
    "a chunk is empty": (set_to("chunk_shape", 0, 0), "negative or 0"),
    "a leaf is too large": (set_to("shape", 0, 2**62), "at most 2882303761517117"),
    "a leaf without elements is": (
        in_order(set_to("shape", 0, 2**61), set_to("shape", 1, 0)),
        "each size of 0 counted as 1",
    ),
    "a chunk is too large": (set_to("chunk_shape", 0, 2**40), "chunks of at most"),
    "no such sharding": (set_to("sharding", 0, 1), "column sharding: index 1"),
    "a PRNG without keys": (set_to("prng_impl", 0, 1), "and for nothing else"),
    "keys without a PRNG": (set_to("prng_impl", 1, 0), "and for nothing else"),
    "an unknown PRNG": (set_to("prng_impls", 0, "os.system"), "one of threefry2x32"),
    "key data of another PRNG": (set_to("prng_impls", 0, "rbg"), r"\(..., 4\) uint32"),
    "a scalar with a shape": (set_to("kind", 0, 3), "expected a scalar"),
    "a number of no Python": (set_to("kind", 0, 4), "expected a scalar"),
}


@pytest.mark.parametrize(("change", "match"), BROKEN.values(), ids=list(BROKEN))
def test_a_table_that_contradicts_itself_is_rejected(
    change: Callable[[pb.LeafTable], None], match: str
) -> None:
    changed = table()
    unpack_leaves(changed)
    change(changed)

    with pytest.raises(InvalidTreeError, match=match):
        unpack_leaves(changed)


def test_more_chunks_than_an_array_can_count_are_counted() -> None:
    leaf = replace(LEAF, shape=(2**62,), chunk_shape=(1,))
    three = Tree(tuple(replace(leaf, key=key) for key in "xyz"))

    assert 3 * 2**62 == three.chunk_count
    with pytest.raises(InvalidChunksError, match="got 0 checksums"):
        unpack_sums(pb.ChunkTable(), count=2**62)
