"""Retries of calls: which errors, how often, with which pauses, and what users see.

Two kinds of errors are transient: a server that does not answer, and a server without
free memory that says when to retry. The first lasts as long as a restart. The second
lasts as long as other saves, but the server is alive, so it is retried for much longer.

Waits for a server that last longer than two seconds are logged. Each call registers for
as long as it and its retries last; a background thread checks the registered calls. A
call that a live server answers at once is logged if it is not answered. A call that may
take long, such as a stream of chunks, is logged only if it is being retried, or if the
server does not answer a probe either.

Users read a traceback from its end: the message, then the line of this library that
raised it. The frames by which a thread pool passes an error from one thread to another
add nothing to that, and are removed (``trim``).
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Final

from storesvc.storage.throttle import OUTAGE_SECONDS
from storesvc_client._values.arguments import NEVER, Deadline
from storesvc_client.errors import LimitError, StoreError, UnavailableError
from storesvc_proto.v1 import upload_service_pb2

WARN_SECONDS: Final = 2.0
"""Time after which a waiting call is logged."""

POLL_SECONDS: Final = 0.25
"""Interval between checks of the thread."""

_log = logging.getLogger("storesvc_client")


class Wait:
    """The wait for one call, including its retries."""

    def __init__(self, call: str, *, is_quick: bool, patience: float) -> None:
        """Starts the wait for an rpc, which a live server answers at once if
        `is_quick`, and which is retried for `patience` seconds after an error."""
        self.call = call
        self.is_quick = is_quick
        self.is_late = False
        """True if it had lasted too long at the last check."""
        self.error: StoreError | None = None
        """Error of the last attempt."""
        self._retried_until = time.monotonic() + patience
        self._failed_at: float | None = None
        """Time of the first failed attempt."""
        self._is_pausing = False
        """True between two attempts."""
        self.try_for(patience)

    def try_for(self, seconds: float) -> None:
        """Records the start of an attempt that ends after so many seconds."""
        now = time.monotonic()
        self._until = now + seconds
        self._is_pausing = False
        self._checked_at, self._pause = now, WARN_SECONDS

    def fail(self, error: StoreError) -> None:
        """Records that an attempt failed; another one may follow."""
        self.error, self._is_pausing = error, True
        if self._failed_at is None:
            self._failed_at = time.monotonic()

    def check(self, answers: Callable[[], bool]) -> None:
        """Updates ``is_late``; `answers` probes the server."""
        now = time.monotonic()
        if self._is_pausing:
            since = now if self._failed_at is None else self._failed_at
            self.is_late |= now - since > WARN_SECONDS
        elif now - self._checked_at >= self._pause:
            if not self.is_quick:
                # Probe less and less often, because very many processes may do so.
                self._checked_at, self._pause = now, 2 * self._pause
            self.is_late = self.is_quick or not answers()

    def text(self, address: str) -> str:
        """Returns what the client waits for, until when, and why."""
        now = time.monotonic()
        until = self._retried_until if self.error else self._until
        if self.error and not isinstance(self.error, UnavailableError):
            until = now  # the server is alive and sets the time of the retry
        why = str(self.error) if self.error else "it has not answered yet"
        limit = ""
        if now < until < now + 1e6:
            clock = time.strftime("%H:%M:%S", time.localtime(time.time() + until - now))
            limit = f" until {clock}, for {until - now:.0f} s more"
        return f"waiting for store {address} to answer {self.call}{limit}: {why}"


class Waits:
    """The waits of one connection. Thread-safe."""

    def __init__(self, address: str, answers: Callable[[], bool]) -> None:
        """Creates an empty set of waits; `answers` probes the server."""
        self._address = address
        self._answers = answers
        self._lock = threading.Lock()
        self._waits: set[Wait] = set()
        self._thread: threading.Thread | None = None

    @contextmanager
    def during(
        self, call: str, *, patience: float, is_quick: bool = False
    ) -> Generator[Wait]:
        """Logs a warning if the body lasts too long; see ``Wait``."""
        wait = Wait(call, is_quick=is_quick, patience=patience)
        with self._lock:
            self._waits.add(wait)
            # after a fork, the parent's thread is not alive in the child
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._check, name="storesvc-waits", daemon=True
                )
                self._thread.start()
        try:
            yield wait
        finally:
            with self._lock:
                self._waits.discard(wait)

    @property
    def trouble(self) -> str:
        """Description of the wait if the server does not answer, else ""."""
        with self._lock:
            for wait in self._waits:
                lasts = wait.is_late and isinstance(wait.error, UnavailableError | None)
                if lasts:
                    return wait.text(self._address)
        return ""

    @property
    def has_failed(self) -> bool:
        """True if a call in progress has failed because the server was unavailable."""
        with self._lock:
            return any(isinstance(w.error, UnavailableError) for w in self._waits)

    def _check(self) -> None:
        while True:
            time.sleep(POLL_SECONDS)
            with self._lock:
                waits = list(self._waits)
                if not waits:
                    self._thread = None  # the next call starts another
                    return
            for wait in waits:
                was_late = wait.is_late
                wait.check(self._answers)
                with self._lock:
                    lasts = wait in self._waits
                if wait.is_late and lasts and not was_late:
                    _log.warning("%s", wait.text(self._address))


_CARRIERS: Final = ("concurrent.futures", "contextlib")
"""Packages whose frames are removed."""

_OWN: Final = ("storesvc", *_CARRIERS)
"""Packages whose frames refer to nothing of the caller."""


def trim(error: BaseException) -> None:
    """Removes the frames of those packages from the traceback of an error."""
    entries = _entries(error.__traceback__)
    kept = [each for each in entries if not _belongs_to(each, _CARRIERS)]
    trace = None
    for each in reversed(kept):
        trace = TracebackType(trace, each.tb_frame, each.tb_lasti, each.tb_lineno)
    error.__traceback__ = trace


def clear_variables(error: BaseException) -> None:
    """Clears the variables of our frames that an error, or a cause of it, passed.

    A frame with a variable for the error is a cycle with it: without this, the buffers
    of a failed save or restore wait for Python's garbage collector, which restores
    pause.
    """
    seen: set[BaseException] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or one in seen:
            continue
        seen.add(one)
        waiting += (one.__cause__, one.__context__)
        for each in _entries(one.__traceback__):
            if _belongs_to(each, _OWN):
                with suppress(RuntimeError):  # it is still running
                    each.tb_frame.clear()


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _belongs_to(entry: TracebackType, packages: tuple[str, ...]) -> bool:
    name = str(entry.tb_frame.f_globals.get("__name__", ""))
    return name.startswith(packages)


PATIENCE_SECONDS: Final = 30.0
"""Maximum time for which a call without progress is retried: a server's restart."""

BUSY_SECONDS: Final = 600.0
"""Maximum time for which a call is retried while the server has no memory for it."""

SAVING: Final = upload_service_pb2.DESCRIPTOR.services_by_name[
    "UploadService"
].methods_by_name
"""Calls of a save: what it has stored so far is worth waiting for a bucket."""

LEAST_ATTEMPTS: Final = 2
"""Minimum attempts, however long each takes: a server that stops may hold a call for
its whole timeout."""

FIRST_PAUSE_SECONDS: Final = 0.1
"""Longest pause after the first attempt; doubles with each attempt."""

MAX_PAUSE_SECONDS: Final = 5.0
"""Longest pause, before what the server asks for."""

BEGINNINGS: Final = 5
"""Maximum starts of a long call that is cut off when a server ends and cannot be
resumed."""


def attempts(*, deadline: Deadline = NEVER, call: str = "") -> "Iterator[Attempt]":
    """Yields attempts at an idempotent call, at least ``LEAST_ATTEMPTS`` up to the
    deadline; pauses between them. `call` is the name of its rpc.

    Retries transient errors only; raises the last one, or, if the deadline cut that
    attempt off, the one before.

    >>> for attempt in attempts():
    ...     with attempt:
    ...         answer = 42
    """
    attempt = Attempt(deadline, outlasts=call in SAVING)
    longest = FIRST_PAUSE_SECONDS
    while True:
        yield attempt
        if (error := attempt.error) is None:
            return
        least = error.retry_seconds if _is_busy(error) else None
        pause = (least or 0.0) + random.uniform(0, longest)  # noqa: S311 - no secret
        longest = min(2 * longest, MAX_PAUSE_SECONDS)
        del error
        time.sleep(min(pause, max(0.0, deadline.left)))


class Attempt:
    """A context for an attempt at a call, and for the next one after an error that may
    pass, which it keeps."""

    def __init__(self, deadline: Deadline, *, outlasts: bool) -> None:
        """Creates it; `outlasts` an outage of the server's storage."""
        self._deadline = deadline
        self._outlasts = outlasts
        self._count = 0
        self._began = self._answered_at = time.monotonic()
        """Time of the first attempt, and of the last response of a live server."""
        self.error: StoreError | None = None
        """Error of the attempt before; None if this was the last one."""

    def __enter__(self) -> None:
        self._count += 1

    def __exit__(self, _kind: object, error: BaseException | None, _: object) -> bool:
        previous, self.error = self.error, None
        if not isinstance(error, StoreError):
            return False
        trim(error)
        was_cut = isinstance(error, UnavailableError) and self._deadline.left <= 0
        if is_transient(error) and not self._is_last(error):
            self.error = error
        elif was_cut and isinstance(previous, UnavailableError):
            raise previous from error
        return self.error is not None

    def _is_last(self, error: StoreError) -> bool:
        """Returns whether a kind of error has lasted too long."""
        now = time.monotonic()
        if self._deadline.left <= 0:
            return True
        if self._outlasts and _is_outage(error):
            return now - self._began >= OUTAGE_SECONDS
        if _is_busy(error):
            self._answered_at = now
            return now - self._began >= BUSY_SECONDS
        has_lasted = now - self._answered_at >= PATIENCE_SECONDS
        return has_lasted and self._count >= LEAST_ATTEMPTS


def is_transient(error: BaseException) -> bool:
    """Returns whether the same call may succeed soon."""
    return isinstance(error, UnavailableError) or _is_busy(error)


def _is_outage(error: StoreError) -> bool:
    """Returns whether a bucket fails; a disk that fails does so for good."""
    is_bucket = error.metadata.get("storage", "").startswith(("gs://", "s3://"))
    return is_bucket and error.reason == "STORAGE_UNAVAILABLE"


def _is_busy(error: BaseException) -> bool:
    """Returns whether a server has no free memory, or a quota no free call, now. A full
    storage gives a retry time, too, but is not transient: space must be freed first."""
    return (
        isinstance(error, LimitError)
        and error.reason in ("LIMIT_EXCEEDED", "QUOTA_EXCEEDED")
        and error.retry_seconds is not None
    )
