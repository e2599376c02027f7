"""The JSON API: routes requests to operations on the buckets; batches of requests; and
the part of the XML API that obstore uses: whole objects, ranges, creation.

Requests are executed without waiting, so each is atomic.
"""

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import unquote
from xml.sax.saxutils import escape

from tests.fake_gcs.messages import (
    Answer,
    Part,
    Request,
    boundary,
    formatted_head,
    json_answer,
    parse_headers,
    parse_parts,
    refusal,
)
from tests.fake_gcs.objects import (
    NO_CONDITIONS,
    Bucket,
    Buckets,
    Conditions,
    Content,
    Range,
    RefusedError,
    StoredObject,
    error_document,
    list_names,
)
from tests.fake_gcs.resources import (
    PROPERTIES,
    bucket_document,
    conditions_of,
    media_answer,
    object_document,
    properties_of,
)
from tests.fake_gcs.tokens import (
    TOKEN_PATH,
    Tokens,
    check_grants,
    exchange_token,
    xml_object,
)
from tests.fake_gcs.uploads import Uploads

MOST_LISTED: Final = 1000
MOST_COMPOSED: Final = 32

_BUCKET: Final = "/storage/v1/b/([^/]+)"
_OBJECT: Final = f"(?:/download)?{_BUCKET}/o/([^/]+)"
_UPLOAD: Final = f"/upload{_BUCKET}/o"
_TARGET: Final = "b/([^/]+)/o/([^/]+)"


class JsonApi:
    """Executes requests of the JSON API."""

    def __init__(
        self,
        buckets: Buckets,
        *,
        tokens: Tokens | None = None,
        ignored: Sequence[str] = (),
        left_out: Sequence[str] = (),
    ) -> None:
        """Makes the API of some buckets.

        Args:
            buckets: The buckets.
            tokens: Valid bearer tokens, one of which every request needs; None: no
                authentication.
            ignored: Patterns of the parameters to ignore; see ``Request.without``.
            left_out: Names of headers that responses of the XML API lack.
        """
        self._buckets = buckets
        self._tokens = tokens
        self._ignored = ignored
        self._left_out = left_out
        uploads = Uploads(buckets)
        routes: list[tuple[str, str, Callable[..., Answer]]] = [
            ("POST", _UPLOAD, uploads.begin),
            ("PUT", _UPLOAD, uploads.resume),
            ("DELETE", _UPLOAD, uploads.cancel),
            ("GET", _OBJECT, self._read),
            ("DELETE", _OBJECT, self._delete),
            ("PATCH", _OBJECT, self._update),
            ("POST", f"{_OBJECT}/compose", self._compose),
            ("POST", f"{_OBJECT}/(rewriteTo|copyTo)/{_TARGET}", self._copy),
            ("GET", f"{_BUCKET}/o", self._list),
            ("GET", _BUCKET, self._show_bucket),
            ("GET", "/storage/v1/b", self._list_buckets),
            ("POST", "/storage/v1/b", self._create_bucket),
            ("POST", "/batch/storage/v1", self._batch),
        ]
        self._routes = [(m, re.compile(path), call) for m, path, call in routes]

    def answer(self, request: Request) -> Answer:
        """Executes a request, and returns the response or an error response."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._tokens is None:
            return self._answer_known(request)
        if request.method == "POST" and request.path == TOKEN_PATH:
            return exchange_token(request, self._tokens)
        if not self._tokens.counts(given):
            return refusal(RefusedError(HTTPStatus.UNAUTHORIZED, "Invalid Credentials"))
        self._tokens.uses.append((given, request.line))
        try:
            for limit in self._tokens.limits(given):
                check_grants(request, limit, self._buckets)
        except RefusedError as e:
            return refusal(e)
        return self._answer_known(request)

    def refused(self, status: int, message: str) -> Answer:
        """Returns the error response to a request that is not executed."""
        return json_answer(error_document(status, message), status=status)

    def _answer_known(self, request: Request) -> Answer:
        if found := xml_object(request):
            try:
                answer = answer_xml(request, self._buckets, *found)
                named = answer.headers.items()
                kept = {k: v for k, v in named if k.lower() not in self._left_out}
                return replace(answer, headers=kept)
            except RefusedError as e:
                return refuse_xml(e)
        try:
            return self._route(request.without(self._ignored))()
        except RefusedError as e:
            return refusal(e)

    def _route(self, request: Request) -> Callable[[], Answer]:
        status = HTTPStatus.NOT_FOUND
        for method, path, call in self._routes:
            match = path.fullmatch(request.path)
            if match is None:
                continue
            if method == request.method:
                return partial(call, request, *map(unquote, match.groups()))
            status = HTTPStatus.METHOD_NOT_ALLOWED
        raise RefusedError(status, f"no {request.method} {request.path}")

    def _batch(self, request: Request) -> Answer:
        return answer_batch(request, self._answer_known)

    # --- Buckets ----------------------------------------------------------------------

    def _list_buckets(self, request: Request) -> Answer:
        del request
        items = [bucket_document(bucket) for bucket in self._buckets.all]
        return json_answer({"kind": "storage#buckets", "items": items})

    def _create_bucket(self, request: Request) -> Answer:
        name = request.document().get("name")
        if not isinstance(name, str) or not name:
            raise RefusedError(HTTPStatus.BAD_REQUEST, "Required parameter: name")
        return json_answer(bucket_document(self._buckets.create(name)))

    def _show_bucket(self, request: Request, bucket: str) -> Answer:
        del request
        return json_answer(bucket_document(self._buckets.get(bucket)))

    def _list(self, request: Request, bucket: str) -> Answer:
        found, query = self._buckets.get(bucket), request.query
        page = list_names(
            found.names,
            Range(
                prefix=query.get("prefix", ""),
                delimiter=query.get("delimiter", ""),
                first=query.get("startOffset", ""),
                before=query.get("endOffset", ""),
            ),
            after=_parse_token(query.get("pageToken", "")),
            most=_page_size(request),
        )
        document: dict[str, object] = {"kind": "storage#objects"}
        # empty fields are omitted, as in the real storage
        if page.names:
            shown = _shown_fields(query.get("fields", ""))
            documents = (
                object_document(request.origin, bucket, name, found[name])
                for name in page.names
            )
            document["items"] = [
                {key: each[key] for key in shown or each} for each in documents
            ]
        if page.groups:
            document["prefixes"] = page.groups
        if page.more_after is not None:
            document["nextPageToken"] = _page_token(page.more_after)
        return json_answer(document)

    # --- Objects ----------------------------------------------------------------------

    def _read(self, request: Request, bucket: str, name: str) -> Answer:
        found = self._buckets.get(bucket).read(
            name, conditions_of(request), generation=request.number("generation")
        )
        if request.query.get("alt") == "media":
            return media_answer(found, request.headers.get("range", ""))
        return json_answer(object_document(request.origin, bucket, name, found))

    def _delete(self, request: Request, bucket: str, name: str) -> Answer:
        self._buckets.get(bucket).delete(
            name, conditions_of(request), generation=request.number("generation")
        )
        return Answer(status=HTTPStatus.NO_CONTENT)

    def _update(self, request: Request, bucket: str, name: str) -> Answer:
        given = request.document()
        updated = self._buckets.get(bucket).update(
            name,
            lambda found: _patched(found.properties, given),
            conditions_of(request),
            generation=request.number("generation"),
        )
        return json_answer(object_document(request.origin, bucket, name, updated))

    def _compose(self, request: Request, bucket: str, name: str) -> Answer:
        asked = request.document()
        sources = asked.get("sourceObjects", [])
        if not 1 <= len(sources) <= MOST_COMPOSED:
            raise RefusedError(
                HTTPStatus.BAD_REQUEST,
                f"sourceObjects: expected 1 to {MOST_COMPOSED}, got {len(sources)}",
            )
        where = self._buckets.get(bucket)
        found = [_source(where, source) for source in sources]
        first_type = found[0].properties["contentType"]
        made = where.insert(
            name,
            Content.composed([source.content for source in found]),
            properties_of(asked.get("destination", {}), first_type),
            conditions_of(request),
            component_count=sum(source.component_count or 1 for source in found),
        )
        return json_answer(object_document(request.origin, bucket, name, made))

    def _copy(
        self, request: Request, bucket: str, name: str, how: str, to: str, new_name: str
    ) -> Answer:
        source = self._buckets.get(bucket).read(
            name,
            conditions_of(request, "ifSource"),
            generation=request.number("sourceGeneration"),
        )
        given = request.document()
        content_type = source.properties["contentType"]
        made = self._buckets.get(to).insert(
            new_name,
            source.content,
            properties_of(given, content_type) if given else source.properties,
            conditions_of(request),
            component_count=source.component_count,
        )
        document = object_document(request.origin, to, new_name, made)
        if how == "rewriteTo":
            document = {
                "kind": "storage#rewriteResponse",
                "totalBytesRewritten": document["size"],
                "objectSize": document["size"],
                "done": True,
                "resource": document,
            }
        copied_bytes = len(source.content.data)
        return replace(json_answer(document), copied_bytes=copied_bytes)


def _patched(properties: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns properties after a patch: null removes one, and metadata are merged."""
    patched = {**properties, **{k: given[k] for k in PROPERTIES if k in given}}
    if given.get("metadata"):
        merged = {**properties.get("metadata", {}), **given["metadata"]}
        patched["metadata"] = {k: v for k, v in merged.items() if v is not None}
    return properties_of({k: v for k, v in patched.items() if v is not None}, "")


def _source(bucket: Bucket, asked: Mapping[str, Any]) -> StoredObject:
    """Returns one of the objects to compose."""
    wanted = asked.get("objectPreconditions", {}).get("ifGenerationMatch")
    generation = asked.get("generation")
    return bucket.read(
        asked["name"],
        Conditions(generation=None if wanted is None else int(wanted)),
        generation=None if generation is None else int(generation),
    )


def _shown_fields(fields: str) -> list[str]:
    """Returns the fields of the items that a list requests; empty: all."""
    found = re.search(r"\bitems\(([\w,]+)\)", fields)
    return found[1].split(",") if found else []


def _page_size(request: Request) -> int:
    asked = request.number("maxResults")
    if asked is None:
        return MOST_LISTED
    if asked < 1:
        raise RefusedError(
            HTTPStatus.BAD_REQUEST, f"maxResults: expected at least 1, got {asked}"
        )
    return min(asked, MOST_LISTED)


def _page_token(last: str) -> str:
    return base64.urlsafe_b64encode(last.encode()).decode()


def _parse_token(token: str) -> str:
    try:
        return base64.urlsafe_b64decode(token).decode()
    except (binascii.Error, UnicodeDecodeError) as e:
        raise RefusedError(
            HTTPStatus.BAD_REQUEST, f"pageToken: expected ours, got {token!r}"
        ) from e


MOST_REQUESTS: Final = 100
"""Most requests of a batch, as in the real storage."""


def answer_batch(request: Request, answer: Callable[[Request], Answer]) -> Answer:
    """Executes a batch.

    Args:
        request: The batch.
        answer: Executes one of its requests.

    Raises:
        RefusedError: It is not a batch, or too large.
    """
    content_type = request.headers.get("content-type", "")
    parts = parse_parts(request.body, content_type)
    if len(parts) > MOST_REQUESTS:
        raise RefusedError(
            HTTPStatus.BAD_REQUEST,
            f"a batch: expected at most {MOST_REQUESTS} requests, got {len(parts)}",
        )
    line = b"--" + boundary(content_type)
    answered = [
        _format_answer(part, answer(_parse_request(part, request))) for part in parts
    ]
    body = b"".join(line + b"\r\n" + text + b"\r\n" for text in answered)
    return Answer(
        headers={"content-type": f"multipart/mixed; boundary={line[2:].decode()}"},
        body=body + line + b"--\r\n",
    )


def _parse_request(part: Part, batch: Request) -> Request:
    text = bytes(part.data).replace(b"\r\n", b"\n").lstrip()
    head, _, body = text.partition(b"\n\n")
    first, _, headers = head.decode().partition("\n")
    method, target, *_ = first.split()
    if target.startswith("http"):
        target = "/" + target.split("/", 3)[3]
    own = parse_headers(headers) | {"host": batch.headers.get("host", "localhost")}
    return Request.of(method, target, own, body)


def _format_answer(part: Part, answer: Answer) -> bytes:
    lines = ["Content-Type: application/http"]
    if "content-id" in part.headers:
        # <x> is answered by <response-x>
        named = part.headers["content-id"].strip("<>")
        lines.append(f"Content-ID: <response-{named}>")
    headers = {**answer.headers, "content-length": str(len(answer.body))}
    head = "\r\n".join(lines) + "\r\n\r\n"
    return head.encode() + formatted_head(answer.status, headers) + bytes(answer.body)


_ONLY_IF = "x-goog-if-generation-match"


def answer_xml(request: Request, buckets: Buckets, bucket: str, name: str) -> Answer:
    """Executes a request on an object.

    Raises:
        RefusedError: The request fails, or the method is not known.
    """
    where = buckets.get(bucket)
    match request.method:
        case "GET" | "HEAD":
            found = where.read(name, NO_CONDITIONS)
            return media_answer(found, request.headers.get("range", ""))
        case "PUT":
            wanted = request.headers.get(_ONLY_IF)
            conditions = Conditions(generation=None if wanted is None else int(wanted))
            kind = {"contentType": "application/octet-stream"}
            made = where.insert(name, Content.of(request.body, {}), kind, conditions)
            headers = {
                "etag": f'"{made.generation:x}"',
                "x-goog-generation": str(made.generation),
            }
            return Answer(headers=headers, stored_bytes=len(request.body))
        case "DELETE":
            where.delete(name, NO_CONDITIONS)
            return Answer(status=HTTPStatus.NO_CONTENT)
    status = HTTPStatus.METHOD_NOT_ALLOWED
    raise RefusedError(status, f"no {request.method} {request.path}")


def refuse_xml(e: RefusedError) -> Answer:
    """Returns the error response of the XML API."""
    text = f"<Error><Message>{escape(str(e))}</Message></Error>"
    headers = {"content-type": "application/xml"}
    return Answer(status=e.status, headers=headers, body=text.encode())
