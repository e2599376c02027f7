"""Reads the stored chunks of a checkpoint as they are, for a copy to another store.

The readers of a restore are used, with their checks, hedging and retries, on a manifest
that describes the same chunks as rows of bytes: each chunk is then one range, with the
elements past the shape of its leaf.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from storesvc.format.chunks import I64
from storesvc.format.grids import Region
from storesvc.format.manifests import Manifest
from storesvc.format.trees import Leaf, Tree
from storesvc_client._chunks.buffers import Buffer
from storesvc_client._chunks.memory import Bytes
from storesvc_client._chunks.slabs import FilledSlab, Slab
from storesvc_client._restore.assembly import Assembly
from storesvc_client._restore.checkpoint import CheckpointReader
from storesvc_client._save.snapshot import SlabQueue
from storesvc_client._save.transfer import READING_SHARE
from storesvc_client._telemetry.progress import Meter


class CheckpointFiller:
    """Reads the chunks of a checkpoint; implements ``_save.transfer.Filler``."""

    def __init__(self, reader: CheckpointReader, slabs: Sequence[Slab]) -> None:
        """Creates the filler; nothing is read yet.

        Args:
            reader: Reader of the checkpoint.
            slabs: Slabs of all its chunks.
        """
        self._reader = reader
        self._slabs = slabs
        self._bytes = replace(reader.manifest, tree=bytes_tree(reader.tree))

    def fill(self, slab_queue: SlabQueue, held: I64, meter: Meter) -> None:
        """See ``Filler.fill``."""
        is_wanted = np.ones(self._bytes.tree.chunk_count, np.bool_)
        is_wanted[held] = False
        # The reader's own buffers are as large as the window.
        limit = slab_queue.budget_bytes // (READING_SHARE - 1)
        with self._reader.hold():
            for window in _windows(self._slabs, is_wanted, limit):
                filled: list[FilledSlab] = []
                for slab, wanted in window:
                    with meter.phase("wait"):
                        buffer = slab_queue.memory(slab.size)
                    if buffer is None:
                        return
                    filled.append(FilledSlab(slab, wanted, buffer))
                self._read(_Window(self._bytes, filled, slab_queue), meter)

    def _read(self, window: "_Window", meter: Meter) -> None:
        name = self._reader.name
        assembly = Assembly(
            self._bytes,
            window.regions(),
            name=name,
            place=window.place,
            meter=Meter("restore", name, within=meter),
        )
        self._reader.open_source().read(assembly.missing, assembly)
        assembly.check_complete()


class _Window:
    """Slabs that are read together. Threads of the reader share it."""

    def __init__(
        self, manifest: Manifest, filled: Sequence[FilledSlab], slab_queue: SlabQueue
    ) -> None:
        self._tree = manifest.tree
        self._slab_queue = slab_queue
        self._lock = threading.Lock()
        self._places: dict[int, tuple[FilledSlab, int]] = {}
        """Slab of each wanted chunk, and the offset of the chunk in it."""
        self._left = {id(one): len(one.wanted) for one in filled}
        """Number of chunks of each slab that are not read yet."""
        for one in filled:
            wanted = set(one.wanted)
            for ordinal, at, _ in one.slab.rows():
                if ordinal in wanted:
                    self._places[ordinal] = one, at

    def regions(self) -> list[tuple[int, list[Region]]]:
        """Returns the rows to read, each with the regions of its chunks."""
        rows: dict[int, list[Region]] = {}
        for ordinal in sorted(self._places):
            row, within = self._tree.locate(ordinal)
            rows.setdefault(row, []).append(self._tree.grids[row].region(within))
        return list(rows.items())

    def place(self, buffer: Buffer) -> None:
        """Copies verified chunks into their slabs; puts complete slabs into the
        queue."""
        first = int(self._tree.first_chunk[buffer.row])
        size = self._tree.grids[buffer.row].chunk_bytes
        for ((start, _),), array in zip(buffer.regions, buffer.arrays, strict=True):
            filled, at = self._places[first + start // size]
            memory: Bytes | None = filled.buffer
            assert memory is not None
            np.copyto(memory[at : at + size], array)
            with self._lock:
                self._left[id(filled)] -= 1
                is_complete = not self._left[id(filled)]
            if is_complete:
                self._slab_queue.put(filled)


def bytes_tree(tree: Tree) -> Tree:
    """Returns rows of bytes whose chunks are the chunks of a tree, with the same
    ordinals and the same bytes."""
    rows = list[Leaf]()
    for leaf, grid in zip(tree.leaves, tree.grids, strict=True):
        size = max(1, grid.chunk_bytes)
        shape, chunk_shape = (grid.count * size,), (size,)
        rows.append(replace(leaf, dtype="uint8", shape=shape, chunk_shape=chunk_shape))
    return Tree(tuple(rows))


def _windows(
    slabs: Sequence[Slab],
    is_wanted: "np.ndarray[tuple[int], np.dtype[np.bool_]]",
    limit: int,
) -> Iterator[list[tuple[Slab, list[int]]]]:
    """Yields the slabs with wanted chunks, and these chunks, in windows of at most
    `limit` bytes, or one larger slab."""
    window: list[tuple[Slab, list[int]]] = []
    size = 0
    for slab in slabs:
        stop = slab.first + len(slab.sizes)
        wanted = (slab.first + np.flatnonzero(is_wanted[slab.first : stop])).tolist()
        if not wanted:
            continue
        if window and size + slab.size > limit:
            yield window
            window, size = [], 0
        window.append((slab, wanted))
        size += slab.size
    if window:
        yield window
