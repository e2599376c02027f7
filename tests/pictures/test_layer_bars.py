"""Bars show the share of changed bytes in each layer."""

import pytest

from storesvc_client._pictures.layer_bars import (
    changed_shares,
    layer_bars,
    layer_changes,
    layers_of,
)
from storesvc_client._pictures.treemap import percent
from storesvc_client._values.models import Diff, LeafDifference
from storesvc_client._views.texts import natural_key
from tests.pictures.models import checkpoint, leaf, transformer
from tests.pictures.parsed import HOSTILE, SVG, parsed, texts, titles


def difference(
    key: str, kind: str, changed: int = 0, chunks: int = 4
) -> LeafDifference:
    return LeafDifference(
        key=key,
        kind=kind,
        base_dtype="float32",
        base_shape=(4,),
        dtype="float32",
        shape=(4,),
        changed_chunk_count=changed,
        chunk_count=chunks,
    )


@pytest.mark.parametrize(
    ("key", "layer"),
    [
        ("params/layers/1/mlp/kernel", "params/layers/1"),
        ("opt/0/mu/layers/1/mlp/kernel", "opt/0/mu/layers/1"),
        ("opt/0/mu/embed/embedding", "opt/0/mu/embed"),
        ("opt/1/count", "opt/1"),
        ("h_10/attn/kernel", "h_10"),
        ("embed/embedding", "embed"),
        ("step", "step"),
        ("a/b/c/d/e/f", "a/b/c/d"),
        ("", ""),
    ],
)
def test_the_layer_of_a_key_ends_with_the_number_that_has_most_siblings(
    key: str, layer: str
) -> None:
    keys = [f"{top}/layers/{at}/w" for top in ("params", "opt/0/mu") for at in range(3)]

    assert layer == layers_of([*keys, "opt/1/x", "h_0/w", "h_1/w", key])[key]


def test_numbers_in_names_are_ordered_by_value() -> None:
    names = ["b", "a10", "a9", "a", "a9b2", "a9b11", f"a{'9' * 40}"]

    assert ["a", "a9", "a9b2", "a9b11", "a10", f"a{'9' * 40}", "b"] == sorted(
        names, key=natural_key
    )


def test_a_difference_has_the_share_of_its_changed_chunks() -> None:
    diff = Diff(
        base=checkpoint(1),
        checkpoint=checkpoint(2),
        same_leaf_count=3,
        differences=(
            difference("a", "content", 1),
            difference("b", "added"),
            difference("c", "unknown"),
            difference("d", "dtype"),
        ),
        items=(),
    )

    assert {"a": 0.25, "b": 1.0, "c": None, "d": 1.0} == changed_shares(diff)


def test_a_layer_has_the_share_of_its_changed_bytes() -> None:
    leaves = [
        *(leaf(f"layers/{at}/big", (30,)) for at in range(2)),
        *(leaf(f"layers/{at}/small", (10,)) for at in range(2)),
    ]

    first, second = layer_changes(leaves, {"layers/1/small": 1.0, "layers/1/big": 0.5})

    assert ("layers/0", 0.0) == (first.name, first.share)
    assert ("layers/1", 0.625) == (second.name, second.share)
    assert (2, 40, 25.0) == (second.leaf_count, second.size_bytes, second.changed_bytes)


def test_the_layers_with_the_most_changed_bytes_have_bars_of_their_own() -> None:
    leaves = [leaf(f"layers/{at}/w", (100,)) for at in range(50)]
    changed = {f"layers/{at}/w": at / 50 for at in range(50)}

    found = layer_changes(leaves, changed, most=3)

    assert ["layers/47", "layers/48", "layers/49", "47 other"] == [
        one.name for one in found
    ]
    assert 4700 == found[-1].size_bytes
    assert sum(range(47)) / 50 / 47 == pytest.approx(found[-1].share)


def test_bars_have_the_length_of_their_shares() -> None:
    leaves = [leaf(f"layers/{at}/w", (100,)) for at in range(3)]

    root = parsed(layer_bars(leaves, {"layers/1/w": 0.5, "layers/2/w": None}))

    widths = [float(one.attrib["width"]) for one in root.iter(f"{SVG}rect")]
    assert 5 == len(widths)  # no bar over the first track
    assert widths[2] == pytest.approx(widths[1] / 2, abs=0.02)
    assert widths[4] == pytest.approx(widths[3])
    assert ["layers/0", "0 %", "of 100 B", "layers/1", "50 %"] == texts(root)[:5]
    assert "not known" in texts(root)
    assert "layers/1\n1 leaf, 100 B\n50 % changed" in titles(root)


def test_a_model_of_many_layers_has_at_most_forty_bars_and_the_rest() -> None:
    root = parsed(layer_bars(transformer(100), {}))

    names = [one for one in root.iter(f"{SVG}text") if one.get("text-anchor") == "end"]
    assert 2 * 41 == len(names)
    assert "266 other" in texts(root)


def test_without_leaves_there_is_a_sentence() -> None:
    assert ["no leaves"] == texts(parsed(layer_bars([], {})))


def test_hostile_names_of_layers_are_texts_and_not_markup() -> None:
    svg = layer_bars([leaf(f"{HOSTILE}/w"), leaf("")], {})

    parsed(svg)
    assert "<script" not in svg
    assert "''" in texts(parsed(svg))


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0 %"), (0.001, "< 1 %"), (0.5, "50 %"), (0.999, "> 99 %"), (1, "100 %")],
)
def test_only_nothing_and_everything_are_rounded_to_0_and_100(
    share: float, text: str
) -> None:
    assert text == percent(share)
