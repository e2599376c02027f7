"""Checksums that a save computes before it may store its first chunk."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from storesvc.format.chunks import Sums
from storesvc_client._chunks.memory import StagingPool
from storesvc_client._chunks.slabs import FilledSlab, Slab, SumsInProgress
from storesvc_client._save.snapshot import SUM_THREADS, SlabQueue, SumsAhead
from storesvc_client._telemetry.progress import Meter
from tests.support.contract import CHUNK, elements, sums

SECONDS = 60.0


def of(chunk: int) -> Slab:
    """Returns the slab of one chunk."""
    return Slab(chunk, (CHUNK,))


def filled(slab_queue: SlabQueue, chunk: int) -> FilledSlab:
    """Returns the slab of a chunk, copied into staging memory."""
    buffer = slab_queue.memory(of(chunk).size)
    assert buffer is not None
    buffer[:] = np.frombuffer(elements(chunk), np.uint8)
    return FilledSlab(of(chunk), [chunk], buffer)


def lent(chunk: int, returned: Callable[[], None] | None = None) -> FilledSlab:
    """Returns the slab of a chunk in memory of the state."""
    memory = np.frombuffer(elements(chunk), np.uint8)
    return FilledSlab(of(chunk), [chunk], None, [[memory]], returned)


class KnownSums(SumsInProgress):
    """Checksums for which a test waits."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._changed = threading.Condition()
        self._count = 0

    def set(self, ordinal: int, crc32c: int, digest: bytes) -> None:
        super().set(ordinal, crc32c, digest)
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait_for(self, count: int) -> bool:
        """Waits until so many chunks have checksums; returns False if it takes too
        long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._count >= count, SECONDS)


class HeldSums(SumsInProgress):
    """Checksums whose first thread waits inside of a slab."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.is_inside = threading.Event()
        self.go_on = threading.Event()

    def knows(self, ordinal: int) -> bool:
        self.is_inside.set()
        assert self.go_on.wait(SECONDS)
        return super().knows(ordinal)


class FailingSums(SumsInProgress):
    """Checksums that cannot be set for one chunk."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.have_failed = threading.Event()

    def set(self, ordinal: int, crc32c: int, digest: bytes) -> None:
        if ordinal == 1:
            self.have_failed.set()
            raise MemoryError("no memory for checksums")
        super().set(ordinal, crc32c, digest)


@pytest.fixture
def meter() -> Iterator[Meter]:
    with Meter("save", "tests/ahead@1") as measured:
        yield measured


def queue_of(chunks: int, *, is_open: bool = False) -> tuple[SlabQueue, StagingPool]:
    """Returns an empty queue, and its memory for a number of chunks."""
    pool = StagingPool(chunks * CHUNK)
    return SlabQueue(pool, is_open=is_open), pool


def ended_queue(chunks: int) -> SlabQueue:
    """Returns a queue that has ended, of so many slabs."""
    slab_queue, _ = queue_of(chunks)
    for chunk in range(chunks):
        slab_queue.put(filled(slab_queue, chunk))
    slab_queue.end()
    return slab_queue


def taken(slab_queue: SlabQueue) -> list[FilledSlab]:
    """Returns what writers get from a queue that has ended."""
    with slab_queue.changed:
        assert slab_queue.is_ready
        return slab_queue.pop(100)


def same(expected: Sums, found: Sums) -> bool:
    return (expected.crc32c == found.crc32c).all() and bool(
        (expected.digests == found.digests).all()
    )


def test_all_slabs_are_summed_up_and_stay_in_the_queue(meter: Meter) -> None:
    slab_queue, _ = queue_of(5)
    put = [filled(slab_queue, chunk) for chunk in range(5)]
    for one in put:
        slab_queue.put(one)
    slab_queue.end()
    known = KnownSums(5)

    with SumsAhead(slab_queue, known, meter):
        assert known.wait_for(5)

    assert same(sums(*range(5)), known.result())
    assert {id(one) for one in put} == {id(one) for one in taken(slab_queue)}


def test_slabs_that_were_summed_up_are_taken_before_the_others(meter: Meter) -> None:
    slab_queue, _ = queue_of(6, is_open=True)
    known = KnownSums(6)
    with SumsAhead(slab_queue, known, meter):
        for chunk in (0, 1, 2):
            slab_queue.put(filled(slab_queue, chunk))
        assert known.wait_for(3)
    for chunk in (3, 4, 5):
        slab_queue.put(filled(slab_queue, chunk))
    slab_queue.end()

    found = [one.slab.first for one in taken(slab_queue)]

    assert [0, 1, 2] == sorted(found[:3])
    assert [3, 4, 5] == found[3:]


def test_slabs_that_come_one_by_one_are_all_summed_up(meter: Meter) -> None:
    """Each comes when all before it are summed up, and nothing else is left."""
    chunks = 4 * SUM_THREADS
    slab_queue, _ = queue_of(chunks, is_open=True)
    known = KnownSums(chunks)
    with SumsAhead(slab_queue, known, meter):
        for chunk in range(chunks):
            slab_queue.put(lent(chunk))
            assert known.wait_for(chunk + 1), chunk
    slab_queue.end()

    assert same(sums(*range(chunks)), known.result())
    assert chunks == len(taken(slab_queue))


def test_no_slab_is_read_before_the_snapshot_is_copied(meter: Meter) -> None:
    """The caller waits for the snapshot: it gets all processors."""
    slab_queue, _ = queue_of(2)
    known = HeldSums(2)
    known.go_on.set()
    slab_queue.put(filled(slab_queue, 0))

    with SumsAhead(slab_queue, known, meter):
        pass
    assert not known.is_inside.is_set()

    slab_queue.put(filled(slab_queue, 1))
    slab_queue.end()
    assert [0, 1] == [one.slab.first for one in taken(slab_queue)]


def test_a_snapshot_that_waits_for_memory_gets_none_from_here(meter: Meter) -> None:
    """The sums of all slabs in memory are computed; a writer frees the first of it."""
    slab_queue, pool = queue_of(2)
    known = KnownSums(3)
    for chunk in (0, 1):
        slab_queue.put(filled(slab_queue, chunk))
    with ThreadPoolExecutor(1) as snapshot:
        with SumsAhead(slab_queue, known, meter):
            copying = snapshot.submit(filled, slab_queue, 2)
            assert known.wait_for(2)
            assert not copying.done()
            assert 2 * CHUNK == pool.held_bytes
        with slab_queue.changed:
            (first,) = slab_queue.pop(1)
        slab_queue.give_back(first)
        slab_queue.put(copying.result(SECONDS))
    slab_queue.end()

    assert 2 == len(taken(slab_queue))
    assert 2 * CHUNK == pool.held_bytes


def test_no_slab_is_read_after_the_context(meter: Meter) -> None:
    slab_queue, _ = queue_of(3, is_open=True)
    known = HeldSums(3)
    slab_queue.put(filled(slab_queue, 0))
    with ThreadPoolExecutor(1) as other, SumsAhead(slab_queue, known, meter):
        assert known.is_inside.wait(SECONDS)
        # The context waits for the slab that a thread reads.
        other.submit(known.go_on.set)

    slab_queue.put(filled(slab_queue, 1))
    slab_queue.end()

    assert [0, 1] == [one.slab.first for one in taken(slab_queue)]
    assert [True, False, False] == [SumsInProgress.knows(known, n) for n in range(3)]


def test_an_error_is_raised_at_the_end_and_no_slab_is_lost(meter: Meter) -> None:
    slab_queue, failing = ended_queue(3), FailingSums(3)
    with (
        pytest.raises(MemoryError, match="no memory for checksums"),
        SumsAhead(slab_queue, failing, meter),
    ):
        assert failing.have_failed.wait(SECONDS)

    assert {0, 1, 2} == {one.slab.first for one in taken(slab_queue)}


def test_the_error_of_the_begin_is_raised_rather_than_one_of_a_checksum(
    meter: Meter,
) -> None:
    slab_queue, failing = ended_queue(3), FailingSums(3)

    def begin() -> None:
        assert failing.have_failed.wait(SECONDS)
        raise ConnectionError("no server")

    with (
        pytest.raises(ConnectionError, match="no server"),
        SumsAhead(slab_queue, failing, meter),
    ):
        begin()


def test_a_save_that_is_cancelled_gets_its_memory_back_once(meter: Meter) -> None:
    slab_queue, pool = queue_of(3)
    returned: list[int] = []
    slab_queue.put(filled(slab_queue, 0))
    slab_queue.put(lent(1, lambda: returned.append(1)))
    slab_queue.put(lent(2, lambda: returned.append(2)))
    slab_queue.end()
    known = HeldSums(3)

    with SumsAhead(slab_queue, known, meter):
        assert known.is_inside.wait(SECONDS)
        slab_queue.cancel()
        known.go_on.set()

    assert [1, 2] == sorted(returned)
    assert [] == taken(slab_queue)
    pool.clear()
    assert 0 == pool.held_bytes


def test_lent_memory_is_not_returned_before_a_writer_has_stored_it(
    meter: Meter,
) -> None:
    slab_queue, _ = queue_of(1, is_open=True)
    returned: list[int] = []
    slab_queue.put(lent(0, lambda: returned.append(0)))
    slab_queue.end()
    known = KnownSums(1)
    with SumsAhead(slab_queue, known, meter):
        assert known.wait_for(1)
    assert [] == returned

    (one,) = taken(slab_queue)
    slab_queue.give_back(one)

    assert [0] == returned
