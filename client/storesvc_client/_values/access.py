"""The identity of a caller, and the quotas of a namespace."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self, cast

from storesvc_client._values.call_kinds import Authentication
from storesvc_proto.v1 import access_service_pb2 as api


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """A limit and its usage, as one server counts it; from ``Client.quotas``."""

    name: str
    """``stored_bytes``, ``streams``, ``watches``, ``uploads``, ``bytes_in_flight`` or
    ``requests_per_second``."""
    scope: str
    """``namespaces/NAMESPACE``, or the principal of the caller."""
    limit: int
    """Maximum; 0: unlimited."""
    soft_limit: int
    """Amount above which the server warns; 0: none."""
    used: int
    """Amount in use."""

    @classmethod
    def from_message(cls, message: api.Quota) -> Self:
        """Returns the value of a message."""
        return cls(
            name=message.name,
            scope=message.scope,
            limit=message.limit,
            soft_limit=message.soft_limit,
            used=message.used,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A caller, as a server sees it; returned by ``Client.identity``."""

    principal: str
    """Name, such as ``user:alice@corp.example``; empty: anonymous."""
    groups: tuple[str, ...]
    """Groups, sorted."""
    authentication: Authentication
    """By what it was authenticated."""
    expire_time: datetime | None
    """When its credential expires; None: never, or unknown."""
    is_restricted: bool
    """True if the server has a policy; if not, everything is permitted."""

    @classmethod
    def from_message(cls, message: api.GetIdentityResponse) -> Self:
        """Returns the value of a message."""
        name = api.Authentication.Name(message.authentication)
        return cls(
            principal=message.principal,
            groups=tuple(message.groups),
            authentication=cast(
                "Authentication", name.removeprefix("AUTHENTICATION_").lower()
            ),
            expire_time=(
                message.expire_time.ToDatetime(UTC)
                if message.HasField("expire_time")
                else None
            ),
            is_restricted=message.is_restricted,
        )
