"""Slots that were put back: an earlier version of a record where a later one was.

A seal cannot show that a record is an earlier version of its own place. Other objects
can, because the order of writes is known (``bucket.proto``):

1. The leaf table of an upload is written before its slot becomes UPLOADING, and is
   deleted only after that state has ended. The manifest is written before the commit.
   So a slot is not UPLOADING by an upload that has a manifest and no leaf table, and
   its epoch is not below that of any upload that has a manifest.
2. A tag or a hold names an upload only after its commit.
3. The journal holds a deletion, an undeletion or a tag only of what was committed. A
   checkpoint loses its slot only after its deletion was announced, so no slot that is
   older than its last announcement names another upload, unless that is a deletion.

Such a slot is reported as damage. To act on what it says would give the step to another
upload, and the data of a checkpoint to the collector.
"""

from collections.abc import Iterable
from typing import Final

from storesvc.catalog.records import damaged, read_record
from storesvc.catalog.slots import UPLOADING
from storesvc.errors import CorruptDataError
from storesvc.format.layout import RunPlaces
from storesvc.format.names import RunName
from storesvc.storage.bucket import Bucket, Generation
from storesvc_proto.v1 import bucket_pb2 as pb

NO_LEAF_TABLE: Final = "its manifest is there, and its leaf table is not"
"""How the objects of an upload contradict a slot that is UPLOADING by it."""


def put_back(run: RunName, step: int, upload: str, why: str) -> CorruptDataError:
    """Returns the refusal of a slot that is an earlier version of itself.

    Args:
        run: The run.
        step: Of the slot.
        upload: The upload that the slot does not hold as a checkpoint.
        why: What shows that the upload was committed, as a clause.
    """
    how = (
        "an earlier version of it was put back: it does not hold upload "
        f"{upload} as a checkpoint, but {why}"
    )
    return damaged(RunPlaces(run).checkpoint(step), how, of=f"{run}@{step}")


def removed(run: RunName, step: int, by: str) -> CorruptDataError:
    """Returns the refusal of a slot that is missing, but not given up.

    Args:
        run: The run.
        step: Of the slot.
        by: The tag or the hold that names its checkpoint.
    """
    return CorruptDataError(
        f"the record of {run}@{step} is missing ({RunPlaces(run).checkpoint(step)}), "
        f"but {by} names it; restore this object from a copy, or delete {by} to give "
        f"{run}@{step} up",
        run=str(run),
        step=str(step),
    )


def purged(run: RunName, slot: pb.CheckpointRecord) -> CorruptDataError:
    """Returns the refusal of a checkpoint of which only the slot is there."""
    place = RunPlaces(run).checkpoint(slot.step)
    return CorruptDataError(
        f"{run}@{slot.step}: its manifest is missing, as all that its record names "
        f"({place}): it was purged and an earlier version of the record was put back, "
        "or the files were removed; restore the files from a copy, or delete and purge "
        "the checkpoint",
        run=str(run),
        step=str(slot.step),
    )


def has_manifest(places: RunPlaces, upload: str, objects: Iterable[str]) -> bool:
    """Returns whether a manifest is among the objects of an upload."""
    manifests = _prefixes(places, upload)[0]
    return any(place.startswith(manifests) for place in objects)


def contradiction(
    places: RunPlaces, upload: str, objects: Iterable[str], *, owns_slot: bool
) -> str:
    """Returns how the objects of an upload contradict its slot, as a clause; "": they
    do not.

    Args:
        places: Of the run.
        upload: The upload.
        objects: Its objects, listed in order before its slot was read.
        owns_slot: Whether the slot is UPLOADING by it; else it names an epoch below
            that of the upload.
    """
    listed = list(objects)
    if not has_manifest(places, upload, listed):
        return ""
    if not owns_slot:
        return "its manifest is there, which none has that never owned its slot"
    trees = _prefixes(places, upload)[1]
    if any(place.startswith(trees) for place in listed):
        return ""
    return NO_LEAF_TABLE


class Rollbacks:
    """Looks at the slots of a bucket that say that they hold no checkpoint."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    async def damage(
        self, run: RunName, found: tuple[pb.CheckpointRecord, Generation] | None
    ) -> CorruptDataError | None:
        """Returns the damage of a slot that was put back to UPLOADING; None: nothing
        shows that it was.

        Args:
            run: The run.
            found: What was read of the slot.
        """
        if found is None or found[0].state != UPLOADING:
            return None
        places, slot = RunPlaces(run), found[0]
        manifests, trees = _prefixes(places, slot.upload)
        # The slot was UPLOADING when its leaf table was missing if it has not changed
        # since the first read.
        if await self._bucket.list(trees) or not await self._bucket.list(manifests):
            return None
        place = places.checkpoint(slot.step)
        again = await read_record(self._bucket, place, pb.CheckpointRecord)
        if again is None or again[1] != found[1]:
            return None
        return put_back(run, slot.step, slot.upload, NO_LEAF_TABLE)


def _prefixes(places: RunPlaces, upload: str) -> tuple[str, str]:
    """Returns the prefixes of the manifests and of the leaf tables of an upload."""
    manifest, tree = places.manifest(upload, b""), places.tree(upload, b"")
    return manifest.removesuffix(".binpb"), tree.removesuffix(".binpb")
