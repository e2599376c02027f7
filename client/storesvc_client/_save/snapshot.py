"""Copies the bytes of a tree to host memory while the caller of ``save`` waits.

Only this step blocks the training loop. Chunks whose digest equals the base's are not
copied. While the caller still waits, the store is asked whether they can be reused; if
it answers no, or late, they are copied after all.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from storesvc.format.chunks import I64, Sums
from storesvc.format.trees import Tree
from storesvc.storage.threads import Threads
from storesvc_client._chunks.host_memory import Bytes
from storesvc_client._chunks.slabs import FilledSlab, Slab
from storesvc_client._save.slab_queue import SlabQueue
from storesvc_client._values.progress import Meter

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

    def copy(self, ordinal: int, into: Bytes) -> None:
        """Copies the elements of a chunk, in C order, little-endian, into `into`."""

    def spans(self, ordinal: int) -> "Sequence[Bytes] | None":
        """Returns the memory that already holds those elements in that form, one range
        after another; None if they must be copied."""

    def digest(self, ordinal: int) -> bytes | None:
        """Returns the digest of a chunk's elements; None if computing it requires a
        copy."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BaseSums:
    """Checksums of the base, which chunks of the tree may still have."""

    sums: Sums
    count: int
    """Number of chunks, the first ones, that ``sums`` is of; the chunks after them are
    of items, and the base has them under other numbers."""
    reusable: Callable[[I64], I64]
    """Returns the given chunks that the store holds with these checksums."""
    ask: Callable[[Sequence[int]], None]
    """Marks chunks that may be equal to the base's but have no digest before they are
    copied; the store is asked about them later."""


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
        is_lent: bool = False,
    ) -> None:
        """Creates a snapshot; ``take`` copies.

        Args:
            source: The tree.
            slabs: Slabs of all chunks of the tree.
            slab_queue: Receives the filled slabs.
            known: Checksums of chunks that need not be sent; None if there are none.
            meter: Measures the phases.
            is_lent: Whether the source stays unchanged until the save is stored, so
                that memory in stored form need not be copied.
        """
        self._is_lent = is_lent
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
                    self._in_threads(self._slabs, lambda slab: _of(slab, left))
        except BaseException as e:
            self._slab_queue.fail(e)
            raise
        # 3. End: from here on the writers may finish.
        self._slab_queue.end()

    def _in_threads(
        self, slabs: Sequence[Slab], choose: Callable[[Slab], Sequence[int]]
    ) -> None:
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

    def _work(
        self, turns: Iterator[Slab], choose: Callable[[Slab], Sequence[int]]
    ) -> None:
        try:
            for slab in turns:
                if self._slab_queue.is_cancelled or self._failed.is_set():
                    return
                with self._meter.phase("digest"):
                    wanted = choose(slab)
                if not wanted:
                    continue
                lent = self._lent(slab)
                if lent is not None:
                    self._slab_queue.put(FilledSlab(slab, wanted, None, lent))
                    continue
                with self._meter.phase("wait"):
                    buffer = self._slab_queue.buffer(slab)
                if buffer is not None:
                    with self._meter.phase("snapshot"):
                        self._fill(slab, buffer, wanted)
        except BaseException:
            self._failed.set()
            raise

    def _fill(self, slab: Slab, buffer: Bytes, wanted: Sequence[int]) -> None:
        try:
            chosen = set(wanted)
            for ordinal, at, size in slab.rows():
                if ordinal in chosen:
                    self._source.copy(ordinal, buffer[at : at + size])
        except BaseException:
            self._slab_queue.drop(buffer)
            raise
        self._slab_queue.put(FilledSlab(slab, wanted, buffer))

    def _lent(self, slab: Slab) -> "Sequence[Sequence[Bytes]] | None":
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

    def _new_chunks(self, slab: Slab) -> Sequence[int]:
        """Returns the chunks of a slab that differ from the base's."""
        ordinals = range(slab.first, slab.first + len(slab.sizes))
        if self._known is None:
            return ordinals
        digests: NDArray[np.uint8] = self._known.sums.digests
        count = self._known.count
        made = {o: self._source.digest(o) if o < count else None for o in ordinals}
        if None in made.values():
            self._known.ask([o for o, digest in made.items() if digest is None])
        same = [
            o
            for o, digest in made.items()
            if digest is not None and digest == digests[o].tobytes()
        ]
        if not same:
            return ordinals
        with self._lock:
            self._unchanged += same
        return sorted(set(ordinals) - set(same))


def _of(slab: Slab, chunks: set[int]) -> Sequence[int]:
    ordinals = range(slab.first, slab.first + len(slab.sizes))
    return [ordinal for ordinal in ordinals if ordinal in chunks]
