"""Holds, and all other references that keep checkpoints from being purged.

A hold is a lease. It is created or renewed in this order:

1. Write the record of the hold, on the condition that it is unchanged.
2. Read the slot of the checkpoint. If it is gone, the call fails. If it is being
   purged, a new hold is rejected; for an older one the slot is set back to DELETED.

A purge does the opposite: it sets PURGING, then looks for holds. So either the purge
sees the hold, or the holder sees the purge. A purge whose slot was set back fails its
own condition, and looks for holds again. So the renewal of a hold does not wait for a
purge, which may have been interrupted, and is not rejected because of one.

Each write counts only if its own condition held: a retry below this module that finds
the record written already is not taken for success. So no call removes a hold that
another call has returned.

A tag, a hold, or a live upload that has it as its base refers to a checkpoint. Two
orders make this safe (``bucket.proto``):

1. A call that adds a reference writes it first, and then reads the slot.
2. A purge sets PURGING first, and then looks for `References`.

A reference that the purge misses is therefore written after PURGING was set, and the
call that added it finds its checkpoint gone.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from storesvc.auth import call as access
from storesvc.auth.policy import Permission
from storesvc.catalog import slots
from storesvc.catalog.catalog import Catalog, rows
from storesvc.catalog.records import (
    duration,
    read_record,
    seal_record,
    timestamp,
    update_record,
    write_record,
)
from storesvc.catalog.slots import COMMITTED, DELETED, MARGIN, PURGING, Observations
from storesvc.clock import Clock
from storesvc.errors import (
    CorruptDataError,
    HoldExpiredError,
    HoldNotFoundError,
    RequestIdReusedError,
)
from storesvc.format.layout import RunPaths
from storesvc.format.names import CheckpointName, HoldName, RunName, TagName
from storesvc.storage.bucket import (
    IF_ABSENT,
    Bucket,
    Generation,
    PreconditionError,
    WriteCondition,
)
from storesvc.storage.requests import gather_each
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

    async def find_references(self, run: RunName) -> dict[str, Reference]:
        """Returns one reference for each referenced checkpoint of a run, by its uid."""
        uploads, named = await asyncio.gather(self._bases(run), self.named(run))
        return {**uploads, **named}

    async def named(self, run: RunName) -> dict[str, Reference]:
        """Returns one tag or hold for each checkpoint that has one, by its uid."""
        holds, tagged = await asyncio.gather(self._held(run), self.find_tags(run))
        tags = {uid: Reference(kind="tag", name=tag) for uid, tag in tagged.items()}
        return {**holds, **tags}

    async def find_tags(self, run: RunName) -> dict[str, str]:
        async def named(tag: str) -> tuple[str, str] | None:
            found = await self._catalog.tag_slot(TagName(run, tag))
            return (found[0].upload, tag) if found else None

        names = await self._catalog.tag_names(run)
        found = filter(None, await gather_each(named, names))
        return {uid: tag for uid, tag in found if uid}

    async def _held(self, run: RunName) -> dict[str, Reference]:
        places = RunPaths(run)

        async def held(place: str) -> tuple[str, Reference] | None:
            of = str(HoldName(run, holds[place]))
            found = await read_record(self._bucket, place, pb.HoldRecord, of=of)
            if found is None:
                return None
            record = found[0]
            if self._observations.is_over(
                place,
                record.SerializeToString(deterministic=True),
                length=record.ttl.ToTimedelta(),
                renew_time=record.renew_time.ToDatetime(UTC),
                clock_now=self._clock.now(),
                elapsed=self._clock.elapsed(),
            ):
                return None
            return record.upload, Reference(
                kind="hold", name=holds[place], owner=record.owner
            )

        listed = await self._bucket.list(places.holds)
        holds = {place: id_ for place in listed if (id_ := places.parse_hold(place))}
        held_by = dict(filter(None, await gather_each(held, holds)))
        self._observations.forget(places.holds, but=holds)
        return held_by

    async def _bases(self, run: RunName) -> dict[str, Reference]:
        """Returns the bases of live uploads, which own a slot UPLOADING, by uid."""

        async def base(upload: str) -> tuple[str, Reference] | None:
            place = RunPaths(run).upload(upload)
            found = await read_record(self._bucket, place, pb.UploadRecord)
            if found is None or not found[0].base:
                return None
            record = found[0]
            slot = await self._catalog.slot(run, record.step)
            if slot is None or slot[0].state != slots.UPLOADING:
                return None
            if (upload, record.epoch) != (slot[0].upload, slot[0].epoch):
                return None
            return record.base, Reference(kind="upload", name=upload)

        begun = await self._catalog.begun_uploads(run)
        return dict(filter(None, await gather_each(base, begun)))


async def referenced_slot(
    catalog: Catalog, run: RunName, record: pb.TagRecord | pb.HoldRecord
) -> tuple[pb.CheckpointRecord, Generation] | None:
    """Returns the slot of the checkpoint of a tag or a hold, and its generation; None:
    it was purged."""
    found = await catalog.slot(run, record.step)
    if found is None or found[0].state not in slots.CHECKPOINTS:
        return None
    return found if found[0].upload == record.upload else None


DEFAULT_TTL: Final = timedelta(minutes=10)
"""Time for which a hold lasts after each renewal."""


@dataclass(eq=False, repr=False)
class Holds:
    """Creates, renews, releases and lists holds, with the errors of the contract."""

    bucket: Bucket
    catalog: Catalog
    clock: Clock

    async def create(
        self,
        name: HoldName,
        checkpoint: CheckpointName,
        *,
        owner: str,
        ttl: timedelta,
        uid: str = "",
    ) -> pb.HoldRecord:
        """Creates a hold, or renews it if it exists; returns its record.

        Args:
            owner: Name of the holder, for people.
            ttl: Time for which the hold lasts after each renewal.
            uid: Uid of the checkpoint, which may be a deleted one; "": any.
        """

        known = None
        if uid and isinstance(checkpoint.which, int):
            known = pb.CheckpointRecord(step=checkpoint.which, upload=uid)

        async def attempt() -> pb.HoldRecord:
            nonlocal known
            # A step and a uid are all that a new hold needs: the first attempt reads
            # nothing before its write, which fails if the hold exists.
            held, known = known, None
            found = await self._read(name) if held is None else None
            if found is None:
                if held is None:
                    held = await self._find(checkpoint, uid)
                record = self._new(held, owner=owner, ttl=ttl)
            else:
                await _check_principal(name, found[0])
                _check_same(name, found[0], checkpoint, uid)
                record = self._renew_record(found[0])
            # 1. Write the hold.
            written = await self._write(name, record, found[1] if found else IF_ABSENT)
            # 2. Read the slot: a purge that missed the hold set PURGING before that.
            slot = await self._held(name.run, record, is_new=found is None)
            if slot is not None and slot.state in (COMMITTED, DELETED):
                return record
            # Roll back only a hold that this call created: another call may have
            # returned an older one.
            if found is None:
                place = RunPaths(name.run).hold(name.hold)
                # or a repeated call has renewed it, and checks the slot itself
                with suppress(PreconditionError):
                    await self.bucket.delete(place, generation=written)
            if slot is not None:
                raise slots.is_deleted(name.run, slot)
            await self._find(checkpoint, uid)  # has the precise error
            raise await self.catalog.missing(CheckpointName(name.run, record.step))

        return await update_record(attempt, record=str(name), hold=name.hold)

    async def renew(self, name: HoldName) -> pb.HoldRecord:
        """Renews a hold and returns its record; an expired hold can be renewed while
        its checkpoint exists."""

        async def attempt() -> pb.HoldRecord:
            found, generation = await self._live(name)
            record = self._renew_record(found)
            # 1. Write the hold.
            await self._write(name, record, generation)
            # 2. Read the slot: another process may have counted the hold as expired,
            #    and purged.
            if await self._held(name.run, record, is_new=False) is None:
                raise _expired_error(name, found)
            return record

        return await update_record(attempt, record=str(name), hold=name.hold)

    async def live(self, name: HoldName) -> pb.HoldRecord:
        """Returns the record of a hold of the caller that has not expired."""
        return (await self._live(name))[0]

    async def _live(self, name: HoldName) -> tuple[pb.HoldRecord, Generation]:
        """Returns the record of a hold as ``live`` does, and its generation."""
        found = await self._read(name)
        if found is None:
            raise HoldNotFoundError(
                f"{name} does not exist, or was collected; create another one",
                hold=name.hold,
            )
        await _check_principal(name, found[0])
        # The record may come from a clock that is behind this one: a hold counts as
        # expired only if no plausible clock error explains its age.
        if expire_time(found[0]) + MARGIN <= self.clock.now():
            raise _expired_error(name, found[0])
        return found

    async def delete(self, name: HoldName) -> None:
        """Releases a hold; does nothing if it does not exist."""
        # Without a policy there is nothing to check, and nothing is read.
        if access.is_restricted() and (found := await self._read(name)):
            await _check_principal(name, found[0])
        await self.bucket.delete(RunPaths(name.run).hold(name.hold))

    async def list(
        self, run: RunName, *, after: str, limit: int
    ) -> list[tuple[HoldName, pb.HoldRecord | CorruptDataError]]:
        """Returns the holds of a run by id, expired ones included, with the error for
        each damaged record."""
        await self.catalog.check_run(run)
        places = RunPaths(run)
        ids = map(places.parse_hold, await self.bucket.list(places.holds))
        names = [HoldName(run, id_) for id_ in sorted(filter(None, ids)) if id_ > after]

        async def look(name: HoldName) -> pb.HoldRecord | None:
            found = await self._read(name)
            return found and found[0]

        return await rows(look, names, limit=limit)

    async def _find(self, checkpoint: CheckpointName, uid: str) -> pb.CheckpointRecord:
        if uid:
            return await self.catalog.checkpoint_with_uid(checkpoint, uid)
        return await self.catalog.checkpoint(checkpoint)

    def _new(
        self, held: pb.CheckpointRecord, *, owner: str, ttl: timedelta
    ) -> pb.HoldRecord:
        now = timestamp(self.clock.now())
        return pb.HoldRecord(
            step=held.step,
            upload=held.upload,
            owner=owner,
            principal=access.principal_name(),
            ttl=duration(ttl),
            create_time=now,
            renew_time=now,
        )

    async def _held(
        self, run: RunName, record: pb.HoldRecord, *, is_new: bool
    ) -> pb.CheckpointRecord | None:
        """Returns the slot of the checkpoint of a written hold; None: it was purged."""
        found = await referenced_slot(self.catalog, run, record)
        if found is None:
            return None
        slot, generation = found
        if slot.state != PURGING or is_new:
            return slot
        # End the purge in progress: it fails its condition, and looks for holds again.
        spared = slots.spare_slot(slot)
        place = RunPaths(run).checkpoint(slot.step)
        await write_record(self.bucket, place, spared, condition=generation)
        return spared

    def _renew_record(self, record: pb.HoldRecord) -> pb.HoldRecord:
        renewed = pb.HoldRecord()
        renewed.CopyFrom(record)
        renewed.renew_time.CopyFrom(timestamp(self.clock.now()))
        renewed.renewals += 1
        return renewed

    async def _read(self, name: HoldName) -> tuple[pb.HoldRecord, Generation] | None:
        place = RunPaths(name.run).hold(name.hold)
        return await read_record(self.bucket, place, pb.HoldRecord, of=str(name))

    async def _write(
        self, name: HoldName, record: pb.HoldRecord, condition: WriteCondition
    ) -> Generation:
        """Writes a hold; an earlier try of this same write is a conflict, too."""
        place = RunPaths(name.run).hold(name.hold)
        return await self.bucket.write(
            place, seal_record(place, record), condition=condition
        )


def expire_time(record: pb.HoldRecord) -> datetime:
    """Returns the time at which a hold expires unless it is renewed."""
    return record.renew_time.ToDatetime(UTC) + record.ttl.ToTimedelta()


async def _check_principal(name: HoldName, record: pb.HoldRecord) -> None:
    """Rejects a caller that may not renew and release a hold."""
    await access.require_own(
        record.principal,
        (),
        Permission.HOLDS_CREATE,
        name.run,
        otherwise=Permission.HOLDS_MANAGE,
    )


def _check_same(
    name: HoldName, record: pb.HoldRecord, checkpoint: CheckpointName, uid: str
) -> None:
    """Rejects a repeated request for another checkpoint."""
    # "latest" and tags are accepted: they may name another checkpoint by now.
    is_another = isinstance(checkpoint.which, int) and checkpoint.which != record.step
    if is_another or uid not in ("", record.upload):
        raise RequestIdReusedError(
            f"{name}: its request id made a hold of step {record.step} with uid "
            f"{record.upload}, got {checkpoint} with uid {uid[:80] or '(any)'}; use a "
            "new id",
            hold=name.hold,
        )


def _expired_error(name: HoldName, record: pb.HoldRecord) -> HoldExpiredError:
    when = expire_time(record).isoformat(timespec="seconds")
    return HoldExpiredError(
        f"{name} on step {record.step} expired at {when}, and its checkpoint may have "
        "been purged; create another one",
        hold=name.hold,
        step=str(record.step),
        expire_time=when,
    )
