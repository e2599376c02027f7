"""Cancels a call at each point where it waits, and checks that it releases everything.

A call may be cancelled between any two steps, as its client dies or its deadline
passes. The server here runs on an event loop that counts the suspensions of a call and
of the tasks that it starts, and cancels the call at one of them: as it begins to wait,
or late, when what it waits for has come, but before the call sees it. After that all
state that calls share must be as it was before.
"""

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import suppress
from contextvars import Context, ContextVar
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc

from storesvc.save.receiver import MAX_FILES
from storesvc.storage.file_bucket import FileBackend
from tests.support.thread_server import ThreadServer

SECONDS: Final = 60.0
"""Longest time for a call and its tasks to end."""

_CALL: Final = "_handle_exceptions"
"""The coroutine of gRPC that each of its calls runs in."""


class Started(NamedTuple):
    """A call that a client has begun."""

    cancel: Callable[[], Any]
    end: Callable[[], Any]
    """Reads all responses."""


Start = Callable[[], Started]
"""Function that begins a call; may be called repeatedly."""


class Cancellation:
    """Cancels the next call of a server at its n-th suspension."""

    def __init__(self, number: int, times: int, *, is_late: bool = False) -> None:
        """Waits for the call.

        Args:
            number: Number of the suspension; the first is 1.
            times: Number of cancels, at consecutive suspensions: the second one hits
                the call while it cleans up.
            is_late: Cancels when what the suspension waits for has come, in the same
                turn of the loop: the call never sees it.
        """
        self._numbers = range(number, number + times)
        self._is_late = is_late
        self._count = 0
        self._call: asyncio.Task[Any] | None = None
        self.tasks: list[asyncio.Task[Any]] = []
        """Tasks of the call, and those that it started."""
        self.was_reached = threading.Event()

    @property
    def awaits_call(self) -> bool:
        """True until the call begins."""
        return self._call is None

    def begin(self, call: asyncio.Task[Any]) -> None:
        """Notes that the call begins."""
        self._call = call

    def suspended(self, awaited: "asyncio.Future[Any] | None") -> None:
        """Notes that the call, or a task of it, is suspended.

        Args:
            awaited: What it waits for; None: for the next turn of the loop.
        """
        self._count += 1
        if self._count not in self._numbers or self._call is None:
            return
        if self._is_late and awaited is not None:
            # Before the task's own callback, which is added after the suspension.
            awaited.add_done_callback(lambda _: self._cancel())
        else:
            self._call.get_loop().call_soon(self._cancel)

    def _cancel(self) -> None:
        assert self._call is not None
        self._call.cancel()
        self.was_reached.set()


_current: ContextVar[Cancellation | None] = ContextVar("_current", default=None)


class _Counted(Coroutine[Any, Any, Any]):
    """A coroutine that counts its suspensions."""

    def __init__(self, inner: Any, cancellation: Cancellation) -> None:
        self._inner = inner
        self._cancellation = cancellation

    def send(self, value: Any) -> Any:
        found = self._inner.send(value)
        self._cancellation.suspended(found)
        return found

    def throw(self, *error: Any) -> Any:
        found = self._inner.throw(*error)
        self._cancellation.suspended(found)
        return found

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise NotImplementedError


class CancellingServer(ThreadServer):
    """A server whose next call can be cancelled at any suspension."""

    def __init__(self, root: Path) -> None:
        super().__init__(root.as_uri())
        self._folder = root
        self._next: Cancellation | None = None
        self.loop.set_task_factory(self._task)

    def sweep(
        self,
        start: Callable[[], Start],
        *,
        times: int,
        stride: int = 1,
        is_late: bool = False,
    ) -> Iterator[tuple[int, list[str]]]:
        """Cancels a call at each suspension until it ends before; yields the number of
        each suspension, and the resources that are not released after it.

        Args:
            start: Prepares a call.
            times: Number of cancels of each call.
            stride: Step between the suspensions.
            is_late: See `Cancellation`.
        """
        number = 1
        while (
            found := self._cancelled(
                start(), Cancellation(number, times, is_late=is_late)
            )
        ) is not None:
            yield number, found
            number += stride

    def _cancelled(self, start: Start, cancellation: Cancellation) -> list[str] | None:
        """Cancels a call; returns the resources that it does not release, or None if it
        ended before that suspension."""
        locks = self.run(_locks())
        self._next = cancellation
        started = start()
        threading.Thread(
            target=_cancel_when, args=(cancellation.was_reached, started), daemon=True
        ).start()
        with suppress(grpc.RpcError, grpc.FutureCancelledError):
            started.end()
        reached = cancellation.was_reached.is_set()
        cancellation.was_reached.set()  # ends the thread
        found = self._wait_for_rest(cancellation, locks)
        if not reached:
            return None
        return found + _repeated(start)

    def _wait_for_rest(
        self, cancellation: Cancellation, locks: dict[asyncio.Semaphore, int]
    ) -> list[str]:
        deadline = time.monotonic() + SECONDS
        while found := self.run(self._unrest(cancellation, locks)):
            if time.monotonic() > deadline:
                return found
            time.sleep(0.005)
        return []

    async def _unrest(
        self, cancellation: Cancellation, locks: dict[asyncio.Semaphore, int]
    ) -> list[str]:
        """Returns the resources that differ from before a call."""
        store, found = self.store, list[str]()
        found += [f"task {t!r} runs" for t in cancellation.tasks if not t.done()]
        found += [
            f"{lock!r}: expected {value}"
            for lock, value in locks.items()
            if lock._value != value
        ]
        admission, sender = store.receiver.admission, store.sender
        backend, calls = store.bucket._backend, list[Any]()
        if isinstance(backend, FileBackend):
            calls = list(backend._threads._queue)
        amounts = {
            "batch permits in use": MAX_FILES - admission.free,
            "streams that wait for a permit": admission.waiting,
            "writes that wait for a thread": sum(
                not call.result.done() for call in calls
            ),
            "bytes in the read buffer": sender._scheduler.size,
            "readers of the read buffer": len(sender._scheduler._readers),
            "reads in flight": len(sender._reads),
            "streams that wait for room": sender._waiting_for_room,
            "watches": store.watcher._watches,
            "feeds of watches": len(store.watcher._feeds),
            "parsed manifests on their way": len(store.catalog._manifests._loading),
            "open files": len(list(self._open_files())),
            "threads outside the pools": sum(
                t.name == "storesvc-blocking-call" for t in threading.enumerate()
            ),
        }
        found += [f"{n} {name}, expected 0" for name, n in amounts.items() if n]
        return found

    def _open_files(self) -> Iterator[str]:
        for descriptor in Path("/proc/self/fd").iterdir():
            try:
                target = descriptor.readlink()
            except OSError:  # closed since it was listed
                continue
            if target.is_relative_to(self._folder):
                yield str(target)

    def _task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Any,
        context: Context | None = None,
    ) -> asyncio.Task[Any]:
        """Task factory of the loop; counts the suspensions of the call's tasks."""
        if (
            self._next is not None
            and self._next.awaits_call
            and getattr(coroutine, "__qualname__", "") == _CALL
        ):
            _current.set(self._next)  # of the task that begins the call, and ends then
        cancellation = _current.get()
        if cancellation is None:
            return asyncio.Task(coroutine, loop=loop, context=context)
        counted = _Counted(coroutine, cancellation)
        task = asyncio.Task(counted, loop=loop, context=context)
        cancellation.tasks.append(task)
        if cancellation.awaits_call:
            cancellation.begin(task)
        return task


async def _locks() -> dict[asyncio.Semaphore, int]:
    """Returns the semaphores of the process, and the free amount of each."""
    found = (o for o in gc.get_objects() if isinstance(o, asyncio.Semaphore))
    return {semaphore: semaphore._value for semaphore in found}


def _cancel_when(reached: threading.Event, started: Started) -> None:
    reached.wait(SECONDS)
    started.cancel()


_ANSWERS: Final = {
    grpc.StatusCode.NOT_FOUND,  # the cancelled call took effect, and cannot be repeated
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.ALREADY_EXISTS,
}


def _repeated(start: Start) -> list[str]:
    """Returns the error of a call that follows a cancelled one."""
    try:
        start().end()
    except grpc.RpcError as e:
        assert isinstance(e, grpc.Call)
        if e.code() not in _ANSWERS:
            return [f"repeated: {e.code().name}: {e.details()}"]
    return []


def one_answer(method: Any, request: Any) -> Start:
    """Returns a function that begins a call with one response.

    Args:
        method: Method of a stub.
        request: Its request, or the requests.
    """

    def start() -> Started:
        call = method.future(_sent(request), timeout=SECONDS)
        return Started(call.cancel, call.result)

    return start


def many_answers(method: Any, request: Any, *, count: int | None = None) -> Start:
    """Returns a function that begins a call with a stream of responses.

    Args:
        method: Method of a stub.
        request: Its request, or the requests.
        count: Responses after which the client cancels; None: it reads all.
    """

    def start() -> Started:
        call = method(_sent(request), timeout=SECONDS)

        def end() -> None:
            for number, _ in enumerate(call, 1):
                if number == count:
                    call.cancel()
                    return

        return Started(call.cancel, end)

    return start


def _sent(request: Any) -> Any:
    return iter(request) if isinstance(request, Iterable) else request
