"""The root of a store in a bucket, which this process reads and writes by itself.

Nothing waits for ever: what is slow is asked a second time, what is late is asked anew,
and in the end it has failed (``storesvc.storage.hedging`` decides). So it is with
writes, too: they are of objects that nobody else names, and may be written twice.
"""

import logging
import math
import queue
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    assert_never,
)

from storesvc.errors import (
    CorruptDataError,
    StorageDeniedError,
    StorageFullError,
    StorageUnavailableError,
)
from storesvc.storage import hedging
from storesvc.storage.errors import translated
from storesvc.storage.gcs import bucket_of, endpoint_in_environment
from storesvc.storage.hedging import Hedging
from storesvc.storage.location import GRPC_DRIVER, Storage
from storesvc.storage.log_throttle import LogThrottle
from storesvc_client.errors import BY_REASON, InvalidRequestError

if TYPE_CHECKING:
    import tensorstore as ts

T = TypeVar("T")

LOOK_SECONDS: Final = 0.2
"""How often who writes looks whether that is still wanted."""

_log = logging.getLogger(__name__)

_REASONS: Final = {
    CorruptDataError: "CORRUPT_DATA",
    StorageDeniedError: "STORAGE_DENIED",
    StorageFullError: "STORAGE_FULL",
    StorageUnavailableError: "STORAGE_UNAVAILABLE",
}


class BucketRoot:
    """The root of a store in a bucket. Threads may share it."""

    def __init__(self, storage: Storage, store: "ts.KvStore") -> None:
        self.storage = storage
        self._store = store
        self._reads = Hedging(hedging.READS)
        self._writes = Hedging(hedging.WRITES)
        self._lines = LogThrottle()

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
            with endpoint_in_environment(storage):
                opening = ts.KvStore.open(
                    dict(storage.spec), context=ts.Context(dict(storage.context))
                )
            return cls(storage, opening.result(hedging.READS.answer_seconds))

    def __str__(self) -> str:
        return self.storage.name

    def read(self, place: str, *, timeout: float) -> bytes | None:
        """Returns what a place holds; None where it holds nothing.

        Args:
            place: To read.
            timeout: Seconds that it may take.

        Raises:
            PreconditionError: The storage lets us not in, or not do this.
            UnavailableError: It failed, or does not answer.
        """
        answers: Answers = queue.SimpleQueue()
        read = self._reads.begin(0, now=time.monotonic())
        what = self.storage.describe(place)
        asked = self._ask(place, lambda: self._store.read(place), read, what, answers)
        end = time.monotonic() + timeout
        try:
            while not asked.is_settled and (left := end - time.monotonic()) > 0:
                asked.await_answer(at_most=left)
            result = asked.result()
        finally:
            asked.end()
        return result.value if result.state == "value" else None

    def ask_range(
        self, place: str, start: int, stop: int, *, what: str, answers: "Answers"
    ) -> "AskedRange":
        """Asks for the bytes of an object from ``start`` up to ``stop``.

        Args:
            place: Of the object.
            start: Of the first byte.
            stop: Behind the last.
            what: What logs call it.
            answers: Where the answers come.
        """
        span = slice(start, stop)
        return self._ask(
            place,
            lambda: self._store.read(place, byte_range=span),
            self._reads.begin(stop - start, now=time.monotonic()),
            what,
            answers,
        )

    def write(
        self, place: str, data: bytes, *, what: str, check: Callable[[], None]
    ) -> None:
        """Writes an object that nobody else names; durable when it returns.

        Args:
            place: Of the object.
            data: All of it.
            what: What logs call it.
            check: Raises an error where nobody wants it any more.

        Raises:
            PreconditionError: The storage lets us not in, or not do this.
            UnavailableError: It failed, or does not answer.
        """
        asked = self._ask(
            place,
            lambda: self._store.write(place, data),
            self._writes.begin(len(data), now=time.monotonic()),
            what,
            queue.SimpleQueue(),
        )
        try:
            while not asked.is_settled:
                check()
                asked.await_answer(at_most=LOOK_SECONDS)
            asked.result()
        finally:
            asked.end()

    def _ask(
        self,
        place: str,
        ask: "Callable[[], ts.Future[T]]",
        call: hedging.HedgedCall,
        what: str,
        answers: "Answers",
    ) -> "Asked[T]":
        return Asked(
            ask,
            call,
            partial(self._tell_late, what),
            answers,
            partial(_told, self.storage, place),
        )

    def _tell_late(self, what: str, seconds: float, *, now: float) -> None:
        if self._lines.admits("late", now=now):
            _log.warning("%s has not answered for %.0f s, asked again", what, seconds)


class Asked(Generic[T]):
    """A read or a write that is under way, as often as it is asked.

    Each answer comes to a queue, from which it is to be given to ``take``, and what is
    due is done by ``step``; until it is settled.
    """

    def __init__(
        self,
        ask: "Callable[[], ts.Future[T]]",
        call: hedging.HedgedCall,
        tell_late: "TellLate",
        answers: "Answers",
        told: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Asks."""
        self._ask = ask
        self._call = call
        self._tell_late = tell_late
        self._answers = answers
        self._told = told
        self._under_way: dict[Any, Callable[[Any], None]] = {}
        """What is asked, and what hears of its answer."""
        self._settled: Any = None
        self.is_settled = False
        """Whether its result is known."""
        self._begin()

    @property
    def wait_seconds(self) -> float:
        """How long to wait for an answer before something is to be done."""
        return max(0.0, self._call.due - time.monotonic())

    def await_answer(self, *, at_most: float = math.inf) -> None:
        """Takes an answer, or does what is due; for who has a queue for it alone.

        Args:
            at_most: Seconds that it may wait.
        """
        try:
            wait_seconds = min(at_most, self.wait_seconds)
            self.take(self._answers.get(timeout=wait_seconds)[1])
        except queue.Empty:
            self.step()

    def take(self, answer: Any) -> None:
        """Takes an answer, be it one that was given up."""
        if self.is_settled or answer not in self._under_way:
            return
        del self._under_way[answer]
        if answer.exception() is None or not self._under_way:
            self._settled, self.is_settled = answer, True

    def step(self) -> None:
        """Does what is due, if anything is."""
        match self._call.step(now=time.monotonic()):
            case hedging.Step.FAIL:
                self.is_settled = True
            case hedging.Step.HEDGE:
                self._begin()
            case hedging.Step.RETRY:
                self._give_up()
                now = time.monotonic()
                self._tell_late(now - self._call.began, now=now)
                self._begin()
            case hedging.Step.WAIT:
                pass
            case step:
                assert_never(step)

    def result(self) -> T:
        """Returns the first answer, once it is settled.

        Raises:
            DataLossError: The object is shorter.
            PreconditionError: The storage lets us not in, or not do this.
            UnavailableError: It failed, or does not answer.
        """
        with self._told():
            if self._settled is None:
                raise TimeoutError
            return self._settled.result()  # type: ignore[no-any-return]

    def end(self) -> None:
        """Gives up what is still asked."""
        self._give_up()
        if self._settled is not None:
            self._call.answered(now=time.monotonic())
        else:
            self._call.abandoned()

    def _begin(self) -> None:
        one, answer = self._ask(), self._answer  # one object, to be removed again
        self._under_way[one] = answer
        one.add_done_callback(answer)

    def _answer(self, one: Any) -> None:
        self._answers.put((self, one))

    def _give_up(self) -> None:
        # not cancel(): see storesvc.storage.futures; what nobody refers to is given up
        for one, answer in self._under_way.items():
            one.remove_done_callback(answer)
        self._under_way.clear()


AskedRange: TypeAlias = "Asked[ts.KvStore.ReadResult]"


class TellLate(Protocol):
    """Tells the log of what is late."""

    def __call__(self, seconds: float, *, now: float) -> None: ...


Answers: TypeAlias = "queue.SimpleQueue[tuple[Asked[Any], Any]]"
"""What was asked, and each answer to it."""


@contextmanager
def _told(storage: Storage, place: str) -> Generator[None]:
    """Raises this library's errors for those of a storage."""
    try:
        with translated(storage, place):
            yield
    except tuple(_REASONS) as e:
        reason = _REASONS[type(e)]
        raise BY_REASON[reason](str(e), reason=reason, metadata=e.metadata) from None
