"""Logs waits for a server: whatever waits for one for longer than two seconds says so.

Each call registers for as long as it lasts, with all its retries; a thread looks at
those that last. A call that should be answered at once is logged where it is not. One
that may take long, such as a stream of chunks, is logged where it is retried, or where
the server does not answer another call meanwhile either.
"""

import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

from storesvc_client.errors import StoreError, UnavailableError

WARN_SECONDS: Final = 2.0
"""How long a call may wait before that is logged."""

LOOK_SECONDS: Final = 0.25
"""How often the thread looks."""

_IDLE_LOOKS: Final = 40
"""After how many looks at nothing the thread ends; the next call starts another."""

_log = logging.getLogger(__name__)


class Wait:
    """The wait for the answer to one call, with all its retries."""

    def __init__(self, call: str, *, is_quick: bool, patience: float) -> None:
        """Begins.

        Args:
            call: The rpc.
            is_quick: Whether a server that is alive answers it at once.
            patience: Seconds from now for which it is retried after an error.
        """
        self.call = call
        self.is_quick = is_quick
        self.is_late = False
        """Whether it has lasted for too long, as of the last look."""
        self.error: StoreError | None = None
        """Of the last attempt."""
        self._retried_until = time.monotonic() + patience
        self._failed_at: float | None = None
        """When the first attempt failed."""
        self._is_pausing = False
        """Whether it waits for its next attempt."""
        self.try_for(patience)

    def try_for(self, seconds: float) -> None:
        """Notes the beginning of an attempt.

        Args:
            seconds: How long it may take.
        """
        now = time.monotonic()
        self._until = now + seconds
        self._is_pausing = False
        self._looked_at, self._pause = now, WARN_SECONDS

    def fail(self, error: StoreError) -> None:
        """Notes that an attempt failed; another one may follow."""
        self.error, self._is_pausing = error, True
        if self._failed_at is None:
            self._failed_at = time.monotonic()

    def look(self, answers: Callable[[], bool]) -> None:
        """Finds out whether it has lasted for too long.

        Args:
            answers: Asks whether the server answers.
        """
        self.is_late = self._found_late(answers)

    def _found_late(self, answers: Callable[[], bool]) -> bool:
        now = time.monotonic()
        if self._is_pausing:
            return self._failed_at is not None and now - self._failed_at > WARN_SECONDS
        if now - self._looked_at < self._pause:
            return self.is_late
        if self.is_quick:
            return True
        # Less and less often: it may be one of very many processes.
        self._looked_at, self._pause = now, 2 * self._pause
        return not answers()

    def text(self, address: str) -> str:
        """Returns what is waited for, until when and why."""
        now = time.monotonic()
        until = self._retried_until if self.error else self._until
        if self.error and not isinstance(self.error, UnavailableError):
            until = now  # the server lives, and is waited for as long as it says
        why = str(self.error) if self.error else "it has not answered yet"
        limit = ""
        if now < until < now + 1e6:
            clock = time.strftime("%H:%M:%S", time.localtime(time.time() + until - now))
            limit = f" until {clock}, for {until - now:.0f} s more"
        return f"waiting for store {address} to answer {self.call}{limit}: {why}"


class Waits:
    """The waits of one connection."""

    def __init__(self, address: str, answers: Callable[[], bool]) -> None:
        """Has none.

        Args:
            address: What messages call the store.
            answers: Asks whether the server answers.
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
        """Logs a warning if what is inside lasts for too long; see ``Wait``."""
        wait = Wait(call, is_quick=is_quick, patience=patience)
        with self._lock:
            self._waits.add(wait)
            # one that a fork left behind is not alive
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._look, name="storesvc-waits", daemon=True
                )
                self._thread.start()
        try:
            yield wait
        finally:
            with self._lock:
                self._waits.discard(wait)

    @property
    def trouble(self) -> str:
        """What is waited for, where the server does not answer; "": it does."""
        with self._lock:
            for wait in self._waits:
                lasts = wait.is_late and isinstance(wait.error, UnavailableError | None)
                if lasts:
                    return wait.text(self._address)
        return ""

    @property
    def has_failed(self) -> bool:
        """Whether a call that lasts still has failed once, as its server was not
        there."""
        with self._lock:
            return any(isinstance(w.error, UnavailableError) for w in self._waits)

    def _look(self) -> None:
        idle = 0
        while True:
            time.sleep(LOOK_SECONDS)
            with self._lock:
                waits = list(self._waits)
                idle = 0 if waits else idle + 1
                if idle > _IDLE_LOOKS:
                    self._thread = None
                    return
            for wait in waits:
                was_late = wait.is_late
                wait.look(self._answers)
                with self._lock:
                    lasts = wait in self._waits
                if wait.is_late and lasts and not was_late:
                    _log.warning("%s", wait.text(self._address))
