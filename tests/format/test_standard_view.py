"""Anyone opens a leaf with plain TensorStore, and nothing of ours."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts

import storesvc_client as store

LEAVES: dict[str, np.ndarray[Any, Any]] = {
    "weights": np.arange(2**23, dtype=np.float32).reshape(2**11, 2**12),
    "edge": np.arange(3_000_017, dtype=np.int64),
    "half": np.arange(12).reshape(3, 4).astype(ml_dtypes.bfloat16),
    "scalar": np.array(2.5),
    "empty": np.zeros((3, 0, 2), np.complex64),
    "mask": np.array([True, False]),
    "nibbles": np.array([1, -2, 7], ml_dtypes.int4),
}


@pytest.mark.parametrize("key", LEAVES)
def test_a_leaf_is_a_zarr3_array_in_ocdbt(tmp_path: Path, key: str) -> None:
    with store.connect(tmp_path.as_uri()) as client:
        client.run("tests/view").save(7, {"params": {key: LEAVES[key]}})
    places = tmp_path / "data/tests/view"
    (tree,) = (places / "trees").iterdir()

    array = ts.open(
        {
            "driver": "zarr3",
            "kvstore": {
                "driver": "ocdbt",
                "base": f"file://{places}/pool/",
                "manifest": f"file://{tree}/",
                "path": f"params/{key}/",
            },
            "fill_missing_data_reads": False,
        },
        open=True,
        read=True,
    ).result()

    expected = LEAVES[key]
    if key == "nibbles":
        expected = expected.view(np.uint8)  # zarr3 has no word for it
    assert expected.shape == array.shape
    assert expected.dtype.name == array.dtype.name
    assert expected.tobytes() == np.asarray(array.read().result()).tobytes()
