"""Exports to safetensors, read by the package of that name."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import storesvc_client as store
from storesvc_client._export.elements import windows
from tests.export.parts import ARRAYS, Save, data_files, dotted, flip
from tests.support.safetensors_files import load_file

THREE = {name: np.full((4, 8), at, np.float32) for at, name in enumerate("abc")}
"""Three tensors of 128 bytes."""


@pytest.fixture
def opened(saved: Save, tmp_path: Path) -> store.OpenCheckpoint:
    return saved((tmp_path / "store").as_uri(), ARRAYS)


def names_below(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_safetensors_reads_the_bytes_that_were_saved(
    opened: store.OpenCheckpoint, tmp_path: Path
) -> None:
    report = opened.export(f"safetensors:{tmp_path}/hf")
    expected = dotted(ARRAYS)

    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert {k: (v.dtype, v.shape, v.tobytes()) for k, v in expected.items()} == {
        k: (v.dtype, v.shape, v.tobytes()) for k, v in found.items()
    }
    with safe_open(tmp_path / "hf" / "model.safetensors", "np") as file:
        assert file.metadata() == {
            "format": "pt",
            "storesvc.checkpoint": opened.name,
            "storesvc.uid": opened.info.uid,
        }
    assert ["model.safetensors"] == names_below(tmp_path / "hf")
    assert (("model.safetensors",), len(expected)) == (report.files, report.leaf_count)
    assert sum(v.nbytes for v in expected.values()) == report.size_bytes


@pytest.mark.parametrize("root", ["memory://", "served"])
def test_a_checkpoint_of_any_storage_is_exported(
    saved: Save, root: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    address = request.getfixturevalue("serve")().address if root == "served" else root
    saved(address, ARRAYS).export(f"safetensors:{tmp_path}/one.safetensors")

    found = load_file(tmp_path / "one.safetensors")
    expected = dotted(ARRAYS)
    assert expected.keys() == found.keys()
    assert all(expected[k].tobytes() == found[k].tobytes() for k in found)


def test_shards_have_an_index_that_names_the_file_of_each_tensor(
    saved: Save, tmp_path: Path
) -> None:
    opened = saved("memory://", THREE)

    report = opened.export(f"safetensors:{tmp_path}/hf", max_shard_bytes=256)

    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert {
        "metadata": {"total_size": 384},
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00001-of-00002.safetensors",
            "c": "model-00002-of-00002.safetensors",
        },
    } == index
    assert sorted(report.files) == names_below(tmp_path / "hf")
    for name, file in index["weight_map"].items():
        np.testing.assert_array_equal(
            THREE[name], load_file(tmp_path / "hf" / file)[name]
        )


def test_leaves_are_selected_and_cast(
    opened: store.OpenCheckpoint, tmp_path: Path
) -> None:
    opened.export(
        f"safetensors:{tmp_path}/x",
        select=["params/layers/**", "counts"],
        cast="float16",
    )

    found = load_file(tmp_path / "x" / "model.safetensors")
    assert {
        "counts": "int64",
        "params.layers.0.kernel": "float16",
        "params.layers.1.kernel": "float16",
    } == {name: str(array.dtype) for name, array in found.items()}
    np.testing.assert_array_equal(
        ARRAYS["params"]["layers"][1]["kernel"], found["params.layers.1.kernel"]
    )


def test_a_cast_that_exceeds_the_range_is_rejected(saved: Save, tmp_path: Path) -> None:
    opened = saved("memory://", {"w": np.array([1.0, 1e30], np.float32)})

    with pytest.raises(store.InvalidRequestError, match=r"leaf 'w'.* range of float16"):
        opened.export(f"safetensors:{tmp_path}/x", cast="float16")

    assert [] == [file for file in (tmp_path / "x").iterdir() if file.suffix != ".part"]


def test_a_mapping_names_and_transposes_tensors(
    opened: store.OpenCheckpoint, tmp_path: Path
) -> None:
    rules = {
        "version": 1,
        "otherwise": "drop",
        "rules": [
            {
                "from": "params/layers/{n:int}/kernel",
                "to": "h/{n}/w",
                "operations": [{"transpose": [1, 0]}],
            }
        ],
    }

    opened.export(f"safetensors:{tmp_path}/x", mapping=rules)

    found = load_file(tmp_path / "x" / "model.safetensors")
    assert ["h.0.w", "h.1.w"] == sorted(found)
    for at in range(2):
        kernel = ARRAYS["params"]["layers"][at]["kernel"]
        np.testing.assert_array_equal(kernel.T, found[f"h.{at}.w"])


@pytest.mark.parametrize(
    ("tree", "options", "problem"),
    [
        (
            {"n": 3},
            {},
            r"leaf 'n': expected an array, got the kind Python scalar, .*--select\)$",
        ),
        ({"t": "text"}, {}, "leaf 't': expected an array, got the kind text"),
        (
            {"a": np.ones(2), "k": jax.random.key(0), "n": 3, "t": "text"},
            {},
            "leaf 'k': .* PRNG key, .*; these cannot be exported either: 'n', 't'$",
        ),
        (
            {f"n{at:02}": at for at in range(30)},
            {},
            "leaf 'n00': .*exported either: 'n01', .*, 'n20', 9 more$",
        ),
        (
            {"q": np.ones(2, ml_dtypes.int4)},
            {},
            "leaf 'q': expected a dtype that safetensors holds, got int4",
        ),
        (
            {"a": {"b": np.ones(2)}, "a.b": np.ones(3)},
            {},
            r"leaf 'a/b': .* of its own, got 'a\.b', which leaf 'a\.b' has",
        ),
        ({"__metadata__": np.ones(2)}, {}, "other names than '__metadata__'"),
    ],
)
def test_what_would_be_lost_is_rejected_by_name(
    saved: Save, tree: Any, options: Any, problem: str, tmp_path: Path
) -> None:
    opened = saved("memory://", tree)

    with pytest.raises(store.PreconditionError, match=problem):
        opened.export(f"safetensors:{tmp_path}/x", **options)

    assert not (tmp_path / "x").exists()


def test_items_are_left_out_only_if_asked(saved: Save, tmp_path: Path) -> None:
    opened = saved("memory://", THREE, items={"config": {"x": 1}, "notes": "n"})
    target = f"safetensors:{tmp_path}/x.safetensors"

    with pytest.raises(store.PreconditionError, match="got config, notes"):
        opened.export(target)
    report = opened.export(target, drop_items=True)

    assert ("config", "notes") == report.dropped_items


def test_nothing_is_replaced(opened: store.OpenCheckpoint, tmp_path: Path) -> None:
    opened.export(f"safetensors:{tmp_path}/x")

    with pytest.raises(store.PreconditionError, match=r"model\.safetensors exists"):
        opened.export(f"safetensors:{tmp_path}/x")


def test_a_retry_keeps_the_shards_that_are_complete(
    saved: Save, tmp_path: Path
) -> None:
    opened = saved((tmp_path / "store").as_uri(), THREE)
    file = data_files(tmp_path / "store")[-1]
    target, folder = f"safetensors:{tmp_path}/hf", tmp_path / "hf"
    names = [f"model-0000{at}-of-00003.safetensors" for at in (1, 2, 3)]
    position = file.read_bytes().index(THREE["b"].tobytes())
    flip(file, position)

    with pytest.raises(store.DataLossError, match="leaf 'b'"):
        opened.export(target, max_shard_bytes=128)
    assert [
        ".model-00002-of-00003.safetensors.part",
        ".storesvc-export.json",
        names[0],
    ] == names_below(folder)
    flip(file, position)
    first = (folder / names[0]).stat().st_mtime_ns
    opened.export(target, max_shard_bytes=128)

    assert [*names, "model.safetensors.index.json"] == names_below(folder)
    assert first == (folder / names[0]).stat().st_mtime_ns
    for name, tensor in zip(names, "abc", strict=True):
        np.testing.assert_array_equal(THREE[tensor], load_file(folder / name)[tensor])


def test_a_retry_writes_a_shard_again_that_has_changed(
    saved: Save, tmp_path: Path
) -> None:
    opened = saved((tmp_path / "store").as_uri(), THREE)
    file = data_files(tmp_path / "store")[-1]
    position = file.read_bytes().index(THREE["b"].tobytes())
    flip(file, position)
    with pytest.raises(store.DataLossError):
        opened.export(f"safetensors:{tmp_path}/hf", max_shard_bytes=128)
    flip(file, position)

    first = tmp_path / "hf" / "model-00001-of-00003.safetensors"
    flip(first, first.stat().st_size - 1)
    opened.export(f"safetensors:{tmp_path}/hf", max_shard_bytes=128)

    np.testing.assert_array_equal(THREE["a"], load_file(first)["a"])


def test_a_url_of_fsspec_is_a_target(
    opened: store.OpenCheckpoint, tmp_path: Path
) -> None:
    fsspec = pytest.importorskip("fsspec")

    report = opened.export("safetensors:memory://exports/hf", max_shard_bytes=4000)

    files = fsspec.filesystem("memory")
    found: dict[str, Any] = {}
    assert 4 == len(report.files)
    for name in report.files:
        (tmp_path / name).write_bytes(files.cat_file(f"/exports/hf/{name}"))
        if name.endswith(".safetensors"):
            found |= load_file(tmp_path / name)
    assert {k: v.tobytes() for k, v in dotted(ARRAYS).items()} == {
        k: v.tobytes() for k, v in found.items()
    }


@pytest.mark.slow
def test_a_leaf_of_many_chunks_is_read_in_parts(saved: Save, tmp_path: Path) -> None:
    wide = np.random.default_rng(0).standard_normal((640, 40_000), np.float32)
    opened = saved((tmp_path / "store").as_uri(), {"w": wide})
    assert opened.leaves["w"].size_bytes > 64 << 20
    rule = {"from": "w", "to": "w", "operations": [{"transpose": [1, 0]}]}

    opened.export(f"safetensors:{tmp_path}/x")
    opened.export(f"safetensors:{tmp_path}/y", mapping={"version": 1, "rules": [rule]})

    found = load_file(tmp_path / "x" / "model.safetensors")["w"]
    assert wide.tobytes() == found.tobytes()
    found = load_file(tmp_path / "y" / "model.safetensors")["w"]
    assert np.array_equal(wide.T, found)


def test_progress_ends_with_all_bytes(
    opened: store.OpenCheckpoint, tmp_path: Path
) -> None:
    seen: list[store.Progress] = []

    opened.export(f"safetensors:{tmp_path}/x", progress=seen.append)

    assert ("export", True) == (seen[-1].what, seen[-1].is_done)
    assert 0 < seen[-1].done_bytes == seen[-1].total_bytes


@pytest.mark.parametrize(
    ("url", "options", "problem"),
    [
        ("/models/llama", {}, "expected orbax:URL, safetensors:URL or npz:FILE"),
        ("zip:/x", {}, "expected orbax:URL, safetensors:URL or npz:FILE"),
        ("safetensors:", {}, "expected orbax:URL, safetensors:URL or npz:FILE"),
        ("safetensors:/x", {"cast": "int8"}, "expected a floating-point dtype"),
        ("safetensors:/x", {"layout": "v0"}, "layout=: expected only for orbax"),
        ("npz:/x.npz", {"max_shard_bytes": 5}, "expected only for safetensors"),
        ("safetensors:/x", {"max_shard_bytes": 0}, "at least 1, got 0"),
        ("safetensors:/x.safetensors", {"max_shard_bytes": 5}, "give a folder"),
        ("safetensors:nowhere://x", {}, "expected a path, file:///PATH, or a URL"),
        ("orbax:/x", {"layout": "v2"}, "expected one of 'v0', 'v1', got 'v2'"),
    ],
)
def test_arguments_that_do_not_fit_are_rejected(
    url: str, options: Any, problem: str, opened: store.OpenCheckpoint
) -> None:
    with pytest.raises(store.InvalidRequestError, match=problem):
        opened.export(url, **options)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4)), max_size=4),
    limit=st.integers(1, 60),
)
def test_windows_cover_an_array_once_in_order(
    sizes: list[tuple[int, int]], limit: int
) -> None:
    shape, chunk = [n for n, _ in sizes], [c for _, c in sizes]
    array = np.arange(math.prod(shape)).reshape(shape)

    parts = [
        array[tuple(slice(*each) for each in region)].reshape(-1)
        for region in windows(shape, chunk, itemsize=1, limit=limit)
    ]

    assert array.reshape(-1).tolist() == [n for part in parts for n in part.tolist()]
    assert all(len(part) <= limit for part in parts)
