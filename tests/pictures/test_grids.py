"""Chunks and shards are drawn as a grid with a place for each."""

import math
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storesvc.format.grids import Grid
from storesvc.format.trees import SavedSharding
from storesvc_client._pictures.layer_bars import Plane, chunk_map, sharding_grid
from storesvc_client._pictures.treemap import CHANGES
from tests.pictures.parsed import HOSTILE, SVG, filled, parsed, texts, titles

CHANGED = CHANGES[-1][1]
COUNTS = st.lists(st.integers(1, 40), max_size=4)


def sharding(
    mesh: dict[str, int], *spec: str | tuple[str, ...] | None
) -> SavedSharding:
    """Returns a sharding, as ``PartitionSpec`` has it."""
    return SavedSharding(
        axis_names=tuple(mesh),
        axis_sizes=tuple(mesh.values()),
        spec=tuple((axes,) if isinstance(axes, str) else axes or () for axes in spec),
    )


@given(COUNTS, st.integers(1, 200), st.data())
def test_each_cell_of_a_grid_is_in_one_cell_of_the_picture(
    counts: list[int], most: int, data: st.DataObject
) -> None:
    plane = Plane.of(counts)
    total = math.prod(counts)
    marked = data.draw(st.sets(st.integers(0, total - 1), max_size=20))

    cells = [*plane.cells(most, marked)]

    assert 1 <= len(cells) <= most
    held = [number for cell in cells for row in cell.numbers for number in row]
    assert [*range(total)] == sorted(held)
    for cell in cells:
        inside = {number for row in cell.numbers for number in row}
        assert len(marked & inside) == cell.marked


def test_the_last_cut_axis_is_the_columns_and_the_others_are_rows() -> None:
    assert Plane(count=12, columns=4) == Plane.of((3, 4))
    assert Plane(count=12, columns=4) == Plane.of((3, 4, 1))
    assert Plane(count=24, columns=4) == Plane.of((2, 3, 4))
    assert Plane(count=5, columns=5) == Plane.of((5,))
    assert Plane(count=1, columns=1) == Plane.of(())


def test_a_vector_with_many_chunks_is_wrapped() -> None:
    assert Plane(count=100, columns=10) == Plane.of((100,))
    assert Plane(count=32, columns=8) == Plane.of((32, 1))


def test_changed_chunks_are_filled() -> None:
    root = parsed(chunk_map((8, 8), (2, 4), changed={3}))

    rectangles = [*root.iter(f"{SVG}rect")]
    assert 8 == len(rectangles)
    (changed,) = filled(root, "rect", CHANGED)
    assert rectangles[3] is changed
    assert "chunk [1,1]\n[2:4, 4:8]\nchanged" == changed.findtext(f"{SVG}title")
    assert "chunk [0,0]\n[0:2, 0:4]\nunchanged" == titles(root)[0]
    assert ["8 chunks of [2,4], 1 changed"] == texts(root)


def test_without_a_comparison_no_chunk_is_called_unchanged() -> None:
    root = parsed(chunk_map((8, 8), (2, 4)))

    assert "chunk [0,0]\n[0:2, 0:4]" == titles(root)[0]
    assert ["8 chunks of [2,4]"] == texts(root)


def test_many_chunks_are_merged_and_none_that_changed_is_lost() -> None:
    root = parsed(chunk_map((10_000, 10_000), (10, 100), changed={77_777}))

    paths = [*root.iter(f"{SVG}path")]
    assert 2 == len(paths)
    assert sum(path.attrib["d"].count("M") for path in paths) <= 2_500
    (changed,) = [path for path in paths if path.get("fill") != "currentColor"]
    assert 1 == changed.attrib["d"].count("M")
    assert "100,000 chunks of [10,100], 1 changed" in texts(root)[0]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=4), st.data()
)
def test_a_chunk_map_of_any_grid_stays_in_its_frame(
    sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    shape, chunk_shape = [n for n, _ in sizes], [c for _, c in sizes]
    count = Grid(tuple(shape), tuple(chunk_shape), 1).count
    changed = data.draw(st.sets(st.integers(0, count - 1))) if count else set[int]()

    root = parsed(chunk_map(shape, chunk_shape, changed=changed))

    assert len([*root.iter()]) < 1_300
    if not count:
        assert ["no chunks: the leaf has no elements"] == texts(root)


def test_each_block_shows_the_devices_that_held_it() -> None:
    two_axes = sharding({"data": 4, "model": 2}, "data", "model")

    root = parsed(sharding_grid((4096, 1024), two_axes))

    assert [*"01234567"] == texts(root)[:8]
    assert "[1024:2048, 512:1024]\n1 device: 3" in titles(root)
    assert "dimension 0: 4 blocks of 1,024 along data" in texts(root)


def test_replicas_of_a_block_are_on_all_devices_along_the_other_axes() -> None:
    by_columns = sharding({"data": 2, "model": 3}, None, "model")

    root = parsed(sharding_grid((4, 9), by_columns))

    assert ["0, 3", "1, 4", "2, 5"] == texts(root)[:3]
    assert "each block on 2 devices" == texts(root)[-1]


def test_several_axes_of_one_dimension_count_the_first_as_the_slowest() -> None:
    both = sharding({"x": 2, "y": 2}, ("y", "x"))

    assert [*"0213"] == texts(parsed(sharding_grid((8,), both)))[:4]


def test_a_leaf_that_is_not_split_is_one_block_on_all_devices() -> None:
    root = parsed(sharding_grid((3, 3), sharding({"x": 4})))

    assert "0-3" == texts(root)[0]
    assert "the leaf on 4 devices" == texts(root)[-1]


def test_a_leaf_without_a_mesh_says_so() -> None:
    assert ["saved without a mesh"] == texts(parsed(sharding_grid((3,), None)))


def test_a_mesh_of_thousands_of_devices_is_merged_and_one_of_millions_named() -> None:
    large = sharding({"x": 64, "y": 64}, "x", "y")
    huge = sharding({"x": 2**40}, "x")

    assert len([*ET.fromstring(sharding_grid((64, 64), large)).iter()]) < 3_200
    (text,) = texts(parsed(sharding_grid((2**40,), huge)))
    assert "1,099,511,627,776 devices is too large to draw" in text


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.lists(st.integers(0, 20), min_size=1, max_size=3),
    st.data(),
)
def test_the_blocks_of_any_sharding_are_on_each_device_once(
    sizes: list[int], shape: list[int], data: st.DataObject
) -> None:
    names = [f"axis{at}" for at in range(len(sizes))]
    chosen = data.draw(st.permutations(names))[: len(shape)]
    split = data.draw(st.integers(0, len(chosen)))
    mesh = sharding(dict(zip(names, sizes, strict=True)), *chosen[:split])

    root = parsed(sharding_grid(shape, mesh, width=3_000))

    held = [title.rpartition(": ")[2] for title in titles(root)]
    devices = [
        device
        for text in held
        if not text.endswith("…")
        for part in text.split(", ")
        for device in range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1)
    ]
    if not any(text.endswith("…") for text in held):
        assert [*range(int(np.prod(sizes)))] == sorted(devices)


def test_hostile_names_of_axes_are_texts_and_not_markup() -> None:
    svg = sharding_grid((4, 4), sharding({HOSTILE: 2}, HOSTILE))

    parsed(svg)
    assert "<script" not in svg
    assert "&lt;script&gt;" in svg


@pytest.mark.parametrize("count", [1, 17, 60])
def test_the_cells_of_a_map_do_not_overlap(count: int) -> None:
    root = parsed(chunk_map((count,), (1,)))

    corners = {(one.get("x"), one.get("y")) for one in root.iter(f"{SVG}rect")}
    assert count == len(corners)
