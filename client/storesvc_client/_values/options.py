"""Options of saves and restores: public value classes, and the requests that pass
from a public function to the code that carries them out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    Self,
    SupportsFloat,
    SupportsIndex,
    TypeAlias,
    TypeVar,
)

from storesvc_client._values.arguments import (
    DurationLike,
    checked_choice,
    checked_duration,
    checked_flag,
    checked_patterns,
)
from storesvc_client.errors import InvalidRequestError

MappingRules: TypeAlias = str | Path | Mapping[str, Any]
"""Rules of a mapping: the path of a TOML or JSON file, the name of a table that comes
with storesvc, such as "llama" or "llama-inverse", or a parsed document."""

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from jax.sharding import Mesh, PartitionSpec
    from numpy.typing import DTypeLike
    from typing_extensions import TypeVar as TypeVarWithDefault

    from storesvc.format.names import Which
    from storesvc_client._mapping import rules as mapping_rules
    from storesvc_client._mapping.planning import MappedTree
    from storesvc_client._telemetry.progress import ProgressCallback
    from storesvc_client._values.key_patterns import Pattern, Patterns

    Rules = Sequence[tuple[str, PartitionSpec]] | Literal["recorded"]
    AnyMapping = MappingRules | mapping_rules.Rules | MappedTree

    Like = TypeVarWithDefault("Like", default=Any)
else:
    Like = TypeVar("Like")
    """Type of ``like`` and of what is restored; Any without ``like``. Python has
    defaults of type variables since 3.13."""

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


R = TypeVar("R", bound="DataclassInstance")


def collect_arguments(kind: type[R], arguments: Mapping[str, Any], **others: Any) -> R:
    """Returns the arguments of a public function as one request, which other layers
    pass on; a test compares their names, types and defaults with its fields.

    Args:
        kind: Class of the request.
        arguments: ``locals()`` of the function; what is no field does not count.
        others: Values of fields that are no arguments, or have other values.
    """
    names = [each.name for each in fields(kind)]
    given = {name: arguments[name] for name in names if name in arguments}
    return kind(**{**given, **others})


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Arguments of a save; see ``Run.save``."""

    step: SupportsIndex
    tree: Any
    metrics: Mapping[str, SupportsFloat] | None = None
    labels: Mapping[str, str] | None = None
    items: Mapping[str, Any] | None = None
    document: bytes = b""
    base: "Which | None" = "latest"
    snapshot: SnapshotMode | None = None
    if_busy: IfBusy | None = None
    distributed: Distributed = ALL_PROCESSES
    progress: "ProgressCallback | None" = None

    def filled_in(self, defaults: SaveOptions) -> Self:
        """Returns the request with the defaults of a run for what it leaves open."""
        snapshot, if_busy = self.snapshot, self.if_busy
        return replace(
            self,
            snapshot=defaults.snapshot if snapshot is None else snapshot,
            if_busy=defaults.if_busy if if_busy is None else if_busy,
        )

    def check(self, place: str) -> None:
        """Checks what needs no other value. It is not done where the request is made:
        in a job the other processes learn of the error, and end, too."""
        checked_choice(f"{place}: snapshot=", self.snapshot, SnapshotMode)
        checked_choice(f"{place}: if_busy=", self.if_busy, IfBusy)
        if not isinstance(self.document, bytes):
            raise InvalidRequestError(
                f"{place}: expected bytes in document=, got "
                f"{type(self.document).__name__}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """Arguments of a restore; see ``Run.restore``."""

    like: Any = None
    mesh: "Mesh | None" = None
    rules: "Rules | None" = None
    select: "Patterns | None" = None
    cast: "DTypeLike | None" = None
    missing: Literal["error", "keep"] = "error"
    indivisible: Indivisible = "error"
    mapping: "AnyMapping | None" = None
    progress: "ProgressCallback | None" = None

    def patterns(self, name: str) -> Sequence["Pattern"] | None:
        """Returns ``select`` parsed, for the checkpoint of a name; None: all leaves."""
        if self.select is None:
            return None
        return checked_patterns(f"restore of {name}: select=", self.select)
