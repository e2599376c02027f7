"""The root of a store in a bucket that this process reads and writes itself.

Every call has a limit: a slow one is hedged, a late one is repeated, and finally it
fails (``storesvc.storage.hedging`` decides). This applies to writes, too, which may be
repeated because no other process writes an object of the same name.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Self,
    TypeAlias,
    TypeVar,
    assert_never,
)

from storesvc.errors import StorageUnavailableError
from storesvc.errors import StoreError as StorageError
from storesvc.format.checksums import Buffer
from storesvc.storage import hedging
from storesvc.storage.bucket import translate_errors
from storesvc.storage.hedging import (
    PAUSE_SECONDS,
    CallSchedule,
    Hedging,
    LogThrottle,
    Step,
)
from storesvc.storage.location import Storage
from storesvc.storage.remote import GcsLists, endpoint_in_environment, make_bucket
from storesvc.storage.requests import add_jitter, shared_window
from storesvc.storage.throttle import (
    FIRST_PAUSE_SECONDS,
    MAX_PAUSE_SECONDS,
    OUTAGE_SECONDS,
    Outcome,
    Window,
    classify,
)
from storesvc_client._storage.objects import ObjectCall, OwnStore, start_request
from storesvc_client.errors import InvalidRequestError, StoreError, error_class

if TYPE_CHECKING:
    import tensorstore as ts

    from storesvc_client._storage.objects import LentStore

T = TypeVar("T")

POLL_SECONDS: Final = 0.2
"""Interval at which a write checks whether it is still needed."""

_log = logging.getLogger("storesvc_client")


class BucketRoot:
    """The root of a store in a bucket. Thread-safe."""

    def __init__(self, storage: Storage, store: "OwnStore | LentStore") -> None:
        """Creates it; with lent credentials, the store has only the objects that the
        credential permits."""
        self.storage = storage
        self._store = store
        self._reads = Hedging(hedging.READS)
        self._writes = Hedging(hedging.WRITES)
        self._window = shared_window(storage)
        # A lent credential permits no lists.
        self._may_probe = storage.is_gcs and isinstance(store, OwnStore)
        self._probing: ObjectCall | None = None
        self._lists: GcsLists | None = None
        self._lock = threading.Lock()
        self._log_throttle = LogThrottle()

    @classmethod
    def open(cls, storage: Storage) -> Self:
        """Opens the root of a storage; sends no request.

        Raises:
            InvalidFieldError: There are no credentials for the storage.
            InvalidRequestError: Packages that it needs are not installed.
            UnavailableError: It cannot be opened.
        """
        try:
            import tensorstore as ts
        except ModuleNotFoundError as e:
            raise InvalidRequestError(
                f"direct: {storage.name} needs {e.name}; pip install "
                "'storesvc[server]', or connect without direct="
            ) from e
        if storage.uses_grpc:
            # checked first: TensorStore aborts the process if it finds no credentials
            make_bucket(storage)
        with _translate_errors(storage, ""):
            with endpoint_in_environment(storage):
                opening = ts.KvStore.open(
                    dict(storage.spec), context=ts.Context(dict(storage.context))
                )
            opened = opening.result(hedging.READS.answer_seconds)
        return cls(storage, OwnStore(storage, opened))

    def __str__(self) -> str:
        return self.storage.name

    @property
    def copies_writes(self) -> bool:
        """True if an object that is being written is in memory several times; may
        search for credentials, which takes seconds."""
        return self._store.copies_writes

    def read(self, path: str, *, timeout: float) -> bytes | None:
        """Returns the object at a path; None if there is none.

        Raises:
            PreconditionError: The storage denies access.
            UnavailableError: The storage failed or did not answer in time.
        """
        answers: Responses = queue.SimpleQueue()
        read = self._reads.begin(0, now=time.monotonic())
        what = self.storage.describe(path)
        call = self._start(path, lambda: self._store.read(path), read, what, answers)
        end = time.monotonic() + timeout
        try:
            while not call.is_settled and (left := end - time.monotonic()) > 0:
                call.await_answer(at_most=left)
            result = call.result()
        finally:
            call.end()
        return result.value if result.state == "value" else None

    def start_read(
        self, path: str, start: int, stop: int, *, what: str, answers: "Responses"
    ) -> "RangeRead":
        """Starts a read of bytes ``[start, stop)`` of an object, `what` in logs."""
        span = slice(start, stop)
        return self._start(
            path,
            lambda: self._store.read(path, byte_range=span),
            self._reads.begin(stop - start, now=time.monotonic()),
            what,
            answers,
        )

    def write(
        self, path: str, data: Sequence[Buffer], *, what: str, check: Callable[[], None]
    ) -> None:
        """Writes an object whose name no other process writes; returns once durable.
        Calls `check` at intervals, which raises an error to cancel the write.

        Raises:
            PreconditionError: The storage denies access.
            UnavailableError: The storage failed or did not answer in time.
        """
        call = self._start(
            path,
            lambda: self._store.write(path, data),
            self._writes.begin(sum(map(len, data)), now=time.monotonic()),
            what,
            queue.SimpleQueue(),
        )
        try:
            while not call.is_settled:
                check()
                call.await_answer(at_most=POLL_SECONDS)
            call.result()
        finally:
            call.end()

    def _start(
        self,
        path: str,
        send: "Callable[[], ts.Future[T]]",
        hedge: CallSchedule,
        what: str,
        answers: "Responses",
    ) -> "HedgedCall[T]":
        return HedgedCall(
            send,
            hedge,
            self._window,
            self._admit,
            partial(self._log_late, what),
            answers,
            partial(_translate_errors, self.storage, path),
        )

    def _admit(self, now: float) -> float:
        """Admits a request as the window does; after a rejection, once a probe of the
        bucket is answered, which waits as long as a ``Retry-After`` asks for."""
        with self._lock:
            if self._may_probe and self._window.is_rejecting:
                probing = self._probing
                if probing is None:
                    self._probing = start_request(self._probe())
                if probing is None or not probing.is_done:
                    return FIRST_PAUSE_SECONDS
                self._probing = None
                if (error := probing.exception()) is not None:
                    self._may_probe = isinstance(error, StorageUnavailableError)
                    return FIRST_PAUSE_SECONDS
        return self._window.admit(now=now)

    async def _probe(self) -> None:
        if self._lists is None:
            self._lists = await GcsLists.for_storage(self.storage)
        await self._lists.probe()

    def _log_late(self, what: str, seconds: float, now: float) -> None:
        if self._log_throttle.admits("late", now=now):
            _log.warning("%s has not answered for %.0f s; retrying", what, seconds)


class HedgedCall(Generic[T]):
    """A read or write in flight, with its hedged and repeated requests.

    Responses arrive in a queue; the owner of the queue passes each to ``take`` and
    calls ``step`` when ``wait_seconds`` have passed, until ``is_settled``.
    """

    def __init__(
        self,
        send: "Callable[[], ts.Future[T]]",
        hedge: CallSchedule,
        window: Window,
        admit: Callable[[float], float],
        log_late: Callable[[float, float], None],
        answers: "Responses",
        translating: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Sends the first request, as soon as the window of its bucket admits it."""
        self._send = send
        self._hedge = hedge
        self._window = window
        self._admit = admit
        self._log_late = log_late
        self._answers: Responses | None = answers
        """None once the call has ended: a response that was not taken stays in the
        queue and refers to this call, which must not refer to the queue then: its
        buffers would wait for the garbage collector."""
        self._translating = translating
        self._in_flight: dict[Any, tuple[Callable[[Any], None], float]] = {}
        """Requests in flight, each with the callback of its response and its start."""
        self._failed: Any = None
        """The response of the last request that failed."""
        self._pause = FIRST_PAUSE_SECONDS
        self._settled: Any = None
        self.is_settled = False
        """True once the result is known."""
        self._begin()

    @property
    def wait_seconds(self) -> float:
        """Seconds until ``step`` is due."""
        return max(0.0, self._hedge.due - time.monotonic())

    def await_answer(self, *, at_most: float = math.inf) -> None:
        """Waits for a response or performs the step that is due; for callers whose
        queue serves no other call."""
        assert self._answers is not None, "the call has ended"
        try:
            wait_seconds = min(at_most, self.wait_seconds)
            self.take(self._answers.get(timeout=wait_seconds)[1])
        except queue.Empty:
            self.step()

    def take(self, answer: Any) -> None:
        """Processes a response; ignores responses to dropped requests."""
        if self.is_settled or answer not in self._in_flight:
            return
        now, (_, began) = time.monotonic(), self._in_flight.pop(answer)
        outcome = classify(answer.exception())
        self._release(outcome, began)
        if answer.exception() is not None:
            self._failed = answer
            if self._in_flight:
                return
            if outcome.is_transient and now - self._hedge.began < OUTAGE_SECONDS:
                # The window knows how long to wait because of load.
                self._hedge.postpone(add_jitter(self._pause), now=now)
                self._pause = min(2 * self._pause, MAX_PAUSE_SECONDS)
                if now - self._hedge.began > PAUSE_SECONDS:
                    self._log_late(now - self._hedge.began, now)
                return
        self._settled, self._failed, self.is_settled = answer, None, True

    def step(self) -> None:
        """Hedges, repeats or fails the call if that is due."""
        match self._hedge.step(now=time.monotonic()):
            case Step.FAIL:
                self.is_settled = True
            case Step.HEDGE | Step.SEND:
                self._begin()
            case Step.RETRY:
                self._drop(list(self._in_flight)[self._hedge.kept :])
                now = time.monotonic()
                self._log_late(now - self._hedge.began, now)
                self._begin()
            case Step.WAIT:
                pass
            case step:
                assert_never(step)

    def result(self) -> T:
        """Returns the first successful response of a settled call.

        Raises:
            DataLossError: The object is shorter than the range.
            PreconditionError: The storage denies access.
            UnavailableError: The storage failed or did not answer in time.
        """
        with self._translating():
            if self._settled is None and self._failed is None:
                raise TimeoutError
            return (self._settled or self._failed).result()  # type: ignore[no-any-return]

    def end(self) -> None:
        """Drops the requests in flight and reports the latency to the hedging."""
        self._drop(list(self._in_flight))
        self._answers = None
        if self._settled is not None:
            self._hedge.record_answer(now=time.monotonic())
        else:
            self._hedge.record_abandonment()

    def _begin(self) -> None:
        now = time.monotonic()
        if wait := self._admit(now):
            if not self._in_flight:  # a hedge is not worth the wait
                self._hedge.postpone(add_jitter(wait), now=now)
            return
        one, answer = self._send(), self._answer  # the bound method must be the same
        self._in_flight[one] = answer, now
        one.add_done_callback(answer)

    def _release(self, outcome: Outcome, began: float) -> None:
        self._window.release(
            outcome,
            began=began,
            now=time.monotonic(),
            size_bytes=self._hedge.size_bytes,
        )

    def _answer(self, one: Any) -> None:
        answers = self._answers  # end() may be running
        if answers is not None:
            answers.put((self, one))

    def _drop(self, dropped: list[Any]) -> None:
        # Not cancel(), which can deadlock: see await_future. TensorStore drops a
        # request when its future is no longer referenced.
        for one in dropped:
            answer, began = self._in_flight.pop(one)
            one.remove_done_callback(answer)
            self._release(Outcome.DROPPED, began)


RangeRead: TypeAlias = "HedgedCall[ts.KvStore.ReadResult]"


Responses: TypeAlias = "queue.SimpleQueue[tuple[HedgedCall[Any], Any]]"
"""Responses, each with its call."""


@contextmanager
def _translate_errors(storage: Storage, path: str) -> Generator[None]:
    """Translates errors of a storage to errors of this library."""
    own: StoreError | None = None
    try:
        with translate_errors(storage, path):
            try:
                yield
            except StoreError as e:
                own = e  # of the server that lends credentials; some are OSErrors too
    except StorageError as e:
        kind = error_class(e.code, e.reason)
        raise kind(str(e), reason=e.reason, metadata=e.metadata) from None
    if own is not None:
        raise own
