"""Rpcs of the access service: who the caller is, and what it may do."""

import difflib

from storesvc.access import call as access
from storesvc.access.policy import Permission, Principal
from storesvc.catalog.records import timestamp
from storesvc.errors import InvalidFieldError
from storesvc.quota.quotas import Quotas
from storesvc.rpc import requests
from storesvc.rpc.audit import AUTHENTICATIONS, AuditCalls
from storesvc.rpc.boundary import Context
from storesvc.rpc.lending import LendingCalls
from storesvc.rpc.permissions import resource_of
from storesvc.rpc.security import Security
from storesvc.store import Store
from storesvc_proto.v1 import access_service_pb2 as access_api


class AccessService(AuditCalls, LendingCalls):
    """Answers what a caller may do, lends credentials, and lists the audit log."""

    def __init__(self, store: Store, security: Security, quotas: Quotas) -> None:
        self._store = store
        self._security = security
        self._lender = security.lender
        self._audit = security.audit
        self._quotas = quotas

    async def GetLoginOptions(
        self, request: access_api.GetLoginOptionsRequest, context: Context
    ) -> access_api.GetLoginOptionsResponse:
        options = self._security.login_options()
        return access_api.GetLoginOptionsResponse(options=options)

    async def GetIdentity(
        self, request: access_api.GetIdentityRequest, context: Context
    ) -> access_api.GetIdentityResponse:
        return identity_message(access.principal(), restricted=access.is_restricted())

    async def TestPermissions(
        self, request: access_api.TestPermissionsRequest, context: Context
    ) -> access_api.TestPermissionsResponse:
        resource = resource_of(request.resource)
        asked = permissions_of(request)
        permitted = [each for each in asked if access.may(each, resource)]
        return access_api.TestPermissionsResponse(permissions=permitted)

    async def GetQuota(
        self, request: access_api.GetQuotaRequest, context: Context
    ) -> access_api.GetQuotaResponse:
        namespace = requests.namespace_of(request.parent)
        if namespace is None:
            raise InvalidFieldError(
                f"parent {request.parent!r}: expected one namespace, got all; get the "
                "quotas of each one"
            )
        found = await self._quotas.describe(namespace)
        return access_api.GetQuotaResponse(quotas=found)


def identity_message(
    principal: Principal, *, restricted: bool
) -> access_api.GetIdentityResponse:
    """Returns the message for a caller."""
    expires = principal.expire_time
    return access_api.GetIdentityResponse(
        principal=principal.name,
        groups=sorted(principal.groups),
        authentication=AUTHENTICATIONS[principal.authentication],
        expire_time=timestamp(expires) if expires else None,
        is_restricted=restricted,
    )


def permissions_of(
    request: access_api.TestPermissionsRequest,
) -> list[Permission]:
    """Returns the permissions that TestPermissions asks for.

    Raises:
        InvalidFieldError: One does not exist.
    """
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
