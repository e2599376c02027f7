"""The call in progress: its caller, and the checks of its permissions.

``storesvc.rpc`` sets the call at its boundary; whatever runs in the same task asks
here, so that no layer between needs an argument for it. Work without a call, such as a
collection in the background, is the server's own, and is permitted everything.
"""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from storesvc.access.permissions import Permission
from storesvc.access.policy import Policy, Resource
from storesvc.access.principals import Principal
from storesvc.errors import PermissionDeniedError
from storesvc.format.names import RunName


@dataclass(slots=True, kw_only=True)
class Call:
    """A call in progress."""

    principal: Principal
    """The caller."""
    policy: Policy | None
    """The policy; None permits everything."""
    method: str
    """Name of the rpc, such as ``DeleteCheckpoint``."""
    request_id: str
    """Identifies the call in logs, in the audit log and in errors."""
    peer: str
    """Address of the client, in gRPC's notation."""
    is_checked: bool = False
    """True once a permission was checked. A call that ends well without is a bug."""
    granted: list[tuple[Permission, Resource]] = field(default_factory=list)
    """The checks that passed."""
    detail: dict[str, str] = field(default_factory=dict)
    """Values for the audit log, such as ``step``, ``upload``, ``tag``."""


class CallObserver(Protocol):
    """Takes part in each call of the contract, such as the audit log and the quotas."""

    async def permitted(self, call: Call) -> None:
        """Continues a call whose permissions are checked, before it changes anything.

        Raises:
            StoreError: The call must not continue; ``ended`` follows.
        """

    async def ended(self, call: Call, error: Exception | None) -> None:
        """Takes note of the end of a call, also if it was denied or cancelled.

        Args:
            call: The call.
            error: Error that ended it; None: it ended well.
        """


current: ContextVar[Call | None] = ContextVar("storesvc_call", default=None)
"""The call that this task serves; None: none."""


def may(permission: Permission, resource: Resource) -> bool:
    """Returns whether the caller has a permission on a resource."""
    call = current.get()
    return (
        call is None
        or call.policy is None
        or call.policy.permits(call.principal, permission, resource)
    )


def may_list(run: RunName) -> bool:
    """Returns whether the caller may see that a run exists."""
    return may(Permission.RUNS_LIST, run)


def require(permission: Permission, resource: Resource) -> None:
    """Checks that the caller has a permission on a resource.

    Raises:
        PermissionDeniedError: It has not. ``storesvc.rpc`` reports a run that the
            caller may not list as one that does not exist.
    """
    call = current.get()
    if call is None:
        return
    call.is_checked = True
    if not may(permission, resource):
        raise PermissionDeniedError(
            f"{call.method} of {resource}: expected the permission {permission}, which "
            f"{call.principal} does not have; ask an administrator of the store for a "
            "role that includes it",
            principal=call.principal.name,
            permission=permission,
            resource=str(resource),
        )
    call.granted.append((permission, resource))


def principal_name() -> str:
    """Returns the name of the caller for records; empty: anonymous, or the server
    itself."""
    call = current.get()
    return call.principal.name if call is not None else ""
