"""Verification: every byte of a checkpoint read again, and compared.

Both views of a checkpoint are looked at: the chunks that the manifest places, and
the key space, which must show the same chunks at the same places beside the
metadata of each leaf; and the file table, without which no garbage of the run can be
told from what is needed. What is wrong is told and ends nothing. Nothing keeps the
checkpoint from being purged meanwhile; so before something counts as missing, the
slot is read again.

Reads are counted over all verifications of the process: that is the bound on the
memory that they take. Checksums are made in threads.
"""

import asyncio
import logging
from collections import deque
from collections.abc import (
    AsyncGenerator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from typing import Final, TypeAlias

import numpy as np

from storesvc.catalog import slots
from storesvc.catalog.catalog import Catalogue
from storesvc.catalog.records import on_its_way
from storesvc.clock import Clock
from storesvc.errors import (
    CheckpointNotFoundError,
    CorruptDataError,
)
from storesvc.fair_semaphore import FairSemaphore
from storesvc.format.chunks import Places
from storesvc.format.layout import RunPlaces
from storesvc.format.manifests import Manifest
from storesvc.format.names import InvalidNameError, RunName, check_data_file
from storesvc.format.reads import Read, plan_reads
from storesvc.inspect import damage
from storesvc.inspect.damage import Damage, Metadata
from storesvc.inspect.verify_report import Report, Tally
from storesvc.storage.ocdbt_reader import ValueLocation
from storesvc.storage.tensorstore_bucket import KvBucket
from storesvc_proto.v1 import bucket_pb2 as pb

VERIFICATIONS_AT_ONCE: Final = 2
"""In a process; each holds a manifest."""

MAX_READS: Final = 3
"""Reads in memory, over all verifications of a process."""

REPORT_SECONDS: Final = 1.0
"""Between reports, about."""

Check: TypeAlias = Callable[[Sequence[int], bytes], Iterable[Damage]]
"""Tells what is wrong with values that lie back to back, by their numbers."""

Missing: TypeAlias = Callable[[int, str], Iterable[Damage]]
"""Tells what is wrong where a value cannot be read, and why."""

_log = logging.getLogger(__name__)


class Verifier:
    """Verifies checkpoints of a bucket."""

    def __init__(self, bucket: KvBucket, catalogue: Catalogue, *, clock: Clock) -> None:
        self._bucket = bucket
        self._catalogue = catalogue
        self._clock = clock
        self._turns = FairSemaphore(
            VERIFICATIONS_AT_ONCE, purpose="verifies checkpoints"
        )
        self._reads = asyncio.Semaphore(MAX_READS)

    async def verify(
        self, run: RunName, record: pb.CheckpointRecord
    ) -> AsyncGenerator[Report]:
        """Yields reports about a checkpoint, one a second or so, and the last one.

        Raises:
            CorruptDataError: Its manifest is missing or damaged.
            CheckpointNotFoundError: It was purged meanwhile.
            StorageUnavailableError: The storage does not answer.
            LimitExceededError: Other verifications take too long.
        """
        async with self._turns.held(run.namespace):
            reading = _Reading(self._bucket, self._catalogue, self._reads, run, record)
            manifest = await reading.manifest()
            tally = Tally(manifest.tree.chunk_count)
            reported = self._clock.elapsed()
            async with aclosing(_chunks(reading, manifest)) as chunks:
                async for read, found in chunks:
                    tally.add(found)
                    tally.advance(len(read.chunks), read.stop - read.start)
                    if self._clock.elapsed() - reported >= REPORT_SECONDS:
                        for report in tally.reports():
                            yield report
                        reported = self._clock.elapsed()
            await _check_key_space(reading, manifest, tally)
            tally.add(await reading.file_table(manifest))
            tally.close()
            for report in tally.reports():
                yield report


class _Reading:
    """Reads of one checkpoint."""

    def __init__(
        self,
        bucket: KvBucket,
        catalogue: Catalogue,
        reads: asyncio.Semaphore,
        run: RunName,
        record: pb.CheckpointRecord,
    ) -> None:
        self._bucket = bucket
        self._catalogue = catalogue
        self._reads = reads
        self._run = run
        self._record = record
        self._places = RunPlaces(run)

    async def manifest(self) -> Manifest:
        """Returns the manifest as it lies now: one that was kept proves nothing.

        Raises:
            CorruptDataError: It is missing or damaged.
        """
        try:
            return await self._catalogue.read_manifest(self._run, self._record)
        except CorruptDataError:
            await self._check_slot()
            raise

    async def shown(self) -> dict[str, ValueLocation] | None:
        """Returns where the key space says that its values lie; None: it is missing
        or damaged."""
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
        """Returns what is wrong with the file table: a damage, or nothing."""
        expected = self._record.files_digest
        if not expected:  # of the first release, which had none
            return []
        place = self._places.file_table(self._record.upload, expected)
        stored = await self._bucket.read(place)
        if stored is None:
            await self._check_slot()
        data = stored.data if stored is not None else None
        return await asyncio.to_thread(
            damage.of_file_table, manifest, data, expected=expected
        )

    async def checked(
        self, places: Places, check: Check, missing: Missing
    ) -> AsyncGenerator[tuple[Read, list[Damage]]]:
        """Yields what is wrong with values of the pool, in the order they lie."""
        under_way: deque[tuple[Read, asyncio.Task[list[Damage]]]] = deque()
        try:
            reads = plan_reads(places, np.arange(len(places.length)))
            # A thread, as for all that goes through every chunk: a ping must not wait.
            while (read := await asyncio.to_thread(next, reads, None)) is not None:
                look = self._look(read, check, missing)
                under_way.append((read, asyncio.create_task(look)))
                if len(under_way) == MAX_READS:
                    yield under_way[0][0], await under_way[0][1]
                    under_way.popleft()
            while under_way:
                yield under_way[0][0], await under_way[0][1]
                under_way.popleft()
        finally:
            for _, task in under_way:
                task.cancel()
            # also takes the errors of those that nobody will wait for
            await asyncio.gather(*(t for _, t in under_way), return_exceptions=True)

    async def _look(self, read: Read, check: Check, missing: Missing) -> list[Damage]:
        # A read takes its place, and gives it back, whether or not anyone takes what
        # it found: so verifications never wait for each other in a ring.
        async with self._reads:
            place = self._places.pool + read.file
            try:
                data = await self._bucket.read_range(place, read.start, read.stop)
            except CorruptDataError:
                found = await self._look_at_each(read, check, missing)
                await self._check_slot()
                return found
            found = await asyncio.to_thread(_checked, check, read.chunks, data)
            if not found:
                return found
            # the answer may have been corrupted on its way
            data = await self._bucket.read_range(place, read.start, read.stop)
            found = await asyncio.to_thread(_checked, check, read.chunks, data)
            if not found:
                _log.warning("%s", on_its_way(place))
            return found

    async def _look_at_each(
        self, read: Read, check: Check, missing: Missing
    ) -> list[Damage]:
        """What is wrong with the values of a file that is missing or ends early."""
        found: list[Damage] = []
        place, start = self._places.pool + read.file, read.start
        why = ""
        for value, length in zip(read.chunks, read.lengths, strict=True):
            # what lies behind the first that is missing is missing too
            if not why:
                try:
                    data = await self._bucket.read_range(place, start, start + length)
                    found += await asyncio.to_thread(_checked, check, [value], data)
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
        """Refuses to call what was purged damaged.

        Raises:
            CheckpointNotFoundError: The checkpoint is no more.
        """
        run, record = self._run, self._record
        found = await self._catalogue.slot(run, record.step)
        # Its bytes go only after its slot was given to another, or became free.
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
    """What is wrong with the chunks, as the manifest places them."""

    def check(chunks: Sequence[int], data: bytes) -> Iterator[Damage]:
        return damage.of_chunks(manifest, chunks, data)

    def missing(chunk: int, why: str) -> list[Damage]:
        return [damage.of_chunk(manifest.tree, chunk, damage.MISSING, why)]

    return reading.checked(manifest.places, check, missing)


async def _check_key_space(reading: _Reading, manifest: Manifest, tally: Tally) -> None:
    """Adds what the key space does not show as the manifest does."""
    shown = await reading.shown()
    if shown is None:
        what = "the key space of the checkpoint is missing or damaged"
        leaves = manifest.tree.leaves
        await asyncio.to_thread(
            tally.add, (damage.of_leaf(leaf, what) for leaf in leaves)
        )
        return
    differing = damage.of_key_space(manifest, shown, tally.damaged)
    await asyncio.to_thread(tally.add, differing)
    metadata = Metadata(manifest.tree)
    unshown, sharing, places = await asyncio.to_thread(
        _metadata_places, metadata, shown
    )
    tally.add(unshown)

    def check(values: Sequence[int], data: bytes) -> Iterator[Damage]:
        at = 0
        for value in values:
            length = int(places.length[value])
            yield from metadata.of_value(sharing[value], data[at : at + length])
            at += length

    def missing(value: int, why: str) -> Iterator[Damage]:
        return (metadata.unread(row, why) for row in sharing[value])

    async with aclosing(reading.checked(places, check, missing)) as checked:
        async for _, found in checked:
            tally.add(found)


def _metadata_places(
    metadata: Metadata, shown: Mapping[str, ValueLocation]
) -> tuple[list[Damage], list[list[int]], Places]:
    """The leaves whose metadata is not shown; where that of the others lies, each
    place once, and beside it the rows of the leaves that share it."""
    unshown = metadata.unshown(shown)
    sharing: dict[ValueLocation, list[int]] = {}
    for row, key in enumerate(metadata.keys):
        if row not in unshown:
            sharing.setdefault(shown[key], []).append(row)
    places = Places.of_rows(list(sharing))
    return list(unshown.values()), list(sharing.values()), places


def _check_files(shown: Mapping[str, ValueLocation]) -> None:
    """Refuses a key space that shows values outside the data files of its pool.

    Raises:
        InvalidNameError: It does.
    """
    for file in {place.file for place in shown.values()}:
        check_data_file(file)


def _checked(check: Check, values: Sequence[int], data: bytes) -> list[Damage]:
    return list(check(values, data))
