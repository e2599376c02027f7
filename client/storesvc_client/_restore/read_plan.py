"""Which ranges of data files a restore reads, and in which order.

Decided from the manifest alone, whatever the storage.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from storesvc.format.chunks import I64, Places
from storesvc.format.manifests import Manifest
from storesvc.format.reads import Read, plan_reads

_SHOWN: Final = 3


def planned(
    manifest: Manifest, *, alone: I64, together: I64, at_most: int, gap_bytes: int
) -> list[Read]:
    """Returns the reads that fetch chunks, leaf after leaf, each in the order in which
    it lies: so few leaves are in memory in part, however many files hold a piece of
    each.

    Args:
        manifest: Of the checkpoint.
        alone: Chunks to be read each for itself.
        together: Chunks to be read with their neighbours.
        at_most: Bytes of neighbours.
        gap_bytes: What may lie between two of them.
    """
    tree, places = manifest.tree, manifest.places
    reads = list(_apart(places, alone))
    reads += plan_reads(places, together, at_most=at_most, gap_bytes=gap_bytes)
    first = np.array([read.chunks[0] for read in reads], np.int64)
    file, offset = places.file[first], places.offset[first]
    rows, _ = tree.locate_all(first)
    # a leaf counts where its first chunk lies
    by_place = np.lexsort((offset, file))
    ranks = np.full(len(tree.leaves), len(reads))
    np.minimum.at(ranks, rows[by_place], np.arange(len(reads)))
    return [reads[at] for at in np.lexsort((offset, file, ranks[rows])).tolist()]


def describe(manifest: Manifest, read: Read) -> str:
    """Returns what messages call the chunks of a read."""
    return ", ".join(map(manifest.tree.describe_chunk, read.chunks[:_SHOWN]))


def _apart(places: Places, chunks: I64) -> Iterator[Read]:
    """The reads that fetch chunks each for itself."""
    columns = (
        chunks,
        places.file[chunks],
        places.offset[chunks],
        places.length[chunks],
    )
    for chunk, file, offset, length in zip(*(c.tolist() for c in columns), strict=True):
        stop = offset + length
        yield Read(places.files[file], offset, stop, (chunk,), (length,), (offset,))
