"""Options of a save, as ``Run.save`` takes them and those pass on who call it."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Literal, SupportsFloat, TypeAlias, TypedDict

from storesvc.format.names import Which
from storesvc_client._progress import OnProgress

SnapshotMode: TypeAlias = Literal["host", "device", "auto", "none"]
IfBusy: TypeAlias = Literal["wait", "queue", "refuse"]
Processes: TypeAlias = Literal["all", "this"]


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
