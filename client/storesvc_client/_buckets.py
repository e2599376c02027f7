"""The root of a store in a bucket, which this process reads and writes by itself.

No read waits for ever: one that is slow is asked a second time, one that is late is
asked anew, and in the end it has failed (``storesvc.hedging`` decides). Writes are of
objects that nobody else names, so that one that is late may be written again.
"""

import logging
import queue
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Self

from storesvc.errors import (
    CorruptDataError,
    StorageFullError,
    StorageUnavailableError,
)
from storesvc.gcs_client import bucket_of
from storesvc.hedging import Hedging, Limits, Step
from storesvc.storage_errors import translated
from storesvc.storages import GRPC_DRIVER, Storage
from storesvc_client.errors import BY_REASON, DataLossError, InvalidRequestError

if TYPE_CHECKING:
    import tensorstore as ts

LIMITS: Final = Limits()

LOOK_SECONDS: Final = 0.2
"""How often who waits looks whether the answer is still wanted."""

WRITE_SECONDS: Final = 60.0
"""Within which an object is written ..."""

LEAST_BYTES_PER_SECOND: Final = 1 << 20
"""... and how slowly its bytes may go meanwhile."""

_log = logging.getLogger(__name__)

_REASONS: Final = {
    CorruptDataError: "CORRUPT_DATA",
    StorageFullError: "STORAGE_FULL",
    StorageUnavailableError: "STORAGE_UNAVAILABLE",
}


class StoppedError(Exception):
    """Nobody wants the answer any more."""


class Waiting:
    """Whoever waits for an answer."""

    def __init__(self, what: str, check: Callable[[], None] = lambda: None) -> None:
        """Waits.

        Args:
            what: What logs call what it waits for.
            check: Raises an error where the answer is not wanted any more.
        """
        self._what = what
        self.check = check

    def ask_again(self, seconds: float) -> None:
        """Tells that there was none for so long."""
        _log.warning("%s has not answered for %.0f s, asked again", self._what, seconds)


class BucketRoot:
    """The root of a store in a bucket. Threads may share it."""

    def __init__(self, storage: Storage, store: "ts.KvStore") -> None:
        self.storage = storage
        self._store = store
        self._hedging = Hedging(LIMITS)

    @classmethod
    def open(cls, storage: Storage) -> Self:
        """Returns the root of a storage; nothing is asked yet.

        Raises:
            InvalidFieldError: There are no credentials for it.
            InvalidRequestError: The packages that speak to it are not installed.
            UnavailableError: It cannot be opened.
        """
        try:
            import tensorstore as ts
        except ModuleNotFoundError as e:
            raise InvalidRequestError(
                f"direct: {storage.name} needs {e.name}; pip install "
                "'storesvc[server]', or leave direct= out"
            ) from e
        if storage.spec["driver"] == GRPC_DRIVER:
            # before TensorStore, which ends the process where this finds no credentials
            bucket_of(storage)
        with _told(storage, ""):
            opening = ts.KvStore.open(
                dict(storage.spec), context=ts.Context(dict(storage.context))
            )
            return cls(storage, opening.result(LIMITS.answer_seconds))

    def __str__(self) -> str:
        return self.storage.name

    def read(self, place: str) -> bytes | None:
        """Returns what a place holds; None where it holds nothing.

        Raises:
            UnavailableError: The storage failed, does not answer, or lets nobody in.
        """
        waiting = Waiting(self.storage.describe(place))
        result = self._read(place, lambda: self._store.read(place), 0, waiting)
        return result.value if result.state == "value" else None

    def read_range(self, place: str, start: int, stop: int, waiting: Waiting) -> bytes:
        """Returns the bytes of an object from ``start`` up to ``stop``.

        Raises:
            DataLossError: It is missing, or shorter.
            UnavailableError: The storage failed, does not answer, or lets nobody in.
        """
        span = slice(start, stop)
        result = self._read(
            place,
            lambda: self._store.read(place, byte_range=span),
            stop - start,
            waiting,
        )
        if result.state != "value":
            raise DataLossError(
                f"{self.storage.describe(place)} is missing; use another checkpoint",
                reason="CORRUPT_DATA",
            )
        return result.value

    def write(self, place: str, data: bytes, waiting: Waiting) -> None:
        """Writes an object that nobody else names; durable when it returns.

        Raises:
            UnavailableError: The storage failed, does not answer, or lets nobody in.
        """
        seconds = WRITE_SECONDS + len(data) / LEAST_BYTES_PER_SECOND
        for tries_left in reversed(range(LIMITS.tries)):
            late_at = time.monotonic() + seconds
            writing = self._store.write(place, data)
            try:
                while not writing.done() and time.monotonic() < late_at:
                    waiting.check()
                    with suppress(TimeoutError):
                        writing.exception(LOOK_SECONDS)
                with _told(self.storage, place):
                    if writing.done():
                        writing.result()
                        return
                    if not tries_left:
                        raise TimeoutError
            finally:
                writing.cancel()
            waiting.ask_again(seconds)

    def _read(
        self,
        place: str,
        ask: "Callable[[], ts.Future[ts.KvStore.ReadResult]]",
        size_bytes: int,
        waiting: Waiting,
    ) -> "ts.KvStore.ReadResult":
        read = _Read(ask, self._hedging, size_bytes, waiting)
        try:
            answered = read.wait()
            with _told(self.storage, place):
                if answered is None:
                    raise TimeoutError
                return answered.result()
        finally:
            read.end()


class _Read:
    """One read, as often as it is asked."""

    def __init__(
        self,
        ask: "Callable[[], ts.Future[ts.KvStore.ReadResult]]",
        hedging: Hedging,
        size_bytes: int,
        waiting: Waiting,
    ) -> None:
        self._ask = ask
        self._waiting = waiting
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._under_way: list[Any] = []
        self._asked = hedging.begin(size_bytes, now=time.monotonic())
        self._is_answered = False

    def wait(self) -> "ts.Future[ts.KvStore.ReadResult] | None":
        """Asks, and asks again, and returns what is answered; None: nothing is."""
        self._begin()
        while True:
            seconds = min(self._asked.due - time.monotonic(), LOOK_SECONDS)
            try:
                one = self._answers.get(timeout=max(0.0, seconds))
            except queue.Empty:
                self._waiting.check()
                if not self._step():
                    return None
                continue
            if one not in self._under_way:  # given up before
                continue
            self._under_way.remove(one)
            if one.exception() is None or not self._under_way:
                self._is_answered = True
                return one  # type: ignore[no-any-return]

    def end(self) -> None:
        """Gives up what is still asked."""
        self._give_up()
        if self._is_answered:
            self._asked.answered(now=time.monotonic())
        else:
            self._asked.given_up()

    def _step(self) -> bool:
        """Does what is due; returns whether an answer is still to come."""
        match self._asked.step(now=time.monotonic()):
            case Step.FAIL:
                return False
            case Step.BESIDE:
                self._begin()
            case Step.ANEW:
                self._give_up()
                self._waiting.ask_again(time.monotonic() - self._asked.began)
                self._begin()
        return True

    def _begin(self) -> None:
        one = self._ask()
        self._under_way.append(one)
        one.add_done_callback(self._answers.put)

    def _give_up(self) -> None:
        for one in self._under_way:
            one.cancel()
        self._under_way.clear()


@contextmanager
def _told(storage: Storage, place: str) -> Generator[None]:
    """Raises this library's errors for those of a storage."""
    try:
        with translated(storage, place):
            yield
    except (CorruptDataError, StorageFullError, StorageUnavailableError) as e:
        reason = _REASONS[type(e)]
        raise BY_REASON[reason](str(e), reason=reason) from e
