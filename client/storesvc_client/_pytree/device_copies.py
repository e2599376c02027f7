"""Copies a tree on its own devices, so that a save blocks only until the copy starts.

The copy is dispatched, not waited for: later operations on the arrays, including
donation, are ordered after it by jax.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal, assert_never

import jax
import numpy as np

SPARE_FRACTION: Final = 0.1
"""Fraction of a device's memory that mode "auto" leaves free."""


def copied_on_device(
    values: Sequence[Any], mode: Literal["host", "device", "auto", "none"]
) -> list[Any] | None:
    """Returns copies of the leaves, device arrays on their devices, or None for no
    copy.

    Args:
        values: The leaves.
        mode: "device" always copies, "host" and "none" never do, "auto" does if all
            devices report enough free memory.
    """
    match mode:
        case "host" | "none":
            return None
        case "device":
            return [_copy(value) for value in values]
        case "auto":
            return [_copy(value) for value in values] if _fits(values) else None
        case _:
            assert_never(mode)


def _copy(value: Any) -> Any:
    if isinstance(value, jax.Array):
        if value.is_fully_addressable:
            return _copy_array(value)
        # all shards are on devices of other processes
        if not value.addressable_shards:
            return value
        # Copied shard by shard: copying the whole array would run on all processes.
        copies = [_copy_array(shard.data) for shard in value.addressable_shards]
        return jax.make_array_from_single_device_arrays(
            value.shape, value.sharding, copies
        )
    return value.copy() if isinstance(value, np.ndarray) else value


def _copy_array(array: jax.Array) -> jax.Array:
    # Array.copy would be a computation, in the caller's context: on its mesh, on its
    # default device, and rejected by its checks, such as for NaN.
    with jax.transfer_guard("allow"):
        copy: jax.Array = jax.device_put(array, array.sharding, may_alias=False)
    return copy


def _fits(values: Sequence[Any]) -> bool:
    """Returns whether a copy fits into the free memory of the devices."""
    arrays = [value for value in values if isinstance(value, jax.Array)]
    shardings = {id(array.sharding): array.sharding for array in arrays}
    devices = set().union(*(s.addressable_devices for s in shardings.values()))
    free = {device: _free(device) for device in devices}
    if not arrays or min(free.values(), default=0) <= 0:
        return False
    needed = dict.fromkeys(devices, 0)
    for array in arrays:
        for shard in array.addressable_shards:
            needed[shard.device] += shard.data.nbytes
    return all(free[device] > size for device, size in needed.items())


def _free(device: jax.Device) -> float:
    """Returns the free bytes of a device; 0 if it does not report them, as CPUs do
    not."""
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit", 0)
    return float((1 - SPARE_FRACTION) * limit - stats.get("bytes_in_use", limit))
