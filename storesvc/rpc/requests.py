"""Checks of the fields of requests, and page tokens.

Every check of a field is here or beside the call it belongs to, so nothing behind
the calls needs to distrust one.
"""

import hashlib
import uuid
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Final, TypeAlias, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from storesvc.errors import InvalidFieldError, InvalidPageTokenError
from storesvc.format.names import (
    InvalidNameError,
    check_id,
)
from storesvc_proto.v1 import checkpoint_service_pb2 as catalogue_api

M = TypeVar("M", bound=Message)
T = TypeVar("T")

ChangeRequest: TypeAlias = (
    catalogue_api.SetTagRequest
    | catalogue_api.DeleteTagRequest
    | catalogue_api.UpdateRunRequest
    | catalogue_api.UpdateCheckpointRequest
    | catalogue_api.DeleteCheckpointRequest
    | catalogue_api.UndeleteCheckpointRequest
)
"""A request whose id a record keeps."""

DEFAULT_PAGE: Final = 100
MAX_PAGE: Final = 1000
MAX_ENTRIES: Final = 64
"""Labels, and metrics, of a checkpoint."""
MAX_TEXT_BYTES: Final = 256
"""Of a label's key and value, and of a metric's key."""

_TOKEN_CHECK_BYTES: Final = 8
_BODY_BYTES: Final = 8


def check_writer(place: str, writer: int, writer_count: int) -> None:
    """Refuses a writer that the upload does not have.

    Raises:
        InvalidFieldError: It has not.
    """
    if not 0 <= writer < writer_count:
        raise InvalidFieldError(
            f"{place}: expected 0 to {writer_count - 1}, got {writer}"
        )


def checked_request_id(request_id: str) -> str:
    """Returns a request id, checked: what an upload or a hold is called by.

    Raises:
        InvalidFieldError: It is not a UUID in its usual form.
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
    """Returns what records keep of a request that changes something, so that
    ``transitions.is_repeated`` knows it again: its id, and a digest of the rest.

    Raises:
        InvalidFieldError: Its ``request_id`` is not a UUID in its usual form.
    """
    return f"{checked_request_id(request.request_id)}:{_body_digest(request)}"


def _body_digest(request: Message) -> str:
    """What tells a request, but for its id, from others."""
    body = type(request)()
    body.CopyFrom(request)
    body.ClearField("request_id")
    # The name too: a deletion and its undoing may have the same bytes.
    name = body.DESCRIPTOR.full_name.encode()
    data = name + b"\0" + body.SerializeToString(deterministic=True)
    return hashlib.blake2b(data, digest_size=_BODY_BYTES).hexdigest()


def duration(field: str, given: Duration, *, most: timedelta) -> timedelta:
    """Returns a duration of 0 or more.

    Raises:
        InvalidFieldError: It is negative, malformed, or more than the most.
    """
    if not (0 <= given.seconds <= most.total_seconds() and 0 <= given.nanos < 10**9):
        raise InvalidFieldError(
            f"{field}: expected 0 to {most.total_seconds():.0f} s, got "
            f"{given.seconds} s and {given.nanos} ns"
        )
    return given.ToTimedelta()


def namespace_of(parent: str) -> str | None:
    """Returns the namespace of ``namespaces/{namespace}``; None for all.

    Raises:
        InvalidFieldError: The text is something else.
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


def page_size(asked: int) -> int:
    """Returns how many rows a page holds.

    Raises:
        InvalidFieldError: It is negative.
    """
    if asked < 0:
        raise InvalidFieldError(f"page_size: expected 0 or more, got {asked}")
    return min(asked or DEFAULT_PAGE, MAX_PAGE)


def page_token(parent: str, last: str) -> str:
    """Returns the token of the page after the row called ``last``."""
    return urlsafe_b64encode(_token_check(parent, last) + last.encode()).decode()


def last_of_page(parent: str, token: str, parse: Callable[[str], T]) -> T | None:
    """Returns the last row of the page before; None for the first page.

    Args:
        parent: What is listed.
        token: Of the page.
        parse: What the row is of its text.

    Raises:
        InvalidPageTokenError: The token was not made for a list of that parent.
    """
    if not token:
        return None
    try:
        data = urlsafe_b64decode(token)
        check, last = data[:_TOKEN_CHECK_BYTES], data[_TOKEN_CHECK_BYTES:].decode()
    except (Base64Error, ValueError):
        check, last = b"", ""
    if check != _token_check(parent, last):
        raise _invalid_token(parent)
    try:
        return parse(last)
    except InvalidNameError as e:
        raise _invalid_token(parent) from e


def _invalid_token(parent: str) -> InvalidPageTokenError:
    return InvalidPageTokenError(
        f"page_token: not a token of a list of {parent}; begin without one"
    )


def _token_check(parent: str, last: str) -> bytes:
    # Not a secret: it tells a token of another list, or a cut one, not a forger.
    made_of = f"{parent}\0{last}".encode()
    return hashlib.blake2b(made_of, digest_size=_TOKEN_CHECK_BYTES).digest()


def checked_owner(field: str, owner: str) -> str:
    """Returns who does something, for people.

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
