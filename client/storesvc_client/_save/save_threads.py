"""The background threads of a run's saves."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

from storesvc.storage.threads import Threads

T = TypeVar("T")

_MAX_WAITING: Final = 32
"""Joint saves that wait for other processes at a time."""


class SaveThreads:
    """Threads that start with the first task and end with ``shutdown``.

    One thread copies snapshots, one writes chunks, each for one save after another; the
    commits of joint saves, which wait for other processes, have threads of their own.
    """

    def __init__(self, run: str) -> None:
        """Creates no thread yet.

        Args:
            run: Name of the run, for the names of threads.
        """
        self._run = run
        self._pools: dict[str, Threads] = {}

    def copy(self, act: Callable[[], T]) -> "Future[T]":
        """Runs a function after the earlier ones in the thread of snapshots."""
        return self._pool(f"storesvc-copy-{self._run}", 1).submit(act)

    def write(self, act: Callable[[], T]) -> "Future[T]":
        """Runs a function after the earlier ones in the thread of writing."""
        return self._pool(f"storesvc-save-{self._run}", 1).submit(act)

    def wait(self, act: Callable[[], T]) -> "Future[T]":
        """Runs a function that waits for other processes."""
        return self._pool("storesvc-await", _MAX_WAITING).submit(act)

    def shutdown(self) -> None:
        """Waits for the threads, as a failed save may still be ending; the next task
        starts new ones."""
        while self._pools:
            self._pools.popitem()[1].shutdown()

    def _pool(self, name: str, threads: int) -> Threads:
        if name not in self._pools:
            self._pools[name] = Threads(threads, name)
        return self._pools[name]
