from storesvc_client._api.client import (
    AuditEntries as AuditEntries,
    Client as Client,
    connect as connect,
)
from storesvc_client._api.groups import (
    Collected as Collected,
    Hold as Hold,
    Usage as Usage,
)
from storesvc_client._api.loop import Loop as Loop
from storesvc_client._api.run import Run as Run
from storesvc_client._doctor.doctor import doctor as doctor
from storesvc_client._doctor.findings import Diagnosis as Diagnosis, Finding as Finding
from storesvc_client._export.exporting import ExportReport as ExportReport
from storesvc_client._foreign.mount import (
    ForeignCheckpoint as ForeignCheckpoint,
    ForeignInfo as ForeignInfo,
    ForeignRun as ForeignRun,
    open_foreign as open_foreign,
)
from storesvc_client._items.values import (
    PerProcess as PerProcess,
    Replicated as Replicated,
)
from storesvc_client._pictures.leaf_statistics import LeafStatistics as LeafStatistics
from storesvc_client._pictures.plots import Plot as Plot
from storesvc_client._pictures.svg import Picture as Picture
from storesvc_client._restore.checkpoint import OpenCheckpoint as OpenCheckpoint
from storesvc_client._restore.items import Items as Items
from storesvc_client._save.saver import Save as Save
from storesvc_client._telemetry.events import StepLogger as StepLogger
from storesvc_client._telemetry.progress import (
    Progress as Progress,
    ProgressCallback as ProgressCallback,
    progress_bar as progress_bar,
)
from storesvc_client._telemetry.reports import (
    PhaseSpan as PhaseSpan,
    ProcessReading as ProcessReading,
    Rehearsal as Rehearsal,
    RestoreReport as RestoreReport,
    SaveReport as SaveReport,
    SaveTrace as SaveTrace,
    WriterReport as WriterReport,
)
from storesvc_client._values.models import (
    AuditEntry as AuditEntry,
    Checkpoint as Checkpoint,
    Damage as Damage,
    Diff as Diff,
    Event as Event,
    HoldInfo as HoldInfo,
    Identity as Identity,
    ItemDifference as ItemDifference,
    ItemInfo as ItemInfo,
    LeafDifference as LeafDifference,
    LeafInfo as LeafInfo,
    Quota as Quota,
    RetentionDecision as RetentionDecision,
    RunInfo as RunInfo,
    ServerInfo as ServerInfo,
    Tag as Tag,
    Transfer as Transfer,
    UploadInfo as UploadInfo,
    Verification as Verification,
)
from storesvc_client._values.options import (
    Distributed as Distributed,
    SaveOptions as SaveOptions,
)
from storesvc_client._values.policies import (
    KeepBest as KeepBest,
    KeepEvery as KeepEvery,
    KeepLatest as KeepLatest,
    KeepNewerThan as KeepNewerThan,
    KeepPinned as KeepPinned,
    KeepSteps as KeepSteps,
    KeepTagged as KeepTagged,
    RetentionPolicy as RetentionPolicy,
    format_policy as format_policy,
    parse_policy as parse_policy,
)
from storesvc_client._values.triggers import (
    Minutes as Minutes,
    Raise as Raise,
    Steps as Steps,
    Tolerate as Tolerate,
)
from storesvc_client.errors import (
    AlreadyExistsError as AlreadyExistsError,
    ConflictError as ConflictError,
    DataLossError as DataLossError,
    InvalidRequestError as InvalidRequestError,
    LimitError as LimitError,
    MismatchError as MismatchError,
    NotFoundError as NotFoundError,
    PeerFailedError as PeerFailedError,
    PermissionDeniedError as PermissionDeniedError,
    PreconditionError as PreconditionError,
    StoreError as StoreError,
    StructureError as StructureError,
    TokenExpiredError as TokenExpiredError,
    UnauthenticatedError as UnauthenticatedError,
    UnavailableError as UnavailableError,
    UnsupportedLeafError as UnsupportedLeafError,
)
