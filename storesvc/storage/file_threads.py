"""Threads for calls that a file system may block: reads, writes and syncs of files.

They are apart from the threads of ``asyncio.to_thread``, which all other work shares
and which the interpreter joins when it ends. A call that exceeds its deadline is
refused; its thread cannot be stopped, so it is abandoned and another takes its place.
Until it returns, further calls for the same place are refused at once, and before the
deadline few calls for one place run at a time: so a file that hangs occupies few
threads, however often it is asked for. The number of abandoned threads is bounded, and
they are daemons: a process ends without them.
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
"""Calls at a time. Others wait, which counts towards their deadline."""

PER_PLACE: Final = 4
"""Of them, for one place."""

MAX_ABANDONED: Final = 64
"""Threads whose calls have exceeded their deadline; then every call is refused."""

IDLE_SECONDS: Final = 10.0
"""After which a thread without work ends."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Call(Generic[T]):
    """A call for a place."""

    place: str
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
        """Prepares to run calls; threads start when they are needed.

        Args:
            name: What errors call the storage.
        """
        self._name = name
        self._queue: deque[_Call[Any]] = deque()
        self._changed = threading.Condition()
        self._threads = 0
        """Those that are not abandoned."""
        self._idle = 0
        self._running: Counter[str] = Counter()
        """By place; the abandoned included."""
        self._abandoned: Counter[str] = Counter()
        """By place."""

    async def run(
        self,
        place: str,
        function: Callable[[], T],
        *,
        seconds: float | None,
        discard: Callable[[T], object] | None = None,
        instead: Callable[[], object] | None = None,
    ) -> T:
        """Returns what a function returns.

        Args:
            place: What the function reads or writes.
            function: Blocks.
            seconds: How long it may take, with what it waits; None: any time.
            discard: Takes what the function returns where nobody waits for it any
                more, in a thread of its own.
            instead: Called, in a thread of its own, where the function never is, as
                nobody waits for it any more.

        Raises:
            StorageUnavailableError: An earlier call for the place, or too many for
                others, have not returned.
            TimeoutError: It takes longer than it may.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        call = _Call(place, function, discard, instead, loop, result)
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
            if call.place in self._abandoned:
                raise StorageUnavailableError(
                    f"{call.place}: an earlier call for this file has not returned; "
                    "check the disk or the network that it lies on, and try again",
                    storage=self._name,
                )
            if self._abandoned.total() >= MAX_ABANDONED:
                raise StorageUnavailableError(
                    f"{call.place}: {MAX_ABANDONED} calls for other files have not "
                    "returned; check the disk or the network that the store lies on",
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
        """Refuses a call that exceeds its deadline, and replaces its thread."""
        with self._changed:
            if call.is_running:
                call.is_abandoned = True
                self._abandoned[call.place] += 1
                self._threads -= 1
                if self._queue:
                    self._start()
                _log.warning("%s: a call for it does not return", call.place)
        if not call.result.done():
            call.result.set_exception(TimeoutError())

    def _work(self) -> None:
        while (call := self._next()) is not None:
            result, error = None, None
            try:
                result = call.function()
            except BaseException as e:  # noqa: BLE001 - for the caller, which waits
                error = e
            with self._changed:
                call.is_running = False
                _subtract(self._running, call.place)
                if call.is_abandoned:
                    _subtract(self._abandoned, call.place)
                    if self._queue and self._threads < THREADS:
                        self._start()  # for what waited for this place
            with suppress(RuntimeError):  # the loop is closed
                call.loop.call_soon_threadsafe(_end, call, result, error)
            if call.is_abandoned:
                return
            del call, result, error  # what they hold is not for the next to wait for

    def _next(self) -> _Call[Any] | None:
        """The next call, to be run; None: the thread shall end."""
        with self._changed:
            while (call := self._taken()) is None:
                self._idle += 1
                is_awake = self._changed.wait(IDLE_SECONDS)
                self._idle -= 1
                if not is_awake and not self._queue:
                    self._threads -= 1
                    return None
            call.is_running = True
            self._running[call.place] += 1
            return call

    def _taken(self) -> _Call[Any] | None:
        """Takes the first call from the queue that may run."""
        while self._queue and self._queue[0].result.done():
            _skip(self._queue.popleft())  # nobody waits for it any more
        for at, call in enumerate(self._queue):
            if not call.result.done() and self._running[call.place] < PER_PLACE:
                del self._queue[at]
                return call
        return None


def _skip(call: _Call[Any]) -> None:
    """Gives up a call whose function was never called."""
    if call.instead is not None:
        threading.Thread(target=call.instead, daemon=True).start()


def _subtract(counter: Counter[str], place: str) -> None:
    counter[place] -= 1
    if not counter[place]:
        del counter[place]  # it has as many entries as there are threads


def _end(call: _Call[Any], result: Any, error: BaseException | None) -> None:
    """Gives a call its result; in the thread of its loop."""
    if call.deadline is not None:
        call.deadline.cancel()
    if not call.result.done():
        if error is None:
            call.result.set_result(result)
        else:
            call.result.set_exception(error)
    elif error is None and call.discard is not None:
        threading.Thread(target=call.discard, args=(result,), daemon=True).start()
