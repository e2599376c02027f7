"""Buckets and objects as clients see them: the properties and preconditions that they
send, documents, and the headers of media.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote

from tests.fake_gcs.messages import Answer, Request
from tests.fake_gcs.objects import Bucket, Conditions, Data, StoredObject

PROPERTIES: Final = (
    "cacheControl",
    "contentDisposition",
    "contentEncoding",
    "contentLanguage",
    "contentType",
    "customTime",
    "metadata",
)
"""Properties of an object that clients may set and change."""


def conditions_of(request: Request, prefix: str = "if") -> Conditions:
    """Returns the preconditions of a request.

    Args:
        request: The request.
        prefix: Prefix of the parameters' names.

    Raises:
        RefusedError: A parameter is not a number.
    """
    return Conditions(
        generation=request.number(f"{prefix}GenerationMatch"),
        not_generation=request.number(f"{prefix}GenerationNotMatch"),
        metageneration=request.number(f"{prefix}MetagenerationMatch"),
        not_metageneration=request.number(f"{prefix}MetagenerationNotMatch"),
    )


def properties_of(document: Mapping[str, Any], content_type: str) -> dict[str, Any]:
    """Returns the properties of an object in a document; the content type is used if
    the document has none."""
    given = {name: document[name] for name in PROPERTIES if name in document}
    return {"contentType": content_type or "application/octet-stream"} | given


def bucket_document(bucket: Bucket) -> dict[str, object]:
    """Returns the resource of a bucket, as clients get it."""
    created = _timestamp(bucket.created)
    return {
        "kind": "storage#bucket",
        "id": bucket.name,
        "name": bucket.name,
        "location": "US",
        "storageClass": "STANDARD",
        "metageneration": "1",
        "timeCreated": created,
        "updated": created,
    }


def object_document(
    origin: str, bucket: str, name: str, found: StoredObject
) -> dict[str, object]:
    """Returns the resource of an object, as clients get it.

    Args:
        origin: URL by which the client knows the server, for the links.
        bucket: The bucket's name.
        name: The object's name.
        found: The object.
    """
    place = f"storage/v1/b/{bucket}/o/{quote(name, safe='')}"
    hashes = found.content.hashes
    document: dict[str, object] = {
        "kind": "storage#object",
        "id": f"{bucket}/{name}/{found.generation}",
        "selfLink": f"{origin}/{place}",
        "mediaLink": f"{origin}/download/{place}"
        f"?generation={found.generation}&alt=media",
        "name": name,
        "bucket": bucket,
        "generation": str(found.generation),
        "metageneration": str(found.metageneration),
        "size": str(len(found.content.data)),
        "storageClass": "STANDARD",
        "crc32c": hashes["crc32c"],
        "etag": _etag(found),
        "timeCreated": _timestamp(found.created),
        "updated": _timestamp(found.updated),
        **found.properties,
    }
    if "md5" in hashes:
        document["md5Hash"] = hashes["md5"]
    if found.component_count is not None:
        document["componentCount"] = found.component_count
    return document


def media_answer(found: StoredObject, asked_range: str) -> Answer:
    """Returns the data of an object, or a range of it.

    Args:
        found: The object.
        asked_range: The header of this name; empty: all is asked for.
    """
    size = len(found.content.data)
    part = part_of(asked_range, size)
    if part is None:
        return Answer(headers=_media_headers(found), body=found.content.data)
    if not part:
        return Answer(
            status=HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
            headers={"content-range": f"bytes */{size}"},
        )
    body: Data = memoryview(found.content.data)[part.start : part.stop]
    shown = f"bytes {part.start}-{part.stop - 1}/{size}"
    return Answer(
        status=HTTPStatus.PARTIAL_CONTENT,
        headers=_media_headers(found) | {"content-range": shown},
        body=body,
    )


def _media_headers(found: StoredObject) -> dict[str, str]:
    hashes = ",".join(f"{name}={h}" for name, h in found.content.hashes.items())
    return {
        "content-type": str(found.properties["contentType"]),
        "etag": f'"{_etag(found)}"',
        "last-modified": formatdate(found.updated, usegmt=True),
        "accept-ranges": "bytes",
        "x-goog-generation": str(found.generation),
        "x-goog-metageneration": str(found.metageneration),
        "x-goog-hash": hashes,
        "x-goog-stored-content-encoding": "identity",
        "x-goog-stored-content-length": str(len(found.content.data)),
    }


def part_of(asked_range: str, size: int) -> range | None:
    """Returns the bytes that a request asks for by the header of this name: None for
    all, empty for none that exist.

    What is no range, or several, counts for nothing, as RFC 9110 wants it.
    """
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", asked_range)
    if match is None or match[0] == "bytes=-":
        return None
    first, last = match.groups()
    if not first:
        return range(max(0, size - int(last)), size)
    if last and int(last) < int(first):
        return None
    return range(int(first), min(size, int(last) + 1) if last else size)


def _etag(found: StoredObject) -> str:
    return f"{found.generation:x}-{found.metageneration:x}"


def _timestamp(seconds: float) -> str:
    when = datetime.fromtimestamp(seconds, UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")
