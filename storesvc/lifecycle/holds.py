"""Holds: leases that keep checkpoints from being purged.

A hold is written first, and only then its checkpoint is looked at: so a purge either
sees the hold, or the holder sees the purge. Each write here is of one call alone: it
counts only where its own condition held, so that no call takes back what another one
answered.
"""

from datetime import UTC, datetime, timedelta
from typing import Final

from storesvc.catalog import transitions
from storesvc.catalog.catalog import Catalogue
from storesvc.catalog.lease_clock import MARGIN
from storesvc.catalog.records import duration, read_record, sealed, timestamp
from storesvc.catalog.row_lookup import rows
from storesvc.catalog.slots import CHECKPOINTS, COMMITTED, DELETED, PURGING
from storesvc.clock import Clock
from storesvc.errors import (
    ConflictError,
    CorruptDataError,
    HoldExpiredError,
    HoldNotFoundError,
    RequestIdReusedError,
)
from storesvc.format.layout import RunPlaces
from storesvc.format.names import CheckpointName, HoldName, RunName
from storesvc.storage.bucket import (
    IF_ABSENT,
    Bucket,
    Generation,
    PreconditionError,
    WriteCondition,
)
from storesvc_proto.v1 import bucket_pb2 as pb

DEFAULT_TTL: Final = timedelta(minutes=10)
"""How long a hold lasts after each renewal."""

_HOLDABLE: Final = frozenset({COMMITTED, DELETED})
_TRIES: Final = 8


class Holds:
    """Those of a bucket."""

    def __init__(self, bucket: Bucket, catalogue: Catalogue, *, clock: Clock) -> None:
        self._bucket = bucket
        self._catalogue = catalogue
        self._clock = clock

    async def create(
        self,
        name: HoldName,
        checkpoint: CheckpointName,
        *,
        owner: str,
        ttl: timedelta,
        uid: str = "",
    ) -> pb.HoldRecord:
        """Holds a checkpoint; where the hold exists already, renews it.

        Args:
            name: The hold.
            checkpoint: What to hold.
            owner: Who holds it, for people.
            ttl: How long it lasts after each renewal.
            uid: The very one of this uid, also where it was deleted; "": any.

        Raises:
            RunNotFoundError: With the most similar names.
            CheckpointNotFoundError: With the nearest steps, or it was replaced.
            CheckpointDeletedError: It was deleted; with a uid: it is being purged.
            TagNotFoundError: With the most similar tags.
            RequestIdReusedError: The hold is of another checkpoint.
            ConflictError: The checkpoint, or the hold, changes at the moment.
        """
        for _ in range(_TRIES):
            found = await self._read(name)
            if found is None:
                record = await self._new(checkpoint, uid, owner=owner, ttl=ttl)
            else:
                _check_same(name, found[0], checkpoint, uid)
                record = self._renewed(found[0])
            written = await self._write(name, record, found[1] if found else IF_ABSENT)
            if written is None:
                continue
            slot = await self._slot(name.run, record)
            if slot is not None and slot.state in _HOLDABLE:
                return record
            if found is None:  # else it may be what another call answered
                await self._take_back(name, written)
            elif slot is not None and slot.state == PURGING:
                raise transitions.being_purged(name.run, slot)  # it may be spared
            if slot is not None:
                raise transitions.is_deleted(name.run, slot)
            raise await self._catalogue.missing(CheckpointName(name.run, record.step))
        raise _contended(name)

    async def renew(self, name: HoldName) -> pb.HoldRecord:
        """Renews a hold, be it late, while its checkpoint is there; returns it.

        Raises:
            HoldNotFoundError: There is none.
            HoldExpiredError: It came too late: the checkpoint was purged.
            ConflictError: The checkpoint is being purged, or others change the hold.
        """
        for _ in range(_TRIES):
            found = await self._read(name)
            if found is None:
                raise HoldNotFoundError(
                    f"{name} does not exist, or was collected; create another one",
                    hold=name.hold,
                )
            # What was recorded may be of a clock that goes behind this one: only what
            # no wrong clock explains counts.
            if expire_time(found[0]) + MARGIN <= self._clock.now():
                raise _expired(name, found[0])
            record = self._renewed(found[0])
            if await self._write(name, record, found[1]) is None:
                continue
            # Another process may have counted it as over, and purged.
            slot = await self._slot(name.run, record)
            if slot is None:
                raise _expired(name, found[0])
            if slot.state == PURGING:
                raise transitions.being_purged(name.run, slot)
            return record
        raise _contended(name)

    async def delete(self, name: HoldName) -> None:
        """Ends a hold; one that does not exist is ended already."""
        await self._bucket.delete(RunPlaces(name.run).hold(name.hold))

    async def list(
        self, run: RunName, *, after: str, limit: int
    ) -> list[tuple[HoldName, pb.HoldRecord | CorruptDataError]]:
        """Returns holds of a run by id, expired ones included; of a damaged record,
        that.

        Args:
            run: The run.
            after: Only those after this id.
            limit: At most so many.

        Raises:
            RunNotFoundError: With the most similar names.
        """
        await self._catalogue.check_run(run)
        places = RunPlaces(run)
        ids = map(places.hold_of, await self._bucket.list(places.holds))
        names = [HoldName(run, id_) for id_ in sorted(filter(None, ids)) if id_ > after]

        async def look(name: HoldName) -> pb.HoldRecord | None:
            found = await self._read(name)
            return found and found[0]

        return await rows(look, names, limit=limit)

    async def _new(
        self, checkpoint: CheckpointName, uid: str, *, owner: str, ttl: timedelta
    ) -> pb.HoldRecord:
        if uid:
            held = await self._catalogue.checkpoint_of_uid(checkpoint, uid)
        else:
            held = await self._catalogue.checkpoint(checkpoint)
        now = timestamp(self._clock.now())
        return pb.HoldRecord(
            step=held.step,
            upload=held.upload,
            owner=owner,
            ttl=duration(ttl),
            create_time=now,
            renew_time=now,
        )

    def _renewed(self, record: pb.HoldRecord) -> pb.HoldRecord:
        renewed = pb.HoldRecord()
        renewed.CopyFrom(record)
        renewed.renew_time.CopyFrom(timestamp(self._clock.now()))
        renewed.renewals += 1
        return renewed

    async def _slot(
        self, run: RunName, record: pb.HoldRecord
    ) -> pb.CheckpointRecord | None:
        """The slot of what is held; None: it was purged."""
        found = await self._catalogue.slot(run, record.step)
        if found is None or found[0].state not in CHECKPOINTS:
            return None
        return found[0] if found[0].upload == record.upload else None

    async def _read(self, name: HoldName) -> tuple[pb.HoldRecord, Generation] | None:
        place = RunPlaces(name.run).hold(name.hold)
        return await read_record(self._bucket, place, pb.HoldRecord, of=str(name))

    async def _write(
        self, name: HoldName, record: pb.HoldRecord, condition: WriteCondition
    ) -> Generation | None:
        """Writes a hold; None: it was written since it was read, be it by ourselves."""
        place = RunPlaces(name.run).hold(name.hold)
        try:
            return await self._bucket.write(
                place, sealed(place, record), condition=condition
            )
        except PreconditionError:
            return None

    async def _take_back(self, name: HoldName, generation: Generation) -> None:
        place = RunPlaces(name.run).hold(name.hold)
        try:
            await self._bucket.delete(place, generation=generation)
        except PreconditionError:
            return  # a repetition of the call renewed it, and looks for itself


def expire_time(record: pb.HoldRecord) -> datetime:
    """Returns when a hold expires unless it is renewed."""
    return record.renew_time.ToDatetime(UTC) + record.ttl.ToTimedelta()


def _check_same(
    name: HoldName, record: pb.HoldRecord, checkpoint: CheckpointName, uid: str
) -> None:
    """Refuses a repetition that means another checkpoint; where "latest" or a tag is
    asked, it may name another one by now."""
    is_another = isinstance(checkpoint.which, int) and checkpoint.which != record.step
    if is_another or uid not in ("", record.upload):
        raise RequestIdReusedError(
            f"{name}: its request id made a hold of step {record.step} with uid "
            f"{record.upload}, got {checkpoint} with uid {uid[:80] or '(any)'}; take a "
            "new one",
            hold=name.hold,
        )


def _expired(name: HoldName, record: pb.HoldRecord) -> HoldExpiredError:
    when = expire_time(record).isoformat(timespec="seconds")
    return HoldExpiredError(
        f"{name} on step {record.step} expired at {when}, and what it held may be "
        "gone; create another one",
        hold=name.hold,
        step=str(record.step),
        expire_time=when,
    )


def _contended(name: HoldName) -> ConflictError:
    return ConflictError(
        f"{name}: others changed it {_TRIES} times meanwhile; try again",
        hold=name.hold,
    )
