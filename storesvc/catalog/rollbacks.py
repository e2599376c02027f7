"""Detects slots that were rolled back, and keeps a reserve of space for deletions.

A seal cannot show that a record is an earlier version of the same path. Other objects
can, because the order of writes is known (``bucket.proto``):

1. The leaf table of an upload is written before its slot becomes UPLOADING, and is
   deleted only after that state has ended. The manifest is written before the commit.
   So a slot is not UPLOADING by an upload that has a manifest and no leaf table, and
   its epoch is not below the epoch of any upload that has a manifest.
2. A tag or a hold names an upload only after its commit.
3. The journal announces deletions, undeletions and tags only of committed checkpoints.
   A checkpoint loses its slot only after its deletion was announced, so no slot that is
   older than its last announcement names another upload, unless that announcement is a
   deletion.

Such a slot is reported as damage. Acting on its contents would give the step to another
upload, and the data of a checkpoint to the collector.

A deletion begins with writes: an announcement, a slot that becomes FREE. On a full disk
they would fail, and no space could ever be freed. So a store on files keeps an object
of zeros, which a call that frees space may delete first.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Final, ParamSpec, TypeVar

from storesvc.catalog.records import damage_error, read_record
from storesvc.catalog.slots import UPLOADING
from storesvc.errors import (
    CorruptDataError,
    StorageDeniedError,
    StorageFullError,
    StorageUnavailableError,
)
from storesvc.format import layout
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName
from storesvc.storage.bucket import IF_ABSENT, Bucket, Generation, PreconditionError
from storesvc_proto.v1 import bucket_pb2 as pb

RESERVE_BYTES: Final = 1 << 20
"""Size of the reserve: some hundred small records."""

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)


class Reserve:
    """The disk reserve of a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._is_kept = False

    async def keep(self) -> None:
        self._is_kept = True
        await self.put_back()

    async def put_back(self) -> None:
        """Creates the reserve again, if it was used and there is space."""
        if not self._is_kept or await self._bucket.list(layout.RESERVE):
            return
        with suppress(PreconditionError):  # another process has created it
            try:
                await self._bucket.write(
                    layout.RESERVE, bytes(RESERVE_BYTES), condition=IF_ABSENT
                )
            except (StorageDeniedError, StorageFullError, StorageUnavailableError) as e:
                if "read_only" not in e.metadata:  # else all saves are rejected
                    _log.warning("%s is not created yet: %s", layout.RESERVE, e)

    async def spent_on(
        self, call: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs a call that frees space, and returns its result; if the storage is full,
        deletes the reserve and runs the call again.

        Raises:
            StorageFullError: The storage is full without the reserve, too.
        """
        try:
            return await call(*args, **kwargs)
        except StorageFullError:
            if not self._is_kept:
                raise
        _log.warning("the storage is full: deleting %s", layout.RESERVE)
        await self._bucket.delete(layout.RESERVE)
        try:
            return await call(*args, **kwargs)
        finally:
            await self.put_back()


NO_LEAF_TABLE: Final = "its manifest is there, and its leaf table is not"
"""Contradiction between the objects of an upload and a slot UPLOADING by it."""


def rolled_back(run: RunName, step: int, upload: str, why: str) -> CorruptDataError:
    """Returns the error of a slot that was rolled back to an earlier version.

    Args:
        upload: The upload that the slot does not hold as a checkpoint.
        why: Evidence that the upload was committed, as a clause.
    """
    how = (
        "an earlier version of it was restored: it does not hold upload "
        f"{upload} as a checkpoint, but {why}"
    )
    return damage_error(RunPaths(run).checkpoint(step), how, of=f"{run}@{step}")


def slot_missing(run: RunName, step: int, by: str) -> CorruptDataError:
    """Returns the error of a missing slot whose checkpoint is still in use."""
    return CorruptDataError(
        f"the record of {run}@{step} is missing ({RunPaths(run).checkpoint(step)}), "
        f"but {by} names it; restore this object from a copy, or delete {by} to "
        f"abandon {run}@{step}",
        run=str(run),
        step=str(step),
    )


def data_missing(run: RunName, slot: pb.CheckpointRecord) -> CorruptDataError:
    """Returns the error of a checkpoint of which only the slot is left."""
    path = RunPaths(run).checkpoint(slot.step)
    return CorruptDataError(
        f"{run}@{slot.step}: its manifest is missing, like all that its record names "
        f"({path}): it was purged and an earlier version of the record was restored, "
        "or the files were removed; restore the files from a copy, or delete and purge "
        "the checkpoint",
        run=str(run),
        step=str(slot.step),
    )


def has_manifest(places: RunPaths, upload: str, objects: Iterable[str]) -> bool:
    manifests = _prefixes(places, upload)[0]
    return any(path.startswith(manifests) for path in objects)


def contradiction(
    places: RunPaths, upload: str, objects: Iterable[str], *, owns_slot: bool
) -> str:
    """Returns the contradiction between the objects of an upload and its slot, as a
    clause; "" if there is none.

    Args:
        objects: Its objects, listed before its slot was read.
        owns_slot: Whether the slot is UPLOADING by it; else the slot's epoch is below
            the epoch of the upload.
    """
    listed = list(objects)
    if not has_manifest(places, upload, listed):
        return ""
    if not owns_slot:
        return "it has a manifest, which only an upload that owned its slot writes"
    trees = _prefixes(places, upload)[1]
    if any(path.startswith(trees) for path in listed):
        return ""
    return NO_LEAF_TABLE


class Rollbacks:
    """Checks slots of a bucket that hold no checkpoint."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    async def damage(
        self, run: RunName, found: tuple[pb.CheckpointRecord, Generation] | None
    ) -> CorruptDataError | None:
        """Returns the error of a slot that was rolled back to UPLOADING; None without
        evidence of that."""
        if found is None or found[0].state != UPLOADING:
            return None
        places, slot = RunPaths(run), found[0]
        manifests, trees = _prefixes(places, slot.upload)
        # If the slot has not changed since the first read, it was UPLOADING while its
        # leaf table was missing.
        if await self._bucket.list(trees) or not await self._bucket.list(manifests):
            return None
        path = places.checkpoint(slot.step)
        again = await read_record(self._bucket, path, pb.CheckpointRecord)
        if again is None or again[1] != found[1]:
            return None
        return rolled_back(run, slot.step, slot.upload, NO_LEAF_TABLE)


def _prefixes(places: RunPaths, upload: str) -> tuple[str, str]:
    """Returns the prefixes of the manifests and of the leaf tables of an upload."""
    manifest, tree = places.manifest(upload, b""), places.tree(upload, b"")
    return manifest.removesuffix(".binpb"), tree.removesuffix(".binpb")
