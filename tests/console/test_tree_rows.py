"""Rows of a tree: level by level, alike siblings together, bounded."""

from storesvc_client._views.texts import Node, grow
from storesvc_client.console.checkpoint_pages import LEVEL, Row, level, opened_rows
from tests.pictures.models import leaf


def tree(*keys: str) -> tuple[Node, ...]:
    return grow(map(leaf, keys))


def names(rows: list[Row]) -> list[str]:
    return [row.name for row in rows]


MODEL = tree(
    *(f"params/layers/{i}/{part}/kernel" for i in range(12) for part in ("a", "b")),
    "params/embed",
    "step",
)


def test_the_top_has_a_row_for_each_child() -> None:
    assert ["params", "step"] == names(level(MODEL, ""))


def test_a_level_has_the_depth_of_its_prefix() -> None:
    rows = level(MODEL, "params/layers/3")

    assert ["a/kernel", "b/kernel"] == names(rows)
    assert {3} == {row.depth for row in rows}
    assert ["params/layers/3/a/kernel"] == [rows[0].prefix]


def test_alike_siblings_share_a_row_that_leads_to_the_first() -> None:
    (row,) = level(MODEL, "params/layers")

    assert ("{0..11}", 12, "12 x 2 leaves") == (row.name, row.alike, row.content)
    assert "params/layers/0" == row.prefix


def test_alike_siblings_have_a_row_each_if_apart() -> None:
    rows = level(MODEL, "params/layers", apart=True)

    assert [*map(str, range(12))] == names(rows)


def test_there_is_no_row_below_a_prefix_that_does_not_exist() -> None:
    assert [] == level(MODEL, "params/absent")
    assert [] == level(MODEL, "step/below")


def test_the_rows_on_the_way_to_a_prefix_are_opened() -> None:
    rows = opened_rows(MODEL, "params/layers/0")

    opened = [row.name for row in rows if row.opened]
    assert ["params", "layers", "{0..11}"] == opened
    assert ["a/kernel", "b/kernel"] == [row.name for row in rows if row.depth == 3]
    assert "step" in names(rows)


def test_a_prefix_inside_a_group_opens_its_own_row() -> None:
    rows = opened_rows(MODEL, "params/layers/7")

    (opened,) = [row for row in rows if row.prefix == "params/layers/7"]
    assert opened.opened
    assert "params/layers/7/a/kernel" in {row.prefix for row in rows}


def test_a_wide_level_is_cut_and_continued() -> None:
    wide = grow(leaf(f"w{i}x", (i + 1,)) for i in range(LEVEL + 50))

    first = level(wide, "")
    rest = level(wide, "", start=first[-1].more_from)

    assert LEVEL + 1 == len(first)
    assert 50 == len(rest)
    assert not any(row.more_from for row in rest)
    seen = {row.prefix for row in (*first[:-1], *rest)}
    assert LEVEL + 50 == len(seen)


def test_a_tree_that_is_a_single_leaf_has_one_row() -> None:
    (row,) = opened_rows(tree(""), "")

    assert ("''", "", True) == (row.name, row.prefix, row.leaf)
