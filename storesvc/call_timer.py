"""A stopwatch: what one call did, and what took how long, for the log.

Phases may overlap, as a stream waits for its client while it writes: their seconds do
not add up to those of the call.
"""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import contextmanager
from threading import Lock
from typing import TypeVar

T = TypeVar("T")


class Stopwatch:
    """The bytes and the seconds of a call. Threads may share it."""

    def __init__(self) -> None:
        """Begins now."""
        self._since = time.perf_counter()
        self._lock = Lock()
        self._phases: dict[str, float] = {}
        self.size_bytes = 0
        """Of stored chunks."""

    def __str__(self) -> str:
        """What the log says of it."""
        seconds = time.perf_counter() - self._since
        text = f"{self.size_bytes} bytes in {seconds:.3f} s"
        phases = (f"{name} {spent:.3f}" for name, spent in self._phases.items())
        return f"{text} ({', '.join(phases)})" if self._phases else text

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Counts the time of a context for a phase."""
        since = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - since
            with self._lock:
                self._phases[name] = self._phases.get(name, 0.0) + spent

    async def waits(self, name: str, stream: AsyncIterator[T]) -> AsyncGenerator[T]:
        """Yields what a stream brings, and counts the waiting for a phase."""
        while True:
            with self.phase(name):
                try:
                    found = await anext(stream)
                except StopAsyncIteration:
                    return
            yield found
