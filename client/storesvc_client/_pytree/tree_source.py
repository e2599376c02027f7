"""Reads the bytes of a tree, chunk by chunk, for a snapshot.

On CPU devices, the memory of a shard is read in place. Shards of other devices are
transferred to the host first, some leaves ahead.
"""

import threading
from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np
from numpy.typing import NDArray

from storesvc.format.checksums import DIGEST_BYTES, Hasher, digest
from storesvc.format.trees import Tree
from storesvc_client._chunks.host_memory import Bytes
from storesvc_client._pytree.save_plan import Plan
from storesvc_client.errors import UnavailableError

AHEAD_BYTES: Final = 256 << 20
"""Bytes of the leaves that are being transferred ahead from devices."""


class TreeSource:
    """A tree to copy; implements ``_save.snapshot.Source``."""

    def __init__(self, plan: Plan, values: Sequence[Any]) -> None:
        self._plan = plan
        self._values = values
        self._cache = threading.local()
        self._lock = threading.Lock()
        self._in_flight: dict[int, list[Any]] = {}
        """Transfers in flight or complete, by row."""
        self._own: frozenset[int] = frozenset(
            self.tree.locate_all(plan.own)[0].tolist() if plan.is_remote else ()
        )
        """Rows of the leaves of which this process writes chunks."""

    @property
    def tree(self) -> Tree:
        """Leaf table of the tree."""
        return self._plan.tree

    def copy(self, ordinal: int, into: Bytes) -> None:
        """Copies the elements of a chunk, padded with zeros past the shape."""
        row, within = self.tree.locate(ordinal)
        plan, grid = self._plan.leaves[row], self.tree.grids[row]
        blocks = self._blocks(row)
        if plan.layout.is_joined:
            np.concatenate([b.reshape(-1) for b in blocks], out=into.view(plan.dtype))
            return
        if plan.layout.is_padded[within]:
            into[...] = 0
        for piece in plan.layout.pieces[within]:
            if piece.span is not None:
                start, at, length = piece.span
                flat = _flat(blocks[piece.block])
                into[at : at + length] = flat[start : start + length]
                continue
            chunk = into.view(plan.dtype).reshape(grid.chunk_shape)
            chunk[piece.target] = blocks[piece.block][piece.source]

    def spans(self, ordinal: int) -> "Sequence[Bytes] | None":
        """Returns the memory of a chunk if it can be sent without a copy, else None.

        The pieces must be contiguous ranges in order, in the tree's own memory on the
        host.
        """
        if self._plan.is_remote:
            return None
        found = self._in_order(ordinal)
        return found if found is not None and self._cache.is_own else None

    def digest(self, ordinal: int) -> bytes | None:
        """Returns the digest of a chunk if it can be computed without a copy."""
        spans, summing = self._in_order(ordinal), Hasher()
        if spans is None:
            return None
        for span in spans:
            summing.add(span.data)
        return summing.digest

    def leaf_digests(self) -> bytes:
        """Returns the digests of the leaves that other processes hold, too.

        They are in the order of the rows, zeros for the other leaves; b"" if there are
        none.
        """
        rows = self._plan.compared
        if not rows:
            return b""
        # Start all transfers before waiting for the first.
        wholes = _to_host([self._whole(row) for row in rows])
        digests = bytearray(len(self.tree.leaves) * DIGEST_BYTES)
        for row, values in zip(rows, wholes, strict=True):
            array = np.asarray(values, self._plan.leaves[row].dtype, order="C")
            at = row * DIGEST_BYTES
            digests[at : at + DIGEST_BYTES] = digest(_flat(array).data)
        return bytes(digests)

    def _whole(self, row: int) -> Any:
        """Returns a leaf of which this process holds all elements."""
        value = self._values[row]
        if self._plan.leaves[row].is_key:
            value = jax.random.key_data(value)
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return value.addressable_data(0)  # it is replicated
        return value

    def _in_order(self, ordinal: int) -> "Sequence[Bytes] | None":
        row, within = self.tree.locate(ordinal)
        pieces = self._plan.leaves[row].layout.contiguous_pieces(within)
        if pieces is None:
            return None
        blocks, found = self._blocks(row), []
        for piece in pieces:
            assert piece.span is not None
            start, _, length = piece.span
            found.append(_flat(blocks[piece.block])[start : start + length])
        return found

    def _blocks(self, row: int) -> Sequence[NDArray[Any]]:
        """Returns the blocks of a leaf on the host; each thread caches its last
        leaf."""
        if getattr(self._cache, "row", None) != row:
            with self._lock:
                shards = (
                    self._transferred(row)
                    if self._plan.is_remote
                    else self._shards(row)
                )
            self._cache.row = row
            self._cache.blocks = [
                np.asarray(shard, self._plan.leaves[row].dtype, order="C")
                for shard in shards
            ]
            self._cache.is_own = all(
                isinstance(shard, jax.Array) or np.may_share_memory(shard, block)
                for shard, block in zip(shards, self._cache.blocks, strict=True)
            )
        blocks: Sequence[NDArray[Any]] = self._cache.blocks
        return blocks

    def _transferred(self, row: int) -> list[Any]:
        """Returns the blocks of a leaf on the host, and starts transfers of the next
        leaves."""
        ahead = 0
        for later in range(row, len(self._values)):
            if later not in self._own:
                continue
            if later not in self._in_flight:
                self._in_flight[later] = _to_host(self._shards(later))
            ahead += self.tree.grids[later].leaf_bytes
            if ahead > AHEAD_BYTES:
                break
        # Another thread may still read the row before this one.
        for past in [known for known in self._in_flight if known < row - 1]:
            del self._in_flight[past]
        return self._in_flight[row]

    def _shards(self, row: int) -> list[Any]:
        """Returns the blocks of a leaf where they are, on the host or on devices.

        Called by one thread at a time: when several threads list the shards of an array
        for the first time at once, jax lists some twice and omits others.

        Raises:
            UnavailableError: This happened, caused by threads outside the save.
        """
        value, plan = self._values[row], self._plan.leaves[row]
        if plan.is_key:
            value = jax.random.key_data(value)
        if plan.devices is None:
            return [value]
        held = {shard.device: shard.data for shard in value.addressable_shards}
        try:
            return [held[device] for device in plan.devices]
        except KeyError as e:
            raise UnavailableError(
                f"leaf {self.tree.leaves[row].key!r}: expected shards on "
                f"{len(plan.devices)} devices, got {len(held)} from jax, because "
                "another thread used the array for the first time during the save; "
                "save a copy of the array"
            ) from e


def _to_host(shards: Sequence[Any]) -> list[Any]:
    """Returns the shards on a CPU device, with the transfers in flight.

    NumPy would also transfer them, but would cache the copy with the device array.
    """
    host = jax.local_devices(backend="cpu")[0]
    return [
        jax.device_put(shard, host) if isinstance(shard, jax.Array) else shard
        for shard in shards
    ]


def _flat(block: NDArray[Any]) -> Bytes:
    return block.reshape(-1).view(np.uint8)
