"""Options of saves and restores, as ``Run`` takes them and those pass on who call
it."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    SupportsFloat,
    TypeAlias,
    TypedDict,
)

from storesvc.format.names import Which
from storesvc_client._values.progress import OnProgress

if TYPE_CHECKING:
    from jax.sharding import Mesh, PartitionSpec
    from numpy.typing import DTypeLike

    Rules = Sequence[tuple[str, PartitionSpec]] | Literal["recorded"]

SnapshotMode: TypeAlias = Literal["host", "device", "auto", "none"]
IfBusy: TypeAlias = Literal["wait", "queue", "refuse"]
Processes: TypeAlias = Literal["all", "this"]
Rehearse: TypeAlias = Literal["warn", "strict", "off"]
OnMismatch: TypeAlias = Literal["raise", "log"]

DEFAULT_DEADLINE: Final = timedelta(hours=1)
"""How long a restore may take."""


class TargetOptions(TypedDict):
    """See ``Run.restore``."""

    like: Any
    mesh: "Mesh | None"
    rules: "Rules | None"
    cast: "DTypeLike | None"
    missing: Literal["error", "keep"]


class ReadOptions(TypedDict, total=False):
    """See ``Run.restore``."""

    spread: bool | None
    deadline: timedelta
    progress: OnProgress | None


class RestoreOptions(ReadOptions, total=False):
    """See ``Run.restore``."""

    processes: Processes


class SaveOptions(TypedDict, total=False):
    """See ``Run.save``."""

    metrics: Mapping[str, SupportsFloat] | None
    labels: Mapping[str, str] | None
    base: Which | None
    snapshot: SnapshotMode
    if_busy: IfBusy
    processes: Processes
    lease: timedelta
    progress: OnProgress | None
