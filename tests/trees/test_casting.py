"""Casting trees to another floating-point dtype."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

from storesvc_client.errors import InvalidRequestError
from storesvc_client.trees.nnx.blueprints import cast_floating
from tests.support.stable_ids import stable_id


@pytest.mark.parametrize(
    "dtype",
    [
        jnp.int8,
        jnp.int4,
        bool,
        int,
        jnp.complex64,
        "bf17",
        "",
        object(),
        object,
        np.dtype("S4"),
        jax.random.key(0).dtype,
    ],
    ids=stable_id,
)
def test_other_than_floating_point_dtypes_are_rejected(dtype: Any) -> None:
    with pytest.raises(InvalidRequestError, match="expected a floating-point dtype"):
        cast_floating({"a": jnp.ones(2)}, dtype)
    with pytest.raises(InvalidRequestError, match="expected a floating-point dtype"):
        cast_floating({}, dtype)


@pytest.mark.parametrize(
    "dtype",
    [
        "bfloat16",
        "bf16",
        jnp.bfloat16,
        np.dtype(ml_dtypes.bfloat16),
        jnp.ones(1, "bfloat16"),
    ],
    ids=["name", "short", "type", "dtype", "array"],
)
def test_floating_point_arrays_are_cast_and_keep_their_types(dtype: Any) -> None:
    dtype = getattr(dtype, "dtype", dtype) if isinstance(dtype, jax.Array) else dtype
    where = SingleDeviceSharding(jax.devices()[1])
    tree = {
        "jax": jax.device_put(jnp.ones(2), where),
        "numpy": np.ones(2),
        "scalar": np.float32(1),
        "abstract": jax.ShapeDtypeStruct((2,), jnp.float32, sharding=where),
        "param": nnx.Param(jnp.ones(2)),
    }

    cast: Any = cast_floating(tree, dtype)

    assert {name: type(leaf) for name, leaf in tree.items() if name != "scalar"} == {
        name: type(leaf) for name, leaf in cast.items() if name != "scalar"
    }
    assert isinstance(cast["scalar"], np.generic)
    assert {jnp.dtype(jnp.bfloat16)} == {leaf.dtype for leaf in jax.tree.leaves(cast)}
    assert where == cast["jax"].sharding == cast["abstract"].sharding


def test_all_else_stays() -> None:
    tree = {
        "key": jax.random.key(0),
        "ints": jnp.arange(2),
        "bools": np.ones(2, np.bool_),
        "complex": jnp.ones(2, jnp.complex64),
        "number": 1.5,
        "count": 3,
        "nothing": None,
    }

    cast = cast_floating(tree, jnp.float16)

    assert all(tree[name] is cast[name] for name in tree)


def test_a_dtype_that_jax_would_narrow_is_rejected_on_devices_only() -> None:
    assert np.float64 == cast_floating(np.ones(2, np.float32), np.float64).dtype
    with pytest.raises(InvalidRequestError, match="jax would narrow float64"):
        cast_floating({"a": jnp.ones(2)}, np.float64)
