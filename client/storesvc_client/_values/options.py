"""Options of saves and restores: public value classes, and keyword arguments by type.

A ``TypedDict`` lists the keyword arguments that several functions share; type checkers
read it through ``Unpack``, and one function in each list has the defaults.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from storesvc_client._values.arguments import (
    DurationLike,
    checked_choice,
    checked_duration,
    checked_flag,
)
from storesvc_client._values.key_patterns import Patterns
from storesvc_client._values.progress import ProgressCallback
from storesvc_client.errors import InvalidRequestError

if TYPE_CHECKING:
    from jax.sharding import Mesh, PartitionSpec
    from numpy.typing import DTypeLike

    Rules = Sequence[tuple[str, PartitionSpec]] | Literal["recorded"]

SnapshotMode: TypeAlias = Literal["host", "device", "auto", "none"]
IfBusy: TypeAlias = Literal["wait", "queue", "refuse"]
Processes: TypeAlias = Literal["all", "this"]
Rehearse: TypeAlias = Literal["warn", "strict", "off"]
OnMismatch: TypeAlias = Literal["raise", "log"]
Indivisible: TypeAlias = Literal["error", "replicate"]
Missing: TypeAlias = Literal["error", "init", "keep"]
OptState: TypeAlias = Literal["restore", "init", "skip"]
OnDamaged: TypeAlias = Literal["raise", "older"]

DEFAULT_DEADLINE: Final = timedelta(hours=1)
"""Longest duration of a restore."""

DEFAULT_LEASE: Final = timedelta(minutes=10)
"""Time for which the server keeps an upload that its writers do not renew."""

MAX_LEASE: Final = timedelta(days=30)
"""Longest lease that the contract allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributed:
    """Options of saves and restores by the processes of a ``jax.distributed`` job.

    One value serves saves and restores. Outside of a job only ``lease`` has an effect.

    >>> alone = Distributed(processes="this")
    >>> together = Distributed(spread=True, lease=1800)

    Raises:
        InvalidRequestError: A field has another type, or is out of range.
    """

    processes: Processes = "all"
    """``"all"``: every process of the job makes the same call, and the call succeeds in
    all of them or in none. ``"this"``: this process saves what its own devices hold, or
    restores, alone."""
    spread: bool | None = None
    """Restores: whether each stored byte that several processes need is read by one of
    them and sent to the others between their devices. None does so where it saves more
    than 64 MiB of reads from a remote storage. Saves ignore it."""
    lease: DurationLike = DEFAULT_LEASE
    """Saves: how long the server keeps an upload that its writers do not renew, a
    ``timedelta`` or seconds, at most 30 days. A process that waits for others stops
    waiting then; a later save of the same step reuses what was written. Restores ignore
    it."""

    def __post_init__(self) -> None:
        checked_choice("Distributed: processes=", self.processes, Processes)
        checked_flag("Distributed: spread=", self.spread)
        lease = checked_duration("Distributed: lease=", self.lease, most=MAX_LEASE)
        object.__setattr__(self, "lease", lease)


def checked_distributed(place: str, value: object) -> Distributed:
    """Returns the value of ``distributed=``.

    Raises:
        InvalidRequestError: It is no ``Distributed``.
    """
    if not isinstance(value, Distributed):
        raise InvalidRequestError(
            f"{place}: distributed=: expected a Distributed, such as "
            f"Distributed(processes='this'), got {value!r}"
        )
    return value


ALL_PROCESSES: Final = Distributed()
THIS_PROCESS: Final = Distributed(processes="this")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Defaults for the saves of a run; see ``Client.run`` and ``Run.save``.

    >>> run = client.run("prod/llama-8b", save=SaveOptions(if_busy="queue"))

    Raises:
        InvalidRequestError: A field has another value.
    """

    snapshot: SnapshotMode = "auto"
    """Memory that the tree is copied to before ``Run.save`` returns."""
    if_busy: IfBusy = "wait"
    """Action of ``Run.save`` while an earlier save of the run is running."""

    def __post_init__(self) -> None:
        checked_choice("SaveOptions: snapshot=", self.snapshot, SnapshotMode)
        checked_choice("SaveOptions: if_busy=", self.if_busy, IfBusy)


DEFAULT_SAVE: Final = SaveOptions()


class OneSaveKeywords(TypedDict, total=False):
    """Keyword arguments of ``Run.save`` for which a run has no defaults."""

    metrics: Mapping[str, SupportsFloat] | None
    labels: Mapping[str, str] | None
    items: Mapping[str, Any] | None
    base: Which | None
    distributed: Distributed
    progress: ProgressCallback | None


class SaveKeywords(OneSaveKeywords, total=False):
    """Keyword arguments of ``Run.save``, without ``document``."""

    snapshot: SnapshotMode | None
    if_busy: IfBusy | None


def check_keywords(function: str, given: Mapping[str, Any], allowed: Any) -> None:
    """Rejects keyword arguments that a ``TypedDict`` does not list, before a function
    below is named that the caller did not call.

    Raises:
        TypeError: As Python's own, of the public function.
    """
    for name in given.keys() - allowed.__annotations__.keys():
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


class RestoreKeywords(TypedDict, total=False):
    """Keyword arguments of ``Run.restore`` and ``OpenCheckpoint.restore``."""

    like: Any
    mesh: "Mesh | None"
    rules: "Rules | None"
    select: Patterns | None
    cast: "DTypeLike | None"
    missing: Literal["error", "keep"]
    indivisible: Indivisible
    progress: ProgressCallback | None


class ReadKeywords(TypedDict, total=False):
    """Arguments of a restore that do not change its result."""

    deadline: DurationLike
    progress: ProgressCallback | None


class ModelRestoreKeywords(ReadKeywords, total=False):
    """Keyword arguments that restores of models share with ``Run.restore``."""

    distributed: Distributed
