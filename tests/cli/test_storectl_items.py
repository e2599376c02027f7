"""storectl shows items, and writes them byte for byte."""

import os
import pty
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import storesvc_client as store
from storesvc_client._values.item_values import encode_item
from tests.support.command_line import document, printed, refusal, storectl, table

CONFIG = {"layers": [1, 2.5], "name": "é"}
ITEMS: dict[str, Any] = {
    "config": CONFIG,
    "notes": "two\nlines \x1b[2J",
    "tokenizer": bytes(range(256)),
    "empty": b"",
    "data": store.PerProcess({"at": 7}),
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
        ("prod/items@1:w", "'w' is a leaf of prod/items@1, no item; 'storectl stat"),
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


@pytest.mark.parametrize(
    "path", ["prod/items@1", "prod/items", "prod/items@1:", "prod/items@1:data/x"]
)
def test_cat_of_another_path_is_wrong_usage(address: str, path: str) -> None:
    result = storectl(address, "cat", path)

    assert (2, "") == (result.exit_code, result.stdout)
    assert "such as" in result.stderr


def in_a_terminal(address: str, path: str) -> str:
    """Returns the output of cat, which sees a terminal."""
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "storesvc_client.cli", "-s", address, "cat", path]
    done = subprocess.run(command, stdout=its, stderr=its, check=False)
    os.close(its)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == ("is 256 B of bytes" in shown)
    return shown


@pytest.mark.slow
def test_cat_cannot_control_a_terminal(address: str) -> None:
    shown = in_a_terminal(address, "prod/items@1:notes")
    assert "two\r\nlines \\x1b[2J\r\n" == shown
    assert encode_item(CONFIG).data.decode() + "\r\n" == in_a_terminal(
        address, "prod/items@1:config"
    )
    assert "redirect it to a file" in in_a_terminal(address, "prod/items@1:tokenizer")


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


def test_stat_lists_items(address: str) -> None:
    (line,) = (
        line
        for line in printed(address, "stat", "prod/items@2").splitlines()
        if line.strip().startswith("items ")
    )

    assert line.split(None, 1)[1] == (
        f"config (json, {len(encode_item(CONFIG).data)} B), data (1 x json, 8 B), "
        "notes (text, 5 B), tokenizer (bytes, 256 B)"
    )
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

    assert "leaf name: expected an array, got the kind text" in refusal(
        address, "get", "prod/items@1:name", "-o", str(file)
    )
    assert not file.exists()
