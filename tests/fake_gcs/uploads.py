"""The three kinds of uploads: simple, multipart (with metadata) and resumable.

A resumable upload takes effect with its last chunk: the preconditions that it began
with are checked then.
"""

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from tests.fake_gcs.messages import (
    CLIENT_CLOSED_REQUEST,
    Answer,
    Body,
    Request,
    json_answer,
    parse_document,
    parse_parts,
)
from tests.fake_gcs.objects import (
    Buckets,
    Conditions,
    Content,
    Data,
    RefusedError,
    StoredObject,
)
from tests.fake_gcs.resources import conditions_of, object_document, properties_of

_HASHES: Final = (("crc32c", "crc32c"), ("md5Hash", "md5"))


@dataclass(slots=True, kw_only=True)
class Upload:
    """An upload in progress."""

    bucket: str
    name: str
    properties: Mapping[str, Any]
    conditions: Conditions
    hashes: dict[str, str]
    """Checksums that the client announced."""
    pieces: list[Data] = field(default_factory=list)
    received_bytes: int = 0
    made: StoredObject | None = None


class Uploads:
    """Uploads in progress to some buckets."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._begun: dict[str, Upload] = {}

    def begin(self, request: Request, bucket: str) -> Answer:
        """Stores an object, or begins a resumable upload."""
        self._buckets.get(bucket)
        match request.query.get("uploadType"):
            case "media":
                return self._store(request, _simple(request, bucket))
            case "multipart":
                return self._store(request, _multipart(request, bucket))
            case "resumable" if "upload_id" in request.query:
                return self.resume(request, bucket)
            case "resumable":
                return self._open(request, bucket)
        raise RefusedError(
            HTTPStatus.BAD_REQUEST,
            "uploadType: expected media, multipart or resumable, "
            f"got {request.query.get('uploadType')!r}",
        )

    def resume(self, request: Request, bucket: str) -> Answer:
        """Receives a chunk, or returns how many bytes an upload has received."""
        upload = self._find(request, bucket)
        if upload.made is not None:
            return json_answer(_document(request, upload, upload.made))
        total = _add_chunk(upload, request)
        if total is None or upload.received_bytes < total:
            last = upload.received_bytes - 1
            headers = {"range": f"bytes=0-{last}"} if upload.received_bytes else {}
            return Answer(status=HTTPStatus.PERMANENT_REDIRECT, headers=headers)
        upload.hashes |= _claimed(request.headers, {})
        return self._store(request, upload)

    def cancel(self, request: Request, bucket: str) -> Answer:
        """Cancels a resumable upload."""
        self._find(request, bucket)
        del self._begun[request.query["upload_id"]]
        return Answer(status=CLIENT_CLOSED_REQUEST)

    def _open(self, request: Request, bucket: str) -> Answer:
        given = request.document()
        content_type = request.headers.get("x-upload-content-type", "")
        upload_id = uuid.uuid4().hex
        self._begun[upload_id] = Upload(
            bucket=bucket,
            name=request.query.get("name") or given.get("name", ""),
            properties=properties_of(given, content_type),
            conditions=conditions_of(request),
            hashes=_claimed({}, given),
        )
        place = f"/upload/storage/v1/b/{bucket}/o?uploadType=resumable"
        headers = {
            "location": f"{request.origin}{place}&upload_id={upload_id}",
            "x-guploader-uploadid": upload_id,
        }
        return Answer(headers=headers)

    def _store(self, request: Request, upload: Upload) -> Answer:
        one = len(upload.pieces) == 1
        data = upload.pieces[0] if one else b"".join(upload.pieces)
        upload.made = self._buckets.get(upload.bucket).insert(
            upload.name,
            Content.of(data, upload.hashes),
            upload.properties,
            upload.conditions,
        )
        upload.pieces.clear()
        document = _document(request, upload, upload.made)
        return json_answer(document, stored_bytes=len(data))

    def _find(self, request: Request, bucket: str) -> Upload:
        self._buckets.get(bucket)
        upload_id = request.query.get("upload_id", "")
        if upload_id not in self._begun:
            raise RefusedError(HTTPStatus.NOT_FOUND, f"No such upload: {upload_id!r}")
        return self._begun[upload_id]


def _simple(request: Request, bucket: str) -> Upload:
    return Upload(
        bucket=bucket,
        name=request.query.get("name", ""),
        properties=properties_of({}, request.headers.get("content-type", "")),
        conditions=conditions_of(request),
        hashes=_claimed(request.headers, {}),
        pieces=[request.body],
    )


def _multipart(request: Request, bucket: str) -> Upload:
    parts = parse_parts(request.body, request.headers.get("content-type", ""))
    if len(parts) != 2:
        raise RefusedError(
            HTTPStatus.BAD_REQUEST, f"multipart: expected 2 parts, got {len(parts)}"
        )
    about, media = parts
    given = parse_document(bytes(about.data))
    return Upload(
        bucket=bucket,
        name=request.query.get("name") or given.get("name", ""),
        properties=properties_of(given, media.headers.get("content-type", "")),
        conditions=conditions_of(request),
        hashes=_claimed(request.headers, given),
        pieces=[media.data],
    )


def _add_chunk(upload: Upload, request: Request) -> int | None:
    """Adds a chunk; returns the size of the object, or None if it is not known yet."""
    body: Body = request.body
    everything = f"bytes 0-{len(body) - 1}/{len(body)}" if body else "bytes */0"
    text = request.headers.get("content-range", everything)
    match = re.fullmatch(r"bytes (?:(\d+)-(?:\d+|\*)|\*)/(\d+|\*)", text)
    if match is None:
        raise RefusedError(HTTPStatus.BAD_REQUEST, f"content-range {text!r}")
    first, total = match.groups()
    if first is not None:
        known = upload.received_bytes - int(first)
        if known < 0:
            raise RefusedError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"expected byte {upload.received_bytes} next, got {first}",
            )
        # a client that lost the response sends bytes again
        upload.pieces.append(memoryview(body)[known:])
        upload.received_bytes += max(0, len(body) - known)
    return None if total == "*" else int(total)


def _claimed(headers: Mapping[str, str], document: Mapping[str, Any]) -> dict[str, str]:
    """Returns the checksums that a client announced, by name."""
    pairs = (
        p.strip().partition("=") for p in headers.get("x-goog-hash", "").split(",")
    )
    claims = {name: value for name, _, value in pairs if name}
    if "content-md5" in headers:
        claims["md5"] = headers["content-md5"]
    return claims | {ours: document[name] for name, ours in _HASHES if name in document}


def _document(
    request: Request, upload: Upload, made: StoredObject
) -> dict[str, object]:
    return object_document(request.origin, upload.bucket, upload.name, made)
