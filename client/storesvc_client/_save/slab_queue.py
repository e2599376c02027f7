"""The outbox of a save: slabs on their way from the snapshot to the store.

The snapshot puts filled slabs in, and ends it; writers take them. Where it waits for
memory, and there is nothing to take, they are told so: what they hold back keeps it
from going on. Where the writing fails, the outbox is given up: the snapshot stops, and
what is in it goes back to the staging. Where the snapshot fails, the writers see its
error.
"""

import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Final

from storesvc_client._chunks.slabs import Filled, Slab
from storesvc_client._chunks.staging_pool import Bytes, Staging

LOOK_SECONDS: Final = 0.05
"""How often who waits for a slab looks whether the snapshot waits for memory."""

_AT_ONCE: Final = 16
"""Slabs that one question about what is to be sent is asked of."""

Choose = Callable[[Sequence[Filled]], None]
"""Takes out of slabs what need not be stored."""


class StarvedError(Exception):
    """There is nothing to take, as the snapshot waits for memory."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        """How often it has waited by now."""


class Outbox:
    """Filled slabs, in the order in which they came."""

    def __init__(self, staging: Staging, *, is_open: bool = False) -> None:
        """Is empty.

        Args:
            staging: The memory of slabs that are staged.
            is_open: Whether writers begin at once.
        """
        self._staging = staging
        self._queue: queue.SimpleQueue[Filled | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        """What the snapshot failed with."""
        self._starved = 0
        """How often the snapshot has waited for memory."""
        self._given_up = threading.Event()
        self._opened = threading.Event()
        """Whether writers may begin: they would keep the snapshot, which somebody waits
        for, from the processors and the memory."""
        if is_open:
            self._opened.set()

    @property
    def budget_bytes(self) -> int:
        """Of the staging."""
        return self._staging.budget_bytes

    @property
    def is_given_up(self) -> bool:
        """Whether nobody takes anything out any more."""
        return self._given_up.is_set()

    def buffer(self, slab: Slab) -> "Bytes | None":
        """Returns memory for a slab, once there is some; None: given up."""
        return self._staging.take(
            slab.size, given_up=self._given_up.is_set, waiting=self._starve
        )

    def _starve(self) -> None:
        self._starved += 1
        self._opened.set()

    def give_back(self, filled: Filled) -> None:
        """Takes the memory of a slab back that was stored."""
        if filled.buffer is not None:
            self._staging.give_back(filled.buffer)

    def drop(self, buffer: Bytes) -> None:
        """Takes memory back that was not filled."""
        self._staging.give_back(buffer)

    def put(self, filled: Filled) -> None:
        """Puts a slab in."""
        self._queue.put(filled)
        if self.is_given_up:
            self._empty()

    def end(self) -> None:
        """Says that nothing follows."""
        self._queue.put(None)
        self._opened.set()

    def fail(self, error: BaseException) -> None:
        """Says that the snapshot failed; what it put in counts for nothing.

        What interrupts its thread, as Ctrl-C does, is not for the others to raise.
        """
        if not isinstance(error, Exception):
            error = CancelledError("the save was interrupted")
        self._error = error
        self.give_up()

    def give_up(self) -> None:
        """Says that nothing is taken any more."""
        self._given_up.set()
        self._opened.set()
        self._staging.wake()
        self._empty()

    def check(self) -> None:
        """Does nothing, unless the snapshot failed.

        Raises:
            Exception: What it failed with.
        """
        if self._error is not None:
            raise self._error

    def take(self, *, starved: float = math.inf) -> Filled | None:
        """Returns the next slab; None: there is none, for whoever asks.

        Args:
            starved: How often the snapshot has waited for memory, as far as the caller
                knows.

        Raises:
            StarvedError: There is none yet, as it has waited more often.
            Exception: What the snapshot failed with.
        """
        self._opened.wait()
        found = self._next(starved)
        if self._error is not None:
            if found is not None:
                self.give_back(found)
            self._empty()
            raise self._error
        if found is None:
            self._queue.put(None)  # for the others who ask
        return found

    def check_starved(self, starved: float) -> None:
        """Looks whether the snapshot waits for memory.

        Raises:
            StarvedError: It has waited more often than so.
        """
        if self._starved > starved:
            raise StarvedError(self._starved)

    def _next(self, starved: float) -> Filled | None:
        while True:
            with suppress(queue.Empty):
                return self._queue.get(timeout=LOOK_SECONDS)
            self.check_starved(starved)

    def take_more(self) -> Filled | None:
        """Returns the next slab if there is one by now."""
        try:
            found = self._queue.get_nowait()
        except queue.Empty:
            return None
        if found is None:
            self._queue.put(None)
        return found

    def _empty(self) -> None:
        with suppress(queue.Empty):
            while True:
                found = self._queue.get_nowait()
                if found is not None:
                    self.give_back(found)
        self._queue.put(None)  # for those who wait


class Wanted:
    """The slabs of an outbox of which something is to be stored. Threads share it."""

    def __init__(self, outbox: Outbox, choose: Choose) -> None:
        self._outbox = outbox
        self._choose = choose
        self._lock = threading.Lock()
        self._chosen: deque[Filled] = deque()

    def take(self, *, starved: float = math.inf) -> Filled | None:
        """Returns the next one; None: there is none.

        Args:
            starved: See ``Outbox.take``.

        Raises:
            StarvedError: There is none yet, as the snapshot waits for memory.
            Exception: What the snapshot failed with.
        """
        # who waits in line hears of it, too
        while not self._lock.acquire(timeout=LOOK_SECONDS):
            self._outbox.check_starved(starved)
        try:
            while not self._chosen:
                first = self._outbox.take(starved=starved)
                if first is None:
                    return None
                self._chosen += self._choose_of(first)
            return self._chosen.popleft()
        finally:
            self._lock.release()

    def taker(self) -> Callable[[], Filled | None]:
        """Returns a ``take`` that tells of each wait of the snapshot once."""
        starved = 0

        def take() -> Filled | None:
            nonlocal starved
            try:
                return self.take(starved=starved)
            except StarvedError as e:
                starved = e.times
                raise

        return take

    def drop(self) -> None:
        """Gives back what nobody took."""
        with self._lock:
            while self._chosen:
                self._outbox.give_back(self._chosen.popleft())

    def _choose_of(self, first: Filled) -> list[Filled]:
        """Those of some slabs of which something is to be stored."""
        some = [first]
        while len(some) < _AT_ONCE and (more := self._outbox.take_more()) is not None:
            some.append(more)
        try:
            self._choose(some)
        except BaseException:
            for filled in some:
                self._outbox.give_back(filled)
            raise
        for filled in some:
            if not filled.wanted:
                self._outbox.give_back(filled)
        return [filled for filled in some if filled.wanted]
