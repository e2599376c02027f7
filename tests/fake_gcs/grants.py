"""Rights of tokens that are limited to prefixes, and what each request needs of them.

A request that this module does not know needs a right that no limited token has.
"""

import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final
from urllib.parse import unquote

from tests.fake_gcs.messages import Request
from tests.fake_gcs.objects import Buckets
from tests.fake_gcs.refusals import RefusedError

GET: Final = "storage.objects.get"
CREATE: Final = "storage.objects.create"
DELETE: Final = "storage.objects.delete"
LIST: Final = "storage.objects.list"

OF_ROLE: Final = {
    "inRole:roles/storage.objectViewer": frozenset({GET, LIST}),
    "inRole:roles/storage.objectCreator": frozenset({CREATE}),
}

_JSON_OBJECT: Final = re.compile("(?:/download)?/storage/v1/b/([^/]+)/o/([^/]+)")
_JSON_UPLOAD: Final = re.compile("/upload/storage/v1/b/([^/]+)/o")
_OWN: Final = ("/storage/", "/upload/", "/download/", "/batch/", "/v1/")
_XML_OBJECT: Final = re.compile("/([^/]+)/(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Verbs that a token has on the objects of a bucket below a prefix."""

    bucket: str
    prefix: str
    verbs: frozenset[str]

    def permits(self, verb: str, bucket: str, name: str) -> bool:
        """Returns whether the grant permits a verb on an object.

        The resource of a list is the bucket, whose name no prefix of objects begins.
        """
        is_inside = bucket == self.bucket and name.startswith(self.prefix)
        return verb in self.verbs and verb != LIST and is_inside


def check(request: Request, grants: tuple[Grant, ...], buckets: Buckets) -> None:
    """Rejects a request that a limited token does not permit.

    Raises:
        RefusedError: The token does not permit it (403).
    """
    verb, bucket, name = _asked(request)
    verbs = [verb]
    if verb == CREATE and buckets.get(bucket).get(name) is not None:
        verbs.append(DELETE)  # the real storage wants it of who overwrites
    for one in verbs:
        if not any(grant.permits(one, bucket, name) for grant in grants):
            raise RefusedError(
                HTTPStatus.FORBIDDEN,
                f"The caller does not have {one} access to the Google Cloud Storage "
                "object.",
            )


def xml_object(request: Request) -> tuple[str, str] | None:
    """Returns bucket and name of a request of the XML API; None for others."""
    match = _XML_OBJECT.fullmatch(request.path)
    if match is None or request.path.startswith(_OWN):
        return None
    return unquote(match[1]), unquote(match[2])


def _asked(request: Request) -> tuple[str, str, str]:
    """Returns the verb, the bucket and the object of a request."""
    if found := xml_object(request):
        verb = {"GET": GET, "HEAD": GET, "PUT": CREATE, "DELETE": DELETE}
        return verb.get(request.method, "?"), *found
    if match := _JSON_OBJECT.fullmatch(request.path):
        verb = {"GET": GET, "DELETE": DELETE}
        return verb.get(request.method, "?"), unquote(match[1]), unquote(match[2])
    match = _JSON_UPLOAD.fullmatch(request.path)
    if match and request.query.get("uploadType") == "media":
        return CREATE, unquote(match[1]), request.query.get("name", "")
    return "?", "", ""
