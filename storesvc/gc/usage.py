"""How many bytes a run takes: from its slots and its file tables, without its data.

What checkpoints share is counted once, as far as file tables tell: of each data file
they say how many bytes of it a checkpoint has. The most that any one has is taken for
what is used of the file. That is exact where what a checkpoint shares of a file is part
of what an earlier one had of it, as it is while the first one stays; it is too little
where two checkpoints share different parts of a file whose own checkpoint was purged.
"""

from dataclasses import dataclass

from storesvc.catalog.catalog import Catalogue
from storesvc.catalog.slots import CHECKPOINTS, COMMITTED, UPLOADING
from storesvc.errors import CorruptDataError
from storesvc.format.layout import RunPlaces
from storesvc.format.manifests import Manifest
from storesvc.format.names import RunName
from storesvc.gc.run_state import Snapshots
from storesvc.storage.bounded_gather import each
from storesvc_proto.v1 import bucket_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a run takes."""

    checkpoints: int
    """Committed ones."""
    deleted_checkpoints: int
    """Those that are not yet purged."""
    uploads: int
    """Live ones."""
    logical_bytes: int
    """Of all leaves of all checkpoints, deleted ones included."""
    stored_bytes: int
    """Of their stored chunks, each counted as often as it is used."""
    distinct_bytes: int
    """Of their stored chunks, each counted once."""
    files: int
    """Data files that they need."""


class Usages:
    """Those of the runs of a bucket."""

    def __init__(self, catalogue: Catalogue, snapshots: Snapshots) -> None:
        self._catalogue = catalogue
        self._snapshots = snapshots

    async def of(self, run: RunName) -> Usage:
        """Returns what a run takes.

        Raises:
            RunNotFoundError: With the most similar names.
            CorruptDataError: The file table of a checkpoint is missing or damaged.
        """
        slots = [slot for slot, _ in (await self._snapshots.slots(run)).values()]
        held = [slot for slot in slots if slot.state in CHECKPOINTS]
        uploads = sum(slot.state == UPLOADING for slot in slots)
        if not (held or uploads):
            await self._catalogue.check_run(run)
        largest: dict[str, int] = {}

        async def add(record: pb.CheckpointRecord) -> None:
            for file, chunk_bytes in (await self._files(run, record)).items():
                largest[file] = max(chunk_bytes, largest.get(file, 0))

        await each(add, held)
        committed = sum(slot.state == COMMITTED for slot in held)
        return Usage(
            checkpoints=committed,
            deleted_checkpoints=len(held) - committed,
            uploads=uploads,
            logical_bytes=sum(slot.size_bytes for slot in held),
            stored_bytes=sum(slot.stored_bytes for slot in held),
            distinct_bytes=sum(largest.values()),
            files=len(largest),
        )

    async def _files(self, run: RunName, record: pb.CheckpointRecord) -> dict[str, int]:
        """Bytes of a checkpoint's chunks in each data file that it needs."""
        if record.files_digest:
            place = RunPlaces(run).file_table(record.upload, record.files_digest)
            table = await self._snapshots.file_table(place)
            if table is None:
                raise CorruptDataError(f"{place} is missing")
            return dict(zip(table.file, table.chunk_bytes, strict=True))
        # of the first release
        return _files_of(await self._catalogue.manifest(run, record))


def _files_of(manifest: Manifest) -> dict[str, int]:
    found: dict[str, int] = {}
    for file, _, length in manifest.places.rows():
        found[file] = found.get(file, 0) + length
    return found
