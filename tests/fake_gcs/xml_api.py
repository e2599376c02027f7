"""The part of the XML API that obstore uses: whole objects, ranges, creation."""

from http import HTTPStatus
from xml.sax.saxutils import escape

from tests.fake_gcs.contents import Content
from tests.fake_gcs.messages import Answer, Request
from tests.fake_gcs.objects import NO_CONDITIONS, Buckets, Conditions
from tests.fake_gcs.refusals import RefusedError
from tests.fake_gcs.resources import media_answer

_ONLY_IF = "x-goog-if-generation-match"


def answer(request: Request, buckets: Buckets, bucket: str, name: str) -> Answer:
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


def refused(e: RefusedError) -> Answer:
    """Returns the error response of the XML API."""
    text = f"<Error><Message>{escape(str(e))}</Message></Error>"
    headers = {"content-type": "application/xml"}
    return Answer(status=e.status, headers=headers, body=text.encode())
