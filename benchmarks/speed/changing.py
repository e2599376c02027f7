"""States whose leaves all change between two saves, as in a training step.

A step that donates its state writes into the memory of the step before. Here a change
does the same for every contender: it adds one to the bits of each number, in buffers of
the host that were touched before, and makes new arrays of them, which jax on CPU shares
instead of copying. So no save reads a page for the first time, nothing that a store
remembers about an array or its bytes holds for the next one, and replicas on CPU
devices are the same memory.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

State: TypeAlias = dict[str, jax.Array]

_ALIGNED_BYTES = 64
"""Alignment of memory that jax shares; it copies other memory."""


class Changing:
    """A state over memory that it keeps."""

    def __init__(
        self, leaves: "Iterable[tuple[str, NDArray[Any], NamedSharding]]"
    ) -> None:
        self._leaves = {key: _Leaf(array, placed) for key, array, placed in leaves}
        self.state: State = {}
        """The arrays since the last change; older ones must no longer be used."""
        self._renew()

    def change(self) -> State:
        """Changes each number of each leaf; returns the new arrays."""
        for leaf in self._leaves.values():
            leaf.change()
        self._renew()
        return self.state

    def _renew(self) -> None:
        self.state = {key: leaf.array() for key, leaf in self._leaves.items()}
        jax.block_until_ready(self.state)


class _Leaf:
    """A leaf, one buffer for the shards of each index."""

    def __init__(self, array: "NDArray[Any]", placed: NamedSharding) -> None:
        self._shape, self._placed = array.shape, placed
        indices = placed.addressable_devices_indices_map(array.shape).values()
        self._parts = {
            repr(index): _aligned(array[index])
            for index in indices
            if index is not None
        }

    def change(self) -> None:
        """Adds one to the bits of each number."""
        for part in self._parts.values():
            bits = part.reshape(-1).view(f"u{part.itemsize}")
            bits += np.array(1, bits.dtype)

    def array(self) -> jax.Array:
        """Returns an array over the buffers.

        Raises:
            RuntimeError: jax copied one of them.
        """
        made = jax.make_array_from_callback(
            self._shape, self._placed, lambda index: self._parts[repr(index)]
        )
        there = {part.ctypes.data for part in self._parts.values()}
        for shard in made.addressable_shards:
            if shard.data.nbytes and shard.data.unsafe_buffer_pointer() not in there:
                raise RuntimeError("expected an array over the buffers, got a copy")
        return made


def _aligned(array: "NDArray[Any]") -> "NDArray[Any]":
    """Returns a copy that jax need not copy again."""
    buffer = np.empty(array.nbytes + _ALIGNED_BYTES, np.uint8)
    offset = -buffer.ctypes.data % _ALIGNED_BYTES
    copy = buffer[offset : offset + array.nbytes].view(array.dtype)
    copy = copy.reshape(array.shape)
    copy[...] = array
    return copy
