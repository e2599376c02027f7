"""Makes the state of drawn leaves.

The values matter to a store that compresses, as Orbax does by default: of weights,
whose exponents are alike, it stores 78 % (bfloat16) or 92 % (float32), for twice the
CPU time that random bits take.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from benchmarks.shapes.drawing import Leaf
from benchmarks.speed.changing import Changing
from benchmarks.speed.states import random_bits

Values: TypeAlias = Callable[
    [np.random.Generator, tuple[int, ...], "np.dtype[Any]"], Any
]


def state_of(leaves: Mapping[str, Leaf], seed: int, values: Values) -> Changing:
    """Returns a state of finite numbers."""
    rng = np.random.default_rng(seed)
    dtypes = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
    return Changing(
        (key, values(rng, leaf.shape, dtypes[leaf.dtype]), sharding_of(leaf))
        for key, leaf in leaves.items()
    )


def sharding_of(leaf: Leaf) -> NamedSharding:
    """Returns the sharding of a leaf over the first devices."""
    names = "xy"[: len(leaf.mesh)]
    devices = np.array(jax.devices()[: math.prod(leaf.mesh)]).reshape(leaf.mesh)
    split = (None if axis is None else names[axis] for axis in leaf.split)
    return NamedSharding(Mesh(devices, tuple(names)), PartitionSpec(*split))


def _weights(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: "np.dtype[Any]"
) -> "NDArray[Any]":
    numbers = rng.standard_normal(shape, np.float32)
    numbers *= 0.02
    return numbers.astype(dtype, copy=False)


VALUES: Final[Mapping[str, Values]] = {"weights": _weights, "bits": random_bits}
"""Normally distributed numbers, as weights are, or random bits."""
