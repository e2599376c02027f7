"""Bearer tokens, and the rights of those that are limited to prefixes.

A request that this module does not know needs a right that no limited token has. Tokens
are exchanged for limited ones by a Credential Access Boundary, as `storesvc.lending`
makes them; no other expression is parsed.
"""

import json
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

from tests.fake_gcs.messages import Answer, Request, json_answer
from tests.fake_gcs.objects import Buckets, RefusedError

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


def check_grants(request: Request, grants: tuple[Grant, ...], buckets: Buckets) -> None:
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


LENT_SECONDS = 3600.0


class Tokens:
    """Tokens that were issued, and the times at which they expire."""

    def __init__(self, *given: str) -> None:
        """Begins with tokens that do not expire."""
        self._until = dict.fromkeys(given, float("inf"))
        self._limits: dict[str, list[tuple[Grant, ...]]] = {}
        """Grants of limited tokens, of which each must permit a request."""
        self._is_frozen = False
        self.lent_seconds = LENT_SECONDS
        """Life of lent tokens."""
        self.lent: list[str] = []
        """Tokens that were lent, in this order."""
        self.uses: list[tuple[str, str]] = []
        """Token and line of each request that a valid token made."""

    def hand_out(self, seconds: float) -> str:
        """Returns a new token that expires after some seconds."""
        made = uuid.uuid4().hex
        self._until[made] = time.monotonic() + seconds
        return made

    def limit(self, token: str, *grants: Grant) -> None:
        """Limits a token."""
        self._limits[token] = [*self._limits.get(token, []), grants]

    def lend(self, parent: str, grants: tuple[Grant, ...]) -> tuple[str, float]:
        """Returns a token with grants that its parent has too, and its life."""
        seconds = min(self.lent_seconds, self._until[parent] - time.monotonic())
        made = self.hand_out(seconds)
        self._limits[made] = [*self._limits.get(parent, []), grants]
        if self._is_frozen:
            self._limits[made].append(())
        self.lent.append(made)
        return made, seconds

    def freeze(self) -> None:
        """Takes the rights on objects from what lends, so that tokens to come have
        none."""
        self._is_frozen = True

    def end(self, token: str) -> None:
        """Ends a token."""
        self._until[token] = 0.0

    def limits(self, token: str) -> list[tuple[Grant, ...]]:
        """Returns the limits of a token, none if it may do everything."""
        return self._limits.get(token, [])

    def revoke(self) -> None:
        """Revokes all tokens."""
        self._until.clear()

    def counts(self, token: str) -> bool:
        """Returns whether a token is issued and not expired."""
        return self._until.get(token, 0.0) > time.monotonic()


TOKEN_PATH: Final = "/v1/token"
MOST_RULES: Final = 10

_GRANT: Final = "urn:ietf:params:oauth:grant-type:token-exchange"
_ACCESS_TOKEN: Final = "urn:ietf:params:oauth:token-type:access_token"
_BUCKET: Final = re.compile("//storage.googleapis.com/projects/_/buckets/([^/]+)")
_CONDITION: Final = re.compile(
    r"resource\.name\.startsWith\('projects/_/buckets/([^/']+)/objects/([^'\\]+)'\)"
)


def exchange_token(request: Request, tokens: Tokens) -> Answer:
    """Returns a limited token, or an error of OAuth."""
    form = dict(parse_qsl(bytes(request.body).decode()))
    given = form.get("subject_token", "")
    kinds = [form.get(f"{one}_token_type") for one in ("subject", "requested")]
    if form.get("grant_type") != _GRANT or kinds != [_ACCESS_TOKEN, _ACCESS_TOKEN]:
        return _refuse_grant(
            "invalid_request", "expected the exchange of an access token"
        )
    if not tokens.counts(given):
        return _refuse_grant("invalid_grant", "the subject token is invalid or expired")
    try:
        grants = grants_of(json.loads(unquote(form.get("options", ""))))
    except (ValueError, KeyError, TypeError) as e:
        return _refuse_grant("invalid_request", f"options: {e}")
    lent, seconds = tokens.lend(given, grants)
    document: dict[str, Any] = {
        "access_token": lent,
        "issued_token_type": _ACCESS_TOKEN,
        "token_type": "Bearer",
        "expires_in": int(seconds),
    }
    return json_answer(document)


def grants_of(options: Mapping[str, Any]) -> tuple[Grant, ...]:
    """Returns the grants of a boundary.

    Raises:
        ValueError: It is not one that this module knows.
        KeyError: A field is missing.
    """
    rules = options["accessBoundary"]["accessBoundaryRules"]
    if not 1 <= len(rules) <= MOST_RULES:
        raise ValueError(f"expected 1 to {MOST_RULES} rules, got {len(rules)}")
    return tuple(_grant(rule) for rule in rules)


def _grant(rule: Mapping[str, Any]) -> Grant:
    bucket = _BUCKET.fullmatch(rule["availableResource"])
    expression = rule["availabilityCondition"]["expression"]
    condition = _CONDITION.fullmatch(expression)
    if bucket is None or condition is None or condition[1] != bucket[1]:
        raise ValueError(f"unknown resource or condition: {expression}")
    verbs = frozenset[str]().union(*(OF_ROLE[r] for r in rule["availablePermissions"]))
    return Grant(bucket=bucket[1], prefix=condition[2], verbs=verbs)


def _refuse_grant(error: str, says: str) -> Answer:
    document = {"error": error, "error_description": says}
    return json_answer(document, status=HTTPStatus.BAD_REQUEST)
