"""A folder of safetensors has the config and the tokenizer of its model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storesvc_client as store
from storesvc_client._export.target import COPY_BYTES
from tests.export.parts import Save
from tests.support.command_line import invoke, printed

TREE = {"w": np.arange(6, dtype=np.float32)}
ITEMS: dict[str, Any] = {
    "config": {"model_type": "llama"},
    "generation-config": {"eos_token_id": 2},
    "notes": "a text",
    "vocabulary": b"\0" * (COPY_BYTES + 9),
}
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "notes",
    "vocabulary",
}


@pytest.fixture
def opened(saved: Save) -> store.OpenCheckpoint:
    return saved("memory://", TREE, items=ITEMS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The directory of a model, as the cache of Hugging Face has it."""
    folder, blob = tmp_path / "given", tmp_path / "blob"
    (folder / "sub.json").mkdir(parents=True)
    for name in ("config.json", "tokenizer.model", "vocab.txt"):
        (folder / name).write_text(f'"{name}"')
    for name in (".hidden.json", "model.safetensors.index.json", "pytorch_model.bin"):
        (folder / name).write_text("other")
    blob.write_bytes(b"x" * (COPY_BYTES + 1))
    (folder / "tokenizer.json").symlink_to(blob)
    (folder / "dangling.json").symlink_to(tmp_path / "absent")
    return folder


@pytest.mark.parametrize("select", [None, "w"])
def test_items_are_files(
    opened: store.OpenCheckpoint, tmp_path: Path, select: str | None
) -> None:
    report = opened.export(f"safetensors:{tmp_path}/x", select=select)

    found = {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir()}
    assert FILES == found.keys() == set(report.files)
    assert () == report.dropped_items
    assert ITEMS["config"] == json.loads(found["config.json"])
    assert (b"a text", ITEMS["vocabulary"]) == (found["notes"], found["vocabulary"])


def test_a_directory_replaces_items(
    opened: store.OpenCheckpoint, folder: Path, tmp_path: Path
) -> None:
    report = opened.export(f"safetensors:{tmp_path}/x", config=folder)

    found = {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir()}
    copied = {"config.json", "tokenizer.json", "tokenizer.model", "vocab.txt"}
    assert {*copied, "model.safetensors"} == found.keys() == set(report.files)
    assert all((folder / name).read_bytes() == found[name] for name in copied)
    assert sorted(ITEMS) == [*report.dropped_items]


def test_a_directory_does_not_replace_what_is_no_file(
    saved: Save, folder: Path, tmp_path: Path
) -> None:
    items = {"config": {"x": 1}, "data": store.PerProcess(1)}
    opened = saved("memory://", TREE, items=items)
    target = f"safetensors:{tmp_path}/x"

    with pytest.raises(store.PreconditionError, match="got data, which"):
        opened.export(target, config=folder)
    assert not (tmp_path / "x").exists()
    report = opened.export(target, config=folder, drop_items=True)

    assert ("config", "data") == report.dropped_items


@pytest.mark.parametrize("text", ['"config.json"!', '"config.json'])
def test_a_file_that_differs_is_not_replaced(
    opened: store.OpenCheckpoint, folder: Path, tmp_path: Path, text: str
) -> None:
    target = tmp_path / "x"
    target.mkdir()
    (target / "config.json").write_text(text)

    with pytest.raises(store.PreconditionError, match=r"config\.json exists, and diff"):
        opened.export(f"safetensors:{target}", config=folder)

    assert ["config.json"] == [path.name for path in target.iterdir()]
    assert text == (target / "config.json").read_text()


def test_an_export_goes_on_with_the_files_that_it_wrote(
    opened: store.OpenCheckpoint, folder: Path, tmp_path: Path
) -> None:
    target = f"safetensors:{tmp_path}/x"
    opened.export(target, config=folder)
    (tmp_path / "x" / "model.safetensors").unlink()
    changed = (tmp_path / "x" / "tokenizer.json").stat().st_mtime_ns

    opened.export(target, config=folder)

    assert (tmp_path / "x" / "model.safetensors").exists()
    assert changed == (tmp_path / "x" / "tokenizer.json").stat().st_mtime_ns


def test_weights_that_exist_are_found_before_a_file_is_written(
    opened: store.OpenCheckpoint, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_text("other")

    with pytest.raises(store.PreconditionError, match=r"model\.safetensors exists"):
        opened.export(f"safetensors:{tmp_path}")

    assert ["model.safetensors"] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("safetensors:{}/x", "expected a directory with config.json"),
        ("safetensors:{}/x.safetensors", "expected a folder as the target"),
        ("npz:{}/x.npz", "expected only for safetensors"),
    ],
)
def test_a_directory_that_is_of_no_use_is_rejected(
    opened: store.OpenCheckpoint, tmp_path: Path, target: str, message: str
) -> None:
    with pytest.raises(store.InvalidRequestError, match=message):
        opened.export(target.format(tmp_path), config=tmp_path, drop_items=True)

    assert [] == [*tmp_path.iterdir()]


def test_storectl_copies_the_files_of_a_directory(folder: Path, tmp_path: Path) -> None:
    root = (tmp_path / "store").as_uri()
    with store.connect(root) as client:
        client.run("prod/x").save(1, TREE, items={"config": {"x": 1}}).result()
    line = ("export", "prod/x@1", f"safetensors:{tmp_path}/x", "--config")

    text = printed(root, *line, str(folder))
    assert "1 leaf" in text
    assert "without the items config" in text
    assert (tmp_path / "x" / "tokenizer.json").exists()
    assert 2 == invoke("--store", root, *line, str(tmp_path / "absent")).exit_code
