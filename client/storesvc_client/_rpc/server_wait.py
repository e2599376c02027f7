"""Logs waits for a server that last longer than two seconds.

Each call registers for as long as it and its retries last; a background thread checks
the registered calls. A call that a live server answers at once is logged if it is not
answered. A call that may take long, such as a stream of chunks, is logged only if it is
being retried, or if the server does not answer a probe either.
"""

import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

from storesvc_client.errors import StoreError, UnavailableError

WARN_SECONDS: Final = 2.0
"""Time after which a waiting call is logged."""

POLL_SECONDS: Final = 0.25
"""Interval between checks of the thread."""

_IDLE_CHECKS: Final = 40
"""Checks without any call after which the thread ends; the next call starts another."""

_log = logging.getLogger("storesvc_client")


class Wait:
    """The wait for one call, including its retries."""

    def __init__(self, call: str, *, is_quick: bool, patience: float) -> None:
        """Starts the wait.

        Args:
            call: Name of the rpc.
            is_quick: Whether a live server answers it at once.
            patience: Seconds from now for which it is retried after an error.
        """
        self.call = call
        self.is_quick = is_quick
        self.is_late = False
        """True if it had lasted too long at the last check."""
        self.error: StoreError | None = None
        """Error of the last attempt."""
        self._retried_until = time.monotonic() + patience
        self._failed_at: float | None = None
        """Time of the first failed attempt."""
        self._is_pausing = False
        """True between two attempts."""
        self.try_for(patience)

    def try_for(self, seconds: float) -> None:
        """Records the start of an attempt.

        Args:
            seconds: Timeout of the attempt.
        """
        now = time.monotonic()
        self._until = now + seconds
        self._is_pausing = False
        self._checked_at, self._pause = now, WARN_SECONDS

    def fail(self, error: StoreError) -> None:
        """Records that an attempt failed; another one may follow."""
        self.error, self._is_pausing = error, True
        if self._failed_at is None:
            self._failed_at = time.monotonic()

    def check(self, answers: Callable[[], bool]) -> None:
        """Updates ``is_late``.

        Args:
            answers: Probes the server; returns whether it answers.
        """
        self.is_late = self._found_late(answers)

    def _found_late(self, answers: Callable[[], bool]) -> bool:
        now = time.monotonic()
        if self._is_pausing:
            return self._failed_at is not None and now - self._failed_at > WARN_SECONDS
        if now - self._checked_at < self._pause:
            return self.is_late
        if self.is_quick:
            return True
        # Probe less and less often, because very many processes may do so.
        self._checked_at, self._pause = now, 2 * self._pause
        return not answers()

    def text(self, address: str) -> str:
        """Returns what the client waits for, until when, and why."""
        now = time.monotonic()
        until = self._retried_until if self.error else self._until
        if self.error and not isinstance(self.error, UnavailableError):
            until = now  # the server is alive and sets the time of the retry
        why = str(self.error) if self.error else "it has not answered yet"
        limit = ""
        if now < until < now + 1e6:
            clock = time.strftime("%H:%M:%S", time.localtime(time.time() + until - now))
            limit = f" until {clock}, for {until - now:.0f} s more"
        return f"waiting for store {address} to answer {self.call}{limit}: {why}"


class Waits:
    """The waits of one connection. Thread-safe."""

    def __init__(self, address: str, answers: Callable[[], bool]) -> None:
        """Creates an empty set of waits.

        Args:
            address: Name of the store in messages.
            answers: Probes the server; returns whether it answers.
        """
        self._address = address
        self._answers = answers
        self._lock = threading.Lock()
        self._waits: set[Wait] = set()
        self._thread: threading.Thread | None = None

    @contextmanager
    def during(
        self, call: str, *, patience: float, is_quick: bool = False
    ) -> Generator[Wait]:
        """Logs a warning if the body lasts too long; see ``Wait``."""
        wait = Wait(call, is_quick=is_quick, patience=patience)
        with self._lock:
            self._waits.add(wait)
            # after a fork, the parent's thread is not alive in the child
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._check, name="storesvc-waits", daemon=True
                )
                self._thread.start()
        try:
            yield wait
        finally:
            with self._lock:
                self._waits.discard(wait)

    @property
    def trouble(self) -> str:
        """Description of the wait if the server does not answer, else ""."""
        with self._lock:
            for wait in self._waits:
                lasts = wait.is_late and isinstance(wait.error, UnavailableError | None)
                if lasts:
                    return wait.text(self._address)
        return ""

    @property
    def has_failed(self) -> bool:
        """True if a call in progress has failed because the server was unavailable."""
        with self._lock:
            return any(isinstance(w.error, UnavailableError) for w in self._waits)

    def _check(self) -> None:
        idle = 0
        while True:
            time.sleep(POLL_SECONDS)
            with self._lock:
                waits = list(self._waits)
                idle = 0 if waits else idle + 1
                if idle > _IDLE_CHECKS:
                    self._thread = None
                    return
            for wait in waits:
                was_late = wait.is_late
                wait.check(self._answers)
                with self._lock:
                    lasts = wait in self._waits
                if wait.is_late and lasts and not was_late:
                    _log.warning("%s", wait.text(self._address))
