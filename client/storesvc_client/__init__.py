"""Save training state to a checkpoint store, and restore it.

>>> import storesvc_client as store
>>> with store.connect("memory://") as client:
...     run = client.run("docs/example")
...     run.save(0, {"weights": [1.0, 2.0]}).result().leaf_count
2
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from storesvc_client._api.client import AuditEntries, Client, connect
    from storesvc_client._api.groups import Collected, Hold, Usage
    from storesvc_client._api.loop import Loop
    from storesvc_client._api.run import Run
    from storesvc_client._doctor.doctor import doctor
    from storesvc_client._doctor.findings import Diagnosis, Finding
    from storesvc_client._export.exporting import ExportReport
    from storesvc_client._foreign.mount import (
        ForeignCheckpoint,
        ForeignInfo,
        ForeignRun,
        open_foreign,
    )
    from storesvc_client._items.values import PerProcess, Replicated
    from storesvc_client._pictures.leaf_statistics import LeafStatistics
    from storesvc_client._pictures.plots import Plot
    from storesvc_client._pictures.svg import Picture
    from storesvc_client._restore.checkpoint import OpenCheckpoint
    from storesvc_client._restore.items import Items
    from storesvc_client._save.saver import Save
    from storesvc_client._telemetry.events import StepLogger
    from storesvc_client._telemetry.progress import (
        Progress,
        ProgressCallback,
        progress_bar,
    )
    from storesvc_client._telemetry.reports import (
        PhaseSpan,
        ProcessReading,
        Rehearsal,
        RestoreReport,
        SaveReport,
        SaveTrace,
        WriterReport,
    )
    from storesvc_client._values.models import (
        AuditEntry,
        Checkpoint,
        Damage,
        Diff,
        Event,
        HoldInfo,
        Identity,
        ItemDifference,
        ItemInfo,
        LeafDifference,
        LeafInfo,
        Quota,
        RetentionDecision,
        RunInfo,
        ServerInfo,
        Tag,
        Transfer,
        UploadInfo,
        Verification,
    )
    from storesvc_client._values.options import Distributed, SaveOptions
    from storesvc_client._values.policies import (
        KeepBest,
        KeepEvery,
        KeepLatest,
        KeepNewerThan,
        KeepPinned,
        KeepSteps,
        KeepTagged,
        RetentionPolicy,
        format_policy,
        parse_policy,
    )
    from storesvc_client._values.triggers import Minutes, Raise, Steps, Tolerate
    from storesvc_client.errors import (
        AlreadyExistsError,
        ConflictError,
        DataLossError,
        InvalidRequestError,
        LimitError,
        MismatchError,
        NotFoundError,
        PeerFailedError,
        PermissionDeniedError,
        PreconditionError,
        StoreError,
        StructureError,
        TokenExpiredError,
        UnauthenticatedError,
        UnavailableError,
        UnsupportedLeafError,
    )

__all__ = [
    "AlreadyExistsError",
    "AuditEntries",
    "AuditEntry",
    "Checkpoint",
    "Client",
    "Collected",
    "ConflictError",
    "Damage",
    "DataLossError",
    "Diagnosis",
    "Diff",
    "Distributed",
    "Event",
    "ExportReport",
    "Finding",
    "ForeignCheckpoint",
    "ForeignInfo",
    "ForeignRun",
    "Hold",
    "HoldInfo",
    "Identity",
    "InvalidRequestError",
    "ItemDifference",
    "ItemInfo",
    "Items",
    "KeepBest",
    "KeepEvery",
    "KeepLatest",
    "KeepNewerThan",
    "KeepPinned",
    "KeepSteps",
    "KeepTagged",
    "LeafDifference",
    "LeafInfo",
    "LeafStatistics",
    "LimitError",
    "Loop",
    "Minutes",
    "MismatchError",
    "NotFoundError",
    "OpenCheckpoint",
    "PeerFailedError",
    "PerProcess",
    "PermissionDeniedError",
    "PhaseSpan",
    "Picture",
    "Plot",
    "PreconditionError",
    "ProcessReading",
    "Progress",
    "ProgressCallback",
    "Quota",
    "Raise",
    "Rehearsal",
    "Replicated",
    "RestoreReport",
    "RetentionDecision",
    "RetentionPolicy",
    "Run",
    "RunInfo",
    "Save",
    "SaveOptions",
    "SaveReport",
    "SaveTrace",
    "ServerInfo",
    "StepLogger",
    "Steps",
    "StoreError",
    "StructureError",
    "Tag",
    "TokenExpiredError",
    "Tolerate",
    "Transfer",
    "UnauthenticatedError",
    "UnavailableError",
    "UnsupportedLeafError",
    "UploadInfo",
    "Usage",
    "Verification",
    "WriterReport",
    "connect",
    "doctor",
    "format_policy",
    "open_foreign",
    "parse_policy",
    "progress_bar",
]

_HOMES: Final = {
    name: module
    for module, names in {
        "_api.client": "AuditEntries Client connect",
        "_api.groups": "Collected Hold Usage",
        "_api.loop": "Loop",
        "_api.run": "Run",
        "_doctor.doctor": "doctor",
        "_doctor.findings": "Diagnosis Finding",
        "_export.exporting": "ExportReport",
        "_foreign.mount": "ForeignCheckpoint ForeignInfo ForeignRun open_foreign",
        "_items.values": "PerProcess Replicated",
        "_pictures.leaf_statistics": "LeafStatistics",
        "_pictures.plots": "Plot",
        "_pictures.svg": "Picture",
        "_restore.checkpoint": "OpenCheckpoint",
        "_restore.items": "Items",
        "_save.saver": "Save",
        "_telemetry.events": "StepLogger",
        "_telemetry.progress": "Progress ProgressCallback progress_bar",
        "_telemetry.reports": (
            "PhaseSpan ProcessReading Rehearsal RestoreReport SaveReport SaveTrace "
            "WriterReport"
        ),
        "_values.models": (
            "AuditEntry Checkpoint Damage Diff Event HoldInfo Identity "
            "ItemDifference ItemInfo LeafDifference LeafInfo Quota "
            "RetentionDecision RunInfo ServerInfo Tag Transfer UploadInfo "
            "Verification"
        ),
        "_values.options": "Distributed SaveOptions",
        "_values.policies": (
            "KeepBest KeepEvery KeepLatest KeepNewerThan KeepPinned KeepSteps "
            "KeepTagged RetentionPolicy format_policy parse_policy"
        ),
        "_values.triggers": "Minutes Raise Steps Tolerate",
    }.items()
    for name in names.split()
}
"""Module of each public name; all other names are in ``errors``."""


def __getattr__(name: str) -> object:
    """Imports a public name on first use, so that storectl starts without gRPC."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_HOMES.get(name, 'errors')}")
    return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    return __all__
