"""Reads requests and writes responses: between the contract and the service.

Every check of a field is here, so nothing behind it needs to distrust one.
"""

import hashlib
import uuid
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Mapping
from typing import Final

from storesvc.catalogue import RunSummary
from storesvc.errors import InvalidFieldError, InvalidPageTokenError
from storesvc.format.names import (
    MAX_STEP,
    CheckpointName,
    InvalidNameError,
    RunName,
    UploadName,
    check_id,
    parse_step,
)
from storesvc.uploads import DEFAULT_LEASE, NewUpload
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import checkpoint_service_pb2 as catalogue_api
from storesvc_proto.v1 import upload_service_pb2 as upload_api

DEFAULT_PAGE: Final = 100
MAX_PAGE: Final = 1000
MAX_WRITERS: Final = 65536
MAX_LEASE_SECONDS: Final = 30 * 24 * 3600
MAX_ENTRIES: Final = 64
"""Labels, and metrics, of a checkpoint."""
MAX_TEXT_BYTES: Final = 256
"""Of a label's key and value, and of a metric's key."""

_TOKEN_CHECK_BYTES: Final = 8


def new_upload(upload: upload_api.Upload) -> NewUpload:
    """Returns what BeginUpload asks for.

    Raises:
        InvalidFieldError: Naming the field.
    """
    if not 0 <= upload.step <= MAX_STEP:
        raise InvalidFieldError(f"upload.step: expected 0 or more, got {upload.step}")
    if not 1 <= upload.writer_count <= MAX_WRITERS:
        raise InvalidFieldError(
            f"upload.writer_count: expected 1 to {MAX_WRITERS}, got "
            f"{upload.writer_count}"
        )
    lease = upload.lease_duration
    if not (0 <= lease.seconds <= MAX_LEASE_SECONDS and 0 <= lease.nanos < 10**9):
        raise InvalidFieldError(
            f"upload.lease_duration: expected 0 to {MAX_LEASE_SECONDS} s, got "
            f"{lease.seconds} s and {lease.nanos} ns"
        )
    _check_entries("labels", upload.labels)
    _check_entries("metrics", upload.metrics)
    return NewUpload(
        step=upload.step,
        writer_count=upload.writer_count,
        labels=dict(sorted(upload.labels.items())),
        metrics=dict(sorted(upload.metrics.items())),
        lease=lease.ToTimedelta() or DEFAULT_LEASE,
        body=upload.SerializeToString(deterministic=True),
    )


def upload_name(parent: str, request_id: str) -> UploadName:
    """Returns the name of the upload that a request id stands for.

    Raises:
        InvalidFieldError: The id is not a UUID in its usual form.
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
    return UploadName(RunName.from_resource(parent), parsed.hex)


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


def last_run(parent: str, token: str) -> RunName | None:
    """Returns the last run of the page before; None for the first page.

    Raises:
        InvalidPageTokenError: The token was not made for a list of that parent.
    """
    last = _last_of_page(parent, token)
    try:
        return None if last is None else RunName.parse(last)
    except InvalidNameError as e:
        raise _invalid_token(parent) from e


def last_step(parent: str, token: str) -> int | None:
    """Returns the last step of the page before; None for the first page.

    Raises:
        InvalidPageTokenError: The token was not made for a list of that parent.
    """
    last = _last_of_page(parent, token)
    try:
        return None if last is None else parse_step(last)
    except InvalidNameError as e:
        raise _invalid_token(parent) from e


def _last_of_page(parent: str, token: str) -> str | None:
    """The last row of the page before; None for the first page.

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
    return last


def _invalid_token(parent: str) -> InvalidPageTokenError:
    return InvalidPageTokenError(
        f"page_token: not a token of a list of {parent}; begin without one"
    )


def _token_check(parent: str, last: str) -> bytes:
    # Not a secret: it tells a token of another list, or a cut one, not a forger.
    made_of = f"{parent}\0{last}".encode()
    return hashlib.blake2b(made_of, digest_size=_TOKEN_CHECK_BYTES).digest()


def _check_entries(field: str, entries: Mapping[str, str | float]) -> None:
    if len(entries) > MAX_ENTRIES:
        raise InvalidFieldError(
            f"upload.{field}: expected at most {MAX_ENTRIES} entries, got "
            f"{len(entries)}"
        )
    for key, value in entries.items():
        texts = [key, value] if isinstance(value, str) else [key]
        if not key or max(len(text.encode()) for text in texts) > MAX_TEXT_BYTES:
            raise InvalidFieldError(
                f"upload.{field}[{key[:40]!r}]: expected texts of 1 to "
                f"{MAX_TEXT_BYTES} bytes"
            )


def upload_message(name: UploadName, record: pb.UploadRecord) -> upload_api.Upload:
    """Returns an upload as the contract shows it."""
    return upload_api.Upload(
        name=name.resource,
        step=record.step,
        writer_count=record.writer_count,
        labels=record.labels,
        metrics=record.metrics,
        lease_duration=record.lease_duration,
        epoch=record.epoch,
        create_time=record.create_time,
    )


def checkpoint_message(
    run: RunName, record: pb.CheckpointRecord
) -> catalogue_api.Checkpoint:
    """Returns a checkpoint as the contract shows it."""
    return catalogue_api.Checkpoint(
        name=CheckpointName(run, record.step).resource,
        uid=record.upload,
        step=record.step,
        create_time=record.create_time,
        commit_time=record.commit_time,
        labels=record.labels,
        metrics=record.metrics,
        size_bytes=record.size_bytes,
        stored_bytes=record.stored_bytes,
        leaf_count=record.leaf_count,
        chunk_count=record.chunk_count,
        manifest_bytes=record.manifest_bytes,
        manifest_digest=record.manifest_digest,
    )


def run_message(summary: RunSummary) -> catalogue_api.Run:
    """Returns a run as the contract shows it."""
    return catalogue_api.Run(
        name=summary.name.resource,
        uid=summary.record.uid,
        create_time=summary.record.create_time,
        latest_step=summary.latest.step,
    )
