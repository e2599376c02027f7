"""Results of inspections: damage of a checkpoint, differences between two."""

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from storesvc.format.keys import item_of
from storesvc_client._values.resource_names import received
from storesvc_client._values.texts import count_text
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
"""Texts of ``Damage.kind``."""

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
"""Texts of ``LeafDifference.kind``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One part of a checkpoint whose bytes are missing or differ from those saved."""

    key: str
    """Key of the leaf; "" for the checkpoint as a whole."""
    index: tuple[int, ...]
    """Index of the chunk in the grid of the leaf; () also for the leaf as a whole."""
    kind: str
    """"missing", "checksum", "digest", "key_space" or "file_table"; "unknown": a kind
    of a newer server."""
    message: str
    """Leaf, chunk and damage, for people."""

    def __repr__(self) -> str:
        return f"<Damage {self.kind}: {self.message}>"

    @classmethod
    def from_message(cls, message: maintenance_api.Damage) -> "Damage":
        """Returns the value of a protobuf message."""
        return cls(
            key=message.key,
            index=tuple(message.index),
            kind=DAMAGE_KINDS.get(message.kind, "unknown"),
            message=message.message,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Findings of ``Run.verify``, so far or in the end."""

    checkpoint: Checkpoint
    """The verified checkpoint."""
    chunk_count: int
    """Chunks that were read."""
    stored_bytes: int
    """Bytes that were read."""
    damages: tuple[Damage, ...]
    """All damage found, in the order of keys."""

    def __repr__(self) -> str:
        found, damages = self.checkpoint, len(self.damages)
        damage = f"{count_text(damages, 'damage')}" if damages else "no damage"
        chunks = count_text(self.chunk_count, "chunk")
        return f"<Verification {found.run}@{found.step}, {chunks}, {damage}>"

    def _repr_html_(self) -> str:
        from storesvc_client._values.notebook import verification_html

        return verification_html(self)

    @property
    def ok(self) -> bool:
        """True if no damage was found."""
        return not self.damages


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafDifference:
    """Difference of one leaf between two checkpoints; from ``Diff.differences``."""

    key: str
    """Key of the leaf."""
    kind: str
    """The first that applies of "added", "removed", "shape", "dtype", "content";
    "unknown": same shape and dtype, but other chunks, so that digests cannot decide."""
    base_dtype: str | None
    """Dtype in the earlier checkpoint, None if the leaf was added; of PRNG keys with
    their implementation, such as "key<threefry2x32>"."""
    base_shape: tuple[int, ...] | None
    """Shape in the earlier checkpoint; for PRNG keys that of the array of keys."""
    dtype: str | None
    """Dtype in the later checkpoint; None if the leaf was removed."""
    shape: tuple[int, ...] | None
    """Shape in the later checkpoint; None if the leaf was removed."""
    changed_chunk_count: int
    """Chunks whose bytes differ, for "content"."""
    chunk_count: int
    """Chunks in the later checkpoint; in the earlier one if the leaf was removed."""

    def __repr__(self) -> str:
        return f"<LeafDifference {self.kind} {self.key}>"

    @classmethod
    def from_message(cls, message: api.LeafDifference) -> "LeafDifference":
        """Returns the value of a protobuf message."""
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
class ItemDifference:
    """Difference of one item between two checkpoints; from ``Diff.items``."""

    name: str
    """Name of the item."""
    process: int | None
    """Number of the process that saved the value; None: it is one value for all."""
    kind: str
    """"added", "removed", "kind" or "content"; "unknown": other chunks, so that digests
    cannot decide."""
    base_value_kind: str | None
    """"text", "json" or "bytes" in the earlier checkpoint; None if it was added."""
    base_size_bytes: int | None
    """Bytes of the encoded value in the earlier checkpoint; None if it was added."""
    value_kind: str | None
    """Kind of the value in the later checkpoint; None if it was removed."""
    size_bytes: int | None
    """Bytes of the encoded value in the later checkpoint; None if it was removed."""

    def __repr__(self) -> str:
        return f"<ItemDifference {self.kind} {self.place}>"

    @property
    def place(self) -> str:
        """Name of the item; with the number of the process, ``data/3``, for its own
        value."""
        return self.name if self.process is None else f"{self.name}/{self.process}"

    @classmethod
    def from_message(cls, message: api.LeafDifference) -> "ItemDifference":
        """Returns the value of a protobuf message."""
        name = received(item_of, message.key)
        kind = DIFFERENCE_KINDS.get(message.kind, "unknown")
        added, removed = not message.base_dtype, not message.dtype
        return cls(
            name=name.item,
            process=name.process,
            kind="kind" if kind == "dtype" else kind,
            base_value_kind=None if added else message.base_dtype,
            base_size_bytes=None if added else math.prod(message.base_shape),
            value_kind=None if removed else message.dtype,
            size_bytes=None if removed else math.prod(message.shape),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """Differences between two checkpoints; from ``Run.diff``."""

    base: Checkpoint
    """The earlier checkpoint."""
    checkpoint: Checkpoint
    """The later checkpoint."""
    same_leaf_count: int
    """Number of leaves that are equal."""
    differences: tuple[LeafDifference, ...]
    """The other leaves, in the order of keys."""
    items: tuple[ItemDifference, ...]
    """The items that differ, in the order of their names."""

    def __repr__(self) -> str:
        before, after = self.base, self.checkpoint
        differences = count_text(len(self.differences), "difference")
        if self.items:
            differences += f", {count_text(len(self.items), 'item')} changed"
        return (
            f"<Diff {before.run}@{before.step} to {after.run}@{after.step}, "
            f"{differences}>"
        )

    def _repr_html_(self) -> str:
        from storesvc_client._values.notebook import diff_html

        return diff_html(self)

    @property
    def is_same(self) -> bool:
        """True if both have the same leaves and items, byte for byte."""
        return not self.differences and not self.items
