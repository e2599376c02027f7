"""What inspections find: damage of a checkpoint, and differences between two."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from storesvc_client._values.values import Checkpoint
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1 import maintenance_service_pb2 as maintenance_api

DAMAGE_KINDS: Final = MappingProxyType(
    {
        maintenance_api.Damage.KIND_MISSING: "missing",
        maintenance_api.Damage.KIND_CHECKSUM: "checksum",
        maintenance_api.Damage.KIND_DIGEST: "digest",
        maintenance_api.Damage.KIND_KEY_SPACE: "key_space",
        maintenance_api.Damage.KIND_FILE_TABLE: "file_table",
    }
)
"""What ``Damage.kind`` says."""

DIFFERENCE_KINDS: Final = MappingProxyType(
    {
        api.LeafDifference.KIND_ADDED: "added",
        api.LeafDifference.KIND_REMOVED: "removed",
        api.LeafDifference.KIND_SHAPE: "shape",
        api.LeafDifference.KIND_DTYPE: "dtype",
        api.LeafDifference.KIND_CONTENT: "content",
        api.LeafDifference.KIND_UNKNOWN: "unknown",
    }
)
"""What ``LeafDifference.kind`` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Something in a checkpoint that is not what was saved."""

    key: str
    """Of the leaf; "" where it is the checkpoint as a whole."""
    index: tuple[int, ...]
    """Of the chunk in the leaf's grid; () too where it is the leaf as a whole."""
    kind: str
    """One of ``DAMAGE_KINDS``, or "unknown" for those of a newer server."""
    message: str
    """Names the leaf and the chunk, if it is of one, and says what is wrong."""

    @classmethod
    def from_message(cls, message: maintenance_api.Damage) -> "Damage":
        """Returns a damage of the contract."""
        return cls(
            key=message.key,
            index=tuple(message.index),
            kind=DAMAGE_KINDS.get(message.kind, "unknown"),
            message=message.message,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What a verification has found, so far or in the end."""

    checkpoint: Checkpoint
    chunk_count: int
    """Chunks that were read."""
    stored_bytes: int
    """Their bytes, as stored."""
    damages: tuple[Damage, ...]

    @property
    def ok(self) -> bool:
        """Whether all that was read is what was saved."""
        return not self.damages


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafDifference:
    """How a leaf differs."""

    key: str
    kind: str
    """One of ``DIFFERENCE_KINDS``: the first that does. "unknown": the same shape and
    dtype in other chunks, so that the digests do not tell."""
    base_dtype: str | None
    """Before; None where it was added. Of PRNG keys with their implementation, such
    as "key<threefry2x32>"."""
    base_shape: tuple[int, ...] | None
    """Before; of PRNG keys, that of the array of keys."""
    dtype: str | None
    """After; None where it was removed."""
    shape: tuple[int, ...] | None
    changed_chunk_count: int
    """With "content": chunks whose bytes differ."""
    chunk_count: int
    """Chunks after or, where it was removed, before."""

    @classmethod
    def from_message(cls, message: api.LeafDifference) -> "LeafDifference":
        """Returns a difference of the contract."""
        added, removed = not message.base_dtype, not message.dtype
        return cls(
            key=message.key,
            kind=DIFFERENCE_KINDS.get(message.kind, "unknown"),
            base_dtype=None if added else message.base_dtype,
            base_shape=None if added else tuple(message.base_shape),
            dtype=None if removed else message.dtype,
            shape=None if removed else tuple(message.shape),
            changed_chunk_count=message.changed_chunk_count,
            chunk_count=message.chunk_count,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """What differs between two checkpoints."""

    base: Checkpoint
    """The one before."""
    checkpoint: Checkpoint
    """The one after."""
    same_leaf_count: int
    differences: tuple[LeafDifference, ...]
    """In the order of keys."""

    @property
    def is_same(self) -> bool:
        """Whether both hold the same leaves, to the byte."""
        return not self.differences
