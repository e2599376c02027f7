"""Reading a run, for the collector.

The objects are listed first, and only then the slots are read. One read of each tells
what may end. For garbage they are all read again, until two reads in a row agree, as
``read_agreement`` means it; ``mark`` says what follows from that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from google.protobuf.message import DecodeError

from storesvc.catalog.catalog import Catalogue
from storesvc.catalog.records import damaged, read_record
from storesvc.catalog.slots import fault
from storesvc.errors import ConflictError, CorruptDataError
from storesvc.format.checksums import digest
from storesvc.format.layout import RunPlaces
from storesvc.format.names import InvalidNameError, RunName, check_data_file
from storesvc.gc.mark import Snapshot, unnamed
from storesvc.gc.read_agreement import agree
from storesvc.storage.bounded_gather import each
from storesvc.storage.bucket import Bucket, Generation
from storesvc_proto.v1 import bucket_pb2 as pb

_TRIES: Final = 10
"""Reads of all slots, while some lose what they hold."""
_LISTS: Final = 10
"""Lists of the slots, while more come."""


class Snapshots:
    """Reads the runs of a bucket."""

    def __init__(self, bucket: Bucket, catalogue: Catalogue) -> None:
        self._bucket = bucket
        self._catalogue = catalogue

    async def look(self, run: RunName) -> Snapshot:
        """Returns what a run holds, each slot as it was at some moment.

        Raises:
            CorruptDataError: A slot, or the record of an upload, is damaged.
        """
        places = RunPlaces(run)
        listed = await self._bucket.list(places.root)
        return await self._described(places, listed, _bare(await self.slots(run)))

    async def settled(self, seen: Snapshot) -> Snapshot:
        """Returns what a run holds, after a look at it, with slots that agree.

        Raises:
            ConflictError: They did not.
            CorruptDataError: A slot, or the record of an upload, is damaged.
        """
        run, first = seen.places.name, seen.slots
        for _ in range(_TRIES):
            first, steps = await self._completed(run, first)
            second = _bare(await self._slots_of(run, steps))
            if agree(first, second):
                return await self._described(seen.places, seen.listed, second)
            first = second
        raise ConflictError(
            f"{run}: a slot was given up or taken over during each of {_TRIES} reads "
            "of all"
        )

    async def file_table(self, place: str) -> pb.FileTable | None:
        """Returns the file table that lies at a place; None: it is missing.

        Raises:
            CorruptDataError: It is damaged.
        """
        stored = await self._bucket.read(place)
        if stored is None:
            return None
        if not place.removesuffix(".binpb").endswith(digest(stored.data).hex()):
            raise CorruptDataError(f"{place} is damaged: its digest is another")
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
        """Returns what each slot of a run holds, one read after another, by step."""
        return await self._slots_of(run, await self._steps(run))

    async def _completed(
        self, run: RunName, read: Mapping[int, pb.CheckpointRecord]
    ) -> tuple[Mapping[int, pb.CheckpointRecord], list[int]]:
        """A read of slots, with those that came since; and a later list, by which no
        more had come."""
        for _ in range(_LISTS):
            steps = await self._steps(run)
            new = [step for step in steps if step not in read]
            if not new:
                return read, steps
            read = {**read, **_bare(await self._slots_of(run, new))}
        raise ConflictError(f"{run}: new slots came between {_LISTS} lists of them")

    async def _steps(self, run: RunName) -> list[int]:
        places = RunPlaces(run)
        listed = await self._bucket.list(places.checkpoints)
        return [s for place in listed if (s := places.step_of(place)) is not None]

    async def _slots_of(
        self, run: RunName, steps: Sequence[int]
    ) -> dict[int, tuple[pb.CheckpointRecord, Generation]]:
        async def slot(step: int) -> tuple[pb.CheckpointRecord, Generation] | None:
            return await self._catalogue.slot(run, step)

        found = await each(slot, steps)
        return {s: slot for s, slot in zip(steps, found, strict=True) if slot}

    async def _described(
        self,
        places: RunPlaces,
        listed: Sequence[str],
        slots: Mapping[int, pb.CheckpointRecord],
    ) -> Snapshot:
        """What was read, with the records of uploads that it needs."""
        _check_slots(places, slots)
        snapshot = Snapshot(places=places, listed=listed, slots=slots, records={})
        uploads = unnamed(snapshot)
        found = await each(self._record, map(places.upload, uploads))
        records = zip(uploads, found, strict=True)
        return replace(snapshot, records={u: r for u, r in records if r is not None})

    async def _record(self, place: str) -> pb.UploadRecord | None:
        found = await read_record(self._bucket, place, pb.UploadRecord)
        return found and found[0]


def _check_slots(places: RunPlaces, slots: Mapping[int, pb.CheckpointRecord]) -> None:
    """Refuses slots from which it cannot be told what may be deleted.

    Raises:
        CorruptDataError: One holds what no release writes, or two name one upload.
    """
    steps: dict[str, int] = {}
    for step, slot in slots.items():
        how, other = fault(slot), steps.setdefault(slot.upload, step)
        if not how and other != step:
            how = f"expected an upload of its own, got that of step {other}"
        if how:
            place = places.checkpoint(step)
            raise damaged(place, how, of=f"{places.name}@{step}")


def _bare(
    slots: Mapping[int, tuple[pb.CheckpointRecord, Generation]],
) -> dict[int, pb.CheckpointRecord]:
    return {step: slot for step, (slot, _) in slots.items()}
