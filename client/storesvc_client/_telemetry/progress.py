"""Measures the progress and the timings of a save, a restore or an export, and draws it
in a terminal or a notebook.

All threads of one operation report to one ``Meter``. Its times are sums over the
threads, and no second of a thread counts twice: phases are not nested.

A callback is called at intervals, by one thread at a time, and once at the end. An
exception of the callback ends a restore or an export; a save commits without
the callback and raises the exception afterwards.

Phases are spans in the profiler of jax, shown by XProf and TensorBoard, where the
process has imported jax already: no other process can profile with it, and importing it
takes longer than a list of checkpoints.

Example:
    >>> meter = Meter("save", "docs/example@0")
    >>> with meter, meter.phase("write"):
    ...     meter.add(8)
    >>> meter.done_bytes
    8
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, Self, TypeAlias

from storesvc_client._telemetry.reports import PhaseSpan

if TYPE_CHECKING:
    from tqdm.std import tqdm


class TraceAnnotation(Protocol):
    """The class of jax that creates a span."""

    def __call__(self, name: str, /, **metadata: str) -> AbstractContextManager[object]:
        """Returns a context that the profiler shows under a name while it records."""


def trace_annotation() -> TraceAnnotation | None:
    """Returns the class of spans; None in a process without jax."""
    # the attribute is missing while another thread is still importing jax
    found: TraceAnnotation | None = getattr(
        sys.modules.get("jax.profiler"), "TraceAnnotation", None
    )
    return found


Operation: TypeAlias = Literal["save", "restore", "export"]

INTERVAL_SECONDS: Final = 0.1
"""Minimum seconds between two calls of a callback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a save or a restore; the argument of a ``ProgressCallback``."""

    what: Operation
    """The operation."""
    name: str
    """Name of the checkpoint, ``namespace/run@step``."""
    done_bytes: int
    """Bytes of stored chunks: for a save those written, in flight to the server, or
    stored already; for a restore those verified and in their buffer."""
    total_bytes: int
    """Bytes of all stored chunks of the operation, as far as they are known."""
    seconds: float
    """Seconds since the start."""
    timings: Mapping[str, float]
    """Seconds by phase, summed over all threads."""
    slowest: str
    """Data file, stream or phase that has been running for the longest time; "" if none
    is."""
    slowest_seconds: float
    """Seconds that it has been running."""
    is_done: bool
    """True in the last call, after success or failure."""

    @property
    def rate_bytes_per_second(self) -> float:
        """Mean bytes per second since the start."""
        return self.done_bytes / self.seconds if self.seconds else 0.0


class ProgressCallback(Protocol):
    """A callable for ``progress=`` of saves and restores.

    It is called at most ten times a second, by any thread but by one at a time, and
    once at the end. An exception that it raises ends a restore; a save commits without
    it, and then its handle raises the exception.

    >>> def show(progress: Progress) -> None:
    ...     print(f"{progress.done_bytes} of {progress.total_bytes} bytes")
    """

    def __call__(self, progress: Progress, /) -> object:
        """Receives the progress; the result is ignored."""


class Ended(NamedTuple):
    """A part that has ended, and its duration."""

    name: str
    seconds: float


class Meter:
    """Bytes and times of all threads of one save or restore.

    As a context manager it spans the operation, and calls the callback at its end.
    """

    def __init__(
        self,
        what: Operation,
        name: str,
        callback: ProgressCallback | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        within: "Meter | None" = None,
    ) -> None:
        """Starts the measurement; its times, but not its bytes, are added to the meter
        `within`, too."""
        self._what = what
        self._name = name
        self._callback = callback
        self.clock = clock
        self.start_time = datetime.now(UTC)
        """Time of the start, in UTC."""
        self._since = clock()
        self._blocking_seconds: float | None = None
        self._annotation = trace_annotation()
        self._trace: AbstractContextManager[object] | None = None
        self._reported_at = self._since
        self._lock = threading.Lock()
        self._callback_lock = threading.Lock()
        self._within = within
        self.under_way: dict[int, _Span] = within.under_way if within else {}
        """Running parts and phases by id, in the order of their start."""
        self.slowest = Ended("", 0.0)
        """Longest of the parts that have ended."""
        self.threads: list[Mapping[str, _Spent]] = within.threads if within else []
        """Times by phase, for each thread."""
        self._own = _Own(self.threads)
        self._error: BaseException | None = None
        self.done_bytes = 0
        self.total_bytes = 0
        """Total, as far as it is known."""

    @property
    def seconds(self) -> float:
        return self.clock() - self._since

    @property
    def blocking_seconds(self) -> float:
        """Seconds for which the caller waited, or has waited so far."""
        return self.seconds if (ended := self._blocking_seconds) is None else ended

    def release(self) -> None:
        """Records that the caller waits no longer, while the operation continues."""
        self._blocking_seconds = self.seconds

    @property
    def timings(self) -> dict[str, float]:
        """Seconds by phase, summed over all threads."""
        return {phase: spent.seconds for phase, spent in self._spent().items()}

    @property
    def timeline(self) -> tuple[PhaseSpan, ...]:
        """Phases in the order of their start, each from its first start to its last end
        in any thread."""
        spans = [
            PhaseSpan(
                name=phase,
                start_seconds=spent.first - self._since,
                end_seconds=spent.last - self._since,
                busy_seconds=spent.seconds,
            )
            for phase, spent in self._spent().items()
        ]
        return tuple(sorted(spans, key=lambda span: span.start_seconds))

    def _spent(self) -> "dict[str, _Spent]":
        """Returns the times by phase over all threads."""
        total: dict[str, _Spent] = {}
        # copies, as the threads continue
        for times in list(self.threads):
            for phase, spent in dict(times).items():
                total.setdefault(phase, _Spent(spent.first)).join(spent)
        return total

    def spend(self, phase: str, since: float, until: float | None = None) -> None:
        """Adds a time of the calling thread, by ``clock`` and until now if there is no
        end, to a phase, where a context for each small chunk would cost too much."""
        times = self._own.times
        spent = times.get(phase)
        if spent is None:
            spent = times[phase] = _Spent(since)
        spent.add(since, self.clock() if until is None else until)

    def add(self, size_bytes: int) -> None:
        """Adds bytes that are done, and calls the callback if it is due."""
        with self._lock:
            self.done_bytes += size_bytes
        callback = self._callback
        if callback is None:
            return
        if self._error is None:
            if self.clock() - self._reported_at < INTERVAL_SECONDS:
                return
            if not self._callback_lock.acquire(blocking=False):
                return  # another thread calls it
            try:
                if self.clock() - self._reported_at >= INTERVAL_SECONDS:
                    self._call(callback, is_done=False)
                    self._reported_at = self.clock()
            finally:
                self._callback_lock.release()
        if self._error is not None and self._what != "save":
            raise CallbackFailedError

    def phase(self, name: str) -> "_Phase":
        """Returns a context whose time is added to a phase; phases are not nested."""
        return _Phase(self, name)

    def trace_span(self, phase: str) -> AbstractContextManager[object] | None:
        """Returns a span of a phase for the profiler of jax; None without jax."""
        if self._annotation is None:
            return None
        return self._annotation(f"storesvc.{self._what}.{phase}")

    def part(self, name: str) -> "_Part":
        """Returns a context that measures a part, such as one data file."""
        return _Part(self, name)

    def end_part(self, name: str, seconds: float) -> None:
        with self._lock:
            if seconds > self.slowest.seconds:
                self.slowest = Ended(name, seconds)
        if self._within is not None:
            self._within.end_part(name, seconds)

    @property
    def part_under_way(self) -> str:
        """Part that has been running for the longest time, for people; "" if none
        is."""
        for span in list(self.under_way.values()):
            if isinstance(span, _Part):
                return f"{span.name} for {self.clock() - span.since:.0f} s now"
        return ""

    def __enter__(self) -> Self:
        if self._annotation is not None:
            name = f"storesvc.{self._what}"
            self._trace = self._annotation(name, checkpoint=self._name)
            self._trace.__enter__()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._trace is not None:
            self._trace.__exit__(None, None, None)
        with self._callback_lock:  # waits for a call that is running
            if self._callback is not None and self._error is None:
                self._call(self._callback, is_done=True)
            self._callback = None
        if self._error is not None and (
            error is None or isinstance(error, CallbackFailedError)
        ):
            raise self._error from None

    def _call(self, callback: ProgressCallback, *, is_done: bool) -> None:
        try:
            callback(self._progress(is_done=is_done))
        except BaseException as e:  # noqa: BLE001 - it is raised again in the end
            self._error = e

    def _progress(self, *, is_done: bool) -> Progress:
        now = self.clock()
        with self._lock:
            done = self.done_bytes
        # a copy, as threads change it without the lock, which costs more than a chunk
        slowest = next(iter(list(self.under_way.values())), None)
        return Progress(
            what=self._what,
            name=self._name,
            done_bytes=done,
            total_bytes=self.total_bytes,
            seconds=now - self._since,
            timings=self.timings,
            slowest=slowest.name if slowest else "",
            slowest_seconds=now - slowest.since if slowest else 0.0,
            is_done=is_done,
        )


class CallbackFailedError(Exception):
    """Ends the threads of a restore whose callback raised an exception.

    The exception itself, such as an OSError of a closed terminal, could be mistaken for
    one of the storage; the meter raises it at the end.
    """


class _Spent:
    """Time of one phase."""

    __slots__ = ("first", "last", "seconds")

    def __init__(self, first: float) -> None:
        self.first = self.last = first
        self.seconds = 0.0

    def add(self, since: float, until: float) -> None:
        """Adds a time of the same thread."""
        self.first = min(self.first, since)
        self.last = max(self.last, until)
        self.seconds += until - since

    def join(self, other: "_Spent") -> None:
        """Adds the time of another thread."""
        self.first = min(self.first, other.first)
        self.last = max(self.last, other.last)
        self.seconds += other.seconds


class _Own(threading.local):
    """Times of the calling thread."""

    def __init__(self, threads: "list[Mapping[str, _Spent]]") -> None:
        self.times: dict[str, _Spent] = {}
        threads.append(self.times)


class _Span:
    """A context that measures its duration."""

    __slots__ = ("_meter", "name", "since")

    def __init__(self, meter: Meter, name: str) -> None:
        self._meter = meter
        self.name = name
        self.since = 0.0

    def __enter__(self) -> None:
        self.since = self._meter.clock()
        self._meter.under_way[id(self)] = self


class _Part(_Span):
    """A part of the operation, in any thread."""

    __slots__ = ()

    def __exit__(self, *_: object) -> None:
        del self._meter.under_way[id(self)]
        self._meter.end_part(self.name, self._meter.clock() - self.since)


class _Phase(_Span):
    """A phase of one thread, which the profiler of jax shows, too."""

    __slots__ = ("_trace",)

    def __enter__(self) -> None:
        self._trace = self._meter.trace_span(self.name)
        if self._trace is not None:
            self._trace.__enter__()
        super().__enter__()

    def __exit__(self, *_: object) -> None:
        if self._trace is not None:
            self._trace.__exit__(None, None, None)
        del self._meter.under_way[id(self)]
        self._meter.spend(self.name, self.since)


def progress_bar() -> ProgressCallback:
    """Returns a callback for ``progress=`` that draws a bar on stderr.

    The bar appears in terminals and notebooks only. One callback serves any number of
    saves and restores; each has its own bar.

    Example:
        >>> import storesvc_client as store
        >>> with store.connect("memory://") as client:
        ...     run = client.run("docs/bars")
        ...     save = run.save(0, {"x": 1.0}, progress=store.progress_bar())
        ...     save.result().step
        0
    """
    bars: dict[str, tqdm] = {}

    def show(progress: Progress) -> None:
        title = f"{progress.what} {progress.name}"
        if title not in bars:
            # imported late, as it takes time
            from tqdm.auto import tqdm

            is_seen = sys.stderr.isatty() or "ipykernel" in sys.modules
            bars[title] = tqdm(
                desc=title,
                total=progress.total_bytes,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                file=sys.stderr,
                disable=not is_seen,
            )
        bar = bars[title]
        bar.set_postfix_str(progress.slowest, refresh=False)
        bar.update(progress.done_bytes - bar.n)
        if progress.is_done:
            bars.pop(title).close()

    return show
