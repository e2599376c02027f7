"""``storectl get``: summaries of leaves, files, and what it rejects."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors

import storesvc_client as store
from tests.support.command_line import document, printed, refusal, storectl, table

FLOATS = np.array([[1.5, np.nan], [-2.5, 4.0]], np.float32)


@pytest.fixture(scope="module")
def address(server_address: str) -> str:
    """The address of a server that holds a checkpoint of odd leaves."""
    state = {
        "params": {
            "blocks": [{"kernel": np.ones(3, np.float32), "bias": 0.5}] * 3,
            "embed": {"embedding": FLOATS},
            "half": jnp.arange(4, dtype=jnp.bfloat16),
        },
        "odd": {
            "empty": np.zeros((0, 3), np.float32),
            "endless": np.array([np.inf, -np.inf, 1.0]),
            "flags": np.array([True, False, True, True]),
            "small": jnp.arange(4, dtype=jnp.int4),
            "waves": np.array([1 + 2j, 3 - 2j]),
        },
        "rngs": {"dropout": jax.random.key(0, impl="threefry2x32")},
        "step": 20,
    }
    with store.connect(server_address) as client:
        client.run("prod/tiny").save(20, state)
    return server_address


def test_get_summarizes_the_values_that_are_not_nan(address: str) -> None:
    header, row = table(printed(address, "get", "prod/tiny@20:params/embed/embedding"))

    assert ["KEY", "DTYPE", "SHAPE", "MIN", "MAX", "MEAN", "NAN"] == header
    assert ["float32", "[2,2]", "-2.5", "4", "1", "1"] == row[1:]


def test_get_summarizes_values_without_order_as_far_as_possible(address: str) -> None:
    rows = {
        row[0]: row[1:] for row in table(printed(address, "get", "prod/tiny@20:**"))
    }

    assert ["float32", "[0,3]", "-", "-", "-", "0"] == rows["odd/empty"]
    assert ["bool", "[4]", "False", "True", "0.75", "0"] == rows["odd/flags"]
    assert ["int4", "[4]", "0", "3", "1.5", "0"] == rows["odd/small"]
    assert ["complex128", "[2]", "-", "-", "2+0j", "0"] == rows["odd/waves"]
    assert ["bfloat16", "[4]", "0", "3", "1.5", "0"] == rows["params/half"]
    assert ["key<threefry2x32>", "[]", "-", "-", "-", "-"] == rows["rngs/dropout"]
    assert ["int64", "[]", "20", "20", "20", "0"] == rows["step"]


def test_json_writes_numbers_that_it_lacks_as_text(address: str) -> None:
    _, infinite, wave = document(address, "get", "prod/tiny@20:odd/[ew]*")

    assert ["-Infinity", "Infinity", "NaN"] == [
        infinite[name] for name in ("min", "max", "mean")
    ]
    assert ([2.0, 0.0], None) == (wave["mean"], wave["min"])


def test_get_writes_one_leaf_as_npy(address: str, tmp_path: Path) -> None:
    file = tmp_path / "embedding.npy"

    text = printed(address, "get", "prod/tiny@20:params/embed/*", "-o", str(file))

    assert f"{file}: 1 leaf, 16 B\n" == text
    assert FLOATS.tobytes() == np.load(file).tobytes()


def test_get_rejects_several_leaves_for_one_npy(address: str, tmp_path: Path) -> None:
    file = tmp_path / "blocks.npy"

    sentence = refusal(address, "get", "prod/tiny@20:params/blocks/**", "-o", str(file))

    assert "6 leaves match" in sentence
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("length", [255, 300])
def test_get_rejects_a_name_that_is_too_long_for_the_file(
    length: int, address: str, tmp_path: Path
) -> None:
    file = tmp_path / f"{'x' * (length - len('.npy'))}.npy"

    sentence = refusal(address, "get", "prod/tiny@20:step", "-o", str(file))

    assert f"{file}: {os.strerror(errno.ENAMETOOLONG)}" == sentence


def test_get_writes_leaves_as_npz_by_their_keys(address: str, tmp_path: Path) -> None:
    file = tmp_path / "odd.npz"

    counts = document(address, "get", "prod/tiny@20:odd/[fw]*", "-o", str(file))

    with np.load(file) as arrays:
        assert {"odd/flags", "odd/waves"} == set(arrays)
        assert [1 + 2j, 3 - 2j] == arrays["odd/waves"].tolist()
    assert 2 == counts["leaf_count"]


def test_get_writes_safetensors_that_its_own_readers_read(
    address: str, tmp_path: Path
) -> None:
    file = tmp_path / "params.safetensors"

    printed(address, "get", "prod/tiny@20:[pr]*/**", "-o", str(file))

    # Their reader of bytes alone: the one of arrays knows no bfloat16.
    read = dict(safetensors.deserialize(file.read_bytes()))  # type: ignore[no-untyped-call]
    assert FLOATS.tobytes() == bytes(read["params/embed/embedding"]["data"])
    half = read["params/half"]
    assert ("BF16", [4]) == (half["dtype"], half["shape"])
    with safetensors.safe_open(file, framework="numpy") as opened:
        assert {"rngs/dropout": "threefry2x32"} == json.loads(
            opened.metadata()["prng_impls"]
        )


@pytest.mark.parametrize(
    ("key", "suffix", "sentence"),
    [
        (
            "params/half",
            ".npz",
            (
                "leaf params/half: NumPy's file format has no name for bfloat16; "
                "a .safetensors file holds it"
            ),
        ),
        (
            "odd/small",
            ".npy",
            "leaf odd/small: NumPy's file format has no name for int4",
        ),
        (
            "odd/waves",
            ".safetensors",
            "leaf odd/waves: safetensors has no name for complex128",
        ),
    ],
)
def test_a_dtype_without_a_name_in_the_format_is_rejected_with_its_leaf(
    address: str, tmp_path: Path, key: str, suffix: str, sentence: str
) -> None:
    file = tmp_path / f"leaf{suffix}"

    assert sentence == refusal(address, "get", f"prod/tiny@20:{key}", "-o", str(file))
    assert [] == list(tmp_path.iterdir())


def test_a_file_that_exists_is_replaced_only_by_force(
    address: str, tmp_path: Path
) -> None:
    file = tmp_path / "step.npy"
    file.write_text("precious")
    arguments = ("get", "prod/tiny@20:step", "-o", str(file))

    assert f"{file} exists; --force replaces it" == refusal(address, *arguments)
    assert "precious" == file.read_text()

    printed(address, *arguments, "--force")
    assert 20 == np.load(file)
    assert [file] == list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_reported(address: str) -> None:
    sentence = refusal(address, "get", "prod/tiny@20:step", "-o", "/nowhere/x.npy")

    assert f"/nowhere/x.npy: {os.strerror(errno.ENOENT)}" == sentence


@pytest.mark.slow
def test_damaged_data_leave_the_file_unchanged(
    start_server: Callable[[], Any], tmp_path: Path
) -> None:
    server = start_server()
    with store.connect(server.address) as client:
        client.run("prod/tiny").save(1, {"w": np.arange(4096.0)}).result()
    files = (file for file in server.root.rglob("pool/**/*") if file.is_file())
    data = max(files, key=lambda file: file.stat().st_size)
    stored = bytearray(data.read_bytes())
    stored[len(stored) // 2] ^= 1
    data.write_bytes(stored)
    file = tmp_path / "folder" / "w.npy"
    file.parent.mkdir()
    file.write_text("precious")

    sentence = refusal(
        server.address, "get", "prod/tiny@1:w", "-o", str(file), "--force"
    )

    assert "leaf 'w'" in sentence
    assert "precious" == file.read_text()
    assert [file] == list(file.parent.iterdir())


def test_a_file_of_another_kind_is_wrong_usage(address: str, tmp_path: Path) -> None:
    result = storectl(address, "get", "a/b@1:x", "-o", str(tmp_path / "x.pt"))

    assert 2 == result.exit_code
    assert ".npy, .npz, .safetensors" in result.stderr


def test_a_glob_that_matches_nothing_names_the_nearest_keys(address: str) -> None:
    sentence = refusal(address, "get", "prod/tiny@latest:params/embed/embeding")

    assert sentence.startswith(
        "no leaf of prod/tiny@20 matches 'params/embed/embeding'; "
        "nearest: params/embed/embedding"
    )


def test_the_path_of_a_subtree_is_an_error_that_names_the_glob_of_its_leaves(
    address: str,
) -> None:
    assert (
        "no leaf of prod/tiny@20 matches 'params/blocks', which is a subtree of "
        "6 leaves; use 'params/blocks/**'"
    ) == refusal(address, "get", "prod/tiny@20:params/blocks")
