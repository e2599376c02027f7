"""Decides how one leaf of a target of Orbax is restored.

Orbax restores a leaf in the type, dtype and sharding that its target names, whatever
was saved; a restore of this library returns what was saved. So a leaf has two parts
here: what to ask the checkpoint for, and what to do with the value. Reads nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from orbax.checkpoint import ArrayRestoreArgs, RestoreArgs

from storesvc.format.dtypes import DTYPES
from storesvc_client._pytree.restore_target import (
    default_device,
    saved_placement,
    would_narrow,
)
from storesvc_client._values.values import LeafInfo
from storesvc_client.errors import InvalidRequestError, MismatchError

_NUMBERS: Final = (bool, int, float, complex)
_SCALAR_TYPES: Final = {
    "bool": bool,
    "int64": int,
    "float64": float,
    "complex128": complex,
}


@dataclass(frozen=True, slots=True, eq=False)
class LeafTarget:
    """Leaf to ask a checkpoint for, and how to convert the restored value."""

    like: Any
    """Leaf for ``like=``."""
    convert: Callable[[Any], Any]
    """Makes what the caller asked for of the restored value."""


def leaf_target(saved: LeafInfo, target: Any) -> LeafTarget:
    """Returns how a leaf is restored.

    Args:
        saved: The leaf in the checkpoint.
        target: An array, a ``ShapeDtypeStruct``, a number, a type, ``NumpyShapeDtype``,
            or one of Orbax's ``RestoreArgs``, which may leave all but the type open.

    Raises:
        MismatchError: No sharding was given, and the saved one does not fit the
            devices.
        InvalidRequestError: An argument of Orbax has no equal.
    """
    if isinstance(target, type):
        target = RestoreArgs(restore_type=target)
    if isinstance(target, RestoreArgs):
        return _of_arguments(saved, target)
    if isinstance(target, _NUMBERS) and not isinstance(target, np.generic):
        return _number(saved, type(target))
    if isinstance(target, np.ndarray | np.generic):
        return _host(saved, target.shape, target.dtype)
    if hasattr(target, "sharding") and hasattr(target, "shape"):
        return _device(saved, target.shape, target.dtype, target.sharding)
    if type(target).__module__.startswith("orbax.") and hasattr(target, "shape"):
        shape, dtype = target.shape, target.dtype  # version 1's array on the host
        shape = _shape(saved) if shape is None else shape
        return _host(saved, shape, _dtype(saved) if dtype is None else dtype)
    return LeafTarget(target, _unchanged)


def saved_struct(saved: LeafInfo) -> Any:
    """Returns a leaf as a ``ShapeDtypeStruct`` with its saved sharding, if that fits
    the devices here; of texts and bytes their kind."""
    if saved.kind in ("text", "bytes", "integer", "unknown"):
        return saved.kind
    shape, dtype = _shape(saved), _dtype(saved)
    is_on_device = saved.kind in ("array", "prng_key")
    sharding = saved_placement(saved.sharding, saved.dtype) if is_on_device else None
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def saved_target(saved: LeafInfo) -> Any:
    """Returns a leaf that is restored as it was saved: for an array on devices its
    ``saved_struct``, for others one of their kind that takes no memory."""
    is_on_device = saved.kind in ("array", "prng_key")
    return saved_struct(saved) if is_on_device else _saved_like(saved)


def _of_arguments(saved: LeafInfo, target: RestoreArgs) -> LeafTarget:
    """Returns how a leaf is restored that Orbax's arguments describe."""
    kind, dtype = target.restore_type, target.dtype
    if kind in _NUMBERS:
        return _number(saved, kind)
    if kind is np.ndarray:
        return _host(saved, _shape(saved), _dtype(saved) if dtype is None else dtype)
    if kind not in (None, jax.Array, str):
        raise InvalidRequestError(
            f"leaf {saved.key!r}: restore_type=: expected jax.Array, np.ndarray, a "
            f"type of numbers or None, got {kind!r}"
        )
    shape, sharding = _shape(saved), None
    if isinstance(target, ArrayRestoreArgs):
        sharding = _sharding_of(target)
        shape = shape if target.global_shape is None else tuple(target.global_shape)
    elif saved.kind not in ("array", "prng_key"):
        like = _saved_like(saved)
        return LeafTarget(like, _unchanged)
    return _device(saved, shape, _dtype(saved) if dtype is None else dtype, sharding)


def _sharding_of(target: ArrayRestoreArgs) -> Any:
    if target.sharding is not None:
        to_jax = getattr(target.sharding, "to_jax_sharding", None)  # saved metadata
        return target.sharding if to_jax is None else to_jax()
    if target.mesh is not None and target.mesh_axes is not None:
        return NamedSharding(target.mesh, target.mesh_axes)
    return None


def _device(saved: LeafInfo, shape: Any, dtype: Any, sharding: Any) -> LeafTarget:
    """Returns how a leaf becomes an array on devices."""
    placement = _placement(saved, sharding)
    shape = tuple(shape)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key) or saved.kind == "prng_key":
        return LeafTarget(
            jax.ShapeDtypeStruct(shape, dtype, sharding=placement), _unchanged
        )
    if saved.kind in ("array", "host_array", "host_scalar"):
        if not would_narrow(saved.dtype):
            like = jax.ShapeDtypeStruct(shape, DTYPES[saved.dtype], sharding=placement)
            wanted = np.dtype(dtype)
            same = wanted == like.dtype
            return LeafTarget(like, _unchanged if same else lambda x: x.astype(wanted))
        like = _host_like(shape, saved.dtype)
    elif saved.kind == "python_scalar" and shape == ():
        like = _saved_like(saved)
    else:
        return LeafTarget(jax.ShapeDtypeStruct(shape, dtype), _unchanged)
    return LeafTarget(
        like, lambda x: jax.device_put(np.asarray(x).astype(dtype), placement)
    )


def _placement(saved: LeafInfo, sharding: Any) -> Any:
    """Returns the sharding of a target, or the saved one if it has none."""
    sharding = getattr(sharding, "sharding", sharding)  # of a jax Format
    if sharding is not None:
        return sharding
    if saved.kind not in ("array", "prng_key") or would_narrow(saved.dtype):
        return default_device()
    found: Sharding | None = saved_placement(saved.sharding, saved.dtype)
    if found is None:
        assert saved.sharding is not None
        count = math.prod(saved.sharding.axis_sizes)
        raise MismatchError(
            f"leaf {saved.key!r}: expected the {count} devices of its saved sharding, "
            f"got {jax.device_count()}; give a sharding in the target"
        )
    return found


def _host(saved: LeafInfo, shape: Any, dtype: Any) -> LeafTarget:
    """Returns how a leaf becomes an array on the host."""
    wanted = np.dtype(dtype)
    if saved.kind == "python_scalar" and tuple(shape) == ():
        return LeafTarget(_saved_like(saved), lambda x: np.asarray(x, wanted))
    like = _host_like(tuple(shape), saved.dtype)
    return LeafTarget(like, lambda x: np.asarray(x).astype(wanted, copy=False))


def _number(saved: LeafInfo, kind: Any) -> LeafTarget:
    """Returns how a leaf becomes a Python number."""
    if saved.kind == "python_scalar":
        return LeafTarget(_saved_like(saved), kind)
    if saved.kind in ("array", "host_array", "host_scalar"):
        like = _host_like((), saved.dtype)
        return LeafTarget(like, lambda x: kind(np.asarray(x).item()))
    return LeafTarget(kind(), _unchanged)


def _saved_like(saved: LeafInfo) -> Any:
    """Returns a leaf of the kind that was saved, on the host."""
    match saved.kind:
        case "python_scalar":
            return _SCALAR_TYPES[saved.dtype]()
        case "text":
            return ""
        case "bytes":
            return b""
        case "integer":
            return 0
        case _:
            return _host_like(saved.shape, saved.dtype)


def _host_like(shape: tuple[int, ...], dtype: str) -> Any:
    """Returns an array of a shape that takes no memory."""
    return np.broadcast_to(np.zeros((), DTYPES[dtype]), shape)


def _shape(saved: LeafInfo) -> tuple[int, ...]:
    return saved.shape[:-1] if saved.kind == "prng_key" else saved.shape


def _dtype(saved: LeafInfo) -> Any:
    if saved.kind == "prng_key":
        made = jax.eval_shape(lambda: jax.random.key(0, impl=saved.prng_impl))
        return made.dtype
    return DTYPES[saved.dtype]


def _unchanged(value: Any) -> Any:
    return value
