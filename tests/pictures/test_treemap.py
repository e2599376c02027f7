"""A treemap has an area for each leaf, in proportion to its bytes."""

from collections import defaultdict
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storesvc_client._pictures.svg import DTYPE_COLOURS, contrast, ink_on
from storesvc_client._pictures.treemap import (
    Rectangle,
    Tile,
    divide_rectangle,
    place_tiles,
    treemap,
)
from storesvc_client._values.models import LeafInfo
from tests.pictures.models import leaf, transformer
from tests.pictures.parsed import HOSTILE, SVG, boxes, parsed, texts, titles
from tests.support.examples import sampled

WHOLE = Rectangle(x=0.0, y=0.0, width=800.0, height=400.0)

PARTS = st.sampled_from(["a", "b", "layers", "0", "1", "10", "kernel", ""])
TREES = st.dictionaries(
    st.lists(PARTS, min_size=1, max_size=4).map("/".join),
    st.integers(0, 10) | st.integers(0, 10**12),
    max_size=60,
)


def leaves_of(tree: dict[str, int]) -> list[LeafInfo]:
    return [leaf(key, (size,)) for key, size in tree.items()]


def rectangles(root: ET.Element) -> list[tuple[float, float, float, float]]:
    """Returns the places of the tiles."""
    return [
        box
        for one in root.iter(f"{SVG}rect")
        if "data-key" in one.attrib and one.get("fill") != "currentColor"
        for box in boxes(one)
    ]


def assert_no_overlap(places: list[tuple[float, float, float, float]]) -> None:
    for at, (left, top, right, bottom) in enumerate(places):
        for other in places[at + 1 :]:
            across = min(right, other[2]) - max(left, other[0])
            down = min(bottom, other[3]) - max(top, other[1])
            assert min(across, down) < 0.02, (places[at], other)


@given(st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=80))
def test_a_division_has_areas_in_proportion_without_gaps(sizes: list[float]) -> None:
    sizes.sort(reverse=True)

    parts = divide_rectangle(WHOLE, sizes)

    assert len(sizes) == len(parts)
    unit = WHOLE.area / sum(sizes)
    for size, part in zip(sizes, parts, strict=True):
        assert size * unit == pytest.approx(part.area, rel=1e-6, abs=1e-6)
    assert sum(part.area for part in parts) == pytest.approx(WHOLE.area)
    assert_no_overlap([(p.x, p.y, p.x + p.width, p.y + p.height) for p in parts])


def test_a_division_of_similar_sizes_has_nearly_square_parts() -> None:
    for part in divide_rectangle(WHOLE, [*range(60, 30, -1)]):
        assert 0.5 < part.width / part.height < 2


@given(TREES)
def test_tiles_hold_each_leaf_with_bytes_once(tree: dict[str, int]) -> None:
    layout = place_tiles(leaves_of(tree), WHOLE, most=30)

    held = sorted(one.key for tile in layout.tiles for one in tile.leaves)
    assert sorted(key for key, size in tree.items() if size) == held
    assert sum(not size for size in tree.values()) == layout.empty_count
    assert len(layout.tiles) + len(layout.groups) <= 30
    for tile in layout.tiles:
        assert sum(one.size_bytes for one in tile.leaves) == tile.size_bytes


@given(TREES)
def test_a_treemap_stays_in_its_frame_without_overlap(tree: dict[str, int]) -> None:
    assert_no_overlap(rectangles(parsed(treemap(leaves_of(tree), width=500))))


def test_tiles_of_one_group_have_areas_in_proportion_to_bytes() -> None:
    sizes = {"a/v": 700, "a/w": 320, "a/x": 110, "b/v": 90, "b/w": 70, "b/x": 25}

    layout = place_tiles(leaves_of(sizes), WHOLE, most=1000)

    groups = defaultdict[str, list[Tile]](list)
    for tile in layout.tiles:
        groups[tile.key.rpartition("/")[0]].append(tile)
    assert [3, 3] == [len(tiles) for tiles in groups.values()]
    for tiles in groups.values():
        per_byte = [tile.place.area / tile.size_bytes for tile in tiles]
        assert max(per_byte) == pytest.approx(min(per_byte))


def test_a_tree_is_grouped_by_the_parts_of_its_keys() -> None:
    layout = place_tiles(transformer(3), WHOLE, most=1000)

    assert {"params", "mu", "nu"} <= {group.key for group in layout.groups}
    (embedding,) = (t for t in layout.tiles if t.key == "params/embed/embedding")
    (params,) = (group for group in layout.groups if group.key == "params")
    assert params.place.x <= embedding.place.x
    assert (
        embedding.place.x + embedding.place.width <= params.place.x + params.place.width
    )
    shown = texts(parsed(treemap(transformer(3))))
    assert {"params", "mu", "nu", "embed/embedding"} <= {*shown}


def test_children_that_are_too_small_share_a_tile_of_their_group() -> None:
    leaves = [leaf("a/big", (10**6,)), *(leaf(f"a/w{at}", (1,)) for at in range(50))]

    layout = place_tiles(leaves, WHOLE, most=1000)

    assert ["big", "other"] == [tile.name for tile in layout.tiles]
    assert "a" == layout.tiles[1].key
    assert 50 == len(layout.tiles[1].leaves)
    assert "a: its smaller parts\n50 leaves" in "".join(titles(parsed(treemap(leaves))))


def test_layers_of_one_size_follow_each_other_by_number() -> None:
    leaves = [leaf(f"layers/{at}/w", (100,)) for at in range(12)]

    layout = place_tiles(sorted(leaves, key=lambda one: one.key), WHOLE, most=100)

    by_place = sorted(layout.tiles, key=lambda tile: tile.place.x + tile.place.y)
    assert ["layers/0/w", "layers/11/w"] == [by_place[0].key, by_place[-1].key]
    (first, second) = (
        tile.place for tile in layout.tiles if tile.key in {"layers/0/w", "layers/1/w"}
    )
    assert first.x == second.x or first.y == second.y


def test_one_leaf_fills_the_picture_and_leaves_without_bytes_are_counted() -> None:
    leaves = [leaf("", (4, 8), "float32"), leaf("a/empty", (0, 3))]

    root = parsed(treemap(leaves, width=300, height=200))

    (place,) = rectangles(root)
    assert (0.5, 0.5, 299.5, 173.5) == place
    assert (
        "treemap of 2 leaves, 1 without bytes, 128 B, by dtype"
        == root.attrib["aria-label"]
    )
    assert "''\nfloat32[4,8]\n128 B, 100 %" in titles(root)


@pytest.mark.parametrize(
    ("leaves", "reason"),
    [([], "no leaves"), ([leaf("a", (0,)), leaf("b", (0,))], "no leaf has bytes")],
)
def test_a_treemap_without_bytes_says_so(leaves: list[LeafInfo], reason: str) -> None:
    assert [reason] == texts(parsed(treemap(leaves)))


def test_hostile_names_are_texts_and_not_markup() -> None:
    leaves = [leaf(f"{HOSTILE}/{at}/{HOSTILE}", (900 + at,)) for at in range(5)]

    svg = treemap(leaves, changed={leaves[0].key: 1.0})

    root = parsed(svg)
    assert "<script" not in svg
    assert any(
        "</svg><script>alert(1)</script>\"'&\\x07\\u202e\\ud800/0" in title
        for title in titles(root)
    )


def test_dtypes_have_different_colours_and_shares_in_the_legend() -> None:
    root = parsed(treemap([leaf("a", (75,), "float32"), leaf("b", (50,), "bfloat16")]))

    fills = [one.get("fill") for one in root.iter(f"{SVG}rect")]
    assert 2 == len({*fills})
    shown = texts(root)
    assert ["float32", "75 %", "bfloat16", "25 %"] == shown[-5:-1]
    assert "2 leaves, 400 B" == shown[-1]


def test_changes_have_the_colours_of_their_shares() -> None:
    leaves = [leaf(key, (100,)) for key in ("kept", "half", "all", "hidden")]
    changed = {"half": 0.5, "all": 1.0, "hidden": None}

    root = parsed(treemap(leaves, changed=changed))

    colours = {
        one.attrib["data-key"]: one.attrib["fill"]
        for one in root.iter(f"{SVG}rect")
        if "data-key" in one.attrib
    }
    assert 4 == len({*colours.values()})
    found = "".join(titles(root))
    for remark in ("0 % changed", "50 % changed", "100 % changed", "change not known"):
        assert remark in found
    assert {"unchanged", "up to 50 %", "up to 100 %", "not known"} <= {*texts(root)}


def test_a_tile_of_many_leaves_has_their_share_of_changed_bytes() -> None:
    leaves = [leaf(f"a/w{at}", (1,)) for at in range(4)]

    root = parsed(treemap(leaves, changed={"a/w0": 1.0}, most=1))

    assert ["the tree\n4 leaves\n4 B, 100 %\n25 % changed"] == titles(root)


@pytest.mark.parametrize("colour", DTYPE_COLOURS)
def test_the_text_on_a_tile_can_be_read(colour: str) -> None:
    assert contrast(ink_on(colour), colour) >= 4.5


@pytest.mark.slow
@pytest.mark.parametrize("form", ["params/layers/{0}/block{1}/w{2}", "p{0}_{1}_{2}"])
def test_a_hundred_thousand_leaves_make_a_picture_of_bounded_size(form: str) -> None:
    leaves = [
        leaf(form.format(at // 100, at // 10 % 10, at % 10), (at % 97 + 1, 64))
        for at in range(100_000)
    ]

    root = parsed(treemap(leaves))

    assert len([*root.iter()]) < 4_000


def test_a_picture_of_a_large_tree_has_few_elements() -> None:
    root = parsed(treemap(transformer(400)))

    assert 1_000 < len(rectangles(root)) <= 1_500
    assert len([*root.iter()]) < 4_500
    assert any(pairwise(rectangles(root)))


@pytest.mark.parametrize("count", sampled([1500, 1700, 2999, 4500, 7200], every=3))
@pytest.mark.parametrize("key", ["w{}", "p/l/{}/a"])
def test_a_tree_of_any_number_of_equal_leaves_is_drawn(count: int, key: str) -> None:
    leaves = [leaf(key.format(at), (100,)) for at in range(count)]

    found = parsed(treemap(leaves, width=800, height=400))

    assert rectangles(found)


@given(st.integers(1, 300), st.integers(1, 40))
def test_a_treemap_of_few_tiles_has_all_bytes(count: int, most: int) -> None:
    leaves = [leaf(f"w{at}", (100,)) for at in range(count)]

    placed = place_tiles(leaves, WHOLE, most=most)

    assert sum(tile.size_bytes for tile in placed.tiles) == sum(
        one.size_bytes for one in leaves
    )


def test_equal_layers_are_read_as_text_is() -> None:
    leaves = [leaf(f"layers/{layer}/kernel", (64, 64)) for layer in range(12)]

    tiles = place_tiles(leaves, WHOLE, most=1500).tiles

    read = sorted(tiles, key=lambda tile: (round(tile.place.y), tile.place.x))
    assert [f"layers/{layer}/kernel" for layer in range(12)] == [t.key for t in read]


def test_a_tile_without_room_for_its_name_has_its_number() -> None:
    leaves = [
        leaf(f"transformer_block_{block:03d}/w{at}", (64,))
        for block in range(100)
        for at in range(500)
    ]

    shown = set(texts(parsed(treemap(leaves, width=780, height=360))))

    assert {f"…{block:03d}" for block in range(100)} <= shown


def test_the_legend_of_changes_names_each_colour_that_is_drawn() -> None:
    leaves = [leaf(f"blocks/{at}/w", (64,)) for at in range(1000)]

    root = parsed(treemap(leaves, changed={"blocks/700/w": 1.0}, most=12))

    tiles = [one for one in root.iter(f"{SVG}rect") if "data-key" in one.attrib]
    drawn = {one.get("fill") for one in tiles} - {"currentColor"}
    legend = {one.get("fill") for one in root.iter(f"{SVG}rect")} - {"currentColor"}
    keys = {one.get("fill") for one in root.iter(f"{SVG}rect") if one.get("rx") == "2"}
    assert drawn == keys == legend
