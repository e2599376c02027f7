"""Requests and responses as values, and multipart bodies."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl, unquote, unquote_plus, urlsplit

from tests.fake_gcs.objects import Data, RefusedError

Body: TypeAlias = bytes | bytearray

JSON: Final = "application/json; charset=UTF-8"

CLIENT_CLOSED_REQUEST: Final = 499
_PHRASES: Final = {
    # used by Google Cloud Storage; the RFCs define it differently or not at all
    HTTPStatus.PERMANENT_REDIRECT: "Resume Incomplete",
    CLIENT_CLOSED_REQUEST: "Client Closed Request",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request, received in full."""

    method: str
    target: str
    path: str
    """Path of the target, percent-encoded."""
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """Headers by names in lower case."""
    body: Body

    @classmethod
    def of(
        cls, method: str, target: str, headers: Mapping[str, str], body: Body
    ) -> "Request":
        """Returns a request to a target: a path with an optional query."""
        parts = urlsplit(target)
        return cls(
            method=method,
            target=target,
            path=parts.path or "/",
            query=dict(parse_qsl(parts.query, keep_blank_values=True)),
            headers=headers,
            body=body,
        )

    def without(self, patterns: Sequence[str]) -> "Request":
        """Returns the request without the parameters in whose "METHOD name=value" a
        pattern is found."""
        kept = {
            name: value
            for name, value in self.query.items()
            if not any(re.search(p, f"{self.method} {name}={value}") for p in patterns)
        }
        return replace(self, query=kept)

    @property
    def line(self) -> str:
        """Method and target, as people write them."""
        path, mark, query = self.target.partition("?")
        return f"{self.method} {unquote(path)}{mark}{unquote_plus(query)}"

    @property
    def origin(self) -> str:
        """URL by which the client knows the server."""
        return f"http://{self.headers.get('host', 'localhost')}"

    def number(self, parameter: str) -> int | None:
        """Returns a parameter of the query, or None if it is absent.

        Raises:
            RefusedError: It is not a number.
        """
        text = self.query.get(parameter)
        if text is None:
            return None
        try:
            return int(text)
        except ValueError as e:
            raise RefusedError(
                HTTPStatus.BAD_REQUEST, f"{parameter}: expected a number, got {text!r}"
            ) from e

    def document(self) -> dict[str, Any]:
        """Returns the body, parsed; an empty one as an empty document.

        Raises:
            RefusedError: The body is not a JSON object.
        """
        return parse_document(self.body)


def parse_document(text: Body) -> dict[str, Any]:
    """Returns a JSON object; an empty text is an empty object.

    Raises:
        RefusedError: The text is not a JSON object.
    """
    try:
        parsed = json.loads(text or b"{}")
    except ValueError as e:
        raise RefusedError(HTTPStatus.BAD_REQUEST, f"Parse error: {e}") from e
    if not isinstance(parsed, dict):
        raise RefusedError(
            HTTPStatus.BAD_REQUEST,
            f"Parse error: expected an object, got {type(parsed).__name__}",
        )
    return parsed


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A response that is not sent yet."""

    status: int = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Data = b""
    stored_bytes: int = 0
    """Size of the object that the request uploaded."""
    copied_bytes: int = 0
    """Size of the object that the request made of another one."""


def json_answer(
    document: Mapping[str, object],
    *,
    status: int = HTTPStatus.OK,
    stored_bytes: int = 0,
) -> Answer:
    """Returns a response with a JSON document."""
    return Answer(
        status=status,
        headers={"content-type": JSON},
        body=json.dumps(document).encode(),
        stored_bytes=stored_bytes,
    )


def refusal(error: RefusedError) -> Answer:
    """Returns the error response to a request that is not executed."""
    if error.status == HTTPStatus.NOT_MODIFIED:
        return Answer(status=error.status)
    return json_answer(error.document, status=error.status)


def formatted_head(status: int, headers: Mapping[str, str]) -> bytes:
    """Returns the part of a response before its body."""
    phrase = _PHRASES.get(status) or HTTPStatus(status).phrase
    lines = [f"HTTP/1.1 {int(status)} {phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a multipart body."""

    headers: Mapping[str, str]
    """Headers of the part, by names in lower case."""
    data: memoryview
    """Content of the part, a view of the body."""


def boundary(content_type: str) -> bytes:
    """Returns the boundary between the parts.

    Raises:
        RefusedError: The header has no boundary.
    """
    match = re.search(r'boundary="?([^";]+)', content_type)
    if match is None:
        raise RefusedError(
            HTTPStatus.BAD_REQUEST, f"expected a boundary, got {content_type!r}"
        )
    return match[1].encode()


def parse_parts(body: Body, content_type: str) -> list[Part]:
    """Returns the parts of a body, as views of it.

    Raises:
        RefusedError: The body is not a multipart body with that boundary.
    """
    line = b"--" + boundary(content_type)
    starts = [m.end() for m in re.finditer(re.escape(line) + rb"(?=\r?\n|--)", body)]
    if not starts:
        raise RefusedError(HTTPStatus.BAD_REQUEST, "expected parts, got none")
    ends = [start - len(line) for start in starts[1:]]
    # the last boundary closes the body
    return [
        _parse_part(body, start, end) for start, end in zip(starts, ends, strict=False)
    ]


def parse_headers(lines: str) -> dict[str, str]:
    """Returns headers by their names in lower case."""
    pairs = (line.partition(":") for line in lines.splitlines() if line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _parse_part(body: Body, start: int, end: int) -> Part:
    # some clients end their lines with a bare line feed
    newline = b"\r\n" if body[start : start + 2] == b"\r\n" else b"\n"
    data = body.find(2 * newline, start, end)
    if data < 0:
        raise RefusedError(HTTPStatus.BAD_REQUEST, "a part has no end of its headers")
    headers = parse_headers(body[start:data].decode("latin1"))
    part = memoryview(body)[data + 2 * len(newline) : end - len(newline)]
    return Part(headers=headers, data=part)
