"""What the catalogue tells: runs, checkpoints, leaves."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, TypeAlias

from storesvc.format.grids import Grid
from storesvc.format.keys import INTEGER_KINDS, split_key
from storesvc.format.names import CheckpointName, RunName
from storesvc.format.trees import Leaf, SavedSharding
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1 import tree_pb2

PathPart: TypeAlias = str | int

KINDS: Final[Mapping[int, str]] = {
    tree_pb2.LEAF_KIND_ARRAY: "array",
    tree_pb2.LEAF_KIND_HOST_ARRAY: "host_array",
    tree_pb2.LEAF_KIND_HOST_SCALAR: "host_scalar",
    tree_pb2.LEAF_KIND_PYTHON_SCALAR: "python_scalar",
    tree_pb2.LEAF_KIND_PRNG_KEY: "prng_key",
}
"""What ``LeafInfo.kind`` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What a server is."""

    version: str
    store_uid: str
    """UUID of the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """A run that has a checkpoint."""

    name: str
    """``namespace/run``."""
    uid: str
    create_time: datetime
    """When its first checkpoint was committed."""
    latest_step: int | None
    """The newest committed step."""

    @classmethod
    def from_message(cls, message: api.Run) -> "RunInfo":
        """Returns a run of the contract."""
        return cls(
            name=str(RunName.from_resource(message.name)),
            uid=message.uid,
            create_time=message.create_time.ToDatetime(UTC),
            latest_step=(
                message.latest_step if message.HasField("latest_step") else None
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint. Immutable."""

    run: str
    """``namespace/run``."""
    step: int
    uid: str
    """Tells it from a later checkpoint at the same step."""
    create_time: datetime
    """When its save began."""
    commit_time: datetime
    labels: Mapping[str, str]
    metrics: Mapping[str, float]
    size_bytes: int
    """Of all leaves."""
    stored_bytes: int
    """Of all stored chunks."""
    leaf_count: int
    chunk_count: int

    @classmethod
    def from_message(cls, message: api.Checkpoint) -> "Checkpoint":
        """Returns a checkpoint of the contract."""
        return cls(
            run=str(CheckpointName.from_resource(message.name).run),
            step=message.step,
            uid=message.uid,
            create_time=message.create_time.ToDatetime(UTC),
            commit_time=message.commit_time.ToDatetime(UTC),
            labels=dict(message.labels),
            metrics=dict(message.metrics),
            size_bytes=message.size_bytes,
            stored_bytes=message.stored_bytes,
            leaf_count=message.leaf_count,
            chunk_count=message.chunk_count,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafInfo:
    """One leaf of a checkpoint."""

    key: str
    path: tuple[PathPart, ...]
    """Its path in the tree: names, and numbers for indices and integer keys."""
    path_kinds: str
    """A letter for each part of the path; see ``LeafTable.path_kinds``."""
    kind: str
    """One of ``KINDS``."""
    dtype: str
    shape: tuple[int, ...]
    """Of what is stored: for PRNG keys, of their key data."""
    chunk_shape: tuple[int, ...]
    chunk_count: int
    size_bytes: int
    sharding: SavedSharding | None
    """How it lay on its devices when it was saved."""
    prng_impl: str | None

    @classmethod
    def from_row(cls, leaf: Leaf, grid: Grid) -> "LeafInfo":
        """Returns a row of a leaf table."""
        return cls(
            key=leaf.key,
            path=path_of(leaf),
            path_kinds=leaf.path_kinds,
            kind=KINDS[leaf.kind],
            dtype=leaf.dtype,
            shape=leaf.shape,
            chunk_shape=leaf.chunk_shape,
            chunk_count=grid.count,
            size_bytes=grid.leaf_bytes,
            sharding=leaf.sharding,
            prng_impl=leaf.prng_impl,
        )


def path_of(leaf: Leaf) -> tuple[PathPart, ...]:
    """Returns a leaf's path, its numbers as numbers."""
    parts = zip(split_key(leaf.key), leaf.path_kinds, strict=True)
    return tuple(int(text) if kind in INTEGER_KINDS else text for text, kind in parts)
