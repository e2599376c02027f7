"""Verifies checkpoints, and compares two of them.

A verification reads every byte of a checkpoint again and checks it: the chunks that the
manifest locates; the key space, which must show the same chunks at the same locations,
and the ``zarr.json`` of each leaf; and the file table, without which garbage collection
cannot know the data files of the checkpoint.

Damage is reported and does not end a verification. The checkpoint may be purged in the
meantime; therefore the slot is read again before anything is reported as missing.

The number of reads in flight bounds the memory, over all verifications of the process.
Checksums are computed in threads.

A comparison compares the manifests of two checkpoints, without reading their chunks.
"""

import asyncio
import logging
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from storesvc.catalog import slots
from storesvc.catalog.catalog import Catalog
from storesvc.catalog.records import corrupted_in_transit
from storesvc.clock import Clock
from storesvc.concurrency import FairSemaphore
from storesvc.errors import CheckpointNotFoundError, CorruptDataError
from storesvc.format.chunks import ChunkLocations, Read, plan_reads
from storesvc.format.layout import RunPaths
from storesvc.format.manifests import Manifest
from storesvc.format.names import (
    CheckpointName,
    InvalidNameError,
    RunName,
    check_data_file,
)
from storesvc.format.ocdbt import ValueLocation
from storesvc.inspect import rules
from storesvc.inspect.rules import (
    Damage,
    Difference,
    LeafMetadata,
    Report,
    Tally,
    differences,
)
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.telemetry.events import DamageFound, publish
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import maintenance_service_pb2 as api

COMPARISONS_AT_ONCE: Final = 2
"""Maximum comparisons in a process; each may hold two manifests of the largest size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The differences between two checkpoints."""

    before: pb.CheckpointRecord
    after: pb.CheckpointRecord
    same_leaf_count: int
    differences: Sequence[Difference]


class Comparisons:
    """Compares checkpoints."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._turns = FairSemaphore(COMPARISONS_AT_ONCE, purpose="compares checkpoints")

    @asynccontextmanager
    async def between(
        self, before: CheckpointName, after: CheckpointName
    ) -> AsyncIterator[Comparison]:
        """Yields the differences between two checkpoints, of one run or of two runs."""
        old = await self._catalog.checkpoint(before)
        new = await self._catalog.checkpoint(after)
        async with self._turns.held(before.run.namespace):
            found = await asyncio.to_thread(
                differences,
                await self._catalog.manifest(before.run, old),
                await self._catalog.manifest(after.run, new),
            )
            different = sum(
                difference.after is not None and not difference.is_item
                for difference in found
            )
            yield Comparison(
                before=old,
                after=new,
                same_leaf_count=new.leaf_count - different,
                differences=found,
            )


VERIFICATIONS_AT_ONCE: Final = 2
"""Maximum verifications in a process; each holds a manifest."""

MAX_READS: Final = 3
"""Maximum reads in memory, over all verifications of a process."""

REPORT_SECONDS: Final = 1.0
"""Approximate interval between reports."""

Check: TypeAlias = Callable[[Sequence[int], bytes], Iterable[Damage]]
"""Returns the damages of values that are stored back to back, given their numbers."""

Missing: TypeAlias = Callable[[int, str], Iterable[Damage]]
"""Returns the damages of a value that cannot be read, given its number and a cause."""

_log = logging.getLogger(__name__)


class Verifier:
    """Verifies checkpoints."""

    def __init__(
        self, bucket: TensorStoreBucket, catalog: Catalog, *, clock: Clock
    ) -> None:
        self._bucket = bucket
        self._catalog = catalog
        self._clock = clock
        self._turns = FairSemaphore(
            VERIFICATIONS_AT_ONCE, purpose="verifies checkpoints"
        )
        self._reads = asyncio.Semaphore(MAX_READS)

    async def verify(
        self, run: RunName, record: pb.CheckpointRecord
    ) -> AsyncGenerator[Report]:
        """Yields reports about a checkpoint: one about every second, and a last one.

        Raises:
            CorruptDataError: The manifest is missing or damaged.
            CheckpointNotFoundError: The checkpoint was purged in the meantime.
            StorageUnavailableError: The storage does not answer.
            LimitExceededError: Other verifications took too long.
        """
        async with self._turns.held(run.namespace):
            reading = _Reading(self._bucket, self._catalog, self._reads, run, record)
            manifest = await reading.manifest()
            tally = Tally(manifest.tree.chunk_count)
            reported = self._clock.elapsed()
            async with aclosing(_chunks(reading, manifest)) as chunks:
                async for read, found in chunks:
                    tally.add(found)
                    tally.advance(len(read.chunks), read.stop - read.start)
                    if self._clock.elapsed() - reported >= REPORT_SECONDS:
                        for report in tally.reports():
                            _publish(run, record, report)
                            yield report
                        reported = self._clock.elapsed()
            await _check_key_space(reading, manifest, tally)
            tally.add(await reading.file_table(manifest))
            tally.close()
            for report in tally.reports():
                _publish(run, record, report)
                yield report


def _publish(run: RunName, record: pb.CheckpointRecord, report: Report) -> None:
    for each in report.damages:
        kind = api.Damage.Kind.Name(each.kind).removeprefix("KIND_").lower()
        publish(DamageFound(run=str(run), step=record.step, kind=kind))


class _Reading:
    """The reads of one verification."""

    def __init__(
        self,
        bucket: TensorStoreBucket,
        catalog: Catalog,
        reads: asyncio.Semaphore,
        run: RunName,
        record: pb.CheckpointRecord,
    ) -> None:
        self._bucket = bucket
        self._catalog = catalog
        self._reads = reads
        self._run = run
        self._record = record
        self._places = RunPaths(run)

    async def manifest(self) -> Manifest:
        """Reads the manifest from the bucket, because a cached copy proves nothing."""
        try:
            return await self._catalog.read_manifest(self._run, self._record)
        except CorruptDataError:
            await self._check_slot()
            raise

    async def shown(self) -> dict[str, ValueLocation] | None:
        """Returns the locations of values in the key space; None: it is damaged."""
        space = self._bucket.key_space(
            path=self._places.key_space(self._record.upload, self._record.attempt),
            pool=self._places.pool,
        )
        shown = None
        try:
            shown = await space.places()
            if shown is not None:
                await asyncio.to_thread(_check_files, shown)
        except (CorruptDataError, InvalidNameError) as e:
            shown = None
            _log.warning("%s@%d: %s", self._run, self._record.step, e)
        if shown is None:
            await self._check_slot()
        return shown

    async def file_table(self, manifest: Manifest) -> list[Damage]:
        """Returns the damage of the file table: one, or none."""
        expected = self._record.files_digest
        if not expected:  # checkpoints of the first release have no file table
            return []
        place = self._places.file_table(self._record.upload, expected)
        stored = await self._bucket.read(place)
        if stored is None:
            await self._check_slot()
        data = stored.data if stored is not None else None
        return await asyncio.to_thread(
            rules.file_table_damages, manifest, data, expected=expected
        )

    async def checked(
        self, places: ChunkLocations, check: Check, missing: Missing
    ) -> AsyncGenerator[tuple[Read, list[Damage]]]:
        """Yields each read of values in the pool and its damages, in storage order."""
        in_flight: deque[tuple[Read, asyncio.Task[list[Damage]]]] = deque()
        try:
            reads = plan_reads(places, np.arange(len(places.length)))
            # In a thread, like all loops over every chunk: a health check must not
            # wait for it.
            while (read := await asyncio.to_thread(next, reads, None)) is not None:
                task = asyncio.create_task(self._check(read, check, missing))
                in_flight.append((read, task))
                if len(in_flight) == MAX_READS:
                    yield in_flight[0][0], await in_flight[0][1]
                    in_flight.popleft()
            while in_flight:
                yield in_flight[0][0], await in_flight[0][1]
                in_flight.popleft()
        finally:
            for _, task in in_flight:
                task.cancel()
            # Retrieves the errors of the tasks too, which nothing else awaits.
            await asyncio.gather(*(t for _, t in in_flight), return_exceptions=True)

    async def _check(self, read: Read, check: Check, missing: Missing) -> list[Damage]:
        # A read releases the semaphore even if its result is never used, so that
        # verifications cannot wait for each other in a cycle.
        async with self._reads:
            place = self._places.pool + read.file
            try:
                data = await self._bucket.read_range(place, read.start, read.stop)
            except CorruptDataError:
                found = await self._check_each(read, check, missing)
                await self._check_slot()
                return found
            found = await asyncio.to_thread(_check_values, check, read.chunks, data)
            if not found:
                return found
            # Read again: the response may have been corrupted in transit.
            data = await self._bucket.read_range(place, read.start, read.stop)
            found = await asyncio.to_thread(_check_values, check, read.chunks, data)
            if not found:
                _log.warning("%s", corrupted_in_transit(place))
            return found

    async def _check_each(
        self, read: Read, check: Check, missing: Missing
    ) -> list[Damage]:
        """Returns the damages of values in a file that is missing or truncated."""
        found: list[Damage] = []
        place, start = self._places.pool + read.file, read.start
        why = ""
        for value, length in zip(read.chunks, read.lengths, strict=True):
            # Values behind the first missing one are missing too.
            if not why:
                try:
                    data = await self._bucket.read_range(place, start, start + length)
                    found += await asyncio.to_thread(
                        _check_values, check, [value], data
                    )
                except CorruptDataError:
                    why = (
                        f"{read.file} is missing, or ends before byte "
                        f"{start + length}, or is no regular file"
                    )
            if why:
                found += missing(value, why)
            start += length
        return found

    async def _check_slot(self) -> None:
        """Rejects a checkpoint that was purged: it must not be reported as damaged."""
        run, record = self._run, self._record
        found = await self._catalog.slot(run, record.step)
        # Chunks are deleted only after the slot was freed or reserved again.
        if (
            found is None
            or found[0].upload != record.upload
            or found[0].state == slots.FREE
        ):
            raise CheckpointNotFoundError(
                f"{run}@{record.step} was purged while it was verified",
                run=str(run),
                step=str(record.step),
            )


def _chunks(
    reading: _Reading, manifest: Manifest
) -> AsyncGenerator[tuple[Read, list[Damage]]]:
    """Returns the damages of chunks at the locations of the manifest."""

    def check(chunks: Sequence[int], data: bytes) -> Iterator[Damage]:
        return rules.chunk_damages(manifest, chunks, data)

    def missing(chunk: int, why: str) -> list[Damage]:
        return [rules.chunk_damage(manifest.tree, chunk, rules.MISSING, why)]

    return reading.checked(manifest.places, check, missing)


async def _check_key_space(reading: _Reading, manifest: Manifest, tally: Tally) -> None:
    """Adds the differences between the key space and the manifest."""
    shown = await reading.shown()
    if shown is None:
        what = "the key space of the checkpoint is missing or damaged"
        leaves = manifest.tree.leaves
        await asyncio.to_thread(
            tally.add, (rules.leaf_damage(leaf, what) for leaf in leaves)
        )
        return
    differing = rules.key_space_damages(manifest, shown, tally.damaged)
    await asyncio.to_thread(tally.add, differing)
    metadata = LeafMetadata(manifest.tree)
    unshown, sharing, places = await asyncio.to_thread(
        _metadata_places, metadata, shown
    )
    tally.add(unshown)

    def check(values: Sequence[int], data: bytes) -> Iterator[Damage]:
        at = 0
        for value in values:
            length = int(places.length[value])
            yield from metadata.check(sharing[value], data[at : at + length])
            at += length

    def missing(value: int, why: str) -> Iterator[Damage]:
        return (metadata.unread(row, why) for row in sharing[value])

    async with aclosing(reading.checked(places, check, missing)) as checked:
        async for _, found in checked:
            tally.add(found)


def _metadata_places(
    metadata: LeafMetadata, shown: Mapping[str, ValueLocation]
) -> tuple[list[Damage], list[list[int]], ChunkLocations]:
    """Returns the damages of leaves without metadata in the key space; for the other
    leaves the rows that share a location, and the distinct locations."""
    unshown = metadata.unshown(shown)
    sharing: dict[ValueLocation, list[int]] = {}
    for row, key in enumerate(metadata.keys):
        if row not in unshown:
            sharing.setdefault(shown[key], []).append(row)
    places = ChunkLocations.of_rows(list(sharing))
    return list(unshown.values()), list(sharing.values()), places


def _check_files(shown: Mapping[str, ValueLocation]) -> None:
    """Rejects a key space that references values outside the data files of the pool."""
    for file in {place.file for place in shown.values()}:
        check_data_file(file)


def _check_values(check: Check, values: Sequence[int], data: bytes) -> list[Damage]:
    return list(check(values, data))
