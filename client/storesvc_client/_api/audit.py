"""The audit log of a server, read page by page."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Final, Self

from google.protobuf.timestamp_pb2 import Timestamp

from storesvc_client._rpc.connection import Connection
from storesvc_client._rpc.run_stub import FOLLOWING
from storesvc_client._values.arguments import is_text, parent_resource
from storesvc_client._values.call_kinds import (
    AUTHENTICATIONS,
    STAGES,
    AuditStage,
    Authentication,
)
from storesvc_client._values.values import (
    AuditEntry,
    authentication_number,
    stage_number,
)
from storesvc_client.errors import DataLossError, InvalidRequestError
from storesvc_proto.v1 import access_service_pb2 as access_api
from storesvc_proto.v1.access_service_pb2_grpc import AccessServiceStub

_FIRST: Final = 100
"""Page size of the first page, whose entries are wanted soon."""


class AuditEntries(Iterator[AuditEntry]):
    """Entries of the audit log of a server, the newest first; returned by
    ``Client.audit_entries``. Nothing is read before the first entry is asked for.

    Iterate over it, or call ``read_page`` to know where a page ends, but not both: an
    iteration reads pages ahead, whose entries ``read_page`` does not return again.
    """

    def __init__(
        self, connection: Connection, request: access_api.ListAuditEntriesRequest
    ) -> None:
        self._connection = connection
        self._request = request
        self._is_over = False
        self._server = ""
        self._ahead = deque[AuditEntry]()

    @property
    def server(self) -> str:
        """Name of the server whose log was read; empty before the first page."""
        return self._server

    @property
    def page_token(self) -> str:
        """Token that continues after the pages that were read, for
        ``Client.audit_entries``; empty: nothing is left to read."""
        return "" if self._is_over else self._request.page_token

    def read_page(self, size: int = _FIRST) -> list[AuditEntry]:
        """Returns the entries of the next page.

        It may have fewer than ``size``, or none, although ``page_token`` is set: a
        server reads a bounded part of its log for a page.

        Raises:
            PermissionDeniedError: This client may not read the log.
            PreconditionError: The server has no audit log.
            InvalidRequestError: The log was rotated since the page before, or another
                server has answered: start again, at the address of one server.
            UnavailableError: The log cannot be read, or the server does not answer for
                longer than a restart takes.
        """
        if self._is_over:
            return []
        self._request.page_size = size
        stub = AccessServiceStub(self._connection.channel)
        page = self._connection.ask(stub.ListAuditEntries, self._request)
        if page.next_page_token and page.next_page_token == self._request.page_token:
            raise DataLossError(
                "the server sent a page of its audit log whose next page is itself; "
                "connect to another server",
                reason="CORRUPT_DATA",
            )
        self._server = page.server
        self._request.page_token = page.next_page_token
        self._is_over = not page.next_page_token
        return [AuditEntry.from_message(each) for each in page.entries]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> AuditEntry:
        while not self._ahead:
            if self._is_over:
                raise StopIteration
            is_first = not self._server
            self._ahead.extend(self.read_page(_FIRST if is_first else FOLLOWING))
        return self._ahead.popleft()

    def __repr__(self) -> str:
        return f"<iterator over audit entries of {self._connection.address}>"


def audit_entries(
    connection: Connection,
    *,
    principal: str | None,
    method: str | None,
    parent: str | None,
    stage: AuditStage | None,
    authentication: Authentication | None,
    since: datetime | None,
    until: datetime | None,
    page_token: str,
) -> AuditEntries:
    """Returns the entries of the audit log that match; see ``Client.audit_entries``."""
    for name, text in (("principal=", principal), ("method=", method)):
        if text is not None and not (is_text(text) and text):
            raise InvalidRequestError(
                f"audit entries: {name} expected a text, got {text!r}"
            )
    _check_choice("stage=", stage, STAGES)
    _check_choice("authentication=", authentication, AUTHENTICATIONS)
    if not is_text(page_token):
        raise InvalidRequestError(
            f"audit entries: page_token= expected a text, got {page_token!r}"
        )
    request = access_api.ListAuditEntriesRequest(
        principal=principal or "",
        method=method or "",
        resource=parent_resource(parent),
        stage=stage_number(stage),
        authentication=authentication_number(authentication),
        page_token=page_token,
    )
    if since is not None:
        request.start_time.CopyFrom(_stamp("since=", since))
    if until is not None:
        request.end_time.CopyFrom(_stamp("until=", until))
    return AuditEntries(connection, request)


def newest(
    entries: AuditEntries, count: int, *, most_pages: float = math.inf
) -> list[AuditEntry]:
    """Reads entries in as few pages as possible: each may be of another replica.

    Args:
        entries: The entries.
        count: Maximum number of entries.
        most_pages: Number of pages after which there may be fewer.
    """
    found, pages = list[AuditEntry](), 0
    while True:
        found += entries.read_page(min(count - len(found), FOLLOWING))
        pages += 1
        if not entries.page_token or len(found) >= count or pages >= most_pages:
            return found


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value is not None and value not in choices:
        raise InvalidRequestError(
            f"audit entries: {name} expected one of {', '.join(choices)}, got {value!r}"
        )


def _stamp(name: str, time: object) -> Timestamp:
    """Returns the message of a time."""
    stamp = Timestamp()
    if isinstance(time, datetime) and time.tzinfo is not None:
        with suppress(ValueError, OverflowError):  # not in the years of UTC
            stamp.FromDatetime(time)
            return stamp
    raise InvalidRequestError(
        f"audit entries: {name} expected a datetime with a time zone, in the years 1 "
        f"to 9999 of UTC, got {time!r}"
    )
