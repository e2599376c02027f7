"""Snapshots: the bytes of a tree copied to the host, while its owner waits.

Only this blocks the training loop. A chunk that is, by its digest, what the base holds
is not copied; the store is asked whether it can be claimed while the owner still
waits, and is copied after all where the answer is no, or late.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from storesvc.format.chunks import I64, Sums
from storesvc.format.trees import Tree
from storesvc_client._chunks.slabs import Filled, Slab
from storesvc_client._chunks.staging_pool import Bytes
from storesvc_client._save.slab_queue import Outbox
from storesvc_client._values.progress import Meter

THREADS: Final = min(os.cpu_count() or 1, 4)
"""That copy at a time; the owner's is one of them."""

SMALL_BYTES: Final = 64 << 10
"""Chunks below it take more of the interpreter than of the memory: one thread is as
fast as several, and to copy them together as fast as to write them one by one."""


class Source(Protocol):
    """A tree whose bytes do not change while it is copied."""

    @property
    def tree(self) -> Tree:
        """Its leaves."""

    def copy(self, ordinal: int, into: Bytes) -> None:
        """Copies the elements of a chunk, in C order, little-endian."""

    def runs(self, ordinal: int) -> "Sequence[Bytes] | None":
        """Returns the memory in which those elements lie already, one run after
        another; None: they are to be copied."""

    def digest(self, ordinal: int) -> bytes | None:
        """Returns the digest of a chunk's elements where they need not be copied for
        it."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Known:
    """Sums that the chunks of a tree may still have: those of the base."""

    sums: Sums
    claimable: Callable[[I64], I64]
    """Returns those of some chunks that the store holds, as these sums tell."""
    ask: Callable[[Sequence[int]], None]
    """Called with chunks that may be the same, but have no digest before they are
    copied."""


class Snapshot:
    """A copy that is being made."""

    def __init__(
        self,
        source: Source,
        slabs: Sequence[Slab],
        outbox: Outbox,
        known: Known | None,
        meter: Meter,
        *,
        is_lent: bool = False,
    ) -> None:
        """Prepares to copy.

        Args:
            source: The tree.
            slabs: Of all its chunks.
            outbox: Takes what the store must be sent.
            known: What need not be sent; None: nothing.
            meter: Takes note of what is done.
            is_lent: Whether the source stays as it is until all of it is stored:
                what lies as it is stored is not copied then.
        """
        self._is_lent = is_lent
        self._meter = meter
        self._source = source
        self._slabs = slabs
        self._outbox = outbox
        self._known = known
        self._unchanged: list[int] = []
        self._lock = threading.Lock()
        self._failed = threading.Event()

    def take(self) -> None:
        """Copies all that the store must be sent, and ends the outbox."""
        try:
            self._in_threads(self._slabs, self._new_chunks)
            if self._unchanged and self._known is not None:
                asked = np.array(sorted(self._unchanged), np.int64)
                held = set(self._known.claimable(asked).tolist())
                left = {o for o in self._unchanged if o not in held}
                if left:
                    self._in_threads(self._slabs, lambda slab: _of(slab, left))
        except BaseException as e:
            self._outbox.fail(e)
            raise
        self._outbox.end()

    def _in_threads(
        self, slabs: Sequence[Slab], choose: Callable[[Slab], Sequence[int]]
    ) -> None:
        turns = iter(slabs)
        chunks = sum(len(slab.sizes) for slab in slabs)
        if THREADS == 1 or sum(slab.size for slab in slabs) < chunks * SMALL_BYTES:
            self._work(turns, choose)
            return
        with ThreadPoolExecutor(THREADS - 1, "storesvc-snapshot") as pool:
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
                if self._outbox.is_given_up or self._failed.is_set():
                    return
                with self._meter.phase("digest"):
                    wanted = choose(slab)
                if not wanted:
                    continue
                lent = self._lent(slab)
                if lent is not None:
                    self._outbox.put(Filled(slab, wanted, None, lent))
                    continue
                with self._meter.phase("wait"):
                    buffer = self._outbox.buffer(slab)
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
            self._outbox.drop(buffer)
            raise
        self._outbox.put(Filled(slab, wanted, buffer))

    def _lent(self, slab: Slab) -> "Sequence[Sequence[Bytes]] | None":
        """The memory of the chunks of a slab that is not copied; None: it is."""
        if not self._is_lent or slab.size < len(slab.sizes) * SMALL_BYTES:
            return None
        found = []
        for ordinal, _, _ in slab.rows():
            runs = self._source.runs(ordinal)
            if runs is None:
                return None
            found.append(runs)
        return found

    def _new_chunks(self, slab: Slab) -> Sequence[int]:
        """The chunks of a slab that are not as the base has them."""
        ordinals = range(slab.first, slab.first + len(slab.sizes))
        if self._known is None:
            return ordinals
        digests: NDArray[np.uint8] = self._known.sums.digests
        made = {o: self._source.digest(o) for o in ordinals}
        if None in made.values():
            self._known.ask([o for o, digest in made.items() if digest is None])
        same = [o for o, digest in made.items() if digest == digests[o].tobytes()]
        if not same:
            return ordinals
        with self._lock:
            self._unchanged += same
        return sorted(set(ordinals) - set(same))


def _of(slab: Slab, chunks: set[int]) -> Sequence[int]:
    ordinals = range(slab.first, slab.first + len(slab.sizes))
    return [ordinal for ordinal in ordinals if ordinal in chunks]
