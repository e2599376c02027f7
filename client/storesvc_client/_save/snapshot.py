"""Copies the bytes of a tree to host memory while the caller of ``save`` waits.

Only this step blocks the training loop. Chunks whose digest equals the base's are not
copied. A digest reads the whole chunk, so it is only computed if the probe, a checksum
of the first bytes, is equal, too: a step that changes all leaves pays for probes only.
While the caller still waits, the store is asked whether the equal chunks can be reused;
if it answers no, or late, they are copied after all.

``SlabQueue``: the snapshot puts filled slabs into a queue and ends it; writers take
them. When the snapshot waits for memory and there is nothing to take, waiting writers
get a ``StarvedError``, because the memory they hold blocks the snapshot. If writing
fails, the queue is cancelled: the snapshot stops, and the queued slabs return to the
staging pool. If the snapshot fails, the writers raise its error. Locks are taken in one
order: that of the staging pool, then that of the queue.

``SumsAhead``: a save to a bucket waits for several requests of its server before it may
store the first chunk. Its processors are idle until then, and its data would wait for
their checksums afterwards, so they are computed in the meantime.
"""

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from storesvc.format.checksums import Hasher, crc32c
from storesvc.format.chunks import I64, Sums
from storesvc.format.trees import Tree
from storesvc.storage.threads import Threads
from storesvc_client._chunks.memory import BufferPool, Bytes
from storesvc_client._chunks.slabs import FilledSlab, Slab, SumsInProgress
from storesvc_client._telemetry.progress import Meter

STARVED_SECONDS: Final = 0.05
"""Time that a writer waits for a slab while the snapshot waits for memory: often
another writer is about to return some."""

_AT_ONCE: Final = 16
"""Maximum slabs in one request for the chunks that the store lacks."""

RemoveStored = Callable[[Sequence[FilledSlab]], None]
"""Removes the chunks that need not be stored from each slab's ``wanted``."""


class StarvedError(Exception):
    """There is no slab to take and the snapshot waits for memory."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        """Number of times the snapshot has waited so far."""


class SlabQueue:
    """Filled slabs in first-in, first-out order. Thread-safe."""

    def __init__(self, staging: BufferPool, *, is_open: bool = False) -> None:
        """Creates an empty queue; writers may start at once if `is_open`."""
        self._staging = staging
        self.changed = threading.Condition()
        """Lock of the queue, notified of its changes."""
        self._slabs: deque[FilledSlab] = deque()
        self._ahead: deque[FilledSlab] = deque()
        """Slabs before those, which were taken out for a time."""
        self._has_ended = False
        self._error: Exception | None = None
        """Error of the snapshot, or of the source of a transfer."""
        self._starved = 0
        """Number of times the snapshot has waited for memory."""
        self.is_cancelled = False
        """True once no slab will be taken any more."""
        self._is_open = is_open
        """True when writers may start: earlier they would compete for processors and
        memory with the snapshot, which the caller waits for."""

    @property
    def budget_bytes(self) -> int:
        """Memory limit of the staging pool."""
        return self._staging.budget_bytes

    @property
    def is_ready(self) -> bool:
        """True if ``pop`` may be called."""
        has_slabs = bool(self._ahead or self._slabs)
        return self._is_open and (has_slabs or self._has_ended)

    def memory(self, size: int) -> "Bytes | None":
        """Waits for staging memory of a size in bytes and returns it; None if
        cancelled."""
        return self._staging.take(
            size, cancelled=lambda: self.is_cancelled, waiting=self._starve
        )

    def memory_now(self, size: int) -> "Bytes | None":
        """Returns staging memory of a size in bytes; None if there is none at
        present."""
        return self._staging.take_now(size)

    def _starve(self) -> None:
        with self.changed:
            self._starved += 1
        self.open()

    def open(self) -> None:
        """Lets writers start."""
        with self.changed:
            self._is_open = True
            self.changed.notify_all()

    def await_open(self) -> None:
        """Waits until writers may start."""
        with self.changed:
            self.changed.wait_for(lambda: self._is_open)

    def give_back(self, filled: FilledSlab) -> None:
        """Returns the memory of a stored slab to the staging pool."""
        if filled.buffer is not None:
            self._staging.give_back(filled.buffer)
        if filled.returned is not None:
            filled.returned()

    def drop(self, buffer: Bytes) -> None:
        """Returns memory that was not filled to the staging pool."""
        self._staging.give_back(buffer)

    def put(self, filled: FilledSlab) -> None:
        """Appends a slab; drops it if the queue is cancelled."""
        self._append(self._slabs, filled)

    def end(self, error: Exception | None = None) -> None:
        """Marks the end of the queue; ``check`` raises an error, if there is one, once
        the slabs before the end are stored."""
        with self.changed:
            self._error = error
            self._has_ended = self._is_open = True
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Cancels the queue because the snapshot failed; its slabs are discarded.

        Writers do not re-raise an interruption of the snapshot's thread, such as
        Ctrl-C; they raise ``CancelledError``.
        """
        if not isinstance(error, Exception):
            error = CancelledError("the save was interrupted")
        self._error = error
        self.cancel()

    def cancel(self) -> None:
        """Cancels the queue: no slab is taken any more."""
        with self.changed:
            self.is_cancelled = self._has_ended = self._is_open = True
            left = [*self._ahead, *self._slabs]
            self._ahead.clear()
            self._slabs.clear()
            self.changed.notify_all()
        # Without the lock: the lock of the pool is taken before that of the queue.
        self._staging.wake()
        for filled in left:
            self.give_back(filled)

    def check(self) -> None:
        """Raises the error of the snapshot, if it failed.

        Raises:
            Exception: The snapshot's error.
        """
        if self._error is not None:
            raise self._error

    def wait_for(self, is_ready: Callable[[], bool], *, starved: float) -> None:
        """Waits for a condition; the caller holds ``changed``.

        Args:
            starved: Waits of the snapshot that the caller has already reacted to.
        """
        ends = math.inf
        while not is_ready():
            if self._starved > starved:
                ends = min(ends, time.monotonic() + STARVED_SECONDS)
                if time.monotonic() >= ends:
                    raise StarvedError(self._starved)
            left = None if ends == math.inf else ends - time.monotonic()
            self.changed.wait(left)

    def pop(self, at_most: int) -> list[FilledSlab]:
        """Takes slabs out, none after the last; the caller holds ``changed`` and has
        waited for ``is_ready``.

        Raises:
            Exception: The snapshot's error.
        """
        if self.is_cancelled:
            self.check()
        slabs = chain(_pop_slabs(self._ahead), _pop_slabs(self._slabs))
        return list(islice(slabs, at_most))

    def take_ahead(self, is_stopped: Callable[[], bool]) -> FilledSlab | None:
        """Waits for the next slab that was not taken out yet, and takes it out for a
        time, before a writer takes any.

        Args:
            is_stopped: Returns whether to end the wait; ``changed`` must be notified
                when that changes.

        Returns:
            The slab, which must be given to ``put_back``; None after the last one, or
            if stopped.
        """

        def is_decided() -> bool:
            # Slabs that were put back do not count: more may follow them.
            has_next = self._is_open and (self._slabs or self._has_ended)
            return is_stopped() or bool(has_next)

        with self.changed:
            self.changed.wait_for(is_decided)
            if is_stopped() or not self._slabs:
                return None
            return self._slabs.popleft()

    def put_back(self, filled: FilledSlab) -> None:
        """Puts back a slab of ``take_ahead``; drops it if the queue is cancelled."""
        self._append(self._ahead, filled)

    def _append(self, slabs: deque[FilledSlab], filled: FilledSlab) -> None:
        with self.changed:
            if not self.is_cancelled:
                slabs.append(filled)
                self.changed.notify()
                return
        self.give_back(filled)


def _pop_slabs(slabs: deque[FilledSlab]) -> Iterator[FilledSlab]:
    while slabs:
        yield slabs.popleft()


class WantedSlabs:
    """The slabs of a queue that hold chunks the store lacks. Thread-safe."""

    def __init__(self, slab_queue: SlabQueue, remove_stored: RemoveStored) -> None:
        self._slab_queue = slab_queue
        self._remove_stored = remove_stored
        self._is_choosing = False
        """True while one thread asks the store, for all that wait."""
        self._chosen: deque[FilledSlab] = deque()

    def take(self, *, starved: float = math.inf) -> FilledSlab | None:
        """Waits for the next slab and returns it; None after the last.

        Args:
            starved: Waits of the snapshot that the caller has already reacted to.

        Raises:
            StarvedError: There is no slab, and the snapshot has waited for memory more
                often than that.
            Exception: The snapshot's error.
        """
        changed = self._slab_queue.changed
        while True:
            with changed:
                self._slab_queue.wait_for(self._is_ready, starved=starved)
                if self._chosen:
                    return self._chosen.popleft()
                some = self._slab_queue.pop(_AT_ONCE)
                if not some:
                    return None
                self._is_choosing = True
            chosen: list[FilledSlab] = []
            try:
                chosen = self._choose(some)
            finally:
                with changed:
                    self._chosen += chosen
                    self._is_choosing = False
                    changed.notify_all()

    def taker(self) -> Callable[[], FilledSlab | None]:
        """Returns a ``take`` that reports each wait of the snapshot once."""
        starved = 0

        def take() -> FilledSlab | None:
            nonlocal starved
            try:
                return self.take(starved=starved)
            except StarvedError as e:
                starved = e.times
                raise

        return take

    def drop(self) -> None:
        """Returns the memory of slabs that no writer took."""
        changed = self._slab_queue.changed
        with changed:
            # the thread of a broken stream may still be choosing
            changed.wait_for(lambda: not self._is_choosing)
            left = list(self._chosen)
            self._chosen.clear()
        for filled in left:
            self._slab_queue.give_back(filled)

    def _is_ready(self) -> bool:
        if self._chosen:
            return True
        return not self._is_choosing and self._slab_queue.is_ready

    def _choose(self, some: Sequence[FilledSlab]) -> list[FilledSlab]:
        """Returns the slabs that hold chunks to be stored; frees the others."""
        try:
            self._remove_stored(some)
        except BaseException:
            for filled in some:
                self._slab_queue.give_back(filled)
            raise
        for filled in some:
            if not filled.wanted:
                self._slab_queue.give_back(filled)
        return [filled for filled in some if filled.wanted]


SUM_THREADS: Final = min(os.cpu_count() or 1, 8)
"""Threads that compute checksums."""


class SumsAhead:
    """Computes the checksums of the slabs of a queue inside its context.

    A slab is out of the queue while a thread reads it, and no thread reads any after
    the context: its memory belongs to the writers then.
    """

    def __init__(self, slab_queue: SlabQueue, sums: SumsInProgress, meter: Meter):
        """Creates it for a queue that no writer reads yet, and fills in `sums`;
        entering its context starts the threads."""
        self._slab_queue = slab_queue
        self._sums = sums
        self._meter = meter
        self._is_stopped = False
        self._threads = Threads(SUM_THREADS, "storesvc-sums")
        self._working: list[Future[None]] = []

    def __enter__(self) -> Self:
        self._working = [self._threads.submit(self._work) for _ in range(SUM_THREADS)]
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with self._slab_queue.changed:
            self._is_stopped = True
            self._slab_queue.changed.notify_all()
        self._threads.shutdown()
        if error is None:
            for one in self._working:
                one.result()

    def _work(self) -> None:
        while filled := self._slab_queue.take_ahead(lambda: self._is_stopped):
            try:
                filled.sum_up(self._sums, self._meter, filled.wanted)
            finally:
                self._slab_queue.put_back(filled)


THREADS: Final = min(os.cpu_count() or 1, 4)
"""Maximum copy threads, including the caller's."""

SMALL_BYTES: Final = 64 << 10
"""Chunk size below which the interpreter costs more than the memory copy: one thread is
as fast as several, and copying chunks together is as fast as writing them one by
one."""


class Source(Protocol):
    """A tree whose bytes do not change during the snapshot."""

    @property
    def tree(self) -> Tree:
        """Leaves of the tree."""

    def reading(self) -> AbstractContextManager[None]:
        """Returns the context in which a thread reads it."""

    def copy(self, ordinal: int, into: Bytes) -> None:
        """Copies the elements of a chunk, in C order, little-endian, into `into`."""

    def spans(self, ordinal: int) -> "Sequence[Bytes] | None":
        """Returns the memory that already holds those elements in that form, one range
        after another; None if they must be copied."""

    def in_order(self, ordinal: int) -> "Sequence[Bytes] | None":
        """Returns those elements in that form, one range after another, in memory that
        may change later; None if they must be copied."""


Probes: TypeAlias = NDArray[np.uint32]
"""Checksum of the first bytes of each chunk of a tree. Chunks whose probes differ are
different; equal probes mean nothing. Unlike checksums they are never stored."""

PROBE_BYTES: Final = 4096


def make_probe(spans: "Iterable[Bytes]") -> int:
    """Returns the probe of a chunk's elements, one range after another."""
    probe, left = 0, PROBE_BYTES
    for span in spans:
        some = span[:left]
        probe, left = crc32c(some.data, probe), left - len(some)
        if not left:
            break
    return probe


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BaseSums:
    """Checksums of the base, which chunks of the tree may still have."""

    sums: Sums
    probes: Probes
    count: int
    """Number of chunks, the first ones, that these are of; the chunks after them are of
    items, and the base has them under other numbers."""
    reusable: Callable[[I64], I64]
    """Returns the given chunks that the store holds with these checksums."""
    ask: Callable[[Sequence[int]], None]
    """Marks chunks that may be equal to the base's but have no digest before they are
    copied; the store is asked about them later."""


_Lent: TypeAlias = "Sequence[Sequence[Bytes]] | None"
"""Memory of the chunks of a slab; None if they must be copied."""

_Choose: TypeAlias = Callable[[Slab, _Lent], Sequence[int]]
"""Returns the chunks of a slab to send."""


class Snapshot:
    """The copy of a state that a save works on."""

    def __init__(
        self,
        source: Source,
        slabs: Sequence[Slab],
        slab_queue: SlabQueue,
        known: BaseSums | None,
        meter: Meter,
        *,
        probes: Probes,
        is_lent: bool = False,
    ) -> None:
        """Creates a snapshot; ``take`` copies, and fills in `probes`. If `is_lent`, the
        source stays unchanged until the save is stored, so that memory in stored form
        need not be copied."""
        self._is_lent = is_lent
        self._probes = probes
        self._meter = meter
        self._source = source
        self._slabs = slabs
        self._slab_queue = slab_queue
        self._known = known
        self._unchanged: list[int] = []
        self._lock = threading.Lock()
        self._failed = threading.Event()

    def take(self) -> None:
        """Copies all chunks that must be sent, then ends the queue."""
        try:
            # 1. Copy the chunks that differ from the base's.
            self._in_threads(self._slabs, self._new_chunks)
            # 2. Copy those that the store lacks, too, while the tree is unchanged.
            if self._unchanged and self._known is not None:
                asked = np.array(sorted(self._unchanged), np.int64)
                held = set(self._known.reusable(asked).tolist())
                left = {o for o in self._unchanged if o not in held}
                if left:
                    self._in_threads(
                        self._slabs,
                        lambda slab, _: [o for o in slab.ordinals if o in left],
                    )
        except BaseException as e:
            self._slab_queue.fail(e)
            raise
        # 3. End: from here on the writers may finish.
        self._slab_queue.end()

    def _in_threads(self, slabs: Sequence[Slab], choose: "_Choose") -> None:
        turns = iter(slabs)
        chunks = sum(len(slab.sizes) for slab in slabs)
        if THREADS == 1 or sum(slab.size for slab in slabs) < chunks * SMALL_BYTES:
            self._work(turns, choose)
            return
        with Threads(THREADS - 1, "storesvc-snapshot") as pool:
            futures = [
                pool.submit(self._work, turns, choose) for _ in range(THREADS - 1)
            ]
            self._work(turns, choose)
            for future in futures:
                future.result()

    def _work(self, turns: Iterator[Slab], choose: "_Choose") -> None:
        try:
            with self._source.reading():
                for slab in turns:
                    if self._slab_queue.is_cancelled or self._failed.is_set():
                        return
                    with self._meter.phase("digest"):
                        lent = self._lent(slab)
                        wanted = choose(slab, lent)
                    if wanted:
                        self._take_slab(slab, wanted, lent)
        except BaseException:
            self._failed.set()
            raise

    def _take_slab(self, slab: Slab, wanted: Sequence[int], lent: "_Lent") -> None:
        if lent is not None:
            probed = 0 if self._known is None else self._known.count
            for ordinal in wanted:
                if ordinal >= probed:
                    self._probes[ordinal] = make_probe(lent[ordinal - slab.first])
            self._slab_queue.put(FilledSlab(slab, wanted, None, lent))
            return
        with self._meter.phase("wait"):
            buffer = self._slab_queue.memory(slab.size)
        if buffer is not None:
            with self._meter.phase("snapshot"):
                self._fill(slab, buffer, wanted)

    def _fill(self, slab: Slab, buffer: Bytes, wanted: Sequence[int]) -> None:
        try:
            chosen = set(wanted)
            for ordinal, at, size in slab.rows():
                if ordinal in chosen:
                    self._source.copy(ordinal, buffer[at : at + size])
                    self._probes[ordinal] = make_probe([buffer[at : at + size]])
            known = self._known
            if known is not None:
                known.ask([o for o in wanted if self._is_doubtful(known, o)])
        except BaseException:
            self._slab_queue.drop(buffer)
            raise
        self._slab_queue.put(FilledSlab(slab, wanted, buffer))

    def _lent(self, slab: Slab) -> "_Lent":
        """Returns the memory of a slab's chunks if it is sent without a copy, else
        None."""
        if not self._is_lent or slab.size < len(slab.sizes) * SMALL_BYTES:
            return None
        found = []
        for ordinal, _, _ in slab.rows():
            spans = self._source.spans(ordinal)
            if spans is None:
                return None
            found.append(spans)
        return found

    def _new_chunks(self, slab: Slab, lent: "_Lent") -> Sequence[int]:
        """Returns the chunks of a slab that differ from the base's."""
        ordinals, known, first = slab.ordinals, self._known, slab.first
        if known is None:
            return ordinals
        if first >= known.count:
            known.ask(ordinals)
            return ordinals
        same = []
        for o in ordinals:
            spans = lent[o - first] if lent is not None else self._source.in_order(o)
            if spans is not None and self._is_same(known, o, spans):
                same.append(o)
        if not same:
            return ordinals
        with self._lock:
            self._unchanged += same
        return sorted(set(ordinals) - set(same))

    def _is_same(self, known: BaseSums, ordinal: int, spans: "Sequence[Bytes]") -> bool:
        """Returns whether a chunk in memory is equal to the base's; keeps its probe."""
        self._probes[ordinal] = probe = make_probe(spans)
        if probe != known.probes[ordinal]:
            return False
        summing = Hasher()
        for span in spans:
            summing.add(span.data)
        same: bool = summing.digest == known.sums.digests[ordinal].tobytes()
        return same

    def _is_doubtful(self, known: BaseSums, ordinal: int) -> bool:
        """Returns whether a chunk that was copied may be equal to the base's."""
        return (
            ordinal < known.count
            and self._probes[ordinal] == known.probes[ordinal]
            and self._source.in_order(ordinal) is None
        )
