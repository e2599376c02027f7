"""Finds expired leases of uploads and holds, and aborts expired uploads.

An upload is aborted through its slot, as in AbortUpload: the slot becomes FREE, on the
condition that it is unchanged since it was read. So an upload that has begun but not
yet reserved its step can no longer reserve it. ``lease_clock`` decides whether a lease
is over, from the observations of this process.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from storesvc.catalog import slots
from storesvc.catalog.catalog import Catalog
from storesvc.catalog.records import read_record, timestamp, write_record
from storesvc.catalog.slots import Observations
from storesvc.clock import Clock
from storesvc.format.layout import RunPaths
from storesvc.format.names import HoldName, RunName
from storesvc.gc import mark
from storesvc.gc.mark import RunState
from storesvc.save.uploads import DEFAULT_LEASE
from storesvc.storage.bucket import IF_ABSENT, Bucket, Generation, PreconditionError
from storesvc.storage.hedged_calls import each
from storesvc_proto.v1 import bucket_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpiredUpload:
    """An upload whose lease is over."""

    upload: str
    create_time: datetime
    """Time at which it began, by the clock of a server."""
    sign: bytes
    """The last lease record, serialised; b"": none."""
    before: pb.CheckpointRecord | None
    """The slot as it was read."""
    after: pb.CheckpointRecord
    """The FREE slot to write."""


class LeaseExpiry:
    """Finds expired leases in the runs of a bucket."""

    def __init__(
        self,
        bucket: Bucket,
        catalog: Catalog,
        observations: Observations,
        *,
        clock: Clock,
    ) -> None:
        self._bucket = bucket
        self._catalog = catalog
        self._observations = observations
        self._clock = clock

    async def uploads(self, run: RunName, state: RunState) -> list[ExpiredUpload]:
        """Returns the uploads whose lease is over."""

        async def look(upload: str) -> ExpiredUpload | None:
            return await self._expired(run, state, upload)

        known = mark.fates(state)
        found = await each(look, mark.leases(state, known))
        return [expired for expired in found if expired is not None]

    async def abort(self, run: RunName, expired: ExpiredUpload) -> bool:
        """Aborts an expired upload; returns False if it was renewed or lost its
        slot."""
        # 1. The slot must be unchanged since the lease was judged.
        step = expired.after.step
        found = await self._catalog.slot(run, step)
        if (found and found[0]) != expired.before:
            return False
        # 2. So must the lease: it may have been renewed since.
        sign = await self._sign(run, expired.upload)
        if _bytes_of(sign) != expired.sign:
            return False
        # 3. Free the slot on the condition that it is still the one of step 1. A
        #    renewal after step 2 finds the slot FREE, and its upload ended.
        try:
            await write_record(
                self._bucket,
                RunPaths(run).checkpoint(step),
                expired.after,
                condition=found[1] if found else IF_ABSENT,
            )
        except PreconditionError:
            return False
        return True

    async def holds(self, run: RunName, state: RunState) -> dict[str, Generation]:
        """Returns the paths of expired holds, with the generations read."""
        places = RunPaths(run)

        async def look(place: str) -> tuple[str, Generation] | None:
            of = str(HoldName(run, holds[place]))
            found = await read_record(self._bucket, place, pb.HoldRecord, of=of)
            if found is None:
                return None
            hold, seen = found[0], _bytes_of(found[0])
            if not self._is_over(place, seen, hold.ttl.ToTimedelta(), hold.renew_time):
                return None
            return place, found[1]

        listed = [p for p in state.listed if p.startswith(places.holds)]
        holds = {place: id_ for place in listed if (id_ := places.hold_of(place))}
        found = await each(look, holds)
        return dict(one for one in found if one is not None)

    async def _expired(
        self, run: RunName, state: RunState, upload: str
    ) -> ExpiredUpload | None:
        record, owned = state.records.get(upload), state.owners.get(upload)
        begun = record or owned
        assert begun is not None
        sign = await self._sign(run, upload)
        length = record.lease_duration.ToTimedelta() if record else DEFAULT_LEASE
        renewed = sign.renew_time if sign else begun.create_time
        # Becoming the owner of a slot renews the lease too.
        seen = _bytes_of(owned) + _bytes_of(sign)
        if not self._is_over(RunPaths(run).lease(upload), seen, length, renewed):
            return None
        reserved = pb.CheckpointRecord(
            upload=upload, step=begun.step, epoch=begun.epoch
        )
        return ExpiredUpload(
            upload=upload,
            create_time=begun.create_time.ToDatetime(UTC),
            sign=_bytes_of(sign),
            before=state.slots.get(begun.step),
            after=slots.released(reserved, timestamp(self._clock.now())),
        )

    async def _sign(self, run: RunName, upload: str) -> pb.LeaseRecord | None:
        """Returns the lease record of an upload; None: it has none."""
        place = RunPaths(run).lease(upload)
        found = await read_record(self._bucket, place, pb.LeaseRecord)
        return found and found[0]

    def _is_over(
        self, key: str, seen: bytes, length: timedelta, renewed: Timestamp
    ) -> bool:
        return self._observations.is_over(
            key,
            seen,
            length=length,
            renew_time=renewed.ToDatetime(UTC),
            clock_now=self._clock.now(),
            elapsed=self._clock.elapsed(),
        )


def _bytes_of(record: Message | None) -> bytes:
    return record.SerializeToString(deterministic=True) if record else b""
