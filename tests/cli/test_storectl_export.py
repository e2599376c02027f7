"""``storectl export``: what it writes, prints and rejects."""

from pathlib import Path
from typing import Final

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

import storesvc_client as store
from tests.support.command_line import document, printed, refusal, storectl


@pytest.fixture(scope="module")
def address(server_address: str) -> str:
    """The address of a server that holds a checkpoint with items."""
    state = {"params": {"kernel": np.ones((8, 4), np.float32)}, "n": np.arange(3)}
    with store.connect(server_address) as client:
        run = client.run("prod/exported")
        run.save(7, state, items={"config": {"x": 1}, "raw": b"raw"}).result()
        run.tags.set("best", 7)
    return server_address


def test_a_checkpoint_becomes_safetensors_in_another_dtype(
    address: str, tmp_path: Path
) -> None:
    text = printed(
        *(address, "export", "prod/exported@best", f"safetensors:{tmp_path}/x"),
        *("--dtype", "bf16", "--select", "params/**", "--max-shard", "1MiB"),
    )

    assert f"safetensors:{tmp_path}/x: 1 leaf, 64 B\n" == text
    with safe_open(tmp_path / "x" / "model.safetensors", "np") as file:
        assert ["params.kernel"] == list(file.keys())
        assert "BF16" == file.get_slice("params.kernel").get_dtype()
        assert jnp.bfloat16 == file.get_tensor("params.kernel").dtype


def test_a_report_is_one_document(address: str, tmp_path: Path) -> None:
    found = document(
        *(address, "export", "prod/exported@7", f"orbax:{tmp_path}"),
        *("--layout", "v1", "--item", "model", "--drop-items"),
    )

    assert ["raw"] == found["dropped_items"]
    assert ["7/model", "7/config"] == found["files"]
    assert (tmp_path / "7" / "orbax.checkpoint").exists()


def test_a_mapping_makes_the_tree_that_is_exported(
    address: str, tmp_path: Path
) -> None:
    (tmp_path / "rules.toml").write_text("""
        version = 1
        otherwise = "drop"
        [[rules]]
        from = "params/{name}"
        to = "h/{name}"
        operations = [{transpose = [1, 0]}]
    """)
    line = (address, "export", "prod/exported@7", f"npz:{tmp_path}/x.npz")

    text = printed(*line, "--map", str(tmp_path / "rules.toml"), "--drop-items")

    assert ": 1 leaf, 128 B, without the items config, raw" in text
    with np.load(tmp_path / "x.npz") as found:
        assert {"h/kernel": (4, 8)} == {k: found[k].shape for k in found.files}
    text = refusal(*line, "--map", str(tmp_path / "rules.yaml"))
    assert "expected a file whose name ends in .toml or .json" in text


def test_what_would_be_lost_is_rejected_by_name(address: str, tmp_path: Path) -> None:
    line = (address, "export", "prod/exported@7", f"npz:{tmp_path}/x.npz")

    assert "got config, raw, which npz cannot hold" in refusal(*line)
    assert "drop_items=True (--drop-items)" in refusal(*line)
    assert [] == list(tmp_path.iterdir())


SIZES: Final = {"5": 0, "5kB": 0, "1.5GB": 0, "0GB": 1, "5iB": 2, "-1": 2}
"""The exit code for each."""


@pytest.mark.parametrize("size", SIZES)
def test_a_size_is_a_positive_number_with_a_known_unit(
    size: str, address: str, tmp_path: Path
) -> None:
    result = storectl(
        *(address, "export", "prod/exported@7", f"safetensors:{tmp_path}/x"),
        *("--max-shard", size, "--drop-items"),
    )

    assert SIZES[size] == result.exit_code
    assert bool(SIZES[size]) == ("expected a" in result.stderr)
    assert (tmp_path / "x").exists() == (not SIZES[size])
