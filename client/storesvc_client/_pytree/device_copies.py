"""Copies of a tree on its own devices, for saves that shall block for no longer.

The copy is asked for, not waited for: what is done to the arrays afterwards, donation
too, comes after it.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal, assert_never

import jax
import numpy as np

SPARE: Final = 0.1
"""Of a device's memory, what a copy leaves free where it is chosen by itself."""


def copied_on_device(
    values: Sequence[Any], mode: Literal["host", "device", "auto", "none"]
) -> list[Any] | None:
    """Returns copies of leaves, those of device arrays on their devices; None: none
    are to be made there.

    Args:
        values: The leaves.
        mode: "auto" copies where the memory of all devices is known to suffice.
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
            return value.copy()
        if not value.addressable_shards:  # it is all on devices of other processes
            return value
        # shard by shard: to copy the whole is a program of all processes
        copies = [shard.data.copy() for shard in value.addressable_shards]
        return jax.make_array_from_single_device_arrays(
            value.shape, value.sharding, copies
        )
    return value.copy() if isinstance(value, np.ndarray) else value


def _fits(values: Sequence[Any]) -> bool:
    """Whether a copy fits beside all that is on the devices."""
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
    """Bytes that a device has left; 0 where it does not say, as CPUs do not."""
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit", 0)
    return float((1 - SPARE) * limit - stats.get("bytes_in_use", limit))
