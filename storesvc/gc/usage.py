"""Computes the bytes that a run uses, from its slots and file tables, not its data.

Bytes that checkpoints share are counted once, as far as file tables show it: a file
table holds the bytes of one checkpoint in each data file, and the maximum over all
checkpoints is taken as the bytes used of the file. This is exact while the checkpoint
that wrote the file exists, because later ones use subsets of its bytes. It is too low
if two checkpoints use different parts of a file whose own checkpoint was purged.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from storesvc.catalog.catalog import Catalog
from storesvc.catalog.slots import CHECKPOINTS, COMMITTED, UPLOADING
from storesvc.errors import CorruptDataError
from storesvc.format.layout import RunPaths, upload_of_data_file
from storesvc.format.names import RunName
from storesvc.gc.run_state import RunReader
from storesvc.storage.hedged_calls import each
from storesvc.storage.tensorstore_bucket import TensorStoreBucket
from storesvc_proto.v1 import bucket_pb2 as pb

LEAST_BYTES: Final = 4096
"""Bytes that the smallest object counts as: it takes a block of a disk, and its number
is limited so, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The space that a run uses."""

    checkpoints: int
    """Number of committed checkpoints."""
    deleted_checkpoints: int
    """Number of deleted checkpoints that are not yet purged."""
    uploads: int
    """Number of live uploads."""
    logical_bytes: int
    """Bytes of all leaves of all checkpoints, deleted ones included."""
    stored_bytes: int
    """Bytes of their stored chunks, each counted once per checkpoint that uses it."""
    distinct_bytes: int
    """Bytes of their stored chunks, each counted once."""
    files: int
    """Number of data files in use."""


@dataclass(slots=True)
class StoredBytes:
    """The bytes that a namespace stores."""

    total: int = 0
    """Bytes of its objects; each counts as ``LEAST_BYTES`` at least."""
    uploads: Counter[str] = field(default_factory=Counter)
    """Bytes of the data files of each upload, by its id."""


class UsageReader:
    """Computes the usage of the runs of a bucket."""

    def __init__(
        self, bucket: TensorStoreBucket, catalog: Catalog, reader: RunReader
    ) -> None:
        self._bucket = bucket
        self._catalog = catalog
        self._reader = reader

    async def of(self, run: RunName) -> Usage:
        """Returns the space that a run uses.

        Raises:
            RunNotFoundError: The run does not exist; names the most similar ones.
            CorruptDataError: The file table of a checkpoint is missing or damaged.
        """
        slots = [slot for slot, _ in (await self._reader.slots(run)).values()]
        held = [slot for slot in slots if slot.state in CHECKPOINTS]
        uploads = sum(slot.state == UPLOADING for slot in slots)
        if not (held or uploads):
            await self._catalog.check_run(run)
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

    async def stored(self, namespace: str) -> StoredBytes:
        """Returns the bytes of everything that a namespace stores, by a list of its
        objects: also of what no checkpoint uses and no collection has deleted yet."""
        found = StoredBytes()
        for path, size in (await self._bucket.sizes(f"data/{namespace}/")).items():
            found.total += max(size, LEAST_BYTES)
            if upload := upload_of_data_file(path):
                found.uploads[upload] += size
        return found

    async def _files(self, run: RunName, record: pb.CheckpointRecord) -> dict[str, int]:
        """Returns the bytes of a checkpoint's chunks in each data file."""
        if record.files_digest:
            place = RunPaths(run).file_table(record.upload, record.files_digest)
            table = await self._reader.file_table(place)
            if table is None:
                raise CorruptDataError(f"{place} is missing")
            return dict(zip(table.file, table.chunk_bytes, strict=True))
        # Checkpoints of the first release have no file table.
        manifest, found = await self._catalog.manifest(run, record), Counter[str]()
        for file, _, length in manifest.places.rows():
            found[file] += length
        return found
