"""The API of S3: routes requests to operations on the buckets.

Requests are executed without waiting, so each is atomic.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from typing import Final
from urllib.parse import unquote
from xml.sax.saxutils import escape

from tests.fake_gcs.messages import Answer, Request
from tests.fake_gcs.objects import (
    NO_CONDITIONS,
    Bucket,
    Buckets,
    Content,
    Page,
    Range,
    RefusedError,
    StoredObject,
    list_names,
)
from tests.fake_gcs.resources import part_of
from tests.fake_s3.keys import ExpiredTokenError, Keys

MOST_LISTED: Final = 1000
MODIFIED: Final = "2026-01-01T00:00:00.000Z"
"""Time at which every object was written, in XML."""

_COPY_SOURCE: Final = "x-amz-copy-source"

_CODES: Final = {
    HTTPStatus.BAD_REQUEST: "InvalidArgument",
    HTTPStatus.CONFLICT: "ConditionalRequestConflict",
    HTTPStatus.FORBIDDEN: "AccessDenied",
    HTTPStatus.METHOD_NOT_ALLOWED: "MethodNotAllowed",
    HTTPStatus.NOT_FOUND: "NoSuchKey",
    HTTPStatus.PRECONDITION_FAILED: "PreconditionFailed",
    HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE: "InvalidRange",
    HTTPStatus.UNAUTHORIZED: "NotSignedUp",
}


class S3Api:
    """Executes requests on a bucket, or on an object in it."""

    def __init__(
        self,
        buckets: Buckets,
        *,
        conditional_methods: Collection[str],
        keys: Keys | None = None,
    ) -> None:
        """Makes the API of some buckets.

        Args:
            buckets: The buckets.
            conditional_methods: Methods whose conditions are checked.
            keys: Valid keys, of which every request needs one; None: no authentication.
        """
        self._buckets = buckets
        self._keys = keys
        self._conditional_methods = conditional_methods

    def answer(self, request: Request) -> Answer:
        """Executes a request, and returns the response or an error response."""
        try:
            if self._keys is not None:
                if request.method == "POST" and request.path == "/":
                    return self._keys.assume(request)
                self._keys.check(request)
            return self._answer(request)
        except ExpiredTokenError:
            inside = "<Code>ExpiredToken</Code>"
            return _document("Error", inside, status=HTTPStatus.BAD_REQUEST)
        except RefusedError as e:
            return self.refused(e.status, str(e))

    def refused(self, status: int, message: str) -> Answer:
        """Returns the error response to a request that is not executed."""
        if status in (HTTPStatus.NOT_MODIFIED, HTTPStatus.NO_CONTENT):
            return Answer(status=status)
        code = _CODES.get(HTTPStatus(status), "InternalError")
        return _document(
            "Error", f"<Code>{code}</Code>{_text('Message', message)}", status=status
        )

    def _answer(self, request: Request) -> Answer:
        bucket, _, name = request.path[1:].partition("/")
        found = self._buckets.get(unquote(bucket))
        if not name:
            return _of_bucket(request, found)
        if request.method == "PUT" and _COPY_SOURCE in request.headers:
            return self._copy(request, found, unquote(name))
        calls = {"GET": _read, "HEAD": _read, "PUT": _write, "DELETE": _delete}
        if request.method not in calls:
            status = HTTPStatus.METHOD_NOT_ALLOWED
            raise RefusedError(status, f"no {request.method} {request.path}")
        if request.method not in self._conditional_methods:
            request = replace(request, headers=_unconditional(request.headers))
        return calls[request.method](request, found, unquote(name))

    def _copy(self, request: Request, bucket: Bucket, name: str) -> Answer:
        """Copies an object to a name, as S3 does up to 5 GB."""
        place = unquote(request.headers[_COPY_SOURCE]).lstrip("/")
        from_bucket, _, from_name = place.partition("/")
        source = self._buckets.get(from_bucket).read(from_name, NO_CONDITIONS)
        wanted = request.headers.get(f"{_COPY_SOURCE}-if-match")
        if wanted not in (None, "*", etag(source)):
            status = HTTPStatus.PRECONDITION_FAILED
            raise RefusedError(status, "At least one of the pre-conditions is not met")
        if "PUT" in self._conditional_methods:
            _check(request.headers, bucket.get(name))
        made = bucket.insert(name, source.content, {}, NO_CONDITIONS)
        inside = _text("ETag", etag(made)) + _text("LastModified", MODIFIED)
        answer = _document("CopyObjectResult", inside)
        return replace(answer, copied_bytes=len(source.content.data))


# --- Buckets --------------------------------------------------------------------------


def _of_bucket(request: Request, bucket: Bucket) -> Answer:
    if request.method == "HEAD":
        return Answer(headers={"x-amz-bucket-region": "us-east-1"})
    if request.method != "GET" or request.query.get("list-type") != "2":
        status = HTTPStatus.METHOD_NOT_ALLOWED
        raise RefusedError(status, f"no {request.method} {request.target}")
    query = request.query
    page = list_names(
        bucket.names,
        Range(prefix=query.get("prefix", ""), delimiter=query.get("delimiter", "")),
        after=query.get("continuation-token") or query.get("start-after", ""),
        most=min(request.number("max-keys") or MOST_LISTED, MOST_LISTED),
    )
    return _document("ListBucketResult", _listed(bucket, page))


def _listed(bucket: Bucket, page: Page) -> str:
    lines = [
        f"<Contents>{_text('Key', name)}"
        f"<Size>{len(bucket[name].content.data)}</Size>"
        f"<LastModified>{MODIFIED}</LastModified>"
        f"{_text('ETag', etag(bucket[name]))}</Contents>"
        for name in page.names
    ]
    lines += [
        f"<CommonPrefixes>{_text('Prefix', group)}</CommonPrefixes>"
        for group in page.groups
    ]
    more = page.more_after
    lines.append(f"<IsTruncated>{'false' if more is None else 'true'}</IsTruncated>")
    if more is not None:
        lines.append(_text("NextContinuationToken", more))
    return "".join(lines)


# --- Objects --------------------------------------------------------------------------


def etag(found: StoredObject) -> str:
    """Returns the ETag of an object's content."""
    return f'"{hashlib.md5(found.content.data).hexdigest()}"'


def _read(request: Request, bucket: Bucket, name: str) -> Answer:
    found = bucket.read(name, NO_CONDITIONS)
    _check(request.headers, found)
    headers = {
        "etag": etag(found),
        "last-modified": formatdate(found.updated, usegmt=True),
        "accept-ranges": "bytes",
        "content-type": "application/octet-stream",
    }
    size = len(found.content.data)
    part = part_of(request.headers.get("range", ""), size)
    if part is None:
        return Answer(headers=headers, body=found.content.data)
    if not part:
        status = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
        raise RefusedError(status, "The requested range is not satisfiable")
    shown = f"bytes {part.start}-{part.stop - 1}/{size}"
    return Answer(
        status=HTTPStatus.PARTIAL_CONTENT,
        headers={**headers, "content-range": shown},
        body=memoryview(found.content.data)[part.start : part.stop],
    )


def _write(request: Request, bucket: Bucket, name: str) -> Answer:
    _check(request.headers, bucket.get(name))
    content = Content.of(request.body, {})
    made = bucket.insert(name, content, {}, NO_CONDITIONS)
    return Answer(headers={"etag": etag(made)}, stored_bytes=len(request.body))


def _delete(request: Request, bucket: Bucket, name: str) -> Answer:
    found = bucket.get(name)
    _check(request.headers, found)
    if found is not None:
        bucket.delete(name, NO_CONDITIONS)
    return Answer(status=HTTPStatus.NO_CONTENT)


def _unconditional(headers: Mapping[str, str]) -> dict[str, str]:
    conditions = ("if-match", "if-none-match")
    return {name: text for name, text in headers.items() if name not in conditions}


def _check(headers: Mapping[str, str], found: StoredObject | None) -> None:
    """Checks the conditions of a request.

    Raises:
        RefusedError: A condition does not hold.
    """
    wanted, unwanted = headers.get("if-match"), headers.get("if-none-match")
    refuse = partial(RefusedError, HTTPStatus.PRECONDITION_FAILED)
    if wanted is not None:
        if found is None:
            raise RefusedError(HTTPStatus.NOT_FOUND, "The specified key does not exist")
        if wanted not in ("*", etag(found)):
            raise refuse("At least one of the pre-conditions did not hold")
    if unwanted is not None and found is not None and unwanted in ("*", etag(found)):
        raise refuse("At least one of the pre-conditions did not hold")


# --- XML ------------------------------------------------------------------------------


def _document(kind: str, inside: str, *, status: int = HTTPStatus.OK) -> Answer:
    text = f'<?xml version="1.0" encoding="UTF-8"?><{kind}>{inside}</{kind}>'
    return Answer(
        status=status, headers={"content-type": "application/xml"}, body=text.encode()
    )


def _text(kind: str, text: str) -> str:
    return f"<{kind}>{escape(text)}</{kind}>"
