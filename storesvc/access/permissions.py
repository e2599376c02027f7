"""Permissions, and the roles that group them."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Permission(StrEnum):
    """One kind of access to a run, or to all runs of a namespace."""

    RUNS_LIST = "runs.list"
    """To see that a run exists. Without it, every other call reports NOT_FOUND."""
    RUNS_GET = "runs.get"
    RUNS_UPDATE = "runs.update"
    RUNS_SET_POLICY = "runs.setPolicy"
    """To set the retention policy or the purge delay of a run."""
    CHECKPOINTS_LIST = "checkpoints.list"
    CHECKPOINTS_GET = "checkpoints.get"
    CHECKPOINTS_READ = "checkpoints.read"
    """To read manifests, chunks and items."""
    CHECKPOINTS_WATCH = "checkpoints.watch"
    CHECKPOINTS_VERIFY = "checkpoints.verify"
    CHECKPOINTS_UPDATE = "checkpoints.update"
    """To set labels and metrics."""
    CHECKPOINTS_PIN = "checkpoints.pin"
    CHECKPOINTS_DELETE = "checkpoints.delete"
    """To delete, also by applying retention."""
    CHECKPOINTS_UNDELETE = "checkpoints.undelete"
    CHECKPOINTS_PURGE = "checkpoints.purge"
    TAGS_LIST = "tags.list"
    TAGS_SET = "tags.set"
    TAGS_DELETE = "tags.delete"
    TAGS_MANAGE = "tags.manage"
    """To protect tags, and to change protected ones."""
    HOLDS_LIST = "holds.list"
    HOLDS_CREATE = "holds.create"
    """To create holds, and to renew and delete one's own."""
    HOLDS_MANAGE = "holds.manage"
    """To renew and delete holds of others."""
    UPLOADS_GET = "uploads.get"
    UPLOADS_BEGIN = "uploads.begin"
    UPLOADS_SUPERSEDE = "uploads.supersede"
    """To begin an upload at a step that another live upload holds."""
    UPLOADS_WRITE = "uploads.write"
    UPLOADS_PLACE = "uploads.place"
    """To refer to data files that the client wrote itself."""
    UPLOADS_COMMIT = "uploads.commit"
    UPLOADS_ABORT = "uploads.abort"
    UPLOADS_MANAGE = "uploads.manage"
    """To write, commit and abort uploads that others began."""
    USAGE_GET = "usage.get"
    QUOTAS_GET = "quotas.get"
    CREDENTIALS_LEND_READ = "credentials.lendRead"
    CREDENTIALS_LEND_WRITE = "credentials.lendWrite"
    GARBAGE_COLLECT = "garbage.collect"
    GARBAGE_COLLECT_EARLY = "garbage.collectEarly"
    """To collect with a grace period below the server's default."""
    AUDIT_READ = "audit.read"
    """To read the audit log of a server; counts on all runs only."""


_READER: Final = frozenset(
    {
        Permission.RUNS_LIST,
        Permission.RUNS_GET,
        Permission.CHECKPOINTS_LIST,
        Permission.CHECKPOINTS_GET,
        Permission.CHECKPOINTS_READ,
        Permission.CHECKPOINTS_WATCH,
        Permission.CHECKPOINTS_VERIFY,
        Permission.TAGS_LIST,
        Permission.HOLDS_LIST,
        Permission.HOLDS_CREATE,
        Permission.UPLOADS_GET,
        Permission.USAGE_GET,
        Permission.QUOTAS_GET,
        Permission.CREDENTIALS_LEND_READ,
    }
)

_WRITER: Final = _READER | {
    Permission.RUNS_UPDATE,
    Permission.CHECKPOINTS_UPDATE,
    Permission.TAGS_SET,
    Permission.TAGS_DELETE,
    Permission.UPLOADS_BEGIN,
    Permission.UPLOADS_SUPERSEDE,
    Permission.UPLOADS_WRITE,
    Permission.UPLOADS_PLACE,
    Permission.UPLOADS_COMMIT,
    Permission.UPLOADS_ABORT,
    Permission.CREDENTIALS_LEND_WRITE,
}

_MANAGER: Final = _WRITER | {
    Permission.RUNS_SET_POLICY,
    Permission.CHECKPOINTS_PIN,
    Permission.CHECKPOINTS_DELETE,
    Permission.CHECKPOINTS_UNDELETE,
    Permission.CHECKPOINTS_PURGE,
    Permission.TAGS_MANAGE,
    Permission.HOLDS_MANAGE,
    Permission.UPLOADS_MANAGE,
    Permission.GARBAGE_COLLECT,
}

ROLES: Final[Mapping[str, frozenset[Permission]]] = MappingProxyType(
    {
        "reader": _READER,
        "writer": _WRITER,
        "manager": _MANAGER,
        "admin": frozenset(Permission),
    }
)
"""The permissions of each role; each role includes the roles before it."""


def least_role(permission: Permission) -> str:
    """Returns the first role that has a permission."""
    return next(role for role, granted in ROLES.items() if permission in granted)
