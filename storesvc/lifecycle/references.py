"""References: finds what keeps a checkpoint from being purged.

A tag, a hold, or a live upload that has it as its base refers to a checkpoint. Two
orders make this safe (``bucket.proto``):

1. A call that adds a reference writes it first, and then reads the slot.
2. A purge sets PURGING first, and then looks for references here.

A reference that the purge misses is therefore written after PURGING was set, and the
call that added it finds its checkpoint gone.
"""

import asyncio
from dataclasses import dataclass
from datetime import UTC
from typing import Literal

from storesvc.catalog import slots
from storesvc.catalog.catalog import Catalog
from storesvc.catalog.records import read_record
from storesvc.catalog.slots import Observations
from storesvc.clock import Clock
from storesvc.format.layout import RunPaths
from storesvc.format.names import HoldName, RunName, TagName
from storesvc.storage.bucket import Bucket, Generation
from storesvc.storage.hedged_calls import each
from storesvc_proto.v1 import bucket_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A reference to a checkpoint; ``str`` describes it for people."""

    kind: Literal["tag", "hold", "upload"]
    name: str
    """Name of the tag, or id of the hold or upload."""
    owner: str = ""
    """Owner of a hold, if it has one."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" + (f" by {self.owner}" if self.owner else "")


class References:
    """Finds the references to the checkpoints of runs."""

    def __init__(self, bucket: Bucket, catalog: Catalog, *, clock: Clock) -> None:
        self._bucket = bucket
        self._catalog = catalog
        self._clock = clock
        # Times at which this process saw holds; every process observes by itself.
        self._observations = Observations()

    async def of(self, run: RunName) -> dict[str, Reference]:
        """Returns one reference for each referenced checkpoint of a run, by its uid."""
        uploads, named = await asyncio.gather(self._bases(run), self.named(run))
        return {**uploads, **named}

    async def named(self, run: RunName) -> dict[str, Reference]:
        """Returns one tag or hold for each checkpoint that has one, by its uid."""
        holds, tagged = await asyncio.gather(self._held(run), self.tagged(run))
        tags = {uid: Reference(kind="tag", name=tag) for uid, tag in tagged.items()}
        return {**holds, **tags}

    async def tagged(self, run: RunName) -> dict[str, str]:
        """Returns the tags of a run by the uid of their checkpoint."""

        async def named(tag: str) -> tuple[str, str] | None:
            found = await self._catalog.tag_slot(TagName(run, tag))
            return (found[0].upload, tag) if found else None

        names = await self._catalog.tag_names(run)
        found = filter(None, await each(named, names))
        return {uid: tag for uid, tag in found if uid}

    async def _held(self, run: RunName) -> dict[str, Reference]:
        places = RunPaths(run)

        async def held(place: str) -> tuple[str, Reference] | None:
            of = str(HoldName(run, holds[place]))
            found = await read_record(self._bucket, place, pb.HoldRecord, of=of)
            if found is None or self._is_over(place, found[0]):
                return None
            record = found[0]
            return record.upload, Reference(
                kind="hold", name=holds[place], owner=record.owner
            )

        listed = await self._bucket.list(places.holds)
        holds = {place: id_ for place in listed if (id_ := places.hold_of(place))}
        held_by = dict(filter(None, await each(held, holds)))
        self._observations.forget(places.holds, but=holds)
        return held_by

    def _is_over(self, place: str, record: pb.HoldRecord) -> bool:
        return self._observations.is_over(
            place,
            record.SerializeToString(deterministic=True),
            length=record.ttl.ToTimedelta(),
            renew_time=record.renew_time.ToDatetime(UTC),
            clock_now=self._clock.now(),
            elapsed=self._clock.elapsed(),
        )

    async def _bases(self, run: RunName) -> dict[str, Reference]:
        """Returns the bases of live uploads, by uid. An upload is live while it owns a
        slot in state UPLOADING."""
        places = RunPaths(run)

        async def base(upload: str) -> tuple[str, Reference] | None:
            found = await read_record(
                self._bucket, places.upload(upload), pb.UploadRecord
            )
            if found is None or not found[0].base:
                return None
            record = found[0]
            slot = await self._catalog.slot(run, record.step)
            if slot is None or slot[0].state != slots.UPLOADING:
                return None
            if (upload, record.epoch) != (slot[0].upload, slot[0].epoch):
                return None
            return record.base, Reference(kind="upload", name=upload)

        # A record stays long after its upload has ended. A live upload also has a leaf
        # table below its name, which it wrote before its slot.
        listed = await self._bucket.list(places.uploads)
        begun = {
            upload
            for place in listed
            if (upload := places.upload_of(place)) and place != places.upload(upload)
        }
        return dict(filter(None, await each(base, sorted(begun))))


async def referenced_slot(
    catalog: Catalog, run: RunName, record: pb.TagRecord | pb.HoldRecord
) -> tuple[pb.CheckpointRecord, Generation] | None:
    """Returns the slot of the checkpoint of a tag or a hold, and its generation; None:
    it was purged."""
    found = await catalog.slot(run, record.step)
    if found is None or found[0].state not in slots.CHECKPOINTS:
        return None
    return found if found[0].upload == record.upload else None
