"""The progress of a save or a restore: how far it is, and what took how long.

A ``Meter`` is fed by all threads of one save or restore. Its times are sums over these
threads, and no part of a thread's time counts twice: phases do not hold one another.

Whoever asked for it is told now and then, by one thread at a time, whichever is at
hand, and once more at the end. What their callback raises ends a restore, whose caller
has lost nothing by that; a save goes on without it and raises it once it is committed,
as a checkpoint is worth more than the news of it.

Example:
    >>> meter = Meter("save", "docs/example@0")
    >>> with meter, meter.phase("write"):
    ...     meter.add(8)
    >>> meter.done_bytes
    8
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, NamedTuple, Protocol, Self

INTERVAL_SECONDS: Final = 0.1
"""How long a callback is left alone at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a save or a restore is."""

    what: Literal["save", "restore"]
    name: str
    """``namespace/run@step``."""
    done_bytes: int
    """Of stored chunks: of a save those that are written, on their way to the server,
    or there already; of a restore those that are checked and in place."""
    total_bytes: int
    seconds: float
    """Since it began."""
    timings: Mapping[str, float]
    """Seconds by phase, over all threads."""
    slowest: str
    """What has been under way the longest by now, a data file, a stream or a phase; "":
    nothing is."""
    slowest_seconds: float
    """How long it has been."""
    is_done: bool
    """Whether this is the last word, be it of success or of failure."""

    @property
    def rate_bytes_per_second(self) -> float:
        """The mean since it began."""
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
    """A part that has ended."""

    name: str
    seconds: float


class Meter:
    """What the threads of one save or restore have done. As a context: all of it, from
    the first byte to the last."""

    def __init__(
        self,
        what: Literal["save", "restore"],
        name: str,
        callback: ProgressCallback | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        within: "Meter | None" = None,
    ) -> None:
        """Begins now.

        Args:
            what: Is under way.
            name: Of the checkpoint.
            callback: Is told of it; None: nobody is.
            clock: Tells seconds.
            within: A meter for which all of this counts too, but for the bytes.
        """
        self._what = what
        self._name = name
        self._callback = callback
        self.clock = clock
        self._since = clock()
        self._told = self._since
        self._lock = threading.Lock()
        self._telling = threading.Lock()
        self._within = within
        self.under_way: dict[int, _Span] = within.under_way if within else {}
        """What began and has not ended, by id, in the order of beginning."""
        self.slowest = Ended("", 0.0)
        """The part that was under way the longest, of those that have ended."""
        self.threads: list[Mapping[str, float]] = within.threads if within else []
        """Seconds by phase, of each thread."""
        self._own = _Own(self.threads)
        self._error: BaseException | None = None
        self.done_bytes = 0
        self.total_bytes = 0
        """As far as it is known yet."""

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self.clock() - self._since

    @property
    def timings(self) -> dict[str, float]:
        """Seconds by phase, over all threads."""
        total: dict[str, float] = {}
        # copies: the threads go on meanwhile
        for spent in list(self.threads):
            for phase, seconds in dict(spent).items():
                total[phase] = total.get(phase, 0.0) + seconds
        return total

    @property
    def times(self) -> defaultdict[str, float]:
        """Seconds by phase of the thread that asks, to add to where a context for each
        small chunk would cost too much."""
        return self._own.times

    def add(self, size_bytes: int) -> None:
        """Takes note that so many more bytes are done.

        Raises:
            CallbackFailedError: This restore is to end.
        """
        with self._lock:
            self.done_bytes += size_bytes
        if self._callback is not None:
            self._tell(self._callback)

    def phase(self, name: str) -> "_Phase":
        """Returns a context whose time counts for a phase; it may hold no other."""
        return _Phase(self, name)

    def part(self, name: str) -> "_Part":
        """Returns a context in which a part, such as a data file, is under way."""
        return _Part(self, name)

    def end_part(self, name: str, seconds: float) -> None:
        """Takes note of a part that has ended."""
        with self._lock:
            if seconds > self.slowest.seconds:
                self.slowest = Ended(name, seconds)
        if self._within is not None:
            self._within.end_part(name, seconds)

    @property
    def part_under_way(self) -> str:
        """What has been under way the longest by now, of parts, for people; "": none
        is."""
        for span in list(self.under_way.values()):
            if isinstance(span, _Part):
                return f"{span.name} for {self.clock() - span.since:.0f} s now"
        return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._telling:  # whoever tells still has the last word but one
            if self._callback is not None and self._error is None:
                self._call(self._callback, is_done=True)
            self._callback = None
        if self._error is not None and (
            error is None or isinstance(error, CallbackFailedError)
        ):
            raise self._error from None

    def _tell(self, callback: ProgressCallback) -> None:
        """Calls the callback, if it is time to and nobody else does."""
        if self._error is None:
            if self.clock() - self._told < INTERVAL_SECONDS:
                return
            if not self._telling.acquire(blocking=False):
                return
            try:
                if self.clock() - self._told >= INTERVAL_SECONDS:
                    self._call(callback, is_done=False)
                    self._told = self.clock()
            finally:
                self._telling.release()
        if self._error is not None and self._what == "restore":
            raise CallbackFailedError

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
    """The callback raised. It unwinds the threads of a restore, in which a callback's
    own error, say of a closed terminal, could be taken for one of the storage."""


class _Own(threading.local):
    """The times of the thread that asks."""

    def __init__(self, threads: list[Mapping[str, float]]) -> None:
        self.times = defaultdict[str, float](float)
        threads.append(self.times)


class _Span:
    """Something that is under way within a context."""

    __slots__ = ("_meter", "name", "since")

    def __init__(self, meter: Meter, name: str) -> None:
        self._meter = meter
        self.name = name
        self.since = 0.0

    def __enter__(self) -> None:
        self.since = self._meter.clock()
        self._meter.under_way[id(self)] = self


class _Part(_Span):
    """A part, by whichever thread."""

    __slots__ = ()

    def __exit__(self, *_: object) -> None:
        del self._meter.under_way[id(self)]
        self._meter.end_part(self.name, self._meter.clock() - self.since)


class _Phase(_Span):
    """A phase of one thread."""

    __slots__ = ()

    def __exit__(self, *_: object) -> None:
        del self._meter.under_way[id(self)]
        self._meter.times[self.name] += self._meter.clock() - self.since
