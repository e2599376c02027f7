"""Runs blocking calls of a file system in daemon threads with deadlines.

``asyncio.to_thread`` shares its threads with all other work, and the interpreter joins
them at exit. Here a file system that hangs occupies few threads and delays no exit:

1. A call that exceeds its deadline fails. Its thread cannot be stopped, so it is
   abandoned, and a new thread replaces it.
2. Until an abandoned call returns, further calls for its path fail at once.
3. Before the deadline, few calls for one path run concurrently.
4. The number of abandoned threads is bounded, and all threads are daemons.
"""

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from storesvc.errors import StorageUnavailableError

T = TypeVar("T")

THREADS: Final = 32
"""Maximum concurrent calls. Others are queued, which counts towards their deadline."""

CALLS_PER_PATH: Final = 4
"""Maximum concurrent calls for one path."""

MAX_ABANDONED: Final = 64
"""Maximum threads of calls past their deadline; at this number every call fails."""

IDLE_SECONDS: Final = 10.0
"""Time after which an idle thread ends."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Call(Generic[T]):
    """A call for a path; the arguments of ``FileThreads.run``."""

    path: str
    function: Callable[[], T]
    discard: Callable[[T], object] | None
    instead: Callable[[], object] | None
    loop: asyncio.AbstractEventLoop
    result: "asyncio.Future[T]"
    deadline: asyncio.TimerHandle | None = None
    is_running: bool = False
    is_abandoned: bool = False


class FileThreads:
    """Runs the blocking calls of one storage."""

    def __init__(self, name: str) -> None:
        """Creates no thread yet.

        Args:
            name: The storage's name in errors.
        """
        self._name = name
        self._queue: deque[_Call[Any]] = deque()
        self._changed = threading.Condition()
        self._threads = 0
        """Number of threads, without the abandoned ones."""
        self._idle = 0
        self._running: Counter[str] = Counter()
        """Running calls by path, abandoned ones included."""
        self._abandoned: Counter[str] = Counter()
        """Abandoned calls by path."""

    async def run(
        self,
        path: str,
        function: Callable[[], T],
        *,
        seconds: float | None,
        discard: Callable[[T], object] | None = None,
        instead: Callable[[], object] | None = None,
    ) -> T:
        """Runs a blocking function, and returns its result.

        Args:
            path: The path that the function reads or writes.
            function: The blocking function.
            seconds: Deadline, time in the queue included; None for no deadline.
            discard: Called with the result, in a new thread, if the caller no longer
                waits for it.
            instead: Called, in a new thread, if the caller stops waiting before the
                function begins.

        Raises:
            StorageUnavailableError: An earlier call for the path has not returned, or
                too many calls for other paths have not.
            TimeoutError: The deadline has passed.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        call = _Call(path, function, discard, instead, loop, result)
        try:
            self._submit(call)
        except StorageUnavailableError:
            _skip(call)
            raise
        if seconds is not None:
            call.deadline = loop.call_later(seconds, self._expire, call)
        try:
            return await result
        finally:
            with self._changed:
                if call.deadline is not None and not call.is_running:
                    call.deadline.cancel()

    def _submit(self, call: _Call[Any]) -> None:
        with self._changed:
            if call.path in self._abandoned:
                raise StorageUnavailableError(
                    f"{call.path}: an earlier call for this file has not returned; "
                    "check the disk or the network that holds it, and try again",
                    storage=self._name,
                )
            if self._abandoned.total() >= MAX_ABANDONED:
                raise StorageUnavailableError(
                    f"{call.path}: {MAX_ABANDONED} calls for other files have not "
                    "returned; check the disk or the network that holds the store",
                    storage=self._name,
                )
            self._queue.append(call)
            if len(self._queue) > self._idle and self._threads < THREADS:
                self._start()
            else:
                self._changed.notify()

    def _start(self) -> None:
        self._threads += 1
        threading.Thread(target=self._work, name="storesvc-file", daemon=True).start()

    def _expire(self, call: _Call[Any]) -> None:
        """Fails a call at its deadline, and replaces its thread."""
        with self._changed:
            if call.is_running:
                call.is_abandoned = True
                self._abandoned[call.path] += 1
                self._threads -= 1
                if self._queue:
                    self._start()
                _log.warning("%s: a call for this file does not return", call.path)
        if not call.result.done():
            call.result.set_exception(TimeoutError())

    def _work(self) -> None:
        while (call := self._next()) is not None:
            result, error = None, None
            try:
                result = call.function()
            except BaseException as e:  # noqa: BLE001 - the awaiting caller raises it
                error = e
            with self._changed:
                call.is_running = False
                _subtract(self._running, call.path)
                if call.is_abandoned:
                    _subtract(self._abandoned, call.path)
                    if self._queue and self._threads < THREADS:
                        self._start()  # for queued calls of this path
            with suppress(RuntimeError):  # the loop is closed
                call.loop.call_soon_threadsafe(_end, call, result, error)
            if call.is_abandoned:
                return
            del call, result, error  # an idle thread must not keep them alive

    def _next(self) -> _Call[Any] | None:
        """Waits for the next call to run; None ends the thread."""
        with self._changed:
            while (call := self._dequeue()) is None:
                self._idle += 1
                is_awake = self._changed.wait(IDLE_SECONDS)
                self._idle -= 1
                if not is_awake and not self._queue:
                    self._threads -= 1
                    return None
            call.is_running = True
            self._running[call.path] += 1
            return call

    def _dequeue(self) -> _Call[Any] | None:
        """Removes and returns the first call of the queue that may run."""
        while self._queue and self._queue[0].result.done():
            _skip(self._queue.popleft())  # its caller no longer waits
        for at, call in enumerate(self._queue):
            if not call.result.done() and self._running[call.path] < CALLS_PER_PATH:
                del self._queue[at]
                return call
        return None


def _skip(call: _Call[Any]) -> None:
    """Ends a call whose function was never called."""
    if call.instead is not None:
        threading.Thread(target=call.instead, daemon=True).start()


def _subtract(counter: Counter[str], path: str) -> None:
    counter[path] -= 1
    if not counter[path]:
        del counter[path]  # keeps the counter as small as the number of threads


def _end(call: _Call[Any], result: Any, error: BaseException | None) -> None:
    """Sets the result of a call; runs in the thread of its event loop."""
    if call.deadline is not None:
        call.deadline.cancel()
    if not call.result.done():
        if error is None:
            call.result.set_result(result)
        else:
            call.result.set_exception(error)
    elif error is None and call.discard is not None:
        threading.Thread(target=call.discard, args=(result,), daemon=True).start()
