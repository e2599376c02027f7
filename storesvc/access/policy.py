"""The policy: which principals have which roles on which runs.

It denies by default. A binding gives a role, on the runs that match its patterns, to
the principals and groups that match its names; bindings only add permissions.

>>> policy = Policy(bindings=(
...     Binding(role="writer", runs=("prod/*",), who=("k8s:train/*",)),
... ))
>>> policy.permits(trainer, Permission.UPLOADS_BEGIN, RunName("prod", "llama-8b"))
True
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, NamedTuple, TypeAlias

from storesvc.access.permissions import ROLES, Permission
from storesvc.access.principals import Principal
from storesvc.format.names import RunName

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
        """Returns whether a principal has a permission on a resource."""
        if self.anonymous and permission in ROLES[self.anonymous]:
            return True
        return any(
            permission in ROLES[binding.role]
            and binding.covers(resource)
            and binding.names(principal.name, principal.groups)
            for binding in self.bindings
        )

    def names(self, principal: Principal) -> bool:
        """Returns whether a binding names a principal."""
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
