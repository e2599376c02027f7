"""``open_foreign`` restores each format into a target."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.array_serialization import pytree_serialization
from jax.sharding import Mesh, PartitionSpec
from safetensors.numpy import save_file

import storesvc_client as store
from storesvc_client.errors import InvalidRequestError, MismatchError
from tests.support.eformer_parts import BIAS, COUNT, KERNEL

EFORMER = Path(__file__).parents[1] / "golden" / "foreign" / "eformer"


def assert_equal(expected: Any, actual: Any) -> None:
    assert str(jax.tree.structure(expected)) == str(jax.tree.structure(actual))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_numbers_in_names_become_indexes_where_the_target_has_them() -> None:
    run = store.open_foreign(f"eformer:{EFORMER}")
    layers = {0: {"kernel": jnp.zeros((2, 3), jnp.bfloat16)}, 1: {"bias": jnp.zeros(3)}}
    like = {"tx": [{"count": jnp.zeros((), jnp.int32), "mu": {"layers": layers}}]}
    expected = {
        "tx": [
            {
                "count": COUNT,
                "mu": {"layers": {0: {"kernel": KERNEL}, 1: {"bias": BIAS}}},
            }
        ]
    }
    assert_equal(expected, run.restore(10, like=like, select="tx/**"))


def test_numbers_in_names_of_an_imported_checkpoint_become_indexes_too(
    run: store.Run,
) -> None:
    run.import_from(f"eformer:{EFORMER}", steps=[20])
    state = {"layers": [{"kernel": KERNEL}, {"bias": BIAS}]}

    assert_equal(state, run.restore(20, like=state))
    with run.loop(every=store.Steps(1)) as loop:
        restored, start = loop.restore_or(state)
    assert 21 == start
    assert_equal(state, restored)
    run.save(21, run.restore(20)).result()  # by this library: its keys are exact
    with pytest.raises(MismatchError, match="a number and its text are different"):
        run.restore(21, like=state)


def test_a_target_of_another_shape_is_rejected() -> None:
    run = store.open_foreign(f"eformer:{EFORMER}")
    like = {"layers": [{"kernel": jnp.zeros((3, 3))}, {"bias": jnp.zeros(3)}]}
    with pytest.raises(MismatchError, match="leaf 'layers/0/kernel': in the ch"):
        run.restore(20, like=like)


@pytest.mark.parametrize("spec", [PartitionSpec("x"), PartitionSpec(None, "x")])
def test_a_sharded_restore_reads_each_byte_of_safetensors_once(
    tmp_path: Path, spec: PartitionSpec
) -> None:
    weights = np.arange(64, dtype=np.float32).reshape(8, 8)
    save_file({"m.w": weights}, tmp_path / "model.safetensors")
    run = store.open_foreign(f"safetensors:{tmp_path}").open()
    mesh = Mesh(np.array(jax.devices()), ("x",))
    like = {"m": {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}}
    state: Any = run.restore(like=like, mesh=mesh, rules=[(".*", spec)])
    assert weights.tolist() == state["m"]["w"].tolist()
    assert spec == state["m"]["w"].sharding.spec
    assert run.report is not None
    assert (weights.nbytes, False) == (run.report.read_bytes, run.report.is_verified)


def test_the_tree_that_jax_saved_comes_back(tmp_path: Path) -> None:
    tree = {"a": (jnp.ones(2), [None, jnp.zeros((2, 2))]), "b": {}}
    pytree_serialization.save(tree, tmp_path)
    assert_equal(tree, store.open_foreign(f"jax:{tmp_path}").restore())


def test_a_url_may_name_one_file_whose_names_are_kept_whole(tmp_path: Path) -> None:
    save_file({"a": np.ones(2), "a.b": np.zeros(1)}, tmp_path / "lora.safetensors")
    save_file({"w": np.ones(2)}, tmp_path / "vae.safetensors")
    run = store.open_foreign(
        f"safetensors:{tmp_path}/lora.safetensors", keep_names=True
    )
    assert f"safetensors:file://{tmp_path}/lora.safetensors" == run.name
    assert {"a": [1.0, 1.0], "a.b": [0.0]} == {
        key: value.tolist() for key, value in run.restore().items()
    }


def test_names_are_kept_whole_for_safetensors_only() -> None:
    with pytest.raises(InvalidRequestError, match="keep_names= with safetensors only"):
        store.open_foreign(f"eformer:{EFORMER}", keep_names=True)
