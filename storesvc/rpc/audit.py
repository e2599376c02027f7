"""The rpc that lists the entries of the audit log."""

import difflib
from collections.abc import Mapping
from typing import Final, TypeVar

from google.protobuf import text_format
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from storesvc.access.policy import Authentication
from storesvc.audit.reader import (
    AuditFilter,
    AuditReader,
    Bookmark,
    Entry,
    Stage,
    Unreadable,
)
from storesvc.errors import AuditLogDisabledError, InvalidFieldError
from storesvc.rpc import paging
from storesvc.rpc.boundary import Context
from storesvc.rpc.permissions import RULES, resource_of
from storesvc_proto.v1 import access_service_pb2 as access_api

E = TypeVar("E")

AUTHENTICATIONS: Final = {
    Authentication.ANONYMOUS: access_api.AUTHENTICATION_ANONYMOUS,
    Authentication.LOCAL: access_api.AUTHENTICATION_LOCAL,
    Authentication.CERTIFICATE: access_api.AUTHENTICATION_CERTIFICATE,
    Authentication.TOKEN: access_api.AUTHENTICATION_TOKEN,
}

STAGES: Final = {
    Stage.STARTED: access_api.AUDIT_STAGE_STARTED,
    Stage.REOPENED: access_api.AUDIT_STAGE_REOPENED,
    Stage.INTENT: access_api.AUDIT_STAGE_INTENT,
    Stage.ENDED: access_api.AUDIT_STAGE_ENDED,
    Stage.DENIED: access_api.AUDIT_STAGE_DENIED,
}


class AuditCalls:
    """Lists the entries of the audit log."""

    _audit: AuditReader | None

    async def ListAuditEntries(
        self, request: access_api.ListAuditEntriesRequest, context: Context
    ) -> access_api.ListAuditEntriesResponse:
        log = self._opened()
        listed, wanted = _listed(request), filter_of(request)
        size = paging.page_size(request.page_size)
        after = paging.last_of_page(listed, request.page_token, Bookmark.parse)
        page = await log.page(wanted, after=after, size=size)
        return access_api.ListAuditEntriesResponse(
            entries=[entry_message(row, log.server) for row in page.rows],
            next_page_token=(
                "" if page.after is None else paging.page_token(listed, str(page.after))
            ),
            server=log.server,
        )

    def _opened(self) -> AuditReader:
        if self._audit is None:
            raise AuditLogDisabledError(
                "audit log: this server has none; ask its administrator to start it "
                "with --audit-log FILE"
            )
        return self._audit


def filter_of(request: access_api.ListAuditEntriesRequest) -> AuditFilter:
    """Returns the filter of a request.

    Raises:
        InvalidNameError: The name of the resource is malformed.
        InvalidFieldError: Another field is malformed or unknown.
    """
    if request.method and request.method not in RULES:
        near = difflib.get_close_matches(request.method, RULES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InvalidFieldError(
            "method: expected the name of an rpc, such as DeleteCheckpoint, got "
            f"{request.method[:80]!r}{hint}"
        )
    stage = _known(STAGES, request.stage, "stage")
    how = _known(AUTHENTICATIONS, request.authentication, "authentication")
    return AuditFilter(
        principal=request.principal,
        method=request.method,
        resource=resource_of(request.resource or "namespaces/-"),
        stage=stage,
        authentication=how,
        start_ns=(
            _time_ns(request.start_time) if request.HasField("start_time") else None
        ),
        end_ns=_time_ns(request.end_time) if request.HasField("end_time") else None,
    )


def _known(values: Mapping[E, int], number: int, field: str) -> E | None:
    """Returns the value of a number of the contract; None for 0, unspecified."""
    if number == 0:
        return None
    for value, its_number in values.items():
        if its_number == number:
            return value
    raise InvalidFieldError(
        f"{field}: expected a value of the contract, got the number {number}; use a "
        "newer server"
    )


def _time_ns(time: Timestamp) -> int:
    """Returns a time in nanoseconds since the epoch."""
    return time.seconds * 10**9 + time.nanos


def _listed(request: access_api.ListAuditEntriesRequest) -> str:
    """Returns the text that identifies the list of a request."""
    of = access_api.ListAuditEntriesRequest()
    of.CopyFrom(request)
    of.ClearField("page_size")
    of.ClearField("page_token")
    return f"audit entries {text_format.MessageToString(of, as_one_line=True)}".strip()


def entry_message(row: Entry | Unreadable, server: str) -> access_api.AuditEntry:
    """Returns the message of a row of a log.

    Args:
        row: The row.
        server: Name of the server that reads the log.
    """
    if isinstance(row, Unreadable):
        return access_api.AuditEntry(server=server, problem=row.problem)
    seconds, nanos = divmod(row.time_ns, 10**9)
    message = access_api.AuditEntry(
        seq=row.seq,
        time=Timestamp(seconds=seconds, nanos=nanos),
        stage=STAGES[row.stage],
        server=row.server,
        request_id=row.request_id,
        principal=row.principal,
        peer=row.peer,
        method=row.method,
        permissions=[
            access_api.AuditPermission(permission=permission, resource=resource)
            for permission, resource in row.permissions
        ],
        detail=row.detail,
        reason=row.reason,
        left_out=row.left_out,
        follows_torn_line=row.follows_torn_line,
    )
    if row.missing is not None:
        permission, resource = row.missing
        message.missing.permission, message.missing.resource = permission, resource
    if row.authentication is not None:
        message.authentication = AUTHENTICATIONS[row.authentication]
    if row.latency_ms is not None:
        latency = Duration()
        latency.FromNanoseconds(round(row.latency_ms * 1e6))
        message.latency.CopyFrom(latency)
    return message
