"""Parses requests, and checks the fields that several rpcs share.

gRPC would respond to malformed bytes with a status of its own, and log a traceback;
parsed here, they are an error of the contract.

All checks of fields are here or next to the handler of the rpc, so the layers below rpc
can rely on valid arguments.
"""

import hashlib
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Final, TypeAlias, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message

from storesvc.errors import InvalidFieldError
from storesvc.format.names import check_id
from storesvc.gc.collector import DEFAULT_GRACE
from storesvc_proto.v1 import checkpoint_service_pb2 as checkpoint_api
from storesvc_proto.v1 import maintenance_service_pb2 as maintenance_api

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

_BODY_BYTES: Final = 8

M = TypeVar("M", bound=Message)


def parsed(kind: type[M], data: bytes) -> M:
    """Parses a message.

    Raises:
        InvalidFieldError: The bytes are no such message.
    """
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
    """Rejects a writer index that the upload does not have.

    Raises:
        InvalidFieldError: The index is out of range.
    """
    if not 0 <= writer < writer_count:
        raise InvalidFieldError(
            f"{place}: expected 0 to {writer_count - 1}, got {writer}"
        )


def checked_request_id(request_id: str) -> str:
    """Returns a valid request id.

    Raises:
        InvalidFieldError: It is not a UUID in its canonical form.
    """
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


def write_id_of(request: ChangeRequest) -> str:
    """Returns the write id of a request: its id, and a digest of its other fields.

    Records store it, so that ``transitions.is_repeated`` recognises a retry.

    Raises:
        InvalidFieldError: The ``request_id`` is not a UUID in its canonical form.
    """
    return f"{checked_request_id(request.request_id)}:{_body_digest(request)}"


def _body_digest(request: Message) -> str:
    """Returns a digest of a request without its id."""
    body = type(request)()
    body.CopyFrom(request)
    body.ClearField("request_id")
    # With the name: a deletion and its undeletion may have equal bytes.
    name = body.DESCRIPTOR.full_name.encode()
    data = name + b"\0" + body.SerializeToString(deterministic=True)
    return hashlib.blake2b(data, digest_size=_BODY_BYTES).hexdigest()


def duration(field: str, given: Duration, *, most: timedelta) -> timedelta:
    """Returns a valid duration.

    Raises:
        InvalidFieldError: It is negative, malformed, or longer than the maximum.
    """
    if not (0 <= given.seconds <= most.total_seconds() and 0 <= given.nanos < 10**9):
        raise InvalidFieldError(
            f"{field}: expected 0 to {most.total_seconds():.0f} s, got "
            f"{given.seconds} s and {given.nanos} ns"
        )
    return given.ToTimedelta()


def grace_of(request: maintenance_api.CollectGarbageRequest) -> timedelta:
    """Returns the grace period of a collection.

    Raises:
        InvalidFieldError: It is negative, malformed or too long.
    """
    if not request.HasField("grace"):
        return DEFAULT_GRACE
    return duration("grace", request.grace, most=MAX_GRACE)


def namespace_of(parent: str) -> str | None:
    """Returns the namespace of ``namespaces/{namespace}``; None for ``namespaces/-``.

    Raises:
        InvalidFieldError: The text has another form.
    """
    collection, _, namespace = parent.partition("/")
    if collection != "namespaces":
        raise InvalidFieldError(
            f"parent {parent!r}: expected namespaces/NAMESPACE, or namespaces/-"
        )
    if namespace == "-":
        return None
    check_id(namespace, "namespace")
    return namespace


def checked_owner(field: str, owner: str) -> str:
    """Returns a valid owner, a text for people.

    Raises:
        InvalidFieldError: The text is too long.
    """
    size = len(owner.encode())
    if size > MAX_TEXT_BYTES:
        raise InvalidFieldError(
            f"{field}: expected at most {MAX_TEXT_BYTES} bytes, got {size}"
        )
    return owner


def check_entries(field: str, entries: Mapping[str, str | float]) -> None:
    """Rejects labels or metrics that are too many or too long.

    Raises:
        InvalidFieldError: Names the field and the entry.
    """
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
