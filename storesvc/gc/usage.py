"""Computes the bytes that a run uses, from its slots and file tables, not its data.

Bytes that checkpoints share are counted once, as far as file tables show it: a file
table holds the bytes of one checkpoint in each data file, and the maximum over all
checkpoints is taken as the bytes used of the file. This is exact while the checkpoint
that wrote the file exists, because later ones use subsets of its bytes. It is too low
if two checkpoints use different parts of a file whose own checkpoint was purged.
"""

from collections import Counter
from dataclasses import dataclass

from storesvc.catalog.catalog import Catalog
from storesvc.catalog.slots import CHECKPOINTS, COMMITTED, UPLOADING
from storesvc.errors import CorruptDataError
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName
from storesvc.gc.run_state import RunReader
from storesvc.storage.bounded_gather import each
from storesvc_proto.v1 import bucket_pb2 as pb


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


class UsageReader:
    """Computes the usage of the runs of a bucket."""

    def __init__(self, catalog: Catalog, reader: RunReader) -> None:
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

    async def own_bytes(self, namespace: str) -> int:
        """Returns the bytes that the saves of a namespace added: cheaper than ``of``,
        as it reads no file table. It is too low where a checkpoint shares the bytes of
        one that was purged."""
        runs = await self._catalog.run_names(namespace)

        async def added(run: RunName) -> int:
            slots = (await self._reader.slots(run)).values()
            return sum(slot.own_bytes for slot, _ in slots if slot.state in CHECKPOINTS)

        return sum(await each(added, runs))

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
