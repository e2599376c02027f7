"""Facts about the rpcs of the contract that several layers need: one row for each.

Whether a server that is read-only answers it, what the audit log records, and what a
quota counts follow from the row. Its permissions are in `storesvc.rpc.methods`, which
knows the requests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final


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

RPCS: Final = MappingProxyType(
    {
        # CheckpointService
        "ListRuns": _READ,
        "GetRun": _READ,
        "UpdateRun": _GRAVE,
        "ApplyRetention": _LONG_GRAVE,
        "ListCheckpoints": _READ,
        "GetCheckpoint": _READ,
        "ReadManifest": _LONG_READ,
        "DiffCheckpoints": _LONG_READ,
        # a pin that is lost, a metric that changes and a tag that moves permit a
        # deletion
        "UpdateCheckpoint": _GRAVE,
        "DeleteCheckpoint": _GRAVE,
        "UndeleteCheckpoint": _GRAVE,
        "PurgeCheckpoint": _GRAVE,
        "WatchCheckpoints": _READ,  # watches have a quota of their own
        "SetTag": _GRAVE,
        "DeleteTag": _GRAVE,
        "ListTags": _READ,
        "CreateHold": Rpc(effect=Effect.CHANGE),
        "RenewHold": Rpc(effect=Effect.PART),
        "DeleteHold": Rpc(effect=Effect.CHANGE),
        "ListHolds": _READ,
        # UploadService
        "BeginUpload": Rpc(effect=Effect.GRAVE_CHANGE, is_stream=True, is_large=True),
        "JoinUpload": _WRITER,
        "GetUpload": _READ,
        "ListUploads": _READ,
        "KeepUploadAlive": Rpc(effect=Effect.PART, is_of_upload=True),
        "FindChunks": _WRITER,
        "WriteChunks": _WRITER,
        "FinishWriter": _WRITER,
        "CommitUpload": _GRAVE,
        "AbortUpload": _GRAVE,
        # ChunkService
        "ReadChunks": _LONG_READ,
        # MaintenanceService
        "GetServerInfo": _READ,
        "VerifyCheckpoint": _LONG_READ,
        "CollectGarbage": _LONG_GRAVE,
        "GetUsage": _READ,
        # AccessService
        "GetLoginOptions": _READ,
        "GetIdentity": _READ,
        "TestPermissions": _READ,
        "LendCredentials": _GRAVE,
        "GetQuota": _READ,
        "ListAuditEntries": _READ,
    }
)
"""The facts of each rpc, by its name; names are unique over the services. A call
without a row is denied."""


def rpcs_with(test: Callable[[Rpc], bool]) -> frozenset[str]:
    """Returns the names of the rpcs whose facts pass a test."""
    return frozenset(name for name, facts in RPCS.items() if test(facts))
