"""Reads the state of a run for the collector.

The objects are listed first, then the slots are read. One read of each slot is enough
to decide what expires. To decide what is garbage, all slots are read again until two
consecutive reads agree in the sense of ``mark``, which decides on the result.

The bytes that a run uses are computed from its slots and file tables, not its data.
Bytes that checkpoints share are counted once, as far as file tables show it: a file
table holds the bytes of one checkpoint in each data file, and the maximum over all
checkpoints is taken as the bytes used of the file. This is exact while the checkpoint
that wrote the file exists, because later ones use subsets of its bytes. It is too low
if two checkpoints use different parts of a file whose own checkpoint was purged.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeAlias

import numpy as np
from cachetools import LRUCache
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from storesvc.catalog.catalog import Catalog
from storesvc.catalog.records import damage_error, read_record
from storesvc.catalog.slots import CHECKPOINTS, COMMITTED, UPLOADING, fault
from storesvc.errors import ConflictError, CorruptDataError
from storesvc.format.checksums import digest, hash_name
from storesvc.format.layout import RunPaths, parse_data_file
from storesvc.format.names import InvalidNameError, RunName, check_data_file
from storesvc.gc import mark
from storesvc.gc.mark import Names, RunState, agree, uploads_needing_records
from storesvc.storage.bucket import Bucket, Generation, list_pages
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.storage.requests import gather_each
from storesvc.telemetry.events import RunContents
from storesvc_proto.v1 import bucket_pb2 as pb

Hashes: TypeAlias = NDArray[np.uint64]

_TRIES: Final = 10
"""Maximum reads of all slots, while some are freed or taken over."""
_LISTS: Final = 10
"""Maximum lists of the slots, while new ones appear."""


def run_contents(state: RunState) -> RunContents:
    slots = state.slots.values()
    committed = [slot for slot in slots if slot.state == COMMITTED]
    open_since = [
        slot.create_time.ToNanoseconds() / 1e9
        for slot in slots
        if slot.state == UPLOADING
    ]
    return RunContents(
        checkpoints=len(committed),
        logical_bytes=sum(slot.size_bytes for slot in committed),
        own_bytes=sum(slot.own_bytes for slot in committed),
        newest_commit=max(
            (slot.commit_time.ToNanoseconds() / 1e9 for slot in committed), default=0.0
        ),
        uploads_open=len(open_since),
        oldest_upload=min(open_since, default=0.0),
    )


class RunReader:
    """Reads the states of the runs of a bucket."""

    def __init__(self, bucket: Bucket, catalog: Catalog) -> None:
        self._bucket = bucket
        self._catalog = catalog

    async def read_once(self, run: RunName) -> RunState:
        """Returns the state of a run, each slot as of a moment of its own.

        Raises:
            CorruptDataError: A slot, or the record of an upload, is damaged.
        """
        places = RunPaths(run)
        # The list before the slots and the records: an upload writes its record first,
        # so each listed object is judged by the record and the slot that may need it.
        # In the other order a new upload's objects could be listed without either.
        listing = mark.Listing(places)
        async for page in list_pages(self._bucket, places.root):
            # In threads: a hundred thousand objects would block the event loop.
            await asyncio.to_thread(listing.add, page)
        slots = _bare(await self.slots(run))
        return await self._describe_state(places, listing, slots)

    async def read_consistent(self, seen: RunState) -> RunState:
        """Returns the state of a run with slots that agree.

        Args:
            seen: The state that an earlier `read_once` returned.

        Raises:
            ConflictError: The slots changed during every read.
            CorruptDataError: A slot, or the record of an upload, is damaged.
        """
        run, first = seen.places.name, seen.slots
        for _ in range(_TRIES):
            # A list in between that shows no new slot proves that each slot was read
            # before and after one moment; see ``mark``.
            first, steps = await self._complete_read(run, first)
            second = _bare(await self._read_slots(run, steps))
            if agree(first, second):
                return await self._describe_state(seen.places, seen, second)
            first = second
        raise ConflictError(
            f"{run}: expected two consecutive reads of all slots to agree, but a slot "
            f"was freed or taken over during each of {_TRIES}; collect again later"
        )

    async def file_table(self, place: str) -> pb.FileTable | None:
        """Returns the file table at a path; None: it is missing."""
        stored = await self._bucket.read(place)
        if stored is None:
            return None
        if not place.removesuffix(".binpb").endswith(digest(stored.data).hex()):
            raise CorruptDataError(f"{place} is damaged: its digest differs")
        try:
            table = pb.FileTable.FromString(stored.data)
            for file in table.file:
                check_data_file(file)
        except (DecodeError, InvalidNameError) as e:
            raise CorruptDataError(f"{place} is damaged: {e}") from e
        return table

    async def slots(
        self, run: RunName
    ) -> dict[int, tuple[pb.CheckpointRecord, Generation]]:
        """Returns the slots of a run by step, read one after another."""
        return await self._read_slots(run, await self._steps(run))

    async def _complete_read(
        self, run: RunName, read: Mapping[int, pb.CheckpointRecord]
    ) -> tuple[Mapping[int, pb.CheckpointRecord], list[int]]:
        """Returns a read of slots completed with new ones, and a list without more."""
        for _ in range(_LISTS):
            steps = await self._steps(run)
            new = [step for step in steps if step not in read]
            if not new:
                return read, steps
            read = {**read, **_bare(await self._read_slots(run, new))}
        raise ConflictError(
            f"{run}: new slots appeared between {_LISTS} consecutive lists; collect "
            "again later"
        )

    async def _steps(self, run: RunName) -> list[int]:
        places = RunPaths(run)
        listed = await self._bucket.list(places.checkpoints)
        return [s for place in listed if (s := places.parse_step(place)) is not None]

    async def _read_slots(
        self, run: RunName, steps: Sequence[int]
    ) -> dict[int, tuple[pb.CheckpointRecord, Generation]]:
        found = await gather_each(partial(self._catalog.slot, run), steps)
        return {s: slot for s, slot in zip(steps, found, strict=True) if slot}

    async def _describe_state(
        self,
        places: RunPaths,
        seen: mark.Listing | RunState,
        slots: Mapping[int, pb.CheckpointRecord],
    ) -> RunState:
        """Returns the state that was read, with the upload records that it needs."""
        # A slot has a valid state, and an upload of its own.
        steps: dict[str, int] = {}
        for step, slot in slots.items():
            how, other = fault(slot), steps.setdefault(slot.upload, step)
            if not how and other != step:
                how = f"expected an upload of its own, got that of step {other}"
            if how:
                place = places.checkpoint(step)
                raise damage_error(place, how, of=f"{places.name}@{step}")
        state = RunState(
            places=places,
            listed=seen.listed,
            ranges=seen.ranges,
            slots=slots,
            records={},
        )
        uploads = uploads_needing_records(state)
        found = await gather_each(
            lambda place: read_record(self._bucket, place, pb.UploadRecord),
            map(places.upload, uploads),
        )
        records = zip(uploads, found, strict=True)
        return replace(state, records={u: r[0] for u, r in records if r is not None})


_KNOWN_GROUPS: Final = 50_000
"""Maximum uploads in the summaries of file tables that are remembered."""


class FileTables:
    """Summaries of the file tables of a bucket. A table never changes, so each is read
    once, as long as they are few enough."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._known: LRUCache[str, Mapping[str, Names]] = LRUCache(
            _KNOWN_GROUPS, getsizeof=lambda groups: 1 + len(groups)
        )

    async def summarize(self, place: str) -> Mapping[str, Names] | None:
        """Returns the files that a table names, by upload; None: it is missing.

        Raises:
            CorruptDataError: It is damaged.
        """
        if (known := self._known.get(place)) is not None:
            return known
        hashes = await self.read_hashes(place)
        if hashes is None:
            return None
        found = {upload: summarize(group) for upload, group in hashes.items()}
        with suppress(ValueError):  # too large to be remembered
            self._known[place] = found
        return found

    async def read_hashes(self, place: str) -> dict[str, Hashes] | None:
        """Returns the hashes of the files that a table names, by upload, ascending;
        None: it is missing.

        Raises:
            CorruptDataError: It is damaged.
        """
        table = await self._reader.file_table(place)
        if table is None:
            return None
        return await asyncio.to_thread(hash_files, table.file)


def hash_files(files: Iterable[str]) -> dict[str, Hashes]:
    """Returns the hashes of data files by the upload that wrote them, ascending."""
    found: dict[str, list[int]] = {}
    for file in files:
        found.setdefault(file.partition("/")[0], []).append(hash_name(file))
    return {upload: np.unique(np.array(h, np.uint64)) for upload, h in found.items()}


def summarize(hashes: Hashes) -> Names:
    """Returns the summary of a set of data files."""
    return Names(len(hashes), mark.sum_hashes(hashes.tolist()))


def is_named(files: Sequence[str], named: Hashes) -> NDArray[np.bool_]:
    """Returns for each data file whether its hash is among ascending ones."""
    hashes = np.array([hash_name(file) for file in files], np.uint64)
    at = np.minimum(np.searchsorted(named, hashes), max(len(named) - 1, 0))
    return named[at] == hashes if len(named) else np.zeros(len(files), np.bool_)


def _bare(
    slots: Mapping[int, tuple[pb.CheckpointRecord, Generation]],
) -> dict[int, pb.CheckpointRecord]:
    return {step: slot for step, (slot, _) in slots.items()}


LEAST_BYTES: Final = 4096
"""Bytes that the smallest object counts as: it takes a block of a disk, and its number
is limited so, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The space that a run uses, in the names of the contract."""

    checkpoint_count: int
    """Number of committed checkpoints."""
    deleted_checkpoint_count: int
    """Number of deleted checkpoints that are not yet purged."""
    upload_count: int
    """Number of live uploads."""
    logical_bytes: int
    """Bytes of all leaves of all checkpoints, deleted ones included."""
    stored_bytes: int
    """Bytes of their stored chunks, each counted once per checkpoint that uses it."""
    distinct_bytes: int
    """Bytes of their stored chunks, each counted once."""
    file_count: int
    """Number of data files in use."""


@dataclass(slots=True)
class StoredBytes:
    """The bytes that a namespace stores."""

    total: int = 0
    """Bytes of its objects; each counts as ``LEAST_BYTES`` at least."""
    uploads: Counter[str] = field(default_factory=Counter)
    """Bytes of the data files of each upload, by its id."""


@dataclass(eq=False, repr=False)
class UsageReader:
    """Computes the usage of the runs of a bucket."""

    _bucket: TensorStoreBucket
    _catalog: Catalog
    _reader: RunReader

    async def read_usage(self, run: RunName) -> Usage:
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

        await gather_each(add, held)
        committed = sum(slot.state == COMMITTED for slot in held)
        return Usage(
            checkpoint_count=committed,
            deleted_checkpoint_count=len(held) - committed,
            upload_count=uploads,
            logical_bytes=sum(slot.size_bytes for slot in held),
            stored_bytes=sum(slot.stored_bytes for slot in held),
            distinct_bytes=sum(largest.values()),
            file_count=len(largest),
        )

    async def stored(self, namespace: str) -> StoredBytes:
        """Returns the bytes of everything that a namespace stores, by a list of its
        objects: also of what no checkpoint uses and no collection has deleted yet."""
        found = StoredBytes()
        for path, size in (await self._bucket.sizes(f"data/{namespace}/")).items():
            found.total += max(size, LEAST_BYTES)
            if upload := parse_data_file(path):
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
