"""Pauses Python's garbage collector while many long-lived objects are created.

The collector traverses all objects whenever their number has grown by a quarter: for a
tree of 100,000 leaves that takes longer than creating them. The last pause of all
threads that ends restores the collector's state; reference counting continues. Use it
for work of seconds that waits for nothing.

>>> with collector_paused():
...     leaves = [[number] for number in range(100_000)]
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

__all__ = ["collector_paused"]


class _Pauses:
    """Number of active pauses, over all threads."""

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
    """Disables the collector within the context, or the decorated function."""
    _pauses.begin()
    try:
        yield
    finally:
        _pauses.end()
