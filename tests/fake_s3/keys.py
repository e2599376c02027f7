"""Keys of S3, and the session policies that limit temporary ones.

It evaluates the policies that `storesvc.lending` makes: statements that allow an action
on resources with ``*`` at their end, on the condition that a header is present.
Signatures are not checked.
"""

import json
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qsl, unquote
from xml.sax.saxutils import escape

from tests.fake_gcs.messages import Answer, Request
from tests.fake_gcs.objects import RefusedError

LENT_SECONDS: Final = 3600.0
MOST_CHARACTERS: Final = 2048
"""Maximum length of a session policy."""

_ACCESS_KEY: Final = re.compile("Credential=([^/]+)/")
_ACTIONS: Final = {
    "GET": "s3:GetObject",
    "HEAD": "s3:GetObject",
    "PUT": "s3:PutObject",
    "DELETE": "s3:DeleteObject",
}


class ExpiredTokenError(Exception):
    """The session has expired, which S3 reports with the status 400."""


@dataclass(slots=True, kw_only=True)
class Session:
    """Temporary keys."""

    secret: str
    token: str
    until: float
    policy: Mapping[str, Any]
    name: str


class Keys:
    """Keys that are known, and sessions of an assumed role."""

    def __init__(self, *known: str, role_arn: str) -> None:
        """Begins with access keys that may do everything, and assume a role."""
        self._known = set(known)
        self._role_arn = role_arn
        self._is_frozen = False
        self.sessions: dict[str, Session] = {}
        """Sessions by access key, in the order in which they began."""
        self.lent_seconds = LENT_SECONDS
        """Life of sessions, whatever is asked for."""
        self.uses: list[tuple[str, str]] = []
        """Access key and line of each request."""

    def freeze(self) -> None:
        """Takes the rights on objects from the role, so that sessions have none."""
        self._is_frozen = True

    def check(self, request: Request) -> None:
        """Rejects a request that its keys do not permit.

        Raises:
            RefusedError: The keys are unknown, or do not permit it (403).
            ExpiredTokenError: The session has expired.
        """
        key = _access_key(request)
        self.uses.append((key, request.line))
        if key in self._known:
            return
        session = self.sessions.get(key)
        if session is None:
            raise _denied("The AWS Access Key Id does not exist in our records.")
        if request.headers.get("x-amz-security-token") != session.token:
            raise _denied("The security token is not that of the key.")
        if time.monotonic() >= session.until:
            raise ExpiredTokenError
        action = _ACTIONS.get(request.method, "")
        bucket, _, name = request.path[1:].partition("/")
        resource = f"arn:aws:s3:::{unquote(bucket)}/{unquote(name)}"
        # Everything with a query is another action: lists, uploads in parts, ACLs.
        is_plain = bool(name) and not set(request.query) - {"x-id"}
        is_copy = "x-amz-copy-source" in request.headers
        allowed = any(
            _allows(statement, action, resource, request)
            for statement in session.policy["Statement"]
        )
        if self._is_frozen or is_copy or not is_plain or not allowed:
            raise _denied(f"not authorized to perform: {action}")

    def assume(self, request: Request) -> Answer:
        """Executes AssumeRole."""
        form = dict(parse_qsl(bytes(request.body).decode()))
        if form.get("Action") != "AssumeRole" or form["RoleArn"] != self._role_arn:
            raise _denied("not authorized to perform: sts:AssumeRole")
        if _access_key(request) not in self._known:
            raise _denied("The security token included in the request is invalid.")
        if len(form["Policy"]) > MOST_CHARACTERS:
            raise RefusedError(HTTPStatus.BAD_REQUEST, "PackedPolicyTooLarge")
        session = Session(
            secret=uuid.uuid4().hex,
            token=uuid.uuid4().hex,
            until=time.monotonic() + self.lent_seconds,
            policy=json.loads(form["Policy"]),
            name=form["RoleSessionName"],
        )
        key = f"ASIA{uuid.uuid4().hex[:16].upper()}"
        self.sessions[key] = session
        return _assumed(key, session, self.lent_seconds)


def _allows(
    statement: Mapping[str, Any], action: str, resource: str, request: Request
) -> bool:
    prefix, star, after = statement["Resource"].partition("*")
    assert (star, after) == ("*", ""), statement
    conditions = statement.get("Condition", {})
    assert set(conditions) <= {"Null"}, statement
    for key, is_null in conditions.get("Null", {}).items():
        header = key.removeprefix("s3:")
        if (header in request.headers) is (is_null == "true"):
            return False
    is_inside = resource.startswith(prefix)
    return bool(statement["Effect"] == "Allow" and statement["Action"] == action) and (
        is_inside
    )


def _access_key(request: Request) -> str:
    if signed := request.query.get("X-Amz-Credential"):
        return signed.partition("/")[0]
    found = _ACCESS_KEY.search(request.headers.get("authorization", ""))
    return found[1] if found else ""


def _denied(says: str) -> RefusedError:
    return RefusedError(HTTPStatus.FORBIDDEN, says)


def _assumed(key: str, session: Session, seconds: float) -> Answer:
    until = datetime.now(UTC) + timedelta(seconds=seconds)
    fields = {
        "AccessKeyId": key,
        "SecretAccessKey": session.secret,
        "SessionToken": session.token,
        "Expiration": until.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    }
    inside = "".join(f"<{k}>{escape(v)}</{k}>" for k, v in fields.items())
    text = (
        '<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
        f"<AssumeRoleResult><Credentials>{inside}</Credentials></AssumeRoleResult>"
        "<ResponseMetadata><RequestId>any</RequestId></ResponseMetadata>"
        "</AssumeRoleResponse>"
    )
    headers = {"content-type": "text/xml"}
    return Answer(headers=headers, body=text.encode())
