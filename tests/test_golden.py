"""A store written by the first release of the format stays readable.

``tests/golden/v1`` was written once, by ``python -m tests.test_golden``; it must
never be written again. A new format adds a folder beside it.
"""

import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import storesvc_client as store
from storesvc_proto.v1 import tree_pb2 as pb

HERE = Path(__file__).parent / "golden"


def the_tree() -> dict[str, Any]:
    """What it holds."""
    return {
        "a": {
            "params": {
                "layers": [
                    {"kernel": np.arange(12, dtype=np.float32).reshape(3, 4)},
                    {"kernel": np.arange(4).astype(ml_dtypes.bfloat16)},
                ],
                "odd/name %": np.array([1, -2, 7], ml_dtypes.int4),
            },
            "rng": jax.random.key(7),
            "step": 1234,
            "empty": np.zeros((3, 0), np.complex64),
        },
        "b": {7: np.float16(-0.0)},
    }


@pytest.mark.parametrize("version", ["v1"])
def test_a_store_of_each_format_is_restored(tmp_path: Path, version: str) -> None:
    root = tmp_path / "store"
    shutil.copytree(HERE / version, root)
    with store.connect(root.as_uri()) as client:
        run = client.run("golden/run")
        back = run.restore(1234)
        found = run.checkpoint(1234)

    expected = the_tree()
    assert str(jax.tree.structure(expected)) == str(jax.tree.structure(back))
    assert jax.random.key_data(expected["a"].pop("rng")).tolist() == (
        jax.random.key_data(back["a"].pop("rng")).tolist()
    )
    for one, other in zip(
        jax.tree.leaves(expected), jax.tree.leaves(back), strict=True
    ):
        assert type(one) is type(other)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    assert {"loss": 0.5} == found.metrics
    assert {"note": "é"} == found.labels


def test_the_numbers_of_the_contract_never_change() -> None:
    assert {
        "key": 1,
        "path_kinds": 2,
        "kind": 3,
        "dtype": 4,
        "dtypes": 5,
        "rank": 6,
        "shape": 7,
        "chunk_shape": 8,
        "sharding": 9,
        "shardings": 10,
        "prng_impl": 11,
        "prng_impls": 12,
        "structure": 13,
    } == {f.name: f.number for f in pb.LeafTable.DESCRIPTOR.fields}
    assert {
        "ordinal": 1,
        "crc32c": 2,
        "digests": 3,
        "file": 4,
        "offset": 5,
        "length": 6,
        "files": 7,
    } == {f.name: f.number for f in pb.ChunkTable.DESCRIPTOR.fields}


if __name__ == "__main__":
    target = HERE / "v1"
    assert not target.exists(), "a golden store is written once"
    with store.connect(target.as_uri()) as writing:
        writing.run("golden/run").save(
            1234, the_tree(), metrics={"loss": 0.5}, labels={"note": "é"}
        )
