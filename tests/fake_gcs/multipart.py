"""Multipart bodies."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from tests.fake_gcs.messages import Body
from tests.fake_gcs.refusals import RefusedError


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
