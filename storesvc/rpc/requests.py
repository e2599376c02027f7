"""Parses requests, limits their size, and checks the fields that several rpcs share.

gRPC would respond to malformed bytes with a status of its own, and log a traceback;
parsed here, they are an error of the contract. All checks of fields are here or next to
the handler of the rpc, so the layers below rpc can rely on valid arguments; they raise
``InvalidFieldError``, which names the field.

An empty entry of a repeated field takes two bytes of a message, but a hundred times
that as a Python object. So the server counts the entries of every repeated field while
they are in protobuf's compact form, and rejects a request with more than any client
needs. ``COUNTS`` has each repeated field of each request; a test fails if one is
missing.
"""

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message

from storesvc.auth.call import rpcs_with
from storesvc.errors import InvalidFieldError, LimitExceededError
from storesvc.format.dtypes import CHECKSUM_BYTES
from storesvc.format.grids import MAX_RANK
from storesvc.format.names import check_id
from storesvc.gc.collector import DEFAULT_GRACE
from storesvc.restore.sender import MAX_CHUNKS as MAX_READ_CHUNKS
from storesvc.save.batches import FRAME_BYTES, SMALL_BYTES
from storesvc.save.leaf_tables import MAX_LEAVES, MAX_PIECES, MAX_VALUES
from storesvc.save.receipts import MAX_PHASES
from storesvc_proto.v1 import checkpoint_service_pb2 as checkpoint_api
from storesvc_proto.v1 import maintenance_service_pb2 as maintenance_api
from storesvc_proto.v1 import tree_pb2

ChangeRequest: TypeAlias = (
    checkpoint_api.SetTagRequest
    | checkpoint_api.DeleteTagRequest
    | checkpoint_api.UpdateRunRequest
    | checkpoint_api.UpdateCheckpointRequest
    | checkpoint_api.DeleteCheckpointRequest
    | checkpoint_api.UndeleteCheckpointRequest
)
"""A request whose id is stored in the record that it changes."""

MAX_ENTRIES: Final = 64
"""Maximum labels, and maximum metrics, of a checkpoint."""

MAX_TEXT_BYTES: Final = 256
"""Maximum bytes of a label's key or value, and of a metric's key."""

MAX_GRACE: Final = timedelta(days=365)
"""Maximum grace period of a collection."""

MESSAGE_TYPE: Final = "message_type"
"""Metadata key for the name of the message that was expected."""

M = TypeVar("M", bound=Message)


def parse_message(kind: type[M], data: bytes) -> M:
    try:
        return kind.FromString(data)
    except DecodeError as e:
        name = kind.DESCRIPTOR.full_name
        raise InvalidFieldError(
            f"request: expected a serialized {name}, got {len(data)} bytes that are "
            "not one; use a client of this contract",
            **{MESSAGE_TYPE: name},
        ) from e


def check_writer(place: str, writer: int, writer_count: int) -> None:
    """Rejects a writer index that the upload does not have."""
    if not 0 <= writer < writer_count:
        raise InvalidFieldError(
            f"{place}: expected 0 to {writer_count - 1}, got {writer}"
        )


def checked_request_id(request_id: str) -> str:
    try:
        parsed = uuid.UUID(request_id)
    except ValueError:
        parsed = None
    if parsed is None or str(parsed) != request_id:
        raise InvalidFieldError(
            f"request_id: expected a UUID such as {uuid.UUID(int=0)}, got "
            f"{request_id!r}"
        )
    return request_id


def make_write_id(request: ChangeRequest) -> str:
    """Returns the write id of a request: its id, and a digest of its other fields.

    Records store it, so that ``slots.is_repeated`` recognises a retry.
    """
    request_id = checked_request_id(request.request_id)
    body: Message = type(request)()
    body.MergeFrom(request)
    body.ClearField("request_id")
    # With the name: a deletion and its undeletion may have equal bytes.
    name = body.DESCRIPTOR.full_name.encode()
    data = name + b"\0" + body.SerializeToString(deterministic=True)
    return f"{request_id}:{hashlib.blake2b(data, digest_size=8).hexdigest()}"


def duration(field: str, given: Duration, *, most: timedelta) -> timedelta:
    if not (0 <= given.seconds <= most.total_seconds() and 0 <= given.nanos < 10**9):
        raise InvalidFieldError(
            f"{field}: expected 0 to {most.total_seconds():.0f} s, got "
            f"{given.seconds} s and {given.nanos} ns"
        )
    return given.ToTimedelta()


def parse_grace(request: maintenance_api.CollectGarbageRequest) -> timedelta:
    if not request.HasField("grace"):
        return DEFAULT_GRACE
    return duration("grace", request.grace, most=MAX_GRACE)


def parse_namespace(parent: str) -> str | None:
    """Parses ``namespaces/{namespace}``; returns None for ``namespaces/-``."""
    collection, _, namespace = parent.partition("/")
    if collection != "namespaces":
        raise InvalidFieldError(
            f"parent {parent!r}: expected namespaces/NAMESPACE, or namespaces/-"
        )
    if namespace == "-":
        return None
    check_id(namespace, "namespace")
    return namespace


def read_mask(
    request: checkpoint_api.UpdateRunRequest | checkpoint_api.UpdateCheckpointRequest,
    known: Sequence[str],
) -> set[str]:
    paths = set(request.update_mask.paths)
    if not paths or not paths <= set(known):
        raise InvalidFieldError(
            f"update_mask: expected some of {', '.join(known)}, got "
            f"{', '.join(sorted(paths))[:200] or 'none'}"
        )
    return paths


def checked_owner(field: str, owner: str) -> str:
    """Returns a valid owner, a text for people."""
    size = len(owner.encode())
    if size > MAX_TEXT_BYTES:
        raise InvalidFieldError(
            f"{field}: expected at most {MAX_TEXT_BYTES} bytes, got {size}"
        )
    return owner


def check_entries(field: str, entries: Mapping[str, str | float]) -> None:
    """Rejects labels or metrics that are too many or too long."""
    if len(entries) > MAX_ENTRIES:
        raise InvalidFieldError(
            f"{field}: expected at most {MAX_ENTRIES} entries, got {len(entries)}"
        )
    for key, value in entries.items():
        texts = [key, value] if isinstance(value, str) else [key]
        if not key or max(len(text.encode()) for text in texts) > MAX_TEXT_BYTES:
            raise InvalidFieldError(
                f"{field}[{key[:40]!r}]: expected texts of 1 to {MAX_TEXT_BYTES} bytes"
            )


MAX_SMALL_BYTES: Final = 256 << 10
"""Maximum bytes of a request without a table: twice the largest retention policy."""

MAX_PART_CHUNKS: Final = 1 << 18
"""Maximum rows in one part of a chunk table: a row takes at least 21 of 4 Mi bytes."""

_MAX_FRAME_PIECES: Final = FRAME_BYTES // (CHECKSUM_BYTES + 1)
"""The number of chunks of minimum size that fit into a frame."""

_MAX_RULES: Final = MAX_SMALL_BYTES // 2
"""The number that fits into a request: ``retention.policy`` has the actual limits,
with errors of their own."""

LARGE: Final = frozenset(
    f"storesvc.v1.{name}Request" for name in rpcs_with(lambda rpc: rpc.is_large)
)
"""Requests that may have the maximum size of a message."""

MAX_READ_BYTES: Final = 10 * MAX_READ_CHUNKS + (4 << 10)
"""Maximum bytes of a ReadChunksRequest: a varint takes ten bytes at most."""

_LIMITS: Final = {
    "storesvc.v1.ReadChunksRequest": MAX_READ_BYTES,
    "storesvc.v1.CommitUploadRequest": SMALL_BYTES + MAX_SMALL_BYTES,
    "storesvc.v1.CreateCheckpointRequest": SMALL_BYTES + MAX_SMALL_BYTES,
}
"""Maximum bytes of other requests."""

_LIMITED: Final = (
    # one entry per leaf
    ("LeafTable", "key path_kinds kind dtype rank sharding prng_impl", MAX_LEAVES),
    # one entry per dimension
    ("LeafTable", "shape chunk_shape", MAX_LEAVES * MAX_RANK),
    ("LeafTable", "dtypes shardings prng_impls", MAX_VALUES),
    ("LeafTable", "structure", MAX_PIECES),
    # a mesh has no more axes than an array has dimensions
    ("Sharding", "axis_names axis_sizes spec", MAX_RANK),
    ("DimensionAxes", "axes", MAX_RANK),
    ("WriterReport", "phases", MAX_PHASES),
    ("ChunkTable", "ordinal crc32c digests file offset length", MAX_PART_CHUNKS),
    ("ChunkTable", "files", 1 << 16),
    ("ChunkFrame", "chunk offset length", _MAX_FRAME_PIECES),
    ("ReadChunksRequest", "chunk", MAX_READ_CHUNKS),
    ("Upload", "labels metrics", MAX_ENTRIES),
    ("Upload", "unfinished_writers", 0),  # output only
    ("Checkpoint", "labels metrics", MAX_ENTRIES),
    ("Run", "labels", MAX_ENTRIES),
    ("Run", "migrations", 64),
    ("RetentionPolicies", "policies", _MAX_RULES),
    ("KeepSteps", "steps", _MAX_RULES),
    ("TestPermissionsRequest", "permissions", MAX_ENTRIES),
)
"""Repeated fields of messages of the contract, and their maximum entries."""

COUNTS: Final = MappingProxyType(
    {
        "google.protobuf.FieldMask.paths": MAX_ENTRIES,
        **{
            f"storesvc.v1.{message}.{name}": most
            for message, names, most in _LIMITED
            for name in names.split()
        },
    }
)
"""Maximum entries of each repeated field in one message of a request."""


class _Field(NamedTuple):
    """A repeated field, or a field with repeated fields inside."""

    name: str
    is_of_table: bool
    limit: int | None
    """Maximum entries; None: the field itself is not repeated."""
    inner: Descriptor | None
    """Message type of the entries; None: it has no repeated fields."""


def check_size(request: str, size_bytes: int) -> None:
    """Rejects a serialized request that is larger than any client needs, before the
    event loop spends time on parsing it."""
    if size_bytes <= MAX_SMALL_BYTES or request in LARGE:
        return
    limit_bytes = _LIMITS.get(request, MAX_SMALL_BYTES)
    if size_bytes > limit_bytes:
        name = request.rpartition(".")[2]
        raise LimitExceededError(
            f"{name}: expected at most {limit_bytes} bytes, got {size_bytes}; send a "
            "smaller request"
        )


def check_counts(message: Message, place: str = "") -> None:
    """Rejects a message with too many entries in a repeated field.

    Args:
        place: Path of its fields for the error, ending in a dot.

    Raises:
        LimitExceededError: A field of a table has too many.
        InvalidFieldError: Another field has too many.
    """
    for field in _repeated_fields(message.DESCRIPTOR):
        if field.limit is None:
            if message.HasField(field.name):
                check_counts(getattr(message, field.name), f"{place}{field.name}.")
            continue
        entries = getattr(message, field.name)
        if len(entries) > field.limit:
            error = LimitExceededError if field.is_of_table else InvalidFieldError
            raise error(
                f"{place}{field.name}: expected at most {field.limit} entries, got "
                f"{len(entries)}; send fewer in one request"
            )
        if field.inner is not None:
            for entry in entries:
                check_counts(entry, f"{place}{field.name}.")


@cache
def _repeated_fields(message: Descriptor) -> tuple[_Field, ...]:
    """Returns the fields of a message that are repeated, or contain repeated ones."""
    is_of_table = message.file.name == tree_pb2.DESCRIPTOR.name
    found = []
    for field in message.fields:
        inner: Descriptor | None = field.message_type
        if inner is not None and (
            inner.GetOptions().map_entry or not holds_repeated(inner)
        ):
            inner = None
        if field.is_repeated or inner is not None:
            limit = COUNTS[field.full_name] if field.is_repeated else None
            found.append(_Field(field.name, is_of_table, limit, inner))
    return tuple(found)


def holds_repeated(message: Descriptor) -> bool:
    """Returns whether a message has a repeated field at any depth."""
    seen, left = set(), [message]
    while left:
        one = left.pop()
        if one.full_name in seen:
            continue
        seen.add(one.full_name)
        if any(field.is_repeated for field in one.fields):
            return True
        left += [f.message_type for f in one.fields if f.message_type is not None]
    return False
