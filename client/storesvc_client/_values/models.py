"""Values that the client returns: runs, checkpoints, leaves, tags, holds, uploads;
entries of the audit log; damage of a checkpoint and differences between two; and
transfers of imports and copies, with the labels that record them."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, Literal, Self, TypeAlias

from google.protobuf.timestamp_pb2 import Timestamp

from storesvc.format.keys import INTEGER_KINDS, parse_item_key, split_key
from storesvc.format.names import CheckpointName, HoldName, RunName, TagName, UploadName
from storesvc_client._values.arguments import MAX_TEXT_BYTES, parse_received
from storesvc_client._values.call_kinds import AuditStage, Authentication
from storesvc_client._values.messages import UNKNOWN, enum_texts, read_message
from storesvc_client._views.texts import count_text, size_text, unicode_text
from storesvc_client.errors import DataLossError, InvalidRequestError
from storesvc_proto.v1 import access_service_pb2, tree_pb2
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1 import upload_service_pb2 as upload_api

if TYPE_CHECKING:
    from storesvc.format.grids import Grid
    from storesvc.format.trees import Leaf, SavedSharding

_STAGES: Final = enum_texts(access_service_pb2.AuditStage.DESCRIPTOR)
_AUTHENTICATIONS: Final = enum_texts(access_service_pb2.Authentication.DESCRIPTOR)

_OBJECT: Final = re.compile(
    r"namespaces/(?P<namespace>[^/]+)"
    r"(?:/runs/(?P<run>[^/]+)(?:/(?P<kind>[a-z]+)/(?P<id>[^/]+))?)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """A limit and its usage, as one server counts it; from ``Client.quotas``."""

    name: str
    """``stored_bytes``, ``streams``, ``watches``, ``uploads``, ``bytes_in_flight`` or
    ``requests_per_second``."""
    scope: str
    """``namespaces/NAMESPACE``, or the principal of the caller."""
    limit: int
    """Maximum; 0: unlimited."""
    soft_limit: int
    """Amount above which the server warns; 0: none."""
    used: int
    """Amount in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A caller, as a server sees it; returned by ``Client.identity``."""

    principal: str
    """Name, such as ``user:alice@corp.example``; empty: anonymous."""
    groups: tuple[str, ...]
    """Groups, sorted."""
    authentication: Authentication
    """By what it was authenticated."""
    expire_time: datetime | None
    """When its credential expires; None: never, or unknown."""
    is_restricted: bool
    """True if the server has a policy; if not, everything is permitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """An entry of the audit log of a server; from ``Client.audit_entries``."""

    server: str
    """Name of the server."""
    problem: str = ""
    """Set if a line of the log cannot be read as an entry: where it is, and why. No
    other field but ``server`` is set then."""
    seq: int = 0
    """Number of the entry in the log, from 1."""
    time: datetime | None = None
    """When it was made; None if ``problem`` is set."""
    stage: AuditStage | None = None
    """The moment that it records; None if ``problem`` is set, or if this release does
    not know it."""
    principal: str = ""
    """Name of the caller; empty: anonymous, or the log itself."""
    authentication: Authentication | None = None
    """By what the caller was authenticated; None for the log itself."""
    method: str = ""
    """Name of the rpc, such as ``DeleteCheckpoint``; empty for the log itself."""
    permissions: tuple[tuple[str, str], ...] = ()
    """The permissions that were checked and granted, each with its resource."""
    missing: tuple[str, str] | None = None
    """The permission that the caller of a denied call lacks, with its resource; None:
    it was denied for another cause, such as an invalid token."""
    detail: Mapping[str, str] = field(default_factory=dict)
    """Values of the call, such as the ``name`` of its object."""
    reason: str = ""
    """Why the call failed, as in ``StoreError.reason``; empty: it did not."""
    latency: timedelta | None = None
    """Duration of the call; None before its end."""
    request_id: str = ""
    """Identifies the call, as ``StoreError.metadata["request_id"]``."""
    peer: str = ""
    """Address of the client."""
    left_out: int = 0
    """Number of denials before this one that were not recorded."""
    follows_torn_line: bool = False
    """True if the line before it was cut off, as by a crash of the server."""

    @property
    def object_name(self) -> str:
        """The object of the call as in ``storectl``, such as ``prod/llama-8b@500``; of
        an upload, the checkpoint if its step is known; empty: none."""
        text = object_text(self.detail.get("name", ""))
        if "step" in self.detail and " upload " in text:
            return f"{text.partition(' ')[0]}@{self.detail['step']}"
        checked = (*((self.missing,) if self.missing else ()), *self.permissions)
        return text or next((resource for _, resource in checked), "")

    @property
    def reason_text(self) -> str:
        """Why the call failed, and how many denials before it were not recorded."""
        more = f"{self.left_out} denials not recorded" if self.left_out else ""
        return ", ".join(filter(None, (self.reason, more)))

    @classmethod
    def from_message(cls, message: access_service_pb2.AuditEntry) -> Self:
        """Returns the value of a message."""
        if message.problem:
            return cls(server=message.server, problem=message.problem)
        missing, latency = message.missing, None
        if message.HasField("latency"):
            try:
                latency = message.latency.ToTimedelta()
            except (ValueError, OverflowError) as e:
                raise _no_value("latency", message.latency.seconds) from e
        return read_message(
            cls,
            message,
            time=_time(message.time),
            stage=_STAGES.get(message.stage),
            authentication=_AUTHENTICATIONS.get(message.authentication),
            permissions=tuple((p.permission, p.resource) for p in message.permissions),
            missing=(missing.permission, missing.resource)
            if message.HasField("missing")
            else None,
            latency=latency,
        )


def object_text(name: str) -> str:
    """Returns the name of an object of the contract as in ``storectl``.

    >>> object_text("namespaces/prod/runs/llama-8b/checkpoints/500")
    'prod/llama-8b@500'
    """
    match = _OBJECT.fullmatch(name)
    if match is None or match["run"] is None:
        return match["namespace"] if match else name
    run = f"{match['namespace']}/{match['run']}"
    match match["kind"]:
        case None:
            return run
        case "checkpoints":
            return f"{run}@{match['id']}"
        case kind:
            return f"{run} {kind.removesuffix('s')} {match['id']}"


def _time(stamp: Timestamp) -> datetime:
    """Returns a time that every time zone can show."""
    try:
        found = stamp.ToDatetime(UTC)
    except (ValueError, OverflowError) as e:
        raise _no_value("time", stamp.seconds) from e
    if not 1970 <= found.year < 9999:
        raise _no_value("time", stamp.seconds)
    return found


def _no_value(field: str, seconds: int) -> DataLossError:
    return DataLossError(
        f"the server sent an audit entry with a {field} of {seconds} s, which no log "
        "has; ask another server",
        reason="CORRUPT_DATA",
    )


PathPart: TypeAlias = str | int

KINDS: Final = enum_texts(tree_pb2.LeafKind.DESCRIPTOR)
"""Texts of ``LeafInfo.kind``."""


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
        name = str(parse_received(RunName.from_resource, message.name))
        return read_message(cls, message, name=name)


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
        from storesvc_client._views.notebook import checkpoint_html

        return checkpoint_html(self)

    @classmethod
    def from_message(cls, message: api.Checkpoint) -> "Checkpoint":
        """Returns the value of a protobuf message."""
        name = parse_received(CheckpointName.from_resource, message.name)
        return read_message(cls, message, run=str(name.run))


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
        name = parse_received(TagName.from_resource, message.name)
        step = _parse_step(message.checkpoint)
        return read_message(cls, message, name=name.tag, step=step)


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
        name = parse_received(HoldName.from_resource, message.name)
        step = _parse_step(message.checkpoint)
        return read_message(cls, message, id=name.hold, step=step)


UploadState: TypeAlias = Literal["live", "committed", "ended", "unknown"]


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
        name = parse_received(UploadName.from_resource, message.name)
        return read_message(
            cls,
            message,
            run=str(name.run),
            id=name.upload,
            base_step=_parse_step(message.base) if message.base else None,
            lease=message.lease_duration.ToTimedelta(),
        )


EventKind: TypeAlias = Literal[
    "committed", "deleted", "undeleted", "tagged", "untagged", "updated", "unknown"
]


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
        return read_message(
            cls,
            message,
            run=str(parse_received(CheckpointName.from_resource, found.name).run),
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
            path=leaf_path(leaf),
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


def leaf_path(leaf: "Leaf") -> tuple[PathPart, ...]:
    """Returns the path of a leaf, with its indices as integers."""
    parts = zip(split_key(leaf.key), leaf.path_kinds, strict=True)
    return tuple(int(text) if kind in INTEGER_KINDS else text for text, kind in parts)


def _parse_step(resource: str) -> int:
    which = parse_received(CheckpointName.from_resource, resource).which
    assert isinstance(which, int)  # the server resolved it
    return which


DIFFERENCE_KINDS: Final = enum_texts(api.LeafDifference.Kind.DESCRIPTOR)
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
        from storesvc_client._views.notebook import verification_html

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
        return read_message(
            cls,
            message,
            base_dtype=None if added else message.base_dtype,
            base_shape=None if added else tuple(message.base_shape),
            dtype=None if removed else message.dtype,
            shape=None if removed else tuple(message.shape),
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
        name = parse_received(parse_item_key, message.key)
        kind = DIFFERENCE_KINDS.get(message.kind, UNKNOWN)
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
        from storesvc_client._views.notebook import diff_html

        return diff_html(self)

    @property
    def is_same(self) -> bool:
        """True if both have the same leaves and items, byte for byte."""
        return not self.differences and not self.items


IMPORTED: Final = "import.format"
"""Label of an imported checkpoint: its format, in which a key that is a number is a
text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One checkpoint of an import or a copy; from ``Run.import_from`` and
    ``Run.copy_to``."""

    source: str
    """Location of the checkpoint that was read."""
    checkpoint: Checkpoint
    """The checkpoint of the run."""
    is_new: bool
    """True if this call stored it; False if an earlier one had."""
    sent_bytes: int
    """Bytes of the chunks that were stored."""
    reused_bytes: int
    """Bytes of the chunks that the store had already."""
    seconds: float
    """Seconds that it took."""
    is_verified: bool
    """True if its bytes were compared with checksums of the source; False if the source
    has none for all of them, or if the checkpoint was there already."""
    verified_count: int
    """Number of leaves and items whose bytes were compared with such checksums."""

    def __repr__(self) -> str:
        name = f"{self.checkpoint.run}@{self.checkpoint.step}"
        if not self.is_new:
            return f"<Transfer {name}, was there already>"
        sent, reused = size_text(self.sent_bytes), size_text(self.reused_bytes)
        return f"<Transfer {name}, {sent} sent, {reused} reused, {self.seconds:.3g} s>"

    @classmethod
    def skipped(cls, source: str, checkpoint: Checkpoint) -> "Transfer":
        """Returns the transfer of a checkpoint that was there already."""
        return cls(
            source=source,
            checkpoint=checkpoint,
            is_new=False,
            sent_bytes=0,
            reused_bytes=0,
            seconds=0.0,
            is_verified=False,
            verified_count=0,
        )


def with_provenance(
    what: str, prefix: str, labels: Mapping[str, str], provenance: Mapping[str, str]
) -> dict[str, str]:
    """Returns labels together with the provenance of a checkpoint."""
    added = {
        f"{prefix}{key}": label_text(text) for key, text in provenance.items() if text
    }
    taken = sorted(added.keys() & labels.keys())
    if taken:
        raise InvalidRequestError(
            f"{what}: expected no label {taken[0]!r}, which records where the "
            f"checkpoint comes from, got {labels[taken[0]]!r}; use another key"
        )
    return {**labels, **added}


def label_text(text: str) -> str:
    """Returns a text as a label holds it: of one that is too long, such as the URL of a
    deep folder, "..." and its end.

    >>> label_text("file:///ckpts"), len(label_text("file:///" + "deep/" * 100))
    ('file:///ckpts', 256)
    """
    data = unicode_text(text).encode()
    if len(data) <= MAX_TEXT_BYTES:
        return data.decode()
    return "..." + data[3 - MAX_TEXT_BYTES :].decode(errors="ignore")
