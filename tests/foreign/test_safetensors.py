"""Safetensors that the package wrote are read as steps."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import storesvc_client as store
from storesvc_client._foreign.formats import safetensors
from storesvc_client._foreign.formats.safetensors import TENSOR_DTYPES
from storesvc_client._foreign.locations import LocalLocation
from storesvc_client.errors import DataLossError, NotFoundError, PreconditionError
from tests.support.foreign_reading import (
    as_bytes,
    read_items,
    read_leaf,
    read_region,
    read_tree,
)

WEIGHTS = {
    "model.embed.weight": np.arange(24, dtype=np.float32).reshape(6, 4),
    "model.layers.0.w": np.arange(6).reshape(1, 2, 3).astype(ml_dtypes.bfloat16),
    "model.layers.1.w": np.array([[True, False], [False, True]]),
    "model.scale": np.array(2.5),
    "empty": np.zeros((0, 3), np.int8),
}
KEYS = {name: name.replace(".", "/") for name in WEIGHTS}


def opened(folder: Path, step: int = 0, **options: Any) -> Any:
    return safetensors.open_root(LocalLocation(folder), **options).open(step)


def write_sharded(folder: Path) -> None:
    """Writes two shards with an index, as transformers does."""
    names = sorted(WEIGHTS)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    shards = [names[:2], names[2:]]
    for file, shard in zip(files, shards, strict=True):
        save_file({n: WEIGHTS[n] for n in shard}, folder / file, {"format": "np"})
    weight_map = {n: f for f, shard in zip(files, shards, strict=True) for n in shard}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_file_is_a_step_whose_names_are_split_at_dots(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors", {"format": "np"})
    root = safetensors.open_root(LocalLocation(tmp_path))
    step = root.open(0)
    expected = as_bytes({KEYS[name]: value for name, value in WEIGHTS.items()})
    assert [0] == list(root.steps())
    assert expected == as_bytes(read_tree(step))
    assert {"header-metadata": {"format": "np"}} == read_items(step)
    assert {"k", "kk", "kkk", "kkkk"} == {
        row.path_kinds for row in step.tree.leaves[: step.tree.tree_count]
    }


def test_shards_are_one_step_with_the_configuration_as_an_item(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / "config.json").write_text('{ "b": 1,  "a": 2}')
    step = opened(tmp_path)
    expected = as_bytes({KEYS[name]: value for name, value in WEIGHTS.items()})
    assert expected == as_bytes(read_tree(step))
    assert {
        "config": '{ "b": 1,  "a": 2}',
        "header-metadata": {"format": "np"},
    } == read_items(step)


def test_every_region_is_read_exactly(tmp_path: Path) -> None:
    cube = np.arange(4 * 5 * 6, dtype=np.int16).reshape(4, 5, 6)
    save_file({"cube": cube}, tmp_path / "a.safetensors")
    step = opened(tmp_path)
    rng = np.random.default_rng(0)
    for _ in range(200):
        ends = [sorted(rng.integers(0, n + 1, 2)) for n in cube.shape]
        region = tuple((int(a), int(b)) for a, b in ends)
        index = tuple(slice(*span) for span in region)
        assert cube[index].tolist() == read_region(step, "cube", region).tolist()


def test_memory_that_is_not_contiguous_is_filled(tmp_path: Path) -> None:
    weights = np.arange(24, dtype=np.float32).reshape(6, 4)
    save_file({"w": weights}, tmp_path / "a.safetensors")
    memory = np.zeros((4, 6), np.float32)
    opened(tmp_path).arrays[0].read(((0, 6), (0, 4)), memory.T).result(60)
    assert weights.tolist() == memory.T.tolist()


def test_names_can_be_kept_whole(tmp_path: Path) -> None:
    weights = {"a": np.zeros(2), "a.b": np.ones(2)}
    save_file(weights, tmp_path / "a.safetensors")
    with pytest.raises(PreconditionError, match=r"'a' .* container, of array 'a.b'"):
        opened(tmp_path)
    step = opened(tmp_path, keep_names=True)
    assert as_bytes(weights) == as_bytes(read_tree(step))


def test_folders_of_steps_are_steps_once_their_index_is_written(tmp_path: Path) -> None:
    for name in ("checkpoint-100", "0200", "run-300", "logs"):
        (tmp_path / name).mkdir()
    save_file(WEIGHTS, tmp_path / "checkpoint-100" / "model.safetensors")
    save_file(WEIGHTS, tmp_path / "0200" / "model-00001-of-00002.safetensors")
    write_sharded(tmp_path / "run-300")
    root = safetensors.open_root(LocalLocation(tmp_path))
    assert [100, 300] == list(root.steps())
    assert 300 == root.open(300).step
    with pytest.raises(NotFoundError, match="no step 200 with finished"):
        root.open(200)


def test_two_folders_of_one_step_are_rejected(tmp_path: Path) -> None:
    for name in ("checkpoint-1", "run-1"):
        (tmp_path / name).mkdir()
    root = safetensors.open_root(LocalLocation(tmp_path))
    with pytest.raises(PreconditionError, match="'checkpoint-1' and 'run-1'"):
        root.steps()


def test_the_url_of_a_step_has_the_number_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-7"
    folder.mkdir()
    save_file(WEIGHTS, folder / "model.safetensors")
    assert [7] == list(safetensors.open_root(LocalLocation(folder)).steps())


def test_one_of_several_files_must_be_named(tmp_path: Path) -> None:
    save_file({"w": np.ones(2)}, tmp_path / "lora.safetensors")
    save_file({"w": np.zeros(2)}, tmp_path / "vae.safetensors")
    with pytest.raises(PreconditionError, match=r"lora\.safetensors, vae\."):
        opened(tmp_path)
    step = opened(tmp_path, file="lora.safetensors")
    assert [1.0, 1.0] == read_leaf(step, "w").tolist()


@pytest.mark.parametrize("below", ["", "snapshots/abc"])
def test_a_repository_in_the_cache_of_hugging_face_is_its_revision_main(
    tmp_path: Path, below: str
) -> None:
    folder = tmp_path / "models--org--name"
    for name in ("blobs", "refs", "snapshots/abc", "snapshots/old"):
        (folder / name).mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    save_file(WEIGHTS, folder / "blobs" / "0123")
    (folder / "snapshots/abc/model.safetensors").symlink_to("../../blobs/0123")
    step = opened(folder / below)
    expected = as_bytes({KEYS[name]: value for name, value in WEIGHTS.items()})
    assert expected == as_bytes(read_tree(step))
    assert {
        "huggingface.repository": "org/name",
        "huggingface.revision": "abc",
    } == step.labels


def test_each_dtype_that_the_package_writes_is_read(tmp_path: Path) -> None:
    types = {
        name: np.dtype(getattr(ml_dtypes, name, None) or name)
        for name, bits in TENSOR_DTYPES.values()
        if bits >= 8 and "fnuz" not in name
    }
    weights = {
        name: np.frombuffer(bytes([0, 1] * 8), dtype) for name, dtype in types.items()
    }
    save_file(weights, tmp_path / "model.safetensors")
    assert as_bytes(weights) == as_bytes(read_tree(opened(tmp_path)))


@pytest.mark.parametrize(
    ("dtype", "ours", "shape"),
    [("F4", "float4_e2m1fn", [4]), ("F6_E2M3", "float6_e2m3fn", [4, 2])],
)
def test_elements_smaller_than_a_byte_are_listed_and_not_read(
    tmp_path: Path, dtype: str, ours: str, shape: list[int]
) -> None:
    size = int(np.prod(shape)) * (4 if dtype == "F4" else 6) // 8
    header = {"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(size)
    (tmp_path / "a.safetensors").write_bytes(data)
    step = opened(tmp_path)
    assert (ours, tuple(shape)) == (
        step.tree.leaves[0].dtype,
        step.tree.leaves[0].shape,
    )
    with pytest.raises(PreconditionError, match=r"tensor 'w': .* bits each"):
        read_leaf(step, "w")


def test_the_digest_changes_with_the_files_that_describe_a_step(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    first = opened(tmp_path).digest
    assert first == opened(tmp_path).digest
    (tmp_path / "config.json").write_text("{}")
    assert first != opened(tmp_path).digest


def test_the_index_of_shards_decides_and_what_it_lacks_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    second = "model-00002-of-00002.safetensors"
    tensors = load_file(tmp_path / second)
    wanted = as_bytes(read_tree(opened(tmp_path)))
    save_file({**tensors, "extra.w": np.ones(2), "more": np.ones(2)}, tmp_path / second)

    found = store.open_foreign(f"safetensors:{tmp_path}").open()
    reason = "has tensors that the index lacks: extra.w, more"
    assert {second: reason} == dict(found.info.unread)
    assert {"model", "empty"} == set(found.restore())
    assert wanted == as_bytes(read_tree(opened(tmp_path)))
    with store.connect(f"file://{tmp_path}/store") as client:
        (done,) = client.run("a/b").import_from(f"safetensors:{tmp_path}")
        label = done.checkpoint.labels["safetensors.not_read"]
        assert f"1: {second}" == label


def test_a_shard_that_lacks_a_tensor_of_the_index_is_rejected(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    save_file({"other": np.ones(2)}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(DataLossError, match=r"in model-00002.*got none; copy the file"):
        opened(tmp_path)
