"""Each region of a leaf gets its own elements, for every layout of buffers."""

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storesvc.format.checksums import crc32c, digest
from storesvc.format.chunks import ChunkLocations, Sums
from storesvc.format.grids import Grid, Region, part, whole
from storesvc.format.manifests import Manifest
from storesvc.format.trees import Leaf, Tree
from storesvc_client._chunks.buffers import (
    Buffer,
    Group,
    Segment,
    Span,
    plan_buffer_layout,
    plan_part_layout,
)
from storesvc_client._restore.assembly import Assembly
from storesvc_client._values.places import Place
from storesvc_client.errors import LimitError
from storesvc_proto.v1 import tree_pb2 as pb
from tests.support.examples import examples


def a_manifest(
    values: Any, chunk_shape: tuple[int, ...], *others: Any
) -> tuple[Manifest, list[bytes]]:
    """A manifest of leaves of one shape, and their chunks as they are stored."""
    stored, rows, leaves = list[bytes](), list[tuple[int, int, bytes]](), list[Leaf]()
    for number, own in enumerate((values, *others)):
        leaf = Leaf(
            key=f"x{number}",
            path_kinds="k",
            kind=pb.LEAF_KIND_ARRAY,
            dtype=own.dtype.name,
            shape=own.shape,
            chunk_shape=chunk_shape,
        )
        leaves.append(leaf)
        for within in range(leaf.grid.count):
            chunk = np.full(chunk_shape, 77, own.dtype)
            held = leaf.grid.region(within)
            whole_chunk = tuple(
                (p, p + n) for (p, _), n in zip(held, chunk_shape, strict=True)
            )
            part(chunk, whole_chunk, held)[...] = part(own, whole(own.shape), held)
            data = chunk.tobytes()
            rows.append((len(stored), crc32c(data), digest(data)))
            stored.append(data + crc32c(data).to_bytes(4, "little"))
    places = ChunkLocations.of_rows([("f", 0, len(data)) for data in stored])
    return Manifest(Tree(tuple(leaves)), Sums.of_rows(rows), places), stored


@st.composite
def leaves_and_regions(
    draw: st.DrawFn,
) -> tuple[tuple[int, ...], tuple[int, ...], list[Region]]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    chunk_shape = tuple(draw(st.integers(1, max(1, n))) for n in shape)
    if draw(st.booleans()):  # as shards: the first dimension in even parts
        parts = draw(st.integers(1, 4))
        cut = sorted(draw(st.sets(st.integers(0, 9), max_size=parts)))
        bounds = [0, *cut, *shape[:1]]
        regions = [
            ((min(a, shape[0]), min(b, shape[0])), *whole(shape[1:]))
            for a, b in pairwise(bounds)
            if shape and a < b
        ]
        return shape, chunk_shape, list(dict.fromkeys(regions))
    count = draw(st.integers(1, 3))
    spans = [st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in shape]
    drawn = [tuple((a, b) for a, b in map(draw, spans)) for _ in range(count)]
    return shape, chunk_shape, list(dict.fromkeys(drawn))


def copy_pieces(assembly: Assembly, ordinal: int, elements: Any, piece: int) -> None:
    """Copies a chunk in pieces of so many bytes."""
    for at, end, into in assembly.pieces(ordinal, piece):
        if into is not None:
            into[...] = elements[at:end]
        else:
            assembly.copy_elements(ordinal, elements[at:end], at)


@settings(max_examples=examples(300), deadline=None)
@given(leaves_and_regions(), st.integers(1, 40))
def test_every_region_gets_its_elements_in_any_order_of_chunks(
    drawn: tuple[tuple[int, ...], tuple[int, ...], list[Region]], piece: int
) -> None:
    shape, chunk_shape, regions = drawn
    values = np.arange(math.prod(shape), dtype=np.int16).reshape(shape)
    manifest, stored = a_manifest(values, chunk_shape)

    for in_pieces in (True, False):
        found: dict[Region, Any] = {}

        def keep(buffers: Iterable[Buffer], found: dict[Region, Any] = found) -> None:
            for buffer in buffers:
                found.update(zip(buffer.regions, buffer.arrays, strict=True))

        assembly = Assembly(manifest, [(0, regions)], name="x", place=keep)
        for ordinal in assembly.missing:
            data = stored[ordinal]
            if in_pieces:
                for at in range(0, len(data), piece):
                    assembly.add(ordinal, at, memoryview(data)[at : at + piece])
                continue
            assembly.begin([ordinal])
            elements = np.frombuffer(data[:-4], np.uint8)
            assembly.check(ordinal, crc32c(data[:-4]), data[-4:])
            copy_pieces(assembly, ordinal, elements, piece)
            assembly.finish([ordinal])

        assert [] == assembly.missing
        assert set(regions) == set(found)
        for region, array in found.items():
            expected = part(values, whole(shape), region)
            assert expected.shape == array.shape
            assert np.array_equal(expected, array)


def test_leaves_share_copies_of_rows_only_if_they_share_a_layout() -> None:
    shape, left, right = (8, 6), ((0, 8), (0, 2)), ((0, 8), (1, 6))
    leaves = [np.arange(48, dtype=np.int16).reshape(shape) + 100 * n for n in range(3)]
    wanted = [left, right, left]
    manifest, stored = a_manifest(leaves[0], (4, 6), *leaves[1:])
    found: dict[int, Any] = {}

    def keep(buffers: Iterable[Buffer]) -> None:
        found.update({each.row: each.arrays[0] for each in buffers})

    each = [(row, [region]) for row, region in enumerate(wanted)]
    assembly = Assembly(manifest, each, name="x", place=keep)
    for ordinal in assembly.missing:
        assembly.begin([ordinal])
        elements = np.frombuffer(stored[ordinal][:-4], np.uint8)
        copy_pieces(assembly, ordinal, elements, 24)  # two rows
        assembly.finish([ordinal])

    for row, region in enumerate(wanted):
        assert np.array_equal(part(leaves[row], whole(shape), region), found[row])


def test_chunks_that_are_finished_together_hand_over_each_buffer_once() -> None:
    leaves = [np.arange(12, dtype=np.int16) + 100 * n for n in range(3)]
    manifest, _ = a_manifest(leaves[0], (6,), *leaves[1:])  # each has two chunks
    handed: list[list[int]] = []

    def keep(buffers: Iterable[Buffer]) -> None:
        handed.append([each.row for each in buffers])

    assembly = Assembly(
        manifest, [(row, [((0, 12),)]) for row in range(3)], name="x", place=keep
    )
    assembly.begin(range(6))

    assert 2 * 24 == assembly.finish([0, 2, 1, 3, 4])
    assert [[0, 1]] == handed
    with pytest.raises(KeyError):
        assembly.finish([5, 4])  # 4 is complete
    assert ([5], 24) == (assembly.missing, assembly.held_bytes)
    assert 24 == assembly.finish([5])
    assert [[0, 1], [2]] == handed


@settings(max_examples=examples(1_500), deadline=None)
@given(st.data())
def test_axes_of_a_leaf_may_be_divided_and_in_another_order(
    data: st.DataObject,
) -> None:
    most = data.draw(st.sampled_from([1, 3]))  # 1: only the order changes
    sizes = tuple(
        tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=most)))
        for _ in range(data.draw(st.integers(1, 3)))
    )
    shape = tuple(map(math.prod, sizes))
    chunk_shape = tuple(data.draw(st.integers(1, n)) for n in shape)
    divided = tuple(chain.from_iterable(sizes))
    ends = st.tuples(*(st.integers(0, n - 1) for n in divided))
    starts, stops = data.draw(ends), data.draw(ends)
    region = tuple(
        (min(a, b), max(a, b) + 1) for a, b in zip(starts, stops, strict=True)
    )
    axes = data.draw(st.permutations(range(len(divided))))
    values = np.arange(math.prod(shape), dtype=np.int16).reshape(shape)
    expected = part(values.reshape(divided), whole(divided), region).transpose(axes)
    place = Place.of_array(expected.shape, 2).transpose(np.argsort(axes).tolist())
    manifest, stored = a_manifest(values, chunk_shape)
    axes_of_parts = () if most == 1 else sizes
    part_of_leaf = Segment(region=region, place=place, sizes=axes_of_parts)
    layout = plan_part_layout(manifest.tree.grids[0], [(0, part_of_leaf)])
    (count,) = (group.chunk_count for group in layout.groups)
    holds = whole(expected.shape)
    own = Segment(
        region=holds, place=Place.of_array(expected.shape, 2), regions=(holds,)
    )
    group = Group(
        segments=(replace(own, inside=(own.place,)),),
        regions=(holds,),
        size_bytes=expected.nbytes,
        chunk_count=count,
    )
    piece = data.draw(st.integers(1, 40))

    for in_pieces in (True, False):
        buffer, found = Buffer(0, group, values.dtype), list[Any]()

        def keep(buffers: Iterable[Buffer], found: list[Any] = found) -> None:
            found.extend(array for buffer in buffers for array in buffer.arrays)

        assembly = Assembly(
            manifest,
            [],
            shared=[(0, layout, [buffer])],
            name="x",
            place=keep,
        )
        for ordinal in assembly.missing:
            assembly.begin([ordinal])
            elements = np.frombuffer(stored[ordinal][:-4], np.uint8)
            held = manifest.tree.grids[0].region(ordinal)
            if not in_pieces:
                array = np.ascontiguousarray(part(values, whole(shape), held))
                assembly.copy_region(ordinal, held, array)
            else:
                copy_pieces(assembly, ordinal, elements, piece)
            assembly.finish([ordinal])

        (array,) = found
        assert np.array_equal(expected, array)
    needed = {
        ordinal
        for ordinal in range(manifest.tree.chunk_count)
        if np.isin(
            expected,
            part(values, whole(shape), manifest.tree.grids[0].region(ordinal)),
        ).any()
    }
    assert needed == {*layout.chunks.tolist()}


def test_a_chunk_of_adjacent_shards_is_one_contiguous_range() -> None:
    grid = Grid((64, 32), (64, 32), 4)
    shards = [((n, n + 8), (0, 32)) for n in range(0, 64, 8)]

    layout = plan_buffer_layout(grid, shards)

    assert [0] == layout.chunks.tolist()
    assert isinstance(layout.goal(0).goes, Span)


def test_shards_are_padded_to_the_alignment_of_xla() -> None:
    grid = Grid((2, 100_001), (2, 100_001), 1)

    (group,) = plan_buffer_layout(
        grid, [((0, 1), (0, 100_001)), ((1, 2), (0, 100_001))]
    ).groups

    assert [0, 0] == [segment.place.start % 64 for segment in group.segments]
    assert 2 == len(group.segments)


def test_large_regions_are_handed_over_one_by_one() -> None:
    grid = Grid((8, 40 << 20), (1, 1 << 20), 1)
    regions = [((n, n + 1), (0, 40 << 20)) for n in range(8)]

    assert 8 == len(plan_buffer_layout(grid, regions).groups)


def test_whole_rows_are_read_into_their_place_and_the_rest_is_copied() -> None:
    values = np.arange(32, dtype=np.int16).reshape(8, 4)
    manifest, _ = a_manifest(values, (8, 4))
    regions: list[Region] = [((0, 3), (0, 4)), ((5, 7), (0, 4)), ((7, 8), (0, 2))]
    assembly = Assembly(manifest, [(0, regions)], name="x", place=print)
    assembly.begin([0])

    found = [
        (start, stop, memory is not None)
        for start, stop, memory in assembly.pieces(0, 40)
    ]

    assert [(0, 24, True), (24, 40, False), (40, 56, True), (56, 64, False)] == found


def test_each_thread_hears_that_there_is_no_memory() -> None:
    """The second one finds no buffer of the first one's."""

    def refuse(size_bytes: int) -> Any:
        raise MemoryError(size_bytes)

    manifest, stored = a_manifest(np.arange(8, dtype=np.int16), (4,))
    assembly = Assembly(
        manifest, [(0, [((0, 8),)])], name="x", place=print, allocate=refuse
    )
    for ordinal in assembly.missing:
        with pytest.raises(LimitError, match="expected to allocate 16 bytes"):
            assembly.add(ordinal, 0, memoryview(stored[ordinal]))
