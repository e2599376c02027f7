"""A run with a recorded history, whose records can be rolled back or exchanged.

All objects are recorded after each call, so any earlier version of an object can
replace its last one. ``losses`` runs garbage collection over such a replaced record,
puts the last version back, and returns the lost data: there must be none.
"""

import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from google.protobuf.message import DecodeError

from storesvc.catalog.records import duration
from storesvc.errors import StoreError
from storesvc.format.checksums import crc32c
from storesvc.format.names import CheckpointName, HoldName, TagName
from storesvc.save.uploads import DEFAULT_LEASE
from storesvc.store import Store
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.support.collecting_process import RUN, Hands, Process
from tests.support.faulty_bucket import FaultyBucket

Objects = Mapping[str, bytes]
PURGE_DELAY = timedelta(minutes=30)
PASSES = 5


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Objects of a run after each call, and the content of its checkpoints."""

    versions: list[Objects]
    contents: dict[int, tuple[int, ...]]
    clock: Hands

    @property
    def last(self) -> Objects:
        """Returns its objects after the last call."""
        return self.versions[-1]

    @property
    def records(self) -> list[str]:
        """Returns the places of sealed records."""
        return [place for place, data in self.last.items() if is_sealed(data)]

    def earlier(self, place: str) -> list[bytes | None]:
        """Returns the distinct earlier versions of an object; None: absent."""
        found: list[bytes | None] = []
        for version in self.versions:
            data = version.get(place)
            if data != self.last[place] and data not in found:
                found.append(data)
        return found


def is_sealed(data: bytes) -> bool:
    """Returns whether an object is a sealed record."""
    try:
        sealed = pb.Sealed.FromString(data)
    except DecodeError:
        return False
    return sealed.crc32c == crc32c(
        sealed.nonce, crc32c(sealed.payload, sealed.format_version)
    ) and bool(sealed.format_version)


async def record() -> Recorded:
    """Records a history: saves that share chunks, an upload that took over a step, a
    moved tag, a hold, an undeleted checkpoint, a policy, and a live upload."""
    process = await Process.over(await FaultyBucket.faulty("memory://"))
    store, versions = process.store, list[Objects]()

    async def keep() -> None:
        versions.append(await objects(process.bucket))
        process.clock.turn(timedelta(minutes=1))

    await process.save(1)
    await process.save(2, (1, 0, 0), base=1)
    await keep()
    cut_off = await process.begin(3)
    await process.send(cut_off, {0: 2})
    await keep()
    upload = await process.begin(3, base=2)
    await process.send(upload, {2: 2})
    await process.finish(upload, (1, 0, 2))
    await keep()
    await process.commit(upload, (1, 0, 2))
    await keep()
    await tag(store, "best", 3)
    await keep()
    await tag(store, "best", 1)
    await tag(store, "good", 3)
    await keep()
    for step in (2, 3):
        await store.holds.create(
            HoldName(RUN, uuid.uuid4().hex),
            CheckpointName(RUN, step),
            owner="",
            ttl=timedelta(days=9),
            uid="",
        )
    await keep()
    await process.save(4, (0, 0, 1), base=1)
    await keep()
    await process.delete(4, purge_delay=PURGE_DELAY)
    await keep()
    await store.lifecycle.undelete(RUN, 4, write_id=str(uuid.uuid4()))
    await keep()
    for count in (1, 0):
        given = pb.RunRecord(purge_delay=duration(PURGE_DELAY))
        if count:
            given.retention.latest.count = count
        await store.runs.update(
            RUN,
            given,
            ("retention", "purge_delay"),
            etag="",
            write_id=str(uuid.uuid4()),
        )
        await keep()
    await process.begin(5, base=4)
    await keep()
    return Recorded(versions=versions, contents=process.contents, clock=process.clock)


async def losses(recorded: Recorded, place: str, data: bytes | None) -> list[str]:
    """Returns the losses of a run if an object is replaced while garbage collection
    runs, and then put back."""
    bucket = await FaultyBucket.faulty("memory://")
    for other, held in {**recorded.last, place: data}.items():
        if held is not None:
            await bucket.write(other, held)
    clock = Hands()
    clock.time = recorded.clock.time
    with suppress(StoreError):  # the record of the store itself
        process = await Process.over(bucket, clock)
        for _ in range(PASSES):
            await process.preview()
            await process.collect()
            clock.turn(max(DEFAULT_LEASE, PURGE_DELAY))
    await bucket.write(place, recorded.last[place])
    process = await Process.over(bucket.reopened(), clock)
    process.contents = dict(recorded.contents)
    try:
        await process.check()
        steps = await process.steps()
    except StoreError as e:
        return [str(e)]
    expected = sorted(recorded.contents, reverse=True)
    return [] if steps == expected else [f"expected steps {expected}, got {steps}"]


async def tag(store: Store, name: str, step: int) -> None:
    """Sets a tag."""
    await store.tags.set(
        TagName(RUN, name),
        CheckpointName(RUN, step),
        protected=None,
        etag="",
        write_id=str(uuid.uuid4()),
    )


async def objects(bucket: FaultyBucket) -> Objects:
    """Returns all objects of a bucket."""
    found = {}
    for place in await bucket.list(""):
        stored = await bucket.read(place)
        assert stored is not None
        found[place] = stored.data
    return found
