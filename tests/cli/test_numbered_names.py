"""Numbered siblings of a tree are drawn once, and sorted by their numbers."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import storesvc_client as store
from storesvc_client._views.texts import natural_key, numbered_keys, numbered_series
from tests.support.command_line import document, on_a_terminal, printed, table


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["layer_0", "layer_1", "layer_2"], ["layer_{0..2}"]),
        (["layer_0", "layer_1", "layer_8"], ["layer_{0..1,8}"]),
        (["0", "2", "4"], ["{0..4..2}"]),
        (["w1", "w3"], ["w{1,3}"]),
        (["k1", "k3", "k7", "k9", "k20", "k33"], ["k{1,3,7,9,…}"]),
        (["block0_norm", "block1_norm"], ["block{0..1}_norm"]),
        (["layer_008", "layer_009", "layer_010"], ["layer_{008..010}"]),
        (["a", "b1", "c"], ["a", "b1", "c"]),
        (["h2_0", "h2_1", "h3_0"], ["h2_{0..1}", "h3_0"]),
    ],
)
def test_names_that_differ_in_a_number_have_one_text(
    names: list[str], expected: list[str]
) -> None:
    assert expected == [series.text for series in numbered_series(names)]


def test_padded_and_other_numbers_are_two_series() -> None:
    names = sorted(["x1", "x2", "x01", "x02"], key=natural_key)

    assert {"x{1..2}", "x{01..02}"} == {
        series.text for series in numbered_series(names)
    }


@given(st.lists(st.text("ab019_", max_size=8), unique=True, max_size=12))
def test_each_name_is_in_one_series(names: list[str]) -> None:
    ordered = sorted(names, key=natural_key)

    indices = [at for series in numbered_series(ordered) for at in series.indices]

    assert [*range(len(names))] == sorted(indices)


@given(st.lists(st.integers(0, 10**6)))
def test_numbers_are_sorted_by_value(numbers: list[int]) -> None:
    names = [f"layer_{number}" for number in numbers]

    assert [f"layer_{number}" for number in sorted(numbers)] == sorted(
        names, key=natural_key
    )


def test_numbers_of_any_length_are_sorted() -> None:
    long = ["9" * 5000, "1" + "0" * 5000]

    assert long == sorted([long[1], long[0]], key=natural_key)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["l/10/w", "l/9/w", "step"], {"l/{9..10}/w": (1, 0), "step": (2,)}),
        (
            ["l/0/d_0/w", "l/0/d_1/w", "l/1/d_0/w", "l/1/d_1/w"],
            {"l/{0..1}/d_{0..1}/w": (0, 2, 1, 3)},
        ),
        (["l/0/w", "l/1/b"], {"l/0/w": (0,), "l/1/b": (1,)}),
        (["l", "l/0", "l/1", ""], {"l": (0,), "l/{0..1}": (1, 2), "": (3,)}),
    ],
)
def test_keys_that_differ_in_numbers_have_one_text(
    keys: list[str], expected: dict[str, tuple[int, ...]]
) -> None:
    found = numbered_keys(keys, [None] * len(keys))

    assert expected == {series.text: series.indices for series in found}
    assert [*expected] == [series.text for series in found]


@given(st.lists(st.tuples(st.text("a01/", max_size=8), st.booleans()), max_size=12))
def test_each_key_is_in_one_series_of_its_like(found: list[tuple[str, bool]]) -> None:
    likeness = dict(found)

    series = numbered_keys([*likeness], [*likeness.values()])

    indices = [at for each in series for at in each.indices]
    assert [*range(len(likeness))] == sorted(indices)
    assert all(
        len({[*likeness.values()][at] for at in each.indices}) == 1 for each in series
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a model of dense layers and layers of experts in turn."""
    dense = {"kernel": np.ones((4, 4), np.float32), "bias": np.ones(4, np.float32)}
    experts = {"experts": np.ones((8, 4), np.float32)}
    layers = {f"layer_{i}": experts if i % 4 == 3 else dense for i in range(12)}
    path = tmp_path_factory.mktemp("root")
    with store.connect(path.as_uri()) as client:
        run = client.run("prod/moe")
        run.save(1, {"blocks": layers, "step": 1}).result()
        layers["layer_4"] = {**dense, "bias": np.zeros(4, np.float32)}
        layers["layer_5"] = {**dense, "bias": np.zeros(4, np.float32)}
        run.save(2, {"blocks": layers, "step": 2}).result()
    return path


def test_siblings_with_the_same_structure_are_one_row(root: Path) -> None:
    assert [
        "prod/moe@1                        22 leaves           1.1 KiB",
        "├── blocks                        21 leaves           1.1 KiB",
        "│   ├── layer_{0..2,4..6,8..10}   9 x 2 leaves       9 x 80 B",
        "│   │   ├── bias                  float32[4]             16 B",
        "│   │   └── kernel                float32[4,4]           64 B",
        "│   └── layer_{3..11..4}/experts  3 x float32[8,4]  3 x 128 B",
        "└── step                          int64[]                 8 B",
    ] == printed(str(root), "tree", "prod/moe@1").splitlines()


def test_expand_draws_each_sibling_in_the_order_of_their_numbers(root: Path) -> None:
    text = printed(str(root), "tree", "prod/moe@1", "--expand", "--depth", "2")

    names = [line.lstrip("│├└─ ").split()[0] for line in text.splitlines()]
    layers = [f"layer_{i}{'/experts' if i % 4 == 3 else ''}" for i in range(12)]
    assert ["blocks", *layers, "step"] == names[1:]


def test_json_has_each_sibling_in_the_order_of_their_numbers(root: Path) -> None:
    blocks, _ = document(str(root), "tree", "prod/moe@1")["children"]

    assert ["layer_9", "layer_10", "layer_11/experts"] == [
        child["name"] for child in blocks["children"][-3:]
    ]


@pytest.mark.slow
def test_a_terminal_shows_alike_rows_of_numbered_keys_once(root: Path) -> None:
    bias, kernel, experts, step = table(
        on_a_terminal("-s", str(root), "ls", "prod/moe@1", columns=80)
    )[1:]

    layers = "layer_{0..2,4..6,8..10}"
    assert ["float32", "[4]", "9 x 16 B", "9 x 1"] == bias[1:]
    assert [f"blocks/{layers}/bias", f"blocks/{layers}/kernel"] == [bias[0], kernel[0]]
    assert ["blocks/layer_{3..11..4}/experts", "step"] == [experts[0], step[0]]


@pytest.mark.slow
def test_a_terminal_shows_alike_differences_of_numbered_keys_once(root: Path) -> None:
    paths = "diff", "prod/moe@1", "prod/moe@2"
    text = on_a_terminal("-s", str(root), *paths, columns=80)

    assert [
        ["blocks/layer_{4..5}/bias", "content", "float32[4]", "same", "2 x 1 of 1"],
        ["step", "content", "int64[]", "same", "1 of 1"],
        ["3 content; 19 leaves the same"],
    ] == table(text)[1:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [["ls", "prod/moe@1"], ["diff", "prod/moe@1", "prod/moe@2"]]
)
def test_expand_and_a_pipe_show_each_row_of_numbered_keys(
    command: list[str], root: Path
) -> None:
    text = on_a_terminal("-s", str(root), *command, "--expand", columns=200)

    assert "blocks/layer_5/bias" in text
    assert text.split() == printed(str(root), *command).split()
