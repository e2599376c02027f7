"""Pauses of Python's garbage collector, while many objects are made that stay.

It goes through all objects of a process whenever a quarter more have come to stay:
for a tree of 100,000 leaves that takes longer than to make them. A pause ends as it
found things, whatever other threads do meanwhile, and frees by counting references
as ever; it is for seconds of work that waits for nothing.

>>> with collector_paused():
...     leaves = [[number] for number in range(100_000)]
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

__all__ = ["collector_paused"]


class _Pauses:
    """Those under way in all threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._count = 0
        self._was_on = False

    def begin(self) -> None:
        with self._lock:
            if not self._count:
                self._was_on = gc.isenabled()
                gc.disable()
            self._count += 1

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count and self._was_on:
                gc.enable()


_pauses = _Pauses()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Runs what is inside, or the function that it decorates, without collections."""
    _pauses.begin()
    try:
        yield
    finally:
        _pauses.end()
