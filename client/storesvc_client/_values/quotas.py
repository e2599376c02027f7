"""Quotas of a namespace."""

from dataclasses import dataclass
from typing import Self

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
