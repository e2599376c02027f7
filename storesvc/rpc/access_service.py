"""Rpcs of the access service: who the caller is, what it may do, credentials for the
storage, and the entries of the audit log.

A credential is lent only to what the server itself would serve, so the upload must be
open, or the hold live.
"""

import difflib
from collections.abc import Mapping
from typing import Final, TypeVar, assert_never

from google.protobuf import text_format
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from storesvc.audit.reader import AuditFilter, Bookmark, Entry, Stage, Unreadable
from storesvc.auth import call as access
from storesvc.auth.policy import Authentication, Permission
from storesvc.catalog.records import timestamp
from storesvc.errors import (
    AuditLogDisabledError,
    InvalidFieldError,
    LendingUnsupportedError,
)
from storesvc.format.names import HoldName, UploadName
from storesvc.lending.lender import GcsToken, Lender, LentCredential, S3Keys
from storesvc.quota import Quotas
from storesvc.rpc import paging, requests
from storesvc.rpc.calls import Security
from storesvc.rpc.methods import RULES, parse_resource
from storesvc.rpc.status import Context
from storesvc.store import Store
from storesvc_proto.v1 import access_service_pb2 as access_api
from storesvc_proto.v1 import upload_service_pb2 as upload_api

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


class AccessService:
    """Answers what a caller may do, lends credentials, and lists the audit log."""

    def __init__(self, store: Store, security: Security, quotas: Quotas) -> None:
        self._store = store
        self._security = security
        self._quotas = quotas

    async def GetLoginOptions(
        self, request: access_api.GetLoginOptionsRequest, context: Context
    ) -> access_api.GetLoginOptionsResponse:
        options = self._security.login_options()
        return access_api.GetLoginOptionsResponse(options=options)

    async def GetIdentity(
        self, request: access_api.GetIdentityRequest, context: Context
    ) -> access_api.GetIdentityResponse:
        caller = access.principal()
        expires = caller.expire_time
        return access_api.GetIdentityResponse(
            principal=caller.name,
            groups=sorted(caller.groups),
            authentication=AUTHENTICATIONS[caller.authentication],
            expire_time=timestamp(expires) if expires else None,
            is_restricted=access.is_restricted(),
        )

    async def TestPermissions(
        self, request: access_api.TestPermissionsRequest, context: Context
    ) -> access_api.TestPermissionsResponse:
        resource = parse_resource(request.resource)
        asked = parse_permissions(request)
        permitted = [each for each in asked if access.may(each, resource)]
        return access_api.TestPermissionsResponse(permissions=permitted)

    async def LendCredentials(
        self, request: access_api.LendCredentialsRequest, context: Context
    ) -> access_api.LendCredentialsResponse:
        match request.WhichOneof("purpose"):
            case "upload":
                lent = await self._lend_write(request.upload)
            case "hold":
                lent = await self._lend_read(HoldName.from_resource(request.hold))
            case None:
                raise InvalidFieldError("purpose: expected upload or hold, got none")
        if call := access.current.get():
            call.detail["prefix"] = lent.prefix
            call.detail["expire_time"] = lent.expire_time.isoformat()
        return lent_message(lent)

    async def _lend_write(self, ref: upload_api.WriterRef) -> LentCredential:
        name, lender = UploadName.from_resource(ref.upload), self._lender()
        upload = await self._store.uploads.open(name, ref.epoch)
        count = upload.record.writer_count
        requests.check_writer("upload.writer", ref.writer, count)
        return await lender.lend(name)

    async def _lend_read(self, name: HoldName) -> LentCredential:
        lender = self._lender()
        await self._store.holds.live(name)
        return await lender.lend(name)

    def _lender(self) -> Lender:
        if self._security.lender is None:
            raise LendingUnsupportedError(
                "lending: expected a server with [lending] in its policy file, got one "
                "without; ask its administrator for it, or connect without "
                "lend_credentials="
            )
        return self._security.lender

    async def GetQuota(
        self, request: access_api.GetQuotaRequest, context: Context
    ) -> access_api.GetQuotaResponse:
        namespace = requests.parse_namespace(request.parent)
        if namespace is None:
            raise InvalidFieldError(
                f"parent {request.parent!r}: expected one namespace, got all; get the "
                "quotas of each one"
            )
        found = await self._quotas.describe(namespace)
        return access_api.GetQuotaResponse(quotas=found)

    async def ListAuditEntries(
        self, request: access_api.ListAuditEntriesRequest, context: Context
    ) -> access_api.ListAuditEntriesResponse:
        log = self._security.audit
        if log is None:
            raise AuditLogDisabledError(
                "audit log: this server has none; ask its administrator to start it "
                "with --audit-log FILE"
            )
        listed, wanted = _list_identity(request), parse_filter(request)
        size = paging.page_size(request.page_size)
        after = paging.parse_last_row(listed, request.page_token, Bookmark.parse)
        page = await log.page(wanted, after=after, size=size)
        return access_api.ListAuditEntriesResponse(
            entries=[entry_message(row, log.server) for row in page.rows],
            next_page_token=(
                "" if page.after is None else paging.page_token(listed, str(page.after))
            ),
            server=log.server,
        )


def parse_filter(request: access_api.ListAuditEntriesRequest) -> AuditFilter:
    if request.method and request.method not in RULES:
        near = difflib.get_close_matches(request.method, RULES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InvalidFieldError(
            "method: expected the name of an rpc, such as DeleteCheckpoint, got "
            f"{request.method[:80]!r}{hint}"
        )
    stage = _known(STAGES, request.stage, "stage")
    how = _known(AUTHENTICATIONS, request.authentication, "authentication")
    start, end = request.start_time, request.end_time
    return AuditFilter(
        principal=request.principal,
        method=request.method,
        resource=parse_resource(request.resource or "namespaces/-"),
        stage=stage,
        authentication=how,
        start_ns=_time_ns(start) if request.HasField("start_time") else None,
        end_ns=_time_ns(end) if request.HasField("end_time") else None,
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


def _list_identity(request: access_api.ListAuditEntriesRequest) -> str:
    """Returns the text that identifies the list of a request."""
    of = access_api.ListAuditEntriesRequest()
    of.CopyFrom(request)
    of.ClearField("page_size")
    of.ClearField("page_token")
    return f"audit entries {text_format.MessageToString(of, as_one_line=True)}".strip()


def entry_message(row: Entry | Unreadable, server: str) -> access_api.AuditEntry:
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


def lent_message(lent: LentCredential) -> access_api.LendCredentialsResponse:
    response = access_api.LendCredentialsResponse(
        prefix=lent.prefix, expire_time=timestamp(lent.expire_time)
    )
    match lent.secret:
        case GcsToken(token=token):
            response.gcs_token = token
        case S3Keys() as keys:
            response.s3.access_key_id = keys.access_key_id
            response.s3.secret_access_key = keys.secret_access_key
            response.s3.session_token = keys.session_token
        case secret:
            assert_never(secret)
    return response


def parse_permissions(request: access_api.TestPermissionsRequest) -> list[Permission]:
    known = [*Permission]
    for name in request.permissions:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InvalidFieldError(
                f"permissions: got {name[:80]!r}, which does not exist{hint}; expected "
                f"some of {', '.join(known)}"
            )
    return [Permission(name) for name in request.permissions] or known
