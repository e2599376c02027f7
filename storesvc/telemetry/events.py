"""Events of the service: what happened, when, for how long, and of what size.

Each event is published once, where its outcome is known, to all subscribers of the
process. Subscribers run in the publishing thread, so they must only count or enqueue.
Without subscribers, ``publish`` costs the check of an empty list.

``storesvc.rpc`` sets the ``scope`` of a call before anything else of it runs. Events
that are published during the call, in its task or in threads that it waits for, belong
to it.

Sizes are in bytes, durations in seconds, times in seconds since the epoch.

Example:
    >>> seen = []
    >>> subscribe(seen.append)
    >>> publish(Retried(operation="read", kind="hedge"))
    >>> seen
    [Retried(operation='read', kind='hedge')]
    >>> unsubscribe(seen.append)
"""

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from typing import Final, Literal, TypeAlias, TypeVar

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class CallScope:
    """Counts of one call."""

    method: str
    """``package.Service/Method``."""
    request_id: str
    """Identifies the call in logs, spans, the audit log and errors."""
    parent: str = ""
    """``traceparent`` of the caller (W3C Trace Context); empty: none."""
    received_bytes: int = 0
    sent_bytes: int = 0
    status: str = ""
    """Name of the gRPC status that was sent; empty: none yet."""
    reason: str = ""
    """Reason of the error in the contract."""
    parts: list[object] = field(default_factory=list)
    """Parts of the call that become spans or span events, for ``spans``."""


scope: ContextVar[CallScope | None] = ContextVar("storesvc_scope", default=None)
"""The call that this task serves; None: none."""


MAX_CHARACTERS: Final = 1000
"""Maximum length of a name: requests are measured before they are checked."""

_KEYS: Final = {
    "checkpoints": "step",
    "uploads": "upload",
    "tags": "tag",
    "holds": "hold",
}


def parse_subject(name: str) -> dict[str, str]:
    """Returns the parts of a resource name for logs and spans; empty for other
    texts, and for names that are longer than any.

    Example:
        >>> parse_subject("namespaces/prod/runs/llama/checkpoints/500")
        {'run': 'prod/llama', 'step': '500'}
    """
    if len(name) > MAX_CHARACTERS:
        return {}
    match name.split("/"):
        case ["namespaces", namespace]:
            return {"namespace": namespace}
        case ["namespaces", namespace, "runs", run]:
            return {"run": f"{namespace}/{run}"}
        case ["namespaces", namespace, "runs", run, kind, one, *_] if kind in _KEYS:
            return {"run": f"{namespace}/{run}", _KEYS[kind]: one}
        case _:
            return {}


Operation: TypeAlias = Literal["read", "write", "sync", "list", "delete"]
"""Kinds of requests to a storage; a sync makes durable what another process wrote."""

Direction: TypeAlias = Literal["in", "out"]
Path: TypeAlias = Literal["stream", "direct"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStarted:
    """A call of the contract has arrived."""

    method: str
    """``package.Service/Method``; "other" if the server has none of this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnded:
    """A call has ended, in any way."""

    method: str
    status: str
    """Name of the gRPC status: "OK", "NOT_FOUND"."""
    start: float
    seconds: float
    received_bytes: int
    """Bytes of all messages of the client."""
    sent_bytes: int
    """Bytes of all messages of the server."""
    reason: str = ""
    """Reason of the error in the contract; empty: none."""
    request_id: str = ""
    principal: str = ""
    subject: Mapping[str, str] = field(default_factory=dict)
    """Subject of the call: ``run``, ``step``, ``upload``, as far as it is known."""
    parent: str = ""
    """``traceparent`` of the caller (W3C Trace Context); empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageRequested:
    """A request to the storage has ended, with all of its hedges and retries."""

    storage: str
    """Driver of TensorStore: "file", "gcs", "gcs_grpc", "memory" or "s3"."""
    operation: Operation
    path: str
    """Path of the object, or prefix of the list."""
    error: str
    """Class of the error; empty: it succeeded."""
    start: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried:
    """A request to the storage was sent again."""

    operation: str
    """Kind of the request: "read", "write" or "change" (a conditional write)."""
    kind: Literal["hedge", "retry"]
    """A hedge is sent in addition to a slow request, a retry instead of a late one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    """A storage has not answered for so long that a warning is logged."""

    storage: str
    """Kind of the storage, as of ``StorageRequested``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunksMoved:
    """Stored chunks have passed between a client and the storage.

    Counts what passed: a chunk that is sent again after a lost connection counts again.
    """

    direction: Direction
    path: Path
    """Through a stream to this server, or directly between client and storage."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """An upload has become a checkpoint; published once for each checkpoint."""

    run: str
    step: int
    upload: str
    start: float
    seconds: float
    """Seconds from the call of the commit to the checkpoint."""
    upload_start: float
    """Time when the upload began."""
    stored_bytes: int
    """Bytes of all stored chunks of the checkpoint."""
    own_bytes: int
    """Bytes of the chunks that this upload sent; the rest is reused."""
    chunk_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """A call has waited for its turn."""

    purpose: str
    """Work that is limited, such as "checks tables"."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContents:
    """Contents of a run."""

    checkpoints: int
    """Committed checkpoints that are not deleted."""
    logical_bytes: int
    """Bytes of their leaves and items."""
    own_bytes: int
    """Bytes of the chunks that each of them wrote: what they occupy together."""
    newest_commit: float
    """Time of the newest commit; 0 if there is none."""
    uploads_open: int
    oldest_upload: float
    """Time when the oldest open upload began; 0 if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCollected:
    """A pass of the garbage collection over one run has ended."""

    run: str
    start: float
    seconds: float
    aborted_uploads: int
    deleted_checkpoints: int
    purged_checkpoints: int
    deleted_objects: int
    is_failed: bool
    """True if an error ended the pass over this run."""
    contents: RunContents | None
    """Contents of the run before the pass; None: it could not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCollected:
    """A pass of the garbage collection over all runs has ended."""

    start: float
    seconds: float
    runs: tuple[str, ...]
    """All runs of the store."""
    is_complete: bool
    """True if no run failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorChanged:
    """Another server collects the garbage of the store now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionApplied:
    """The retention policy of a run was applied after a commit."""

    run: str
    deleted_checkpoints: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BugFound:
    """A call failed with an exception that is a bug."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DamageFound:
    """A check has found damage in a checkpoint."""

    run: str
    step: int
    kind: str
    """``Damage.Kind`` of the contract in small letters: "missing", "corrupt"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFailed:
    """An entry could not be written to the audit log."""


Event: TypeAlias = (
    CallStarted
    | CallEnded
    | StorageRequested
    | Retried
    | Stalled
    | ChunksMoved
    | Committed
    | Waited
    | RunCollected
    | StoreCollected
    | CollectorChanged
    | RetentionApplied
    | BugFound
    | DamageFound
    | AuditFailed
)

Subscriber: TypeAlias = Callable[[Event], object]

_subscribers: list[Subscriber] = []
_failed: set[int] = set()
"""Subscribers whose failure was logged."""

_log = logging.getLogger(__name__)


def subscribe(subscriber: Subscriber) -> None:
    """Calls a function with each event that is published from now on."""
    _subscribers.append(subscriber)


def unsubscribe(subscriber: Subscriber) -> None:
    """Calls a function no longer."""
    _subscribers.remove(subscriber)


def is_observed() -> bool:
    """Returns whether anything receives events, to save the work of building one."""
    return bool(_subscribers)


def publish(event: Event) -> None:
    """Passes an event to all subscribers.

    The first failure of each is logged. None is raised: a commit must not fail because
    it cannot be counted.
    """
    for subscriber in _subscribers:
        try:
            subscriber(event)
        except Exception:  # noqa: BLE001 - the work that is counted goes on
            if id(subscriber) not in _failed:
                _failed.add(id(subscriber))
                _log.exception("%s failed at %s", subscriber, type(event).__name__)


class Span:
    """Measures something from its creation on."""

    __slots__ = ("_since", "error", "start")

    def __init__(self) -> None:
        self.start = time.time()
        self._since = time.perf_counter()
        self.error = ""

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._since


class Stopwatch:
    """Times the phases of one call for the log, and counts its bytes. Thread-safe.

    Phases may overlap: a stream can wait for its client while it writes. Their seconds
    therefore do not add up to the duration of the call.
    """

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._lock = Lock()
        self._phases: dict[str, float] = {}
        self.size_bytes = 0
        """Bytes of stored chunks that the call moved."""

    def __str__(self) -> str:
        """Returns the text for the log."""
        seconds = time.perf_counter() - self._since
        text = f"{self.size_bytes} bytes in {seconds:.3f} s"
        phases = (f"{name} {spent:.3f}" for name, spent in self._phases.items())
        return f"{text} ({', '.join(phases)})" if self._phases else text

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Adds the duration of the context to a phase."""
        since = time.perf_counter()
        try:
            yield
        finally:
            self._add(name, since)

    def _add(self, name: str, since: float) -> None:
        spent = time.perf_counter() - since
        with self._lock:
            self._phases[name] = self._phases.get(name, 0.0) + spent

    async def waits(self, name: str, stream: AsyncIterator[T]) -> AsyncGenerator[T]:
        """Yields the items of a stream; adds the time of waiting to a phase."""
        while True:
            since = time.perf_counter()
            try:
                found = await anext(stream)
            except StopAsyncIteration:
                return
            finally:
                self._add(name, since)
            yield found
