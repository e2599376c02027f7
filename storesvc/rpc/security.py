"""The parts of a server that decide about its callers."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from storesvc.access.call import CallObserver
from storesvc.access.policy import Policy
from storesvc.access.principals import LOCAL, Principal
from storesvc.rpc.boundary import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Authentication, authorization, and what takes part in each call."""

    authenticate: Callable[[Context], Awaitable[Principal]]
    """Returns the caller of a call, or raises why its credentials are rejected."""
    policy: Callable[[], Policy | None]
    """Returns the policy in force; None permits everything."""
    observers: tuple[CallObserver, ...] = ()
    """Take part in each call, in this order."""


async def _local(_: Context) -> Principal:
    return LOCAL


OPEN: Final = Security(authenticate=_local, policy=lambda: None)
"""Permits everything to everyone who can connect."""
