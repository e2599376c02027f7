"""Identities of callers."""

from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Final


class Authentication(Enum):
    """Ways to authenticate a caller."""

    ANONYMOUS = "anonymous"
    LOCAL = "local"
    """By the machine: a loopback address or a Unix socket."""
    CERTIFICATE = "certificate"
    TOKEN = "token"  # noqa: S105 - not a password


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The identity of a caller."""

    name: str
    """Such as ``user:alice@corp.example``, ``k8s:train/trainer``,
    ``spiffe://td/ns/train/sa/job`` or ``local``; empty: anonymous."""
    authentication: Authentication
    groups: frozenset[str] = frozenset()
    """Names of groups as ``ISSUER/NAME``, without the prefix ``group:`` of bindings."""
    expire_time: datetime | None = None
    """When the credential expires; None: never, or unknown."""

    def __str__(self) -> str:
        return self.name or "an anonymous caller"


LOCAL: Final = Principal(name="local", authentication=Authentication.LOCAL)
"""A caller on this machine."""

ANONYMOUS: Final = Principal(name="", authentication=Authentication.ANONYMOUS)
"""A caller without credentials."""
