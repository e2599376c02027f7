"""Values that the client returns: runs, checkpoints, leaves, tags, holds, uploads."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from google.protobuf.timestamp_pb2 import Timestamp

from storesvc.format.keys import INTEGER_KINDS, split_key
from storesvc.format.names import (
    CheckpointName,
    HoldName,
    RunName,
    TagName,
    UploadName,
)
from storesvc_client._values.resource_names import received
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1 import tree_pb2
from storesvc_proto.v1 import upload_service_pb2 as upload_api

if TYPE_CHECKING:
    # NumPy, which lists of runs and checkpoints need not wait for
    from storesvc.format.grids import Grid
    from storesvc.format.trees import Leaf, SavedSharding

PathPart: TypeAlias = str | int

KINDS: Final[Mapping[int, str]] = {
    tree_pb2.LEAF_KIND_ARRAY: "array",
    tree_pb2.LEAF_KIND_HOST_ARRAY: "host_array",
    tree_pb2.LEAF_KIND_HOST_SCALAR: "host_scalar",
    tree_pb2.LEAF_KIND_PYTHON_SCALAR: "python_scalar",
    tree_pb2.LEAF_KIND_PRNG_KEY: "prng_key",
    tree_pb2.LEAF_KIND_TEXT: "text",
    tree_pb2.LEAF_KIND_JSON: "json",
    tree_pb2.LEAF_KIND_BYTES: "bytes",
    tree_pb2.LEAF_KIND_INTEGER: "integer",
}
"""Texts of ``LeafInfo.kind``."""

UNKNOWN: Final = "unknown"
"""Text of a state or a kind that a newer server sent and this release lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """A server; returned by ``Client.info``."""

    version: str
    """Version of storesvc that it runs."""
    store_uid: str
    """UUID of the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The record of a run; from ``Client.runs`` and ``Run.info``."""

    name: str
    """Name of the run, ``namespace/run``."""
    uid: str
    """UUID of the run."""
    create_time: datetime
    """Start of its first save, or time of its first configuration, in UTC."""
    latest_step: int | None
    """Newest committed step; None if there is no checkpoint."""
    labels: Mapping[str, str]
    purge_delay: timedelta | None
    """Time for which a deleted checkpoint can be undeleted; None: the server's
    default."""
    etag: str
    """Version of labels, retention policy and purge delay."""

    def __repr__(self) -> str:
        return f"<RunInfo {self.name}, latest step {self.latest_step}>"

    @classmethod
    def from_message(cls, message: api.Run) -> "RunInfo":
        """Returns the value of a protobuf message."""
        return cls(
            name=str(received(RunName.from_resource, message.name)),
            uid=message.uid,
            create_time=message.create_time.ToDatetime(UTC),
            latest_step=(
                message.latest_step if message.HasField("latest_step") else None
            ),
            labels=dict(message.labels),
            purge_delay=(
                message.purge_delay.ToTimedelta()
                if message.HasField("purge_delay")
                else None
            ),
            etag=message.etag,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionDecision:
    """Decision of a retention policy on one checkpoint; from ``run.retention``."""

    step: int
    """Step of the checkpoint."""
    uid: str
    """UUID of the checkpoint."""
    kept: bool
    """True if the checkpoint is kept."""
    reasons: tuple[str, ...]
    """Rules that keep it, for people, such as "latest 3"."""
    own_bytes: int
    """Bytes of the stored chunks that its save added; it shares the others."""

    def __repr__(self) -> str:
        decision = "kept" if self.kept else "deleted"
        reasons = f": {', '.join(self.reasons)}" if self.reasons else ""
        return f"<RetentionDecision step {self.step} {decision}{reasons}>"

    @classmethod
    def from_message(cls, message: api.RetentionDecision) -> "RetentionDecision":
        """Returns the value of a protobuf message."""
        return cls(
            step=message.step,
            uid=message.uid,
            kept=message.kept,
            reasons=tuple(message.reasons),
            own_bytes=message.own_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint; its leaves never change.

    >>> run.latest()
    <Checkpoint prod/llama-8b@100, 2 leaves, 1048584 bytes>
    """

    run: str
    """Name of its run, ``namespace/run``."""
    step: int
    """Training step."""
    uid: str
    """UUID; a later checkpoint at the same step has another one."""
    create_time: datetime
    """Start of its save, in UTC."""
    commit_time: datetime
    """Time of the commit, in UTC."""
    labels: Mapping[str, str]
    metrics: Mapping[str, float]
    size_bytes: int
    """Bytes of all leaves and items, uncompressed."""
    stored_bytes: int
    """Bytes of all stored chunks."""
    own_bytes: int
    """Bytes of the stored chunks that its save added; it shares the others with earlier
    checkpoints."""
    leaf_count: int
    """Number of leaves of the tree."""
    item_count: int
    """Number of items next to the tree."""
    chunk_count: int
    """Number of chunks of all leaves and items."""
    pinned: bool
    """True if it is protected from deletion."""
    delete_time: datetime | None
    """Time of its deletion, in UTC; None if it is not deleted."""
    purge_time: datetime | None
    """Time until which it can be undeleted, in UTC; None if it is not deleted."""
    etag: str
    """Version of its labels, metrics, pin and deletion."""
    key_space: str
    """Name of its key space (zarr view), below ``trees/`` of its run."""
    principal: str = ""
    """Principal that saved it; "": anonymous, or unknown."""
    change_principal: str = ""
    """Principal of its last change or deletion; "": anonymous, or the service."""

    def __repr__(self) -> str:
        leaves = f"{self.leaf_count} {'leaf' if self.leaf_count == 1 else 'leaves'}"
        size = f"{leaves}, {self.size_bytes} bytes"
        return f"<Checkpoint {self.run}@{self.step}, {size}>"

    def _repr_html_(self) -> str:
        from storesvc_client._values.notebook import checkpoint_html

        return checkpoint_html(self)

    @classmethod
    def from_message(cls, message: api.Checkpoint) -> "Checkpoint":
        """Returns the value of a protobuf message."""
        return cls(
            run=str(received(CheckpointName.from_resource, message.name).run),
            step=message.step,
            uid=message.uid,
            create_time=message.create_time.ToDatetime(UTC),
            commit_time=message.commit_time.ToDatetime(UTC),
            labels=dict(message.labels),
            metrics=dict(message.metrics),
            size_bytes=message.size_bytes,
            stored_bytes=message.stored_bytes,
            own_bytes=message.own_bytes,
            leaf_count=message.leaf_count,
            item_count=message.item_count,
            chunk_count=message.chunk_count,
            pinned=message.pinned,
            delete_time=_moment(message, "delete_time"),
            purge_time=_moment(message, "purge_time"),
            etag=message.etag,
            key_space=message.key_space,
            principal=message.principal,
            change_principal=message.change_principal,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """A movable name for a checkpoint; from ``run.tags``."""

    name: str
    """Name of the tag."""
    step: int
    """Step of the checkpoint."""
    uid: str
    """UUID of the checkpoint."""
    protected: bool
    """True if changes need the etag of the tag."""
    create_time: datetime
    """Time at which it was first set, in UTC."""
    update_time: datetime
    """Time at which it was last set, in UTC."""
    etag: str
    """Version of the tag."""
    principal: str = ""
    """Principal of its last change; "": anonymous, or unknown."""

    def __repr__(self) -> str:
        protected = ", protected" if self.protected else ""
        return f"<Tag {self.name} at step {self.step}{protected}>"

    @classmethod
    def from_message(cls, message: api.Tag) -> "Tag":
        """Returns the value of a protobuf message."""
        return cls(
            name=received(TagName.from_resource, message.name).tag,
            step=_step_of(message.checkpoint),
            uid=message.uid,
            protected=message.protected,
            create_time=message.create_time.ToDatetime(UTC),
            update_time=message.update_time.ToDatetime(UTC),
            etag=message.etag,
            principal=message.principal,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldInfo:
    """A hold on a checkpoint, of any process; from ``run.holds.list``."""

    id: str
    """Id of the hold, for ``run.holds.release``."""
    step: int
    """Step of the checkpoint."""
    uid: str
    """UUID of the checkpoint."""
    owner: str
    """Name of the holder, for people."""
    ttl: timedelta
    """Lifetime after each renewal."""
    create_time: datetime
    """Time of its creation, in UTC."""
    expire_time: datetime
    """Time at which it expires unless it is renewed, in UTC."""
    principal: str = ""
    """Principal that created it; "": anonymous, or unknown."""

    def __repr__(self) -> str:
        expires = self.expire_time.isoformat(timespec="seconds")
        return f"<HoldInfo {self.id} on step {self.step} until {expires}>"

    @classmethod
    def from_message(cls, message: api.Hold) -> "HoldInfo":
        """Returns the value of a protobuf message."""
        return cls(
            id=received(HoldName.from_resource, message.name).hold,
            step=_step_of(message.checkpoint),
            uid=message.uid,
            owner=message.owner,
            ttl=message.ttl.ToTimedelta(),
            create_time=message.create_time.ToDatetime(UTC),
            expire_time=message.expire_time.ToDatetime(UTC),
            principal=message.principal,
        )


UploadState: TypeAlias = Literal["live", "committed", "ended", "unknown"]

_UPLOAD_STATES: Final[Mapping[int, UploadState]] = {
    upload_api.Upload.STATE_LIVE: "live",
    upload_api.Upload.STATE_COMMITTED: "committed",
    upload_api.Upload.STATE_ENDED: "ended",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadInfo:
    """An upload: the save of one step; from ``run.uploads`` and ``client.uploads``."""

    run: str
    """Name of its run, ``namespace/run``."""
    id: str
    """Id of the upload; ``uid`` of the checkpoint that it becomes."""
    step: int
    """Step that it writes."""
    state: UploadState
    """"live"; "committed"; "ended": aborted, or superseded by another upload of the
    step; "unknown": a state of a newer server."""
    writer_count: int
    """Number of writers: the processes of a job, or 1."""
    finished_writer_count: int
    """Writers that have finished; only of a live upload."""
    unfinished_writers: tuple[int, ...]
    """First writers that have not finished, ascending: indices of processes."""
    labels: Mapping[str, str]
    metrics: Mapping[str, float]
    base_step: int | None
    """Step of the checkpoint whose chunks it may share; None if there is none."""
    resumes: bool
    """True if it resumed an unfinished upload of the same step."""
    owner: str
    """Host, process and job of the writer; "" for earlier clients."""
    create_time: datetime
    """Time of its start, in UTC."""
    renew_time: datetime
    """Time of the last renewal of its lease, in UTC."""
    lease: timedelta
    """Time after the last renewal for which garbage collection keeps it."""
    principal: str = ""
    """Principal that began it; "": anonymous, or unknown."""

    def __repr__(self) -> str:
        return f"<UploadInfo {self.id} of {self.run}@{self.step}, {self.state}>"

    @classmethod
    def from_message(cls, message: upload_api.Upload) -> "UploadInfo":
        """Returns the value of a protobuf message."""
        name = received(UploadName.from_resource, message.name)
        return cls(
            run=str(name.run),
            id=name.upload,
            step=message.step,
            state=_UPLOAD_STATES.get(message.state, UNKNOWN),
            writer_count=message.writer_count,
            finished_writer_count=message.finished_writer_count,
            unfinished_writers=tuple(message.unfinished_writers),
            labels=dict(message.labels),
            metrics=dict(message.metrics),
            base_step=_step_of(message.base) if message.base else None,
            resumes=message.resumes,
            owner=message.owner,
            principal=message.principal,
            create_time=message.create_time.ToDatetime(UTC),
            renew_time=message.renew_time.ToDatetime(UTC),
            lease=message.lease_duration.ToTimedelta(),
        )


EventKind: TypeAlias = Literal[
    "committed", "deleted", "undeleted", "tagged", "untagged", "updated", "unknown"
]

_EVENT_KINDS: Final[Mapping[int, EventKind]] = {
    api.CheckpointEvent.KIND_COMMITTED: "committed",
    api.CheckpointEvent.KIND_DELETED: "deleted",
    api.CheckpointEvent.KIND_UNDELETED: "undeleted",
    api.CheckpointEvent.KIND_TAGGED: "tagged",
    api.CheckpointEvent.KIND_UNTAGGED: "untagged",
    api.CheckpointEvent.KIND_UPDATED: "updated",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A change of a checkpoint; from ``Run.watch`` and ``Client.watch``."""

    kind: EventKind
    """"committed", "deleted", "undeleted", "tagged" or "untagged"; "updated": labels,
    metrics or the pin were set; "unknown": a kind of a newer server."""
    run: str
    """Name of the run, ``namespace/run``."""
    step: int
    """Step of the checkpoint."""
    uid: str
    """UUID of the checkpoint."""
    checkpoint: Checkpoint | None
    """Current checkpoint; None if it does not exist any more. Never None for
    "committed"."""
    tag: str | None
    """Name of the tag, for "tagged" and "untagged"."""
    resume_token: str
    """Token for ``watch(since=)``, which continues after this event."""

    def __repr__(self) -> str:
        tag = f" {self.tag}" if self.tag else ""
        return f"<Event {self.kind}{tag} {self.run}@{self.step}>"

    @classmethod
    def from_message(cls, message: api.CheckpointEvent, resume_token: str) -> "Event":
        """Returns the value of a protobuf message."""
        found = message.checkpoint
        is_there = found.HasField("commit_time")
        return cls(
            kind=_EVENT_KINDS.get(message.kind, UNKNOWN),
            run=str(received(CheckpointName.from_resource, found.name).run),
            step=found.step,
            uid=found.uid,
            checkpoint=Checkpoint.from_message(found) if is_there else None,
            tag=message.tag or None,
            resume_token=resume_token,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafInfo:
    """One leaf of a checkpoint; from ``OpenCheckpoint.leaves``."""

    key: str
    """Key of the leaf, such as "params/layers/0/kernel"."""
    path: tuple[PathPart, ...]
    """Path in the tree: names, and numbers for indices and integer keys."""
    path_kinds: str
    """A letter for each part of the path; see ``LeafTable.path_kinds``."""
    kind: str
    """"array", "host_array", "host_scalar", "python_scalar" or "prng_key"; for a leaf
    that is stored as encoded bytes "text", "json", "bytes" or "integer"; "unknown": a
    kind of a newer server."""
    dtype: str
    """Name of the dtype, such as "bfloat16"."""
    shape: tuple[int, ...]
    """Shape of the stored array: for PRNG keys that of their key data."""
    chunk_shape: tuple[int, ...]
    """Shape of its chunks; those at the end of an axis may be smaller."""
    chunk_count: int
    """Number of chunks."""
    size_bytes: int
    """Bytes of the array, uncompressed."""
    sharding: "SavedSharding | None"
    """Mesh and PartitionSpec when it was saved; None if it had none."""
    prng_impl: str | None
    """Implementation of PRNG keys, such as "threefry2x32"; None for other leaves."""

    def __repr__(self) -> str:
        return f"<LeafInfo {self.key} {self.dtype}{[*self.shape]}>"

    @classmethod
    def from_row(cls, leaf: "Leaf", grid: "Grid") -> "LeafInfo":
        """Returns the value of a row of a leaf table."""
        return cls(
            key=leaf.key,
            path=path_of(leaf),
            path_kinds=leaf.path_kinds,
            kind=KINDS.get(leaf.kind, UNKNOWN),
            dtype=leaf.dtype,
            shape=leaf.shape,
            chunk_shape=leaf.chunk_shape,
            chunk_count=grid.count,
            size_bytes=grid.leaf_bytes,
            sharding=leaf.sharding,
            prng_impl=leaf.prng_impl,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemInfo:
    """One item of a checkpoint; from ``Items.info``."""

    name: str
    """Name of the item."""
    kind: str
    """"text", "json" or "bytes"; "unknown": a kind of a newer server."""
    size_bytes: int
    """Bytes of its encoded value; of the values of all processes together."""
    process_count: int | None
    """Number of processes that saved a value each; None: it is one value for all."""


def path_of(leaf: "Leaf") -> tuple[PathPart, ...]:
    """Returns the path of a leaf, with its indices as integers."""
    parts = zip(split_key(leaf.key), leaf.path_kinds, strict=True)
    return tuple(int(text) if kind in INTEGER_KINDS else text for text, kind in parts)


def _moment(
    message: api.Checkpoint, field: Literal["delete_time", "purge_time"]
) -> datetime | None:
    """Returns an optional time of a checkpoint."""
    if not message.HasField(field):
        return None
    stamp: Timestamp = getattr(message, field)
    return stamp.ToDatetime(UTC)


def _step_of(resource: str) -> int:
    which = received(CheckpointName.from_resource, resource).which
    assert isinstance(which, int)  # the server resolved it
    return which
