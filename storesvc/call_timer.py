"""Times the phases of one call for the log.

Phases may overlap: a stream can wait for its client while it writes. Their seconds
therefore do not add up to the duration of the call.
"""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import contextmanager
from threading import Lock
from typing import TypeVar

T = TypeVar("T")


class Stopwatch:
    """The bytes and the seconds of one call. Thread-safe."""

    def __init__(self) -> None:
        """Starts the timer."""
        self._since = time.perf_counter()
        self._lock = Lock()
        self._phases: dict[str, float] = {}
        self.size_bytes = 0
        """Bytes of stored chunks that the call moved."""

    def __str__(self) -> str:
        """Returns the text for the log."""
        seconds = time.perf_counter() - self._since
        text = f"{self.size_bytes} bytes in {seconds:.3f} s"
        phases = (f"{name} {spent:.3f}" for name, spent in self._phases.items())
        return f"{text} ({', '.join(phases)})" if self._phases else text

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Adds the duration of the context to a phase."""
        since = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - since
            with self._lock:
                self._phases[name] = self._phases.get(name, 0.0) + spent

    async def waits(self, name: str, stream: AsyncIterator[T]) -> AsyncGenerator[T]:
        """Yields the items of a stream; adds the time of waiting to a phase."""
        while True:
            with self.phase(name):
                try:
                    found = await anext(stream)
                except StopAsyncIteration:
                    return
            yield found
