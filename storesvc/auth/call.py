"""The call in progress: its caller, the checks of its permissions, facts of its rpc.

``storesvc.rpc`` sets the call at its boundary; whatever runs in the same task asks
here, so that no layer between needs an argument for it. Work without a call, such as a
collection in the background, is the server's own, and is permitted everything.

`RPCS` has the facts of each rpc: from them follow whether a server that is read-only
answers it, what the audit log records, and what a quota counts. Its permissions are in
`storesvc.rpc.methods`, which knows the requests.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final, Protocol

from storesvc.auth.policy import (
    ANONYMOUS,
    Permission,
    Policy,
    Principal,
    Resource,
)
from storesvc.errors import PermissionDeniedError, RunNotFoundError
from storesvc.format.names import RunName


class Effect(Enum):
    """Change that a call makes in the bucket; the audit log records it by this."""

    NONE = "none"
    """Nothing: recorded only if the log has reads, too."""
    PART = "part"
    """A part of what another call is recorded for."""
    CHANGE = "change"
    """Something that can be undone: its end is recorded."""
    GRAVE_CHANGE = "grave change"
    """Data, or what protects data: its intent is recorded before, and its end. So is
    that of any other call on an upload or a hold of another principal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rpc:
    """Facts about one rpc."""

    effect: Effect
    is_stream: bool = False
    """True if quotas count it among the streams: it may take long or much memory."""
    is_of_upload: bool = False
    """True if it works on an upload that another call has begun."""
    is_large: bool = False
    """True if its requests may have the maximum size of a message."""


_READ: Final = Rpc(effect=Effect.NONE)
_LONG_READ: Final = Rpc(effect=Effect.NONE, is_stream=True)
_GRAVE: Final = Rpc(effect=Effect.GRAVE_CHANGE)
_LONG_GRAVE: Final = Rpc(effect=Effect.GRAVE_CHANGE, is_stream=True)
_WRITER: Final = Rpc(
    effect=Effect.PART, is_stream=True, is_of_upload=True, is_large=True
)

_RPCS_BY_FACTS: Final[Mapping[Rpc, str]] = {
    # watches have a quota of their own
    _READ: (
        "ListRuns GetRun ListCheckpoints GetCheckpoint WatchCheckpoints ListTags "
        "ListHolds GetUpload ListUploads GetServerInfo GetUsage GetLoginOptions "
        "GetIdentity TestPermissions GetQuota ListAuditEntries"
    ),
    _LONG_READ: "ReadManifest DiffCheckpoints ReadChunks VerifyCheckpoint",
    Rpc(effect=Effect.PART): "RenewHold",
    Rpc(effect=Effect.PART, is_of_upload=True): "KeepUploadAlive",
    _WRITER: "JoinUpload FindChunks WriteChunks FinishWriter",
    Rpc(effect=Effect.CHANGE): "CreateHold DeleteHold",
    # a pin that is lost, a metric that changes and a tag that moves permit a deletion
    _GRAVE: (
        "UpdateRun UpdateCheckpoint DeleteCheckpoint UndeleteCheckpoint "
        "PurgeCheckpoint SetTag DeleteTag CommitUpload AbortUpload UpgradeStore "
        "LendCredentials"
    ),
    _LONG_GRAVE: "ApplyRetention CreateCheckpoint CollectGarbage",
    Rpc(effect=Effect.GRAVE_CHANGE, is_stream=True, is_large=True): "BeginUpload",
}

RPCS: Final = MappingProxyType(
    {name: facts for facts, names in _RPCS_BY_FACTS.items() for name in names.split()}
)
"""The facts of each rpc, by its name; names are unique over the services. A call
without a row is denied."""


def rpcs_with(test: Callable[[Rpc], bool]) -> frozenset[str]:
    """Returns the names of the rpcs whose facts pass a test."""
    return frozenset(name for name, facts in RPCS.items() if test(facts))


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
    missing: tuple[Permission, Resource] | None = None
    """The permission that the caller lacked; None: it lacked none."""
    granted: list[tuple[Permission, Resource]] = field(default_factory=list)
    """The checks that passed."""
    detail: dict[str, str] = field(default_factory=dict)
    """Values for the audit log, such as ``step``, ``upload``, ``tag``."""
    observers: "tuple[CallObserver, ...]" = ()
    """Take part in the call, in this order."""
    check_format: Callable[[], Awaitable[None]] | None = None
    """Raises if the server does not write the format of the store."""

    @property
    def subject(self) -> Mapping[str, str]:
        """Values for logs and spans; empty if the call was denied: a caller must not
        appear in the trace of an upload because it knows the name."""
        return {} if self.missing is not None else self.detail

    async def permit(self) -> None:
        """Ends the checks of the request: the call may begin its work.

        Raises:
            StoreError: An observer rejects it, or the format of the store.
        """
        self.is_checked = True
        is_change = RPCS[self.method].effect is not Effect.NONE
        if is_change and self.check_format and self.method != "UpgradeStore":
            await self.check_format()
        for observer in self.observers:
            await observer.on_permitted(self)


class CallObserver(Protocol):
    """Takes part in each call of the contract, such as the audit log and the quotas."""

    async def began(self, call: Call) -> None:
        """Continues a call whose caller is known, before its request is looked at.

        Raises:
            StoreError: The call must not continue; ``ended`` follows.
        """

    async def on_permitted(self, call: Call) -> None:
        """Continues a call whose permissions are checked, before it changes anything.

        Raises:
            StoreError: The call must not continue; ``ended`` follows.
        """

    async def on_elevated(self, call: Call) -> None:
        """Continues a call on an object of another principal, which the caller may use
        by a permission of managers; the record of the object has shown that.

        Raises:
            StoreError: The call must not continue; ``ended`` follows.
        """

    async def ended(self, call: Call, error: BaseException | None) -> None:
        """Takes note of the end of a call, also if it was denied or cancelled."""


current: ContextVar[Call | None] = ContextVar("storesvc_call", default=None)
"""The call that this task serves; None: none."""


def may(permission: Permission, resource: Resource) -> bool:
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

    A caller that may not see the run gets the error of one that does not exist.
    """
    call = current.get()
    if call is None:
        return
    if not may(permission, resource):
        call.missing = (permission, resource)
        if isinstance(resource, RunName) and not may_list(resource):
            raise RunNotFoundError(
                f"run {resource} does not exist (no run is similar); list the runs to "
                "see all",
                run=str(resource),
                nearest="",
            )
        raise PermissionDeniedError(
            f"{call.method} of {resource}: expected the permission {permission}, which "
            f"{call.principal} does not have; ask an administrator of the store for "
            f"the role {permission.least_role}",
            principal=call.principal.name,
            permission=permission,
            resource=str(resource),
        )
    call.granted.append((permission, resource))


async def require_own(
    owner: str,
    groups: Iterable[str],
    permission: Permission,
    run: RunName,
    *,
    otherwise: Permission,
) -> None:
    """Checks that the caller may use an object that a principal created.

    It may if it is that principal, if one binding that gives the permission on the run
    names both, as for the hosts of a job, or if it has the permission to use the
    objects of others.

    Args:
        owner: Name of the principal that created it; empty: anyone may use it.
        permission: Permission that the creator needed.
        otherwise: Permission to use the objects of others.

    Raises:
        PermissionDeniedError: The caller may not.
        StoreError: An observer rejects the use of an object of another principal.
    """
    call = current.get()
    if call is None or call.policy is None or owner in ("", call.principal.name):
        return
    if call.policy.binds_both(call.principal, (owner, groups), permission, run):
        return
    if not may(otherwise, run):
        call.missing = (otherwise, run)
        raise PermissionDeniedError(
            f"{call.method} of {run}: it belongs to {owner}, and {call.principal} does "
            f"not have the permission {otherwise}; call as {owner}, or ask an "
            f"administrator of the store for the role {otherwise.least_role}",
            principal=call.principal.name,
            permission=otherwise,
            resource=str(run),
        )
    call.granted.append((otherwise, run))
    for observer in call.observers:
        await observer.on_elevated(call)


def principal() -> Principal:
    """Returns the caller; anonymous without a call."""
    call = current.get()
    return call.principal if call is not None else ANONYMOUS


def principal_name() -> str:
    """Returns the name of the caller for records; empty: anonymous, or the server
    itself."""
    call = current.get()
    return call.principal.name if call is not None else ""


def group_names() -> list[str]:
    """Returns the groups of the caller for records, sorted."""
    call = current.get()
    return sorted(call.principal.groups) if call is not None else []


def is_restricted() -> bool:
    """Returns whether a policy applies to the call in progress."""
    call = current.get()
    return call is not None and call.policy is not None
