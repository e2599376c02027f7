"""Threads for work in the background that ends when it has ended, and never sooner."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from threading import Lock, Semaphore, Thread
from typing import Any, ParamSpec, TypeAlias, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Tasks: TypeAlias = "SimpleQueue[Callable[[], None] | None]"


class Threads(ThreadPoolExecutor):
    """An executor that takes work until the process ends, also after ``shutdown``.

    The one of Python rejects work once the main thread has ended, although another
    thread may go on, save and restore. These threads are daemons: who needs the result
    at the exit waits for it. The base class is only what asyncio asks for.
    """

    def __init__(self, count: int, name: str = "storesvc") -> None:
        """Creates no thread yet: at most so many, whose names begin so."""
        self._count, self._name = count, name
        self._lock = Lock()
        self._renew()

    def _renew(self) -> None:
        self._tasks: Tasks = SimpleQueue()
        self._idle = Semaphore(0)
        self._started: list[Thread] = []

    def submit(
        self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> "Future[T]":
        """See ``ThreadPoolExecutor.submit``."""
        future: Future[T] = Future()
        with self._lock:
            number = len(self._started)
            if not self._idle.acquire(blocking=False) and number < self._count:
                work = (self._tasks, self._idle)  # not self, so that __del__ is called
                name = f"{self._name}_{number}"
                thread = Thread(target=_work, args=work, name=name, daemon=True)
                self._started.append(thread)  # first: Ctrl-C may interrupt the start
                thread.start()
            self._tasks.put(partial(_run, future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, **_options: object) -> None:  # noqa: FBT001, FBT002 - the signature of the base class
        """Ends the threads after their work; the next task starts new ones."""
        with self._lock:
            tasks, started = self._tasks, self._started
            self._renew()
        for _ in started:
            tasks.put(None)
        for thread in filter(Thread.is_alive, started if wait else ()):
            thread.join()

    def __del__(self) -> None:
        for _ in self._started:  # no global name: at the exit, modules may be empty
            self._tasks.put(None)


def _work(tasks: Tasks, idle: Semaphore) -> None:
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
