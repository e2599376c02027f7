"""Sends the calls of a storage at the same time, with deadlines, hedges and retries.

``hedging`` decides when; this module sends, waits and abandons. `await_future` awaits a
TensorStore future, `run_in_daemon_thread` a blocking call; neither delays the exit of
the process or of a cancelled caller.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    ParamSpec,
    TypeAlias,
    TypeVar,
    assert_never,
)

from storesvc.errors import StorageUnavailableError
from storesvc.storage.hedging import (
    PAUSE_SECONDS,
    CallSchedule,
    Hedging,
    Limits,
    LogThrottle,
    Step,
)
from storesvc.storage.location import Storage
from storesvc.storage.threads import Threads
from storesvc.storage.throttle import (
    FIRST_PAUSE_SECONDS,
    MAX_PAUSE_SECONDS,
    Outcome,
    Window,
    classify,
)
from storesvc.telemetry.events import Retried, Stalled, publish

if TYPE_CHECKING:
    import tensorstore as ts

AT_ONCE: Final = 128
"""Small objects that one call reads or writes concurrently."""

S = TypeVar("S")
T = TypeVar("T")


async def gather_each(
    look: Callable[[S], Awaitable[T]], things: Iterable[S], *, at_once: int = AT_ONCE
) -> list[T]:
    """Returns the result of `look` for each item, in the order of the items."""
    slots = asyncio.Semaphore(at_once)

    async def bound_time(thing: S) -> T:
        async with slots:
            return await look(thing)

    # tasks at once: Ctrl-C between two leaves no coroutine unawaited
    tasks = [asyncio.ensure_future(bound_time(thing)) for thing in things]
    return await asyncio.gather(*tasks)


def retrieve_error(ended: "asyncio.Future[Any]") -> None:
    """Retrieves the error of a future that may never be awaited: asyncio would log
    it."""
    if not ended.cancelled():
        ended.exception()


@asynccontextmanager
async def background_task(
    call: Coroutine[Any, Any, T],
) -> AsyncIterator[asyncio.Task[T]]:
    """Runs a call while the context lasts; yields its task, whose result the caller
    awaits if it needs it. Cancels the call at the end, and waits until it has ended."""
    task = asyncio.create_task(call)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})
        retrieve_error(task)


async def run_all(*calls: Coroutine[Any, Any, None]) -> None:
    """Runs calls at the same time. The first error cancels the others, and is raised
    once they have ended."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for call in calls:
                tasks.create_task(call)
    except BaseExceptionGroup as e:
        raise e.exceptions[0] from None


ANSWER_SECONDS: Final = 60.0
"""Maximum time of a response, retries included, before the time for its bytes."""

LEAST_BYTES_PER_SECOND: Final = 1 << 20
"""Throughput by which the size of a request or response extends its deadline."""

DISK_SECONDS: Final = 30.0
"""Maximum time of a read from a local disk, before the time for its bytes. Shorter than
the deadline of the call, so that the error that names the file comes first."""

LATE_SECONDS: Final = 15.0
"""Time after which a warning is logged, before the time for the bytes."""


_log = logging.getLogger(__name__)
_throttle = LogThrottle()


def call_seconds(storage: Storage, *, size_bytes: int = 0) -> float | None:
    """Returns the deadline of a call in seconds; None for a bucket in memory.

    A local disk has a deadline too: it may be a network file system that hangs.
    """
    if storage.is_memory:
        return None
    return ANSWER_SECONDS + size_bytes / LEAST_BYTES_PER_SECOND


async def answer(storage: Storage, asked: Awaitable[T], *, size_bytes: int = 0) -> T:
    """Awaits a call of a storage within its deadline; arguments as of ``call_seconds``.

    Raises:
        TimeoutError: The deadline has passed.
    """
    seconds = call_seconds(storage, size_bytes=size_bytes)
    if seconds is None:
        return await asked
    late_seconds = seconds - ANSWER_SECONDS + LATE_SECONDS
    loop = asyncio.get_running_loop()
    late = loop.call_later(late_seconds, _log_late, storage, late_seconds, loop.time)
    try:
        async with asyncio.timeout(seconds):
            return await asked
    finally:
        late.cancel()


def _log_late(storage: Storage, seconds: float, clock: Callable[[], float]) -> None:
    publish(Stalled(storage=storage.spec["driver"]))
    if _throttle.admits(storage.name, now=clock()):
        _log.warning("%s has not answered for %.0f s", storage.name, seconds)


P = ParamSpec("P")


async def await_future(future: "ts.Future[T]") -> T:
    """Returns the result of a TensorStore future; on cancellation drops the future
    without `cancel()`, which can deadlock.

    Replaces ``await future``: if that is cancelled while the result arrives,
    ``tensorstore.Future.cancel`` holds the interpreter lock while it waits for a
    TensorStore thread, which waits for that lock (seen in 0.1.86, once in some 50,000
    cancellations at the moment of the result). A future without references is dropped
    as well, and blocks nothing.
    """
    if future.done():  # in memory; other tasks take turns nevertheless
        await asyncio.sleep(0)
        return future.result()
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def settle() -> None:
        if not done.done():
            done.set_result(None)

    def notify(_: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle)

    future.add_done_callback(notify)
    try:
        await done
    finally:
        future.remove_done_callback(notify)
    return future.result()


async def run_in_daemon_thread(
    function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Returns the result of a blocking function, run in a new daemon thread; on
    cancellation leaves the thread running.

    ``asyncio.to_thread`` uses executor threads, which the interpreter joins at exit: a
    storage that does not answer would delay the exit by the timeout of its client.
    """
    threads = Threads(1, "storesvc-blocking-call")
    # An error refers to the frames that it passed: if one of them referred to the
    # result, sockets of the function would wait for the garbage collector.
    waiting = [asyncio.wrap_future(threads.submit(function, *args, **kwargs))]
    threads.shutdown(wait=False)
    return await waiting.pop()


SEND_SECONDS: Final = 10.0
"""Time for which a request is repeated after transient errors. Calls of clients that
last longer are repeated by these."""

_windows: dict[tuple[object, ...], Window] = {}


def shared_window(storage: Storage) -> Window:
    """Returns the window of a bucket, which all transfers of this process share."""
    spec, ceiling = storage.spec, storage.concurrency
    key = (spec["driver"], spec.get("bucket"), storage.endpoint, ceiling)
    return _windows.setdefault(key, Window(ceiling))


Holding: TypeAlias = Callable[[Coroutine[Any, Any, None], bool], Awaitable[None]]
"""Awaits a wait of a request that is not sent yet; True: it has failed before."""


async def send(
    window: Window,
    ask: Callable[[], Awaitable[T]],
    *,
    size_bytes: int = 0,
    answered: Outcome = Outcome.ANSWERED,
    probe: Callable[[], Coroutine[Any, Any, None]] | None = None,
    patience_seconds: float | None = None,
    hold: Holding = lambda waiting, _: waiting,
) -> T:
    """Sends a request when the window of its bucket admits it, and again after
    transient errors.

    Args:
        probe: Returns once the bucket has answered a probe; called before each attempt
            while it rejects requests.
        patience_seconds: Time for which it is repeated; None: ``SEND_SECONDS``.
        hold: Awaits what the request waits for until it is sent.

    Raises:
        RuntimeError: The storage rejects all requests.
        Exception: The error of the last attempt.
    """
    clock = asyncio.get_running_loop().time
    until = clock() + (SEND_SECONDS if patience_seconds is None else patience_seconds)
    pause, has_failed = FIRST_PAUSE_SECONDS, False
    while True:
        if probe is not None and window.is_rejecting:
            try:
                await hold(probe(), has_failed)
            except StorageUnavailableError:
                if clock() >= until:
                    raise
                await hold(asyncio.sleep(FIRST_PAUSE_SECONDS), has_failed)
                continue
        while wait := window.admit(now=(began := clock())):
            if window.is_rejecting and began + wait > until:
                raise RuntimeError("it rejects requests because of load")
            await hold(asyncio.sleep(add_jitter(wait)), has_failed)
        outcome, asked = Outcome.DROPPED, 0.0
        try:
            found = await ask()
        except Exception as e:
            outcome, asked = classify(e), _retry_after_seconds(e)
            if not outcome.is_transient or clock() >= until:
                raise
        else:
            outcome = answered
            return found
        finally:
            window.release(
                outcome,
                began=began,
                now=clock(),
                size_bytes=size_bytes,
                retry_after_seconds=asked,
            )
        has_failed = True
        if outcome is Outcome.BROKEN:
            await hold(asyncio.sleep(add_jitter(pause)), has_failed)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)


def _retry_after_seconds(error: BaseException) -> float:
    """The pause that a response asks for; 0 without a ``Retry-After``, or where the
    client does not show headers, as TensorStore and obstore."""
    cause = error.__cause__
    # Google's client has a RetryError around the error with the response.
    response = getattr(getattr(cause, "cause", None), "response", cause)
    headers = getattr(response, "headers", None) or {}
    text = headers.get("retry-after", "")
    return float(text) if text.isdecimal() else 0.0


def add_jitter(seconds: float) -> float:
    """Returns up to twice as many seconds, so that processes do not repeat at once."""
    return seconds * (1 + random.random())  # noqa: S311 - no secret


class HedgedSender:
    """Sends the reads, the writes or the conditional changes of one storage."""

    def __init__(
        self,
        limits: Limits,
        operation: str,
        window: Window,
        *,
        probe: Callable[[], Coroutine[Any, Any, None]] | None = None,
        patience_seconds: float | None = None,
        log: logging.Logger = _log,
    ) -> None:
        """Creates it.

        Args:
            operation: Kind of the calls: "read", "write" or "change".
            log: Gets a line for a call that is late.
        """
        self._hedging = Hedging(limits)
        self.operation = operation
        self.send = partial(
            send, window, probe=probe, patience_seconds=patience_seconds
        )
        self._log = log
        self._throttle = LogThrottle()

    async def answer(
        self, ask: Callable[[], Awaitable[T]], *, size_bytes: int, name: str
    ) -> T:
        """Returns the first response.

        Args:
            ask: Sends one request and returns its response; called again for each
                hedge and retry.
            size_bytes: Size of the request or of the response.
            name: The call's name in log lines.

        Raises:
            TimeoutError: There was no response within the deadlines of all attempts.
            RuntimeError: The storage rejects all requests.
            Exception: The error of the last attempt.
        """
        clock = asyncio.get_running_loop().time
        call = HedgedCall(self, ask, self._hedging.begin(size_bytes, now=clock()), name)
        try:
            return await call.answer()
        finally:
            call.end()

    def log_late(self, name: str, seconds: float, *, now: float) -> None:
        """Logs that a call has no response for so long."""
        if self._throttle.admits("late", now=now):
            self._log.warning("%s has not answered for %.0f s; retrying", name, seconds)


class HedgedCall(Generic[T]):
    """One call, and its requests in flight."""

    def __init__(
        self,
        sender: HedgedSender,
        ask: Callable[[], Awaitable[T]],
        schedule: CallSchedule,
        name: str,
    ) -> None:
        self._sender = sender
        self._ask = ask
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self._name = name
        self._in_flight: list[asyncio.Future[T]] = []
        """Requests in flight, the oldest first."""
        self._schedule = schedule
        self._changed: asyncio.Future[None] = self._loop.create_future()
        """Done once a request has ended, a step is due, or the schedule has changed."""
        self._is_answered = False

    async def answer(self) -> T:
        """Sends requests until one succeeds, or the last one in flight fails."""
        self._send()
        while True:
            self._changed = self._loop.create_future()
            timer = self._loop.call_at(self._schedule.due, self._wake)
            try:  # not asyncio.wait, which takes longer than all the rest
                await self._changed
            finally:
                timer.cancel()
            done = [one for one in self._in_flight if one.done()]
            self._in_flight = [one for one in self._in_flight if one not in done]
            # An error is no response while another request is in flight: if a hedge
            # fails its condition, the first request has perhaps made the change, and a
            # conflict would be reported for a write that took effect.
            good = [one for one in done if one.exception() is None]
            if good or (done and not self._in_flight):
                self._is_answered = True
                ended, done, good = good or done, [], []
                # An error refers to this frame, which must not refer to its request.
                return ended.pop().result()
            if not done:
                self._step()

    def end(self) -> None:
        """Abandons the requests in flight."""
        self._abandon(self._in_flight)
        if self._is_answered:
            self._schedule.record_answer(now=self._clock())
        else:
            self._schedule.record_abandonment()

    def _wake(self, _ended: "asyncio.Future[T] | None" = None) -> None:
        if not self._changed.done():
            self._changed.set_result(None)

    def _step(self) -> None:
        operation = self._sender.operation
        match self._schedule.step(now=self._clock()):
            case Step.FAIL:
                raise TimeoutError
            case Step.HEDGE:
                publish(Retried(operation=operation, kind="hedge"))
                self._send()
            case Step.RETRY:
                self._abandon(self._in_flight[self._schedule.kept :])
                publish(Retried(operation=operation, kind="retry"))
                self._log_late()
                self._send()
            case Step.WAIT:
                pass
            case step:
                assert_never(step)

    def _log_late(self) -> None:
        now = self._clock()
        self._sender.log_late(self._name, now - self._schedule.began, now=now)

    def _send(self) -> None:
        sending = self._sender.send(
            self._ask, size_bytes=self._schedule.size_bytes, hold=self._hold
        )
        self._in_flight.append(asyncio.ensure_future(sending))
        self._in_flight[-1].add_done_callback(self._wake)

    async def _hold(self, waiting: Coroutine[Any, Any, None], has_failed: bool) -> None:  # noqa: FBT001 - see `Holding`
        """Awaits what a request waits for; the deadline of the only one begins then."""
        if has_failed and self._clock() - self._schedule.began > PAUSE_SECONDS:
            self._log_late()
        if len(self._in_flight) != 1:
            await waiting
            return
        self._schedule.hold()
        try:
            await waiting
        finally:
            self._schedule.resume(now=self._clock())
            self._wake()

    def _abandon(self, abandoned: list[asyncio.Future[T]]) -> None:
        for one in abandoned:
            one.cancel()
        self._in_flight = [one for one in self._in_flight if one not in abandoned]
