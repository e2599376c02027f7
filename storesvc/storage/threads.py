"""Threads for work in the background that ends when it has ended, and never sooner."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from threading import Lock, Semaphore, Thread
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Threads(ThreadPoolExecutor):
    """An executor that takes work until the process ends.

    The one of Python rejects work once the main thread has ended, although another
    thread may go on, save and restore. These threads are daemons: who needs the result
    at the exit waits for it. The base class is only what asyncio asks for.
    """

    def __init__(self, count: int, name: str = "storesvc") -> None:
        """Creates no thread yet.

        Args:
            count: Maximum number of threads.
            name: Beginning of their names.
        """
        self._count, self._name = count, name
        self._started: list[Thread] = []
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = Semaphore(0)
        self._lock = Lock()
        self._is_ended = False

    def submit(
        self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> "Future[T]":
        """See ``ThreadPoolExecutor.submit``."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_ended:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if not self._idle.acquire(blocking=False):
                self._start()
            self._tasks.put(partial(_run, future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, **_options: object) -> None:  # noqa: FBT001, FBT002 - the signature of the base class
        """See ``ThreadPoolExecutor.shutdown``; work that waits is never cancelled."""
        with self._lock:
            self._is_ended = True
            for _ in self._started:
                self._tasks.put(None)
        for thread in self._started if wait else ():
            thread.join()

    def __del__(self) -> None:
        self.shutdown(wait=False)

    def _start(self) -> None:
        number = len(self._started)
        if number < self._count:
            name = f"{self._name}_{number}"
            work = (self._tasks, self._idle)  # not self: it ends without references
            thread = Thread(target=_work, args=work, name=name, daemon=True)
            thread.start()
            self._started.append(thread)


def _work(tasks: "SimpleQueue[Callable[[], None] | None]", idle: Semaphore) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # a thread that waits must not keep it alive
        idle.release()


def _run(future: "Future[Any]", act: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = act()
    except BaseException as e:  # noqa: BLE001 - the caller raises it
        future.set_exception(e)
        del future, act  # the traceback refers to this frame
    else:
        future.set_result(result)
