"""Copies the data files of a checkpoint within its bucket, which copies them itself.

No byte of an array passes through this process. Each object is complete when it
appears, and chunks keep their checksums, which Orbax verifies. A file with leaves that
are left out, a cast, and another bucket need copies by this process.
"""

import logging
from collections.abc import Sequence
from typing import Final

import numpy as np

from storesvc_client._export.claims import ClaimedStep
from storesvc_client._export.orbax_data import (
    DATA,
    DataFiles,
    is_stored_as_exported,
    with_names,
)
from storesvc_client._export.orbax_documents import OrbaxLeaf
from storesvc_client._export.source import Source
from storesvc_client._export.target import RefusedCopyError, RemoteTarget, Target
from storesvc_client._values.progress import Meter

AT_ONCE: Final = 64
"""Files that are copied at the same time; between them, the progress advances."""

_log = logging.getLogger("storesvc_client")


def copy_within_bucket(
    source: Source,
    leaves: Sequence[OrbaxLeaf],
    target: Target,
    item: str,
    meter: Meter,
) -> DataFiles | None:
    """Copies the data files that hold the leaves; returns None, without a copy left, if
    a leaf is cast or left out, or if the bucket does not copy them. Then the caller
    reads them, which also finds out what is damaged.

    Raises:
        StoreError: The storage failed.
    """
    pool = source.bucket_pool
    if isinstance(target, ClaimedStep):
        target = target.claimed()
    if (
        pool is None
        or not isinstance(target, RemoteTarget)
        or not target.is_in_bucket_of(pool.storage)
        or not is_stored_as_exported(source, leaves)
    ):
        return None
    places = source.places.take(source.ordinals([leaf.row for leaf in leaves]))
    copies = with_names(places)
    lengths = np.bincount(places.file, places.length, len(places.files))
    used = np.unique(places.file).tolist()
    try:
        for start in range(0, len(used), AT_ONCE):
            batch = used[start : start + AT_ONCE]
            with meter.phase("write"):
                target.copy_objects(
                    pool.storage,
                    [f"{pool.path}{places.files[file]}" for file in batch],
                    [f"{item}/{copies.files[file]}" for file in batch],
                )
            meter.add(int(lengths[batch].sum()))
    except RefusedCopyError as e:
        _undo(source, target, item, str(e))
        return None
    sizes = target.sizes(f"{item}/{DATA.rstrip('/')}") if used else {}
    found = {file: sizes.get(copies.files[file].removeprefix(DATA), 0) for file in used}
    if any(found[file] < places.ends[file] for file in used):
        _undo(source, target, item, "a data file is too short")
        return None
    return DataFiles(places=copies, copied_bytes=sum(found.values()))


def _undo(source: Source, target: Target, item: str, reason: str) -> None:
    """Removes the copies, and logs why."""
    _log.warning(
        "export of %s: its data files are read and written, because the bucket did "
        "not copy them: %s",
        source.name,
        reason,
    )
    target.remove(f"{item}/{DATA.rstrip('/')}")
