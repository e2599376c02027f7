"""What the catalogue tells: runs, checkpoints, leaves."""

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
}
"""What ``LeafInfo.kind`` says."""

UNKNOWN: Final = "unknown"
"""What a state, or a kind, is called that only a newer server knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What a server is."""

    version: str
    store_uid: str
    """UUID of the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """A run that has a checkpoint, or was set up."""

    name: str
    """``namespace/run``."""
    uid: str
    create_time: datetime
    """When its first save began, or it was set up."""
    latest_step: int | None
    """The newest committed step."""
    labels: Mapping[str, str]
    purge_delay: timedelta | None
    """How long a deleted checkpoint can be undeleted; None: as the server says."""
    etag: str
    """Changes with every change of labels, retention or purge delay."""

    @classmethod
    def from_message(cls, message: api.Run) -> "RunInfo":
        """Returns a run of the contract."""
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
    """What a retention policy makes of a checkpoint."""

    step: int
    uid: str
    kept: bool
    reasons: tuple[str, ...]
    """Why it stays, for people: the rules that keep it, such as "latest 3"."""
    own_bytes: int
    """Of the stored chunks that its save brought; the rest it shares."""

    @classmethod
    def from_message(cls, message: api.RetentionDecision) -> "RetentionDecision":
        """Returns a decision of the contract."""
        return cls(
            step=message.step,
            uid=message.uid,
            kept=message.kept,
            reasons=tuple(message.reasons),
            own_bytes=message.own_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint: what it holds never changes."""

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
    own_bytes: int
    """Of the stored chunks that its save brought; the others it shares with earlier
    checkpoints."""
    leaf_count: int
    chunk_count: int
    pinned: bool
    """Whether it must not be deleted."""
    delete_time: datetime | None
    """When it was deleted; None: it was not."""
    purge_time: datetime | None
    """Until when a deleted one can be undeleted."""
    etag: str
    """Changes with every change of it."""
    key_space: str
    """The name of its key space, below ``trees/`` of its run."""

    @classmethod
    def from_message(cls, message: api.Checkpoint) -> "Checkpoint":
        """Returns a checkpoint of the contract."""
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
            chunk_count=message.chunk_count,
            pinned=message.pinned,
            delete_time=_moment(message, "delete_time"),
            purge_time=_moment(message, "purge_time"),
            etag=message.etag,
            key_space=message.key_space,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What a save moved, in bytes of stored chunks."""

    total_bytes: int
    """Of all chunks of the checkpoint."""
    sent_bytes: int
    """Of those that were sent."""
    reused_bytes: int
    """Of those that the store held already."""
    seconds: float
    """From the call of ``save`` to the commit."""
    timings: Mapping[str, float]
    """Seconds by phase, over all threads: plan, snapshot, wait (for memory of the
    staging), begin, digest, find (what the store holds), write and sync (of data
    files) or send (to the server), acknowledge (after the last was sent), finish,
    await others (of the job), commit; those that there were."""
    slowest: str
    """The data file, or "stream" for one to the server, that this process wrote for the
    longest; "": it wrote nothing."""
    slowest_seconds: float
    """How long that took."""
    last_process: str
    """The process of the job that was the last to finish, with its host: ``process 2
    (tpu-host-2)``; "": this one saved alone, or the last one did not live to say so."""
    needs_like: tuple[str, ...]
    """``key: class`` of the containers, such as named tuples, that only a restore with
    ``like=`` rebuilds; without it they come back as dicts or lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReading:
    """What one process of a job read for a restore."""

    process: str
    """Its number and host: ``process 2 (tpu-host-2)``."""
    read_bytes: int
    """Of stored chunks."""
    seconds: float
    """That it read; those that it waited for others do not count."""
    slowest: str
    """The data file, or the stream from the server, of its read that took the longest;
    "": it read nothing."""
    slowest_seconds: float
    """How long that took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What a restore moved."""

    read_bytes: int
    """Of stored chunks that this process read."""
    received_bytes: int
    """Of those that other processes of the job read for it."""
    returned_bytes: int
    """Of what came of them, before it was cast."""
    seconds: float
    timings: Mapping[str, float]
    """Seconds by phase, over all threads: plan, read (or wait for the storage or the
    server), verify, copy (to where it goes), place (on devices), rebuild (of the tree);
    in a job, await others, and exchange (of chunks that others read)."""
    slowest: str
    """The data file, or the stream from the server, of the read that took the longest;
    "": nothing was read."""
    slowest_seconds: float
    """How long that took."""
    slowest_process: ProcessReading | None
    """The process of the job that read the longest; None: this one restored alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """A movable name for a checkpoint."""

    name: str
    step: int
    """Of the checkpoint."""
    uid: str
    """Of the checkpoint."""
    protected: bool
    """Whether a change needs its etag."""
    create_time: datetime
    """When it was first set."""
    update_time: datetime
    """When it was last set."""
    etag: str
    """Changes with every change of it."""

    @classmethod
    def from_message(cls, message: api.Tag) -> "Tag":
        """Returns a tag of the contract."""
        return cls(
            name=received(TagName.from_resource, message.name).tag,
            step=_step_of(message.checkpoint),
            uid=message.uid,
            protected=message.protected,
            create_time=message.create_time.ToDatetime(UTC),
            update_time=message.update_time.ToDatetime(UTC),
            etag=message.etag,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldInfo:
    """A hold on a checkpoint, whoever has it."""

    id: str
    step: int
    """Of the checkpoint."""
    uid: str
    """Of the checkpoint."""
    owner: str
    """Who holds it, for people."""
    ttl: timedelta
    """How long it lasts after each renewal."""
    create_time: datetime
    expire_time: datetime
    """When it expires unless it is renewed."""

    @classmethod
    def from_message(cls, message: api.Hold) -> "HoldInfo":
        """Returns a hold of the contract."""
        return cls(
            id=received(HoldName.from_resource, message.name).hold,
            step=_step_of(message.checkpoint),
            uid=message.uid,
            owner=message.owner,
            ttl=message.ttl.ToTimedelta(),
            create_time=message.create_time.ToDatetime(UTC),
            expire_time=message.expire_time.ToDatetime(UTC),
        )


UploadState: TypeAlias = Literal["live", "committed", "ended", "unknown"]

_UPLOAD_STATES: Final[Mapping[int, UploadState]] = {
    upload_api.Upload.STATE_LIVE: "live",
    upload_api.Upload.STATE_COMMITTED: "committed",
    upload_api.Upload.STATE_ENDED: "ended",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadInfo:
    """An upload: a checkpoint that is being written, or was."""

    run: str
    """``namespace/run``."""
    id: str
    """The uid of the checkpoint that it becomes."""
    step: int
    state: UploadState
    """"ended": it was aborted, or lost its step; "unknown": only a newer server knows
    what."""
    writer_count: int
    finished_writer_count: int
    """While it is live."""
    unfinished_writers: tuple[int, ...]
    """The first ones that it waits for, ascending: of a job, the processes."""
    labels: Mapping[str, str]
    metrics: Mapping[str, float]
    base_step: int | None
    """Of the checkpoint whose chunks it may share; None: it has none."""
    resumes: bool
    """Whether it took an unfinished upload of the same step over."""
    owner: str
    """Who writes it, such as its host, process and job; "": an earlier client."""
    create_time: datetime
    """When it began."""
    renew_time: datetime
    """Its last sign of life."""
    lease: timedelta
    """How long it is safe from collection after its last sign of life."""

    @classmethod
    def from_message(cls, message: upload_api.Upload) -> "UploadInfo":
        """Returns an upload of the contract, as GetUpload and ListUploads answer."""
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
            create_time=message.create_time.ToDatetime(UTC),
            renew_time=message.renew_time.ToDatetime(UTC),
            lease=message.lease_duration.ToTimedelta(),
        )


EventKind: TypeAlias = Literal[
    "committed", "deleted", "undeleted", "tagged", "untagged", "unknown"
]

_EVENT_KINDS: Final[Mapping[int, EventKind]] = {
    api.CheckpointEvent.KIND_COMMITTED: "committed",
    api.CheckpointEvent.KIND_DELETED: "deleted",
    api.CheckpointEvent.KIND_UNDELETED: "undeleted",
    api.CheckpointEvent.KIND_TAGGED: "tagged",
    api.CheckpointEvent.KIND_UNTAGGED: "untagged",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What happened to a checkpoint."""

    kind: EventKind
    """"unknown": only a newer server knows what happened."""
    run: str
    """``namespace/run``."""
    step: int
    uid: str
    """Of the checkpoint."""
    checkpoint: Checkpoint | None
    """The checkpoint as it is now; None: it is gone. Of "committed" it is there."""
    tag: str | None
    """Of "tagged" and "untagged": which tag."""
    resume_token: str
    """Lets another watch go on after this event."""

    @classmethod
    def from_message(cls, message: api.CheckpointEvent, resume_token: str) -> "Event":
        """Returns an event of the contract."""
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
    """One leaf of a checkpoint."""

    key: str
    path: tuple[PathPart, ...]
    """Its path in the tree: names, and numbers for indices and integer keys."""
    path_kinds: str
    """A letter for each part of the path; see ``LeafTable.path_kinds``."""
    kind: str
    """One of ``KINDS``, or "unknown" for those of a newer server."""
    dtype: str
    shape: tuple[int, ...]
    """Of what is stored: for PRNG keys, of their key data."""
    chunk_shape: tuple[int, ...]
    chunk_count: int
    size_bytes: int
    sharding: "SavedSharding | None"
    """How it lay on its devices when it was saved."""
    prng_impl: str | None

    @classmethod
    def from_row(cls, leaf: "Leaf", grid: "Grid") -> "LeafInfo":
        """Returns a row of a leaf table."""
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


def path_of(leaf: "Leaf") -> tuple[PathPart, ...]:
    """Returns a leaf's path, its numbers as numbers."""
    parts = zip(split_key(leaf.key), leaf.path_kinds, strict=True)
    return tuple(int(text) if kind in INTEGER_KINDS else text for text, kind in parts)


def _moment(
    message: api.Checkpoint, field: Literal["delete_time", "purge_time"]
) -> datetime | None:
    """A time that may be absent."""
    if not message.HasField(field):
        return None
    stamp: Timestamp = getattr(message, field)
    return stamp.ToDatetime(UTC)


def _step_of(resource: str) -> int:
    which = received(CheckpointName.from_resource, resource).which
    assert isinstance(which, int)  # the server resolved it
    return which
