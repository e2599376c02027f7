"""Reading a run as it was at one moment, for the collector.

The objects are listed first, and only then the slots are read, all of them again and
again until two reads in a row agree: at a moment between those two they were all so
at once. ``marking`` says what follows from that.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

from google.protobuf.message import DecodeError

from storesvc.bucket import Bucket, Generation
from storesvc.catalogue import Catalogue
from storesvc.errors import ConflictError, CorruptDataError
from storesvc.format.checksums import digest
from storesvc.format.layout import RunPlaces
from storesvc.format.names import RunName
from storesvc.marking import Snapshot, unnamed
from storesvc.records import read_record
from storesvc_proto.v1 import bucket_pb2 as pb

_TRIES: Final = 10
"""Reads of all slots, while some change."""
_READS_AT_ONCE: Final = 32

S = TypeVar("S")
T = TypeVar("T")


class Snapshots:
    """Reads the runs of a bucket."""

    def __init__(self, bucket: Bucket, catalogue: Catalogue) -> None:
        self._bucket = bucket
        self._catalogue = catalogue

    async def read(self, run: RunName) -> Snapshot:
        """Returns what a run holds.

        Raises:
            ConflictError: Its slots did not hold still.
            CorruptDataError: A slot, or the record of an upload, is damaged.
        """
        places = RunPlaces(run)
        listed = await self._bucket.list(places.root)
        slots = await self._still_slots(run)
        snapshot = Snapshot(places=places, listed=listed, slots=slots, records={})
        uploads = unnamed(snapshot)
        found = await each(self._record, map(places.upload, uploads))
        records = {
            upload: record
            for upload, record in zip(uploads, found, strict=True)
            if record is not None
        }
        return Snapshot(places=places, listed=listed, slots=slots, records=records)

    async def file_table(self, place: str) -> pb.FileTable:
        """Returns the file table that lies at a place.

        Raises:
            CorruptDataError: It is missing or damaged.
        """
        stored = await self._bucket.read(place)
        if stored is None:
            raise CorruptDataError(f"{place} is missing")
        if not place.removesuffix(".binpb").endswith(digest(stored.data).hex()):
            raise CorruptDataError(f"{place} is damaged: its digest is another")
        try:
            return pb.FileTable.FromString(stored.data)
        except DecodeError as e:
            raise CorruptDataError(f"{place} is damaged: {e}") from e

    async def _still_slots(self, run: RunName) -> dict[int, pb.CheckpointRecord]:
        """All slots, as they were at one moment."""
        before = None
        for _ in range(_TRIES):
            found = await self.slots(run)
            generations = {step: slot[1] for step, slot in found.items()}
            if generations == before:
                return {step: slot[0] for step, slot in found.items()}
            before = generations
        raise ConflictError(f"{run}: its slots changed during {_TRIES} reads of all")

    async def slots(
        self, run: RunName
    ) -> dict[int, tuple[pb.CheckpointRecord, Generation]]:
        """Returns what each slot of a run holds, one read after another, by step."""
        places = RunPlaces(run)
        listed = await self._bucket.list(places.checkpoints)
        steps = [
            step for place in listed if (step := places.step_of(place)) is not None
        ]

        async def slot(step: int) -> tuple[pb.CheckpointRecord, Generation] | None:
            return await self._catalogue.slot(run, step)

        found = await each(slot, steps)
        return {s: slot for s, slot in zip(steps, found, strict=True) if slot}

    async def _record(self, place: str) -> pb.UploadRecord | None:
        found = await read_record(self._bucket, place, pb.UploadRecord)
        return found and found[0]


async def each(look: Callable[[S], Awaitable[T]], things: Iterable[S]) -> list[T]:
    """Returns what was found at each, in order; many are looked at at once."""
    at_once = asyncio.Semaphore(_READS_AT_ONCE)

    async def bounded(thing: S) -> T:
        async with at_once:
            return await look(thing)

    return await asyncio.gather(*map(bounded, things))
