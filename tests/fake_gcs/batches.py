"""Batch requests: several requests in the body of one."""

from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from tests.fake_gcs.messages import Answer, Request, formatted_head
from tests.fake_gcs.multipart import Part, boundary, parse_headers, parse_parts
from tests.fake_gcs.refusals import RefusedError

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
    answered = [_format(part, answer(_parse(part, request))) for part in parts]
    body = b"".join(line + b"\r\n" + text + b"\r\n" for text in answered)
    return Answer(
        headers={"content-type": f"multipart/mixed; boundary={line[2:].decode()}"},
        body=body + line + b"--\r\n",
    )


def _parse(part: Part, batch: Request) -> Request:
    text = bytes(part.data).replace(b"\r\n", b"\n").lstrip()
    head, _, body = text.partition(b"\n\n")
    first, _, headers = head.decode().partition("\n")
    method, target, *_ = first.split()
    if target.startswith("http"):
        target = "/" + target.split("/", 3)[3]
    own = parse_headers(headers) | {"host": batch.headers.get("host", "localhost")}
    return Request.of(method, target, own, body)


def _format(part: Part, answer: Answer) -> bytes:
    lines = ["Content-Type: application/http"]
    if "content-id" in part.headers:
        # <x> is answered by <response-x>
        named = part.headers["content-id"].strip("<>")
        lines.append(f"Content-ID: <response-{named}>")
    headers = {**answer.headers, "content-length": str(len(answer.body))}
    head = "\r\n".join(lines) + "\r\n\r\n"
    return head.encode() + formatted_head(answer.status, headers) + bytes(answer.body)
