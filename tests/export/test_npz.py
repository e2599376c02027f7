"""Exports to .npz, read by NumPy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storesvc_client as store
from tests.export.parts import Save

TREE: dict[str, Any] = {
    "a/b": np.arange(6.0).reshape(2, 3),
    "n": {"i": np.array([3, -4]), "c": np.array([1 + 2j]), "s": np.float32(1.5)},
    "empty": np.zeros((0, 2), np.float16),
}


def test_numpy_reads_the_bytes_that_were_saved(saved: Save, tmp_path: Path) -> None:
    report = saved("memory://", TREE).export(f"npz:{tmp_path}/all.npz")

    with np.load(tmp_path / "all.npz", allow_pickle=False) as found:
        expected = {
            "a%2Fb": TREE["a/b"],
            "empty": TREE["empty"],
            "n/c": TREE["n"]["c"],
            "n/i": TREE["n"]["i"],
            "n/s": TREE["n"]["s"],
        }
        assert sorted(expected) == sorted(found.files)
        for name, array in expected.items():
            assert (array.dtype, array.shape) == (found[name].dtype, found[name].shape)
            assert array.tobytes() == found[name].tobytes()
    assert ("all.npz",) == report.files


def test_equal_checkpoints_make_equal_files(saved: Save, tmp_path: Path) -> None:
    saved("memory://", TREE).export(f"npz:{tmp_path}/1.npz")
    saved("memory://", TREE).export(f"npz:{tmp_path}/2.npz")

    assert (tmp_path / "1.npz").read_bytes() == (tmp_path / "2.npz").read_bytes()


def test_a_dtype_that_numpy_cannot_read_is_rejected_unless_it_is_cast(
    saved: Save, tmp_path: Path
) -> None:
    import jax.numpy as jnp

    opened = saved("memory://", {"w": jnp.arange(4, dtype=jnp.bfloat16)})

    with pytest.raises(
        store.PreconditionError, match=r"leaf 'w': .* npz holds, got bfloat16; cast it"
    ):
        opened.export(f"npz:{tmp_path}/x.npz")
    opened.export(f"npz:{tmp_path}/x.npz", cast="float32")

    with np.load(tmp_path / "x.npz") as found:
        np.testing.assert_array_equal(np.arange(4, dtype=np.float32), found["w"])


@pytest.mark.parametrize("name", ["..\\..\\w", "\\w", "C:\\w"])
def test_a_name_that_leads_out_of_a_folder_is_rejected(
    saved: Save, name: str, tmp_path: Path
) -> None:
    opened = saved("memory://", {name: {"w": np.ones(2)}})

    with pytest.raises(store.PreconditionError, match="a name for a member"):
        opened.export(f"npz:{tmp_path}/x.npz")


def test_only_a_file_of_that_name_is_written_and_never_twice(
    saved: Save, tmp_path: Path
) -> None:
    opened = saved("memory://", {"w": np.ones(2)})
    opened.export(f"npz:{tmp_path}/x.npz")

    with pytest.raises(store.PreconditionError, match="exists"):
        opened.export(f"npz:{tmp_path}/x.npz")
    with pytest.raises(store.InvalidRequestError, match=r"name ends in \.npz"):
        opened.export(f"npz:{tmp_path}/x")
    assert ["x.npz"] == [file.name for file in tmp_path.iterdir()]
