"""The policy: which principals have which roles on which runs.

A role groups permissions. The policy denies by default: a binding gives a role, on the
runs that match its patterns, to the principals and groups that match its names;
bindings only add permissions.

>>> policy = Policy(bindings=(
...     Binding(role="writer", runs=("prod/*",), who=("k8s:train/*",)),
... ))
>>> policy.permits(trainer, Permission.UPLOADS_BEGIN, RunName("prod", "llama-8b"))
True
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, StrEnum
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final, NamedTuple, Self, TypeAlias

from storesvc.format.names import RunName


class Permission(StrEnum):
    """One kind of access to a run, or to all runs of a namespace.

    Each is defined with the first role that has it, if that is not ``admin``; the roles
    after that have it too.
    """

    RUNS_LIST = "runs.list", "reader"
    """To see that a run exists. Without it, every other call reports NOT_FOUND."""
    RUNS_GET = "runs.get", "reader"
    RUNS_UPDATE = "runs.update", "writer"
    RUNS_SET_POLICY = "runs.setPolicy", "manager"
    """To set the retention policy or the purge delay of a run."""
    CHECKPOINTS_LIST = "checkpoints.list", "reader"
    CHECKPOINTS_GET = "checkpoints.get", "reader"
    CHECKPOINTS_READ = "checkpoints.read", "reader"
    """To read manifests, chunks and items."""
    CHECKPOINTS_WATCH = "checkpoints.watch", "reader"
    CHECKPOINTS_VERIFY = "checkpoints.verify", "reader"
    CHECKPOINTS_UPDATE = "checkpoints.update", "writer"
    """To set labels and metrics."""
    CHECKPOINTS_PIN = "checkpoints.pin", "manager"
    CHECKPOINTS_DELETE = "checkpoints.delete", "manager"
    """To delete, also by applying retention."""
    CHECKPOINTS_UNDELETE = "checkpoints.undelete", "manager"
    CHECKPOINTS_PURGE = "checkpoints.purge", "manager"
    TAGS_LIST = "tags.list", "reader"
    TAGS_SET = "tags.set", "writer"
    TAGS_DELETE = "tags.delete", "writer"
    TAGS_MANAGE = "tags.manage", "manager"
    """To protect tags, and to change protected ones."""
    HOLDS_LIST = "holds.list", "reader"
    HOLDS_CREATE = "holds.create", "reader"
    """To create holds, and to renew and delete one's own."""
    HOLDS_MANAGE = "holds.manage", "manager"
    """To renew and delete holds of others."""
    UPLOADS_GET = "uploads.get", "reader"
    UPLOADS_BEGIN = "uploads.begin", "writer"
    UPLOADS_SUPERSEDE = "uploads.supersede", "writer"
    """To begin an upload at a step that another live upload holds."""
    UPLOADS_WRITE = "uploads.write", "writer"
    UPLOADS_PLACE = "uploads.place", "writer"
    """To refer to data files that the client wrote itself."""
    UPLOADS_COMMIT = "uploads.commit", "writer"
    UPLOADS_ABORT = "uploads.abort", "writer"
    UPLOADS_MANAGE = "uploads.manage", "manager"
    """To write, commit and abort uploads that others began."""
    USAGE_GET = "usage.get", "reader"
    QUOTAS_GET = "quotas.get", "reader"
    CREDENTIALS_LEND_READ = "credentials.lendRead", "reader"
    CREDENTIALS_LEND_WRITE = "credentials.lendWrite", "writer"
    GARBAGE_COLLECT = "garbage.collect", "manager"
    GARBAGE_COLLECT_EARLY = "garbage.collectEarly"
    """To collect with a grace period below the server's default."""
    STORES_UPGRADE = "stores.upgrade"
    """To raise the format of the store; counts on all runs only."""
    AUDIT_READ = "audit.read"
    """To read the audit log of a server; counts on all runs only."""

    def __new__(cls, name: str, role: str = "admin") -> Self:
        permission = str.__new__(cls, name)
        permission._value_ = name
        permission.least_role = role
        return permission

    least_role: str
    """The first role that has it."""


_ROLES: Final = ("reader", "writer", "manager", "admin")

ROLES: Final[Mapping[str, frozenset[Permission]]] = MappingProxyType(
    {
        role: frozenset(
            each for each in Permission if each.least_role in _ROLES[: at + 1]
        )
        for at, role in enumerate(_ROLES)
    }
)
"""The permissions of each role; each role includes the roles before it."""


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


ALL_RUNS: Final = "**"
"""Pattern of all runs of all namespaces."""

GROUP: Final = "group:"
"""Prefix of the name of a group in a binding."""


class Namespace(NamedTuple):
    """All runs of a namespace, also those that do not exist yet."""

    name: str

    def __str__(self) -> str:
        return f"{self.name}/*"


class SomeRun(NamedTuple):
    """Any run that a namespace may have."""

    namespace: str

    def __str__(self) -> str:
        return f"a run of {self.namespace}"


class AllRuns(NamedTuple):
    """All runs of all namespaces."""

    def __str__(self) -> str:
        return ALL_RUNS


Resource: TypeAlias = RunName | Namespace | SomeRun | AllRuns
"""The object of a permission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Gives a role to callers."""

    role: str
    """A key of ``ROLES``."""
    runs: tuple[str, ...]
    """Patterns of runs: ``NAMESPACE/RUN`` with ``*``, ``?`` and ``[...]`` in each part,
    or ``**`` for all."""
    who: tuple[str, ...]
    """Patterns of principals, or of groups after ``group:``."""

    def names(self, name: str, groups: Iterable[str]) -> bool:
        """Returns whether it names a principal with these groups."""
        callers = [name, *(GROUP + group for group in groups)]
        return any(
            bool(caller)
            and caller.startswith(GROUP) == pattern.startswith(GROUP)
            and fnmatchcase(caller, pattern)
            for caller in callers
            for pattern in self.who
        )

    def covers(self, resource: Resource) -> bool:
        """Returns whether it covers a run, or all runs of a namespace."""
        return any(_covers(pattern, resource) for pattern in self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The bindings of a server."""

    bindings: tuple[Binding, ...] = ()
    anonymous: str = ""
    """Role of callers without credentials on all runs; empty: they are rejected."""

    def permits(
        self, principal: Principal, permission: Permission, resource: Resource
    ) -> bool:
        if self.anonymous and permission in ROLES[self.anonymous]:
            return True
        return any(
            permission in ROLES[binding.role]
            and binding.covers(resource)
            and binding.names(principal.name, principal.groups)
            for binding in self.bindings
        )

    def names(self, principal: Principal) -> bool:
        return any(
            binding.names(principal.name, principal.groups) for binding in self.bindings
        )

    def binds_both(
        self,
        principal: Principal,
        other: tuple[str, Iterable[str]],
        permission: Permission,
        run: RunName,
    ) -> bool:
        """Returns whether one binding gives a permission to two principals.

        Args:
            principal: One of them.
            other: Name and groups of the other.
            permission: The permission.
            run: The run that it is for.
        """
        return any(
            permission in ROLES[binding.role]
            and binding.covers(run)
            and binding.names(principal.name, principal.groups)
            and binding.names(*other)
            for binding in self.bindings
        )


def _covers(pattern: str, resource: Resource) -> bool:
    if pattern == ALL_RUNS:
        return True
    namespace, _, run = pattern.partition("/")
    match resource:
        case RunName():
            return fnmatchcase(resource.namespace, namespace) and fnmatchcase(
                resource.run, run
            )
        case Namespace(name):
            return run in ("*", "**") and fnmatchcase(name, namespace)
        case SomeRun(name):
            return fnmatchcase(name, namespace)
        case AllRuns():
            return namespace == "*" and run in ("*", "**")
