"""storectl shows items, and writes them byte for byte."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors

import storesvc_client as store
from storesvc_client._items.values import encode_item
from tests.support.command_line import (
    document,
    on_a_terminal,
    printed,
    refusal,
    storectl,
    table,
)

CONFIG = {"layers": [1, 2.5], "name": "é"}
ITEMS: dict[str, Any] = {
    "config": CONFIG,
    "notes": "two\nlines \x1b[2J",
    "tokenizer": bytes(range(256)),
    "empty": b"",
    "data": store.PerProcess({"at": 7}),
}
TEXTS = {
    "half": jnp.ones(2, jnp.bfloat16),
    "large": 2**80,
    "name": "a text",
    "notes": "two\nlines \x1b[2J",
    "odd": {"..": bytes(range(256))},
    "w": np.ones(1, np.float32),
}
TREE = {"w": np.ones((2, 3), np.float32), "name": "a text", "large": 2**80}


@pytest.fixture(scope="module")
def address(server_address: str) -> str:
    """The address of a server that holds a run with items."""
    with store.connect(server_address) as client:
        run = client.run("prod/items")
        run.save(1, TREE, items=ITEMS).result()
        other = {**ITEMS, "notes": "other", "data": store.PerProcess({"at": 8})}
        del other["empty"]
        run.save(2, TREE, items=other).result()
        client.run("prod/none").save(1, {"x": 1}).result()
        client.run("prod/texts").save(1, TEXTS).result()
    return server_address


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("config", encode_item(CONFIG).data),
        ("notes", b"two\nlines \x1b[2J"),
        ("tokenizer", bytes(range(256))),
        ("empty", b""),
        ("data/0", b'{"at":7}'),
    ],
)
def test_cat_writes_an_item_byte_for_byte(address: str, path: str, data: bytes) -> None:
    result = storectl(address, "cat", f"prod/items@1:{path}")

    assert (0, data, "") == (result.exit_code, result.stdout_bytes, result.stderr)


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("prod/items@1:confg", "prod/items@1 has no item 'confg'; nearest: config"),
        ("prod/items@1:w", "'w' is a leaf of prod/items@1, no item; 'storectl get"),
        ("prod/items@1:v", "prod/items@1 has no item 'v'; it has: config, data,"),
        ("prod/none@1:config", "prod/none@1 has no items"),
        ("prod/items@1:data", "a value of each of 1 process; use prod/items@1:data/0"),
        ("prod/items@1:data/1", "has no value of process 1, but of 1 process from 0"),
        ("prod/items@1:notes/0", "has no value of process 0, but one value for all"),
        ("prod/items@9:config", "prod/items@9 does not exist; the nearest"),
    ],
)
def test_cat_of_what_is_not_there_is_rejected(
    address: str, path: str, match: str
) -> None:
    assert match in refusal(address, "cat", path)


@pytest.mark.parametrize("path", ["prod/items@1", "prod/items", "prod/items@1:"])
def test_cat_of_another_path_is_wrong_usage(address: str, path: str) -> None:
    result = storectl(address, "cat", path)

    assert (2, "") == (result.exit_code, result.stdout)
    assert "such as" in result.stderr


@pytest.mark.slow
def test_cat_cannot_control_a_terminal(address: str) -> None:
    shown = on_a_terminal("-s", address, "cat", "prod/items@1:notes")
    assert "two\r\nlines \\x1b[2J\r\n" == shown
    assert encode_item(CONFIG).data.decode() + "\r\n" == on_a_terminal(
        "-s", address, "cat", "prod/items@1:config"
    )
    assert "redirect it to a file" in on_a_terminal(
        "-s", address, "cat", "prod/items@1:tokenizer", code=1
    )


def test_tree_lists_items_below_the_leaves(address: str) -> None:
    assert [
        ["prod/items@1", "3 leaves", "41 B"],
        ["├── large", "integer[11]", "11 B"],
        ["├── name", "text[6]", "6 B"],
        ["└── w", "float32[2,3]", "24 B"],
        ["items", "5 items", "308 B"],
        ["├── config", "json", "30 B"],
        ["├── data", "1 x json", "8 B"],
        ["├── empty", "bytes", "0 B"],
        ["├── notes", "text", "14 B"],
        ["└── tokenizer", "bytes", "256 B"],
    ] == table(printed(address, "tree", "prod/items@1"))
    assert ["config", "data", "empty", "notes", "tokenizer"] == [
        item["name"] for item in document(address, "tree", "prod/items@1")["items"]
    ]
    assert "items" not in printed(address, "tree", "prod/none@1")
    assert "item" not in printed(address, "tree", "prod/items@1:**").split("\n", 1)[1]


def items_lines(address: str, path: str) -> list[str]:
    """Returns the lines of ``stat`` about items."""
    lines = printed(address, "stat", path).splitlines()
    names = [line.split()[0] for line in lines]
    return lines[names.index("items") : names.index("tags")]


def test_stat_lists_at_most_twenty_items(address: str) -> None:
    with store.connect(address) as client:
        items = {f"item-{number:02}": number for number in range(64)}
        client.run("prod/many").save(1, TREE, items=items).result()

    lines = items_lines(address, "prod/many@1")

    assert 21 == len(lines)
    assert ["item-19 (json, 2 B)", "and 44 more"] == [x.strip() for x in lines[-2:]]
    assert 64 == len(document(address, "stat", "prod/many@1")["items"])


def test_stat_lists_items(address: str) -> None:
    assert [
        f"  items      config (json, {len(encode_item(CONFIG).data)} B)",
        "             data (1 x json, 8 B)",
        "             notes (text, 5 B)",
        "             tokenizer (bytes, 256 B)",
    ] == items_lines(address, "prod/items@2")
    assert ["  items      -"] == items_lines(address, "prod/none@1")
    found = document(address, "stat", "prod/items@1")
    assert {
        "name": "data",
        "kind": "json",
        "size_bytes": 8,
        "process_count": 1,
    } == found["items"][1]
    assert (3, 5) == (found["leaf_count"], found["item_count"])


def test_diff_lists_items_that_changed(address: str) -> None:
    text = printed(address, "diff", "prod/items@1", "prod/items@2")

    assert [
        "ITEM    WHAT     BEFORE      AFTER",
        "data/0  content  json, 8 B   json, 8 B",
        "empty   removed  bytes, 0 B  -",
        "notes   content  text, 14 B  text, 5 B",
        "no leaf differs; 3 leaves the same; items: 2 content, 1 removed",
    ] == text.splitlines()
    found = document(address, "diff", "prod/items@1", "prod/items@2")
    assert ["data", "empty", "notes"] == [item["name"] for item in found["items"]]
    assert "items" not in printed(address, "diff", "prod/items@1", "prod/items@1")


def test_get_reads_leaves_and_refers_to_cat_for_items(address: str) -> None:
    text = printed(address, "get", "prod/items@1:**")

    assert ["large", "name", "w"] == [x.split()[0] for x in text.splitlines()[1:]]
    for command in ("get", "stat", "tree", "ls"):
        assert "'config' is an item of prod/items@1, no leaf; 'storectl cat" in refusal(
            address, command, "prod/items@1:config"
        )


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors"])
def test_a_text_is_written_to_no_file_of_arrays(
    address: str, suffix: str, tmp_path: Any
) -> None:
    file = tmp_path / f"x.{suffix}"

    assert (
        "leaf name: expected an array, got the kind text; leave it out of the path, or "
        "write to a directory, such as -o leaves/"
    ) == refusal(address, "get", "prod/items@1:name", "-o", str(file))
    assert not file.exists()


@pytest.mark.slow
def test_get_prints_a_text_as_cat_does(address: str) -> None:
    def get(path: str) -> bytes:
        return storectl(address, "get", path).stdout_bytes

    assert b"a text" == get("prod/texts@1:name")
    assert str(2**80).encode() == get("prod/texts@1:large")
    assert bytes(range(256)) == get("prod/texts@1:odd/%2E%2E")
    assert "two\r\nlines \\x1b[2J\r\n" == on_a_terminal(
        "-s", address, "get", "prod/texts@1:notes"
    )
    assert "text" == document(address, "get", "prod/texts@1:name")[0]["kind"]
    assert 6 == len(table(printed(address, "get", "prod/texts@1:*")))


def test_get_writes_each_leaf_to_a_file_of_a_directory(
    address: str, tmp_path: Path
) -> None:
    out = tmp_path / "leaves"

    text = printed(address, "get", "prod/texts@1:**", "-o", f"{out}/")

    assert f"{out}/: 6 leaves, 295 B\n" == text
    assert {
        "half.safetensors",
        "large.txt",
        "name.txt",
        "notes.txt",
        "odd/%2E%2E.bin",
        "w.npy",
    } == {str(x.relative_to(out)) for x in out.rglob("*") if x.is_file()}
    assert np.array_equal(np.ones(1, np.float32), np.load(out / "w.npy"))
    assert str(2**80) == (out / "large.txt").read_text()
    assert "a text" == (out / "name.txt").read_text()
    assert bytes(range(256)) == (out / "odd/%2E%2E.bin").read_bytes()
    half = safetensors.deserialize((out / "half.safetensors").read_bytes())  # type: ignore[no-untyped-call]
    assert ["half"] == [name for name, _ in half]
    assert [out] == list(tmp_path.iterdir())
    for again in (f"{out}/", str(out)):
        assert f"{out} exists; expected the name of a new directory" == refusal(
            address, "get", "prod/texts@1:**", "-o", again
        )


def test_what_a_directory_cannot_hold_is_rejected_with_its_leaf(
    address: str, tmp_path: Path
) -> None:
    out = str(tmp_path / "leaves")
    with store.connect(address) as client:
        run = client.run("prod/unfit")
        run.save(1, {"x": "t", "x.txt": {"y": 1}}).result()
        run.save(2, {"z": 10**5000}).result()
        run.save(3, "only").result()

    assert "leaf x: its file x.txt would be the directory of other leaves" in refusal(
        address, "get", "prod/unfit@1:**", "-o", out
    )
    assert "leaf z: expected an integer of at most 4,300 digits, got" in refusal(
        address, "get", "prod/unfit@2:**", "-o", out
    )
    assert [] == list(tmp_path.iterdir())
    assert 2 == storectl(address, "get", "a/b@1:**", "-o", out, "--force").exit_code
    printed(address, "get", "prod/unfit@3:**", "-o", out)
    assert "only" == (tmp_path / "leaves" / "leaf.txt").read_text()
