"""The bytes of a tree, chunk by chunk, as a snapshot copies them.

On CPU devices the memory of a shard is read where it lies; from other devices it is
brought to the host first, some leaves ahead.
"""

import threading
from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np
from numpy.typing import NDArray

from storesvc.format.checksums import DIGEST_BYTES, Hasher, digest
from storesvc.format.trees import Tree
from storesvc_client._chunks.staging_pool import Bytes
from storesvc_client._pytree.save_plan import Plan
from storesvc_client.errors import UnavailableError

AHEAD_BYTES: Final = 256 << 20
"""Of leaves that are on their way from devices."""


class TreeSource:
    """A tree to be copied; see ``_save.snapshot.Source``."""

    def __init__(self, plan: Plan, values: Sequence[Any]) -> None:
        self._plan = plan
        self._values = values
        self._kept = threading.local()
        self._lock = threading.Lock()
        self._coming: dict[int, list[Any]] = {}
        """Leaves that devices were asked for, by row."""
        self._own: frozenset[int] = frozenset(
            self.tree.locate_all(plan.own)[0].tolist() if plan.is_remote else ()
        )
        """Rows of the leaves that this process writes chunks of."""

    @property
    def tree(self) -> Tree:
        """Its leaves."""
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
            if piece.run is not None:
                start, at, length = piece.run
                flat = _flat(blocks[piece.block])
                into[at : at + length] = flat[start : start + length]
                continue
            chunk = into.view(plan.dtype).reshape(grid.chunk_shape)
            chunk[piece.target] = blocks[piece.block][piece.source]

    def runs(self, ordinal: int) -> "Sequence[Bytes] | None":
        """Returns the memory of a chunk, where its pieces are runs in order and lie in
        the tree's own memory, on the host."""
        if self._plan.is_remote:
            return None
        found = self._in_order(ordinal)
        return found if found is not None and self._kept.is_own else None

    def digest(self, ordinal: int) -> bytes | None:
        """Returns the digest of a chunk, where its pieces are runs in order."""
        runs, summing = self._in_order(ordinal), Hasher()
        if runs is None:
            return None
        for run in runs:
            summing.add(run.data)
        return summing.digest

    def leaf_digests(self) -> bytes:
        """Returns the digests of the leaves that other processes hold, too, and zeros
        for the others; b"": other processes hold none."""
        rows = self._plan.compared
        if not rows:
            return b""
        # All are on their way before the first is waited for.
        wholes = _on_host([self._whole(row) for row in rows])
        digests = bytearray(len(self.tree.leaves) * DIGEST_BYTES)
        for row, whole in zip(rows, wholes, strict=True):
            array = np.asarray(whole, self._plan.leaves[row].dtype, order="C")
            at = row * DIGEST_BYTES
            digests[at : at + DIGEST_BYTES] = digest(_flat(array).data)
        return bytes(digests)

    def _whole(self, row: int) -> Any:
        """A leaf of which this process holds all elements."""
        value = self._values[row]
        if self._plan.leaves[row].is_key:
            value = jax.random.key_data(value)
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return value.addressable_data(0)  # it is replicated
        return value

    def _in_order(self, ordinal: int) -> "Sequence[Bytes] | None":
        row, within = self.tree.locate(ordinal)
        pieces = self._plan.leaves[row].layout.runs(within)
        if pieces is None:
            return None
        blocks, found = self._blocks(row), []
        for piece in pieces:
            assert piece.run is not None
            start, _, length = piece.run
            found.append(_flat(blocks[piece.block])[start : start + length])
        return found

    def _blocks(self, row: int) -> Sequence[NDArray[Any]]:
        """The blocks of a leaf on the host, of the last one kept for each thread."""
        if getattr(self._kept, "row", None) != row:
            with self._lock:
                shards = self._brought(row) if self._plan.is_remote else self._held(row)
            self._kept.row = row
            self._kept.blocks = [
                np.asarray(shard, self._plan.leaves[row].dtype, order="C")
                for shard in shards
            ]
            self._kept.is_own = all(
                isinstance(shard, jax.Array) or np.may_share_memory(shard, block)
                for shard, block in zip(shards, self._kept.blocks, strict=True)
            )
        blocks: Sequence[NDArray[Any]] = self._kept.blocks
        return blocks

    def _brought(self, row: int) -> list[Any]:
        """The blocks of a leaf on the host; lets devices send what follows."""
        ahead = 0
        for later in range(row, len(self._values)):
            if later not in self._own:
                continue
            if later not in self._coming:
                self._coming[later] = _on_host(self._held(later))
            ahead += self.tree.grids[later].leaf_bytes
            if ahead > AHEAD_BYTES:
                break
        # another thread may be at the one before
        for past in [known for known in self._coming if known < row - 1]:
            del self._coming[past]
        return self._coming[row]

    def _held(self, row: int) -> list[Any]:
        """The blocks of a leaf, where they are.

        By one thread at a time: where several ask an array for its shards at once that
        nobody asked before, jax lists some of them twice, and others not.

        Raises:
            UnavailableError: It did, for threads of somebody else.
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
                f"{len(plan.devices)} devices, jax lists {len(held)}: another thread "
                "used the array for the first time during the save, and so it stays; "
                "save a copy of the array"
            ) from e


def _on_host(shards: Sequence[Any]) -> list[Any]:
    """Shards on a CPU device, on their way there: so that no copy of theirs stays with
    the arrays that they are of, as it would if NumPy were to bring them."""
    host = jax.local_devices(backend="cpu")[0]
    return [
        jax.device_put(shard, host) if isinstance(shard, jax.Array) else shard
        for shard in shards
    ]


def _flat(block: NDArray[Any]) -> Bytes:
    return block.reshape(-1).view(np.uint8)
