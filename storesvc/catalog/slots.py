"""Decides what may happen to the slot of a step, and when a lease has expired; pure.

The slot (``CheckpointRecord``) is the only arbiter of a step. These functions take the
slot that was read and return the slot to be written, or raise; the caller writes it on
the condition that the slot has not changed since. So the rules hold for any clocks and
any number of processes:

1. The contents of a committed slot never change; the states below decide the rest.
2. An upload owns the slot from its reservation until a later upload takes it over or it
   is aborted. The epoch of each owner is above all earlier ones, also where the slot
   was emptied in between.
3. Only the owner commits, and only with all chunks of all leaves.

After the commit the data of a checkpoint never change; the functions change its state,
its times, its labels, its metrics and its pin. Returning the given slot itself requests
no change. The states::

    COMMITTED  --deleted-->  DELETED  --purging-->  PURGING  --freed-->  FREE
               <-undeleted-           <--spared---

A lease is a record that its holder changes before its duration has passed. It expires
by observation rather than by other clocks: once this process has seen it unchanged for
its whole duration, measured by a monotonic clock. The times in the record come from
other machines, whose clocks may be wrong by days: they count only when a lease is first
seen, and only if they are older than any clock error. So a lease that is renewed in
time never expires, and any other expires at the latest after its duration.
"""

from bisect import bisect_left, insort
from collections.abc import Container, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from itertools import islice
from typing import Any, Final, assert_never

import numpy as np
from google.protobuf.timestamp_pb2 import Timestamp

from storesvc.catalog.records import record_etag, timestamp
from storesvc.errors import (
    CheckpointDeletedError,
    CheckpointExistsError,
    CheckpointInUseError,
    CheckpointNotDeletedError,
    CheckpointNotFoundError,
    ChunksIncompleteError,
    ConflictError,
    EtagMismatchError,
    FormatUnsupportedError,
    RequestIdReusedError,
    UploadNotFoundError,
    UploadSupersededError,
    WriterUnfinishedError,
)
from storesvc.format.chunks import ChunkLocations, Sums
from storesvc.format.names import InvalidNameError, RunName, UploadName, check_upload
from storesvc.format.trees import Tree
from storesvc_proto.v1 import bucket_pb2 as pb

MARGIN: Final = timedelta(days=2)
"""Maximum difference of the clocks of two machines."""


@dataclass(frozen=True, slots=True)
class _Observation:
    """The contents of a lease, and the time since when they have not changed."""

    seen: bytes
    since: float
    was_over: bool
    """True if it was long expired by its own time when it was first seen."""


class Observations:
    """The leases that this process has seen."""

    def __init__(self) -> None:
        self._leases: dict[str, _Observation] = {}
        self._keys: list[str] = []
        """Keys of ``_leases``, in order."""

    def is_over(
        self,
        key: str,
        seen: bytes,
        *,
        length: timedelta,
        renew_time: datetime,
        clock_now: datetime,
        elapsed: float,
    ) -> bool:
        """Returns whether a lease has expired, and records the observation.

        Args:
            seen: Its contents, which differ after each renewal.
            length: Its duration after a renewal.
            renew_time: Time of its renewal, by the clock of its holder.
            clock_now: Wall-clock time, taken after the lease was read.
            elapsed: Seconds of a monotonic clock, taken after the lease was read.
        """
        lease = self._leases.get(key)
        if lease is None:
            insort(self._keys, key)
            was_over = clock_now - renew_time > length + MARGIN
            lease = self._leases[key] = _Observation(seen, elapsed, was_over)
        elif lease.seen != seen:
            lease = self._leases[key] = _Observation(seen, elapsed, was_over=False)
        return lease.was_over or elapsed - lease.since >= length.total_seconds()

    def forget(self, prefix: str, *, but: Container[str]) -> None:
        """Forgets the leases whose keys begin with a prefix, except those in `but`.

        Others, as of all other runs of a store, are not looked at.
        """
        first = end = bisect_left(self._keys, prefix)
        while end < len(self._keys) and self._keys[end].startswith(prefix):
            end += 1
        found = self._keys[first:end]
        self._keys[first:end] = [key for key in found if key in but]
        for key in found:
            if key not in but:
                del self._leases[key]


PATIENCE: Final = timedelta(days=1) + MARGIN
"""Maximum time between an announcement and its change, a commit excepted: a day, by the
clocks of two machines."""

NOTHING: Final = "none"
"""``Announcement.replaces`` if there was no record."""


_SHOWN: Final = 5
"""Maximum chunks or writers that a message names."""


class SlotState(Enum):
    """The states of a slot, as an enum, so that mypy checks `match` statements."""

    UPLOADING = pb.CheckpointRecord.STATE_UPLOADING
    COMMITTED = pb.CheckpointRecord.STATE_COMMITTED
    FREE = pb.CheckpointRecord.STATE_FREE
    DELETED = pb.CheckpointRecord.STATE_DELETED
    PURGING = pb.CheckpointRecord.STATE_PURGING


COMMITTED = pb.CheckpointRecord.STATE_COMMITTED
UPLOADING = pb.CheckpointRecord.STATE_UPLOADING
FREE = pb.CheckpointRecord.STATE_FREE
DELETED = pb.CheckpointRecord.STATE_DELETED
PURGING = pb.CheckpointRecord.STATE_PURGING

CHECKPOINTS = frozenset({COMMITTED, DELETED, PURGING})
"""States of a slot that holds a checkpoint, deleted or not."""


def slot_state(slot: pb.CheckpointRecord) -> SlotState:
    """Returns the state of a slot."""
    try:
        return SlotState(slot.state)
    except ValueError as e:
        raise FormatUnsupportedError(
            f"the slot of step {slot.step}: expected a state that this release knows, "
            f"got {slot.state}; use a newer release"
        ) from e


def fault(slot: pb.CheckpointRecord) -> str:
    """Describes a value in a slot that no release writes, as a clause; "" for none.

    The collector acts on the values: it deletes all objects whose name begins with the
    id of an upload. ``slot_state`` rejects unknown states.
    """
    try:
        check_upload(slot.upload)
    except InvalidNameError as e:
        return f"expected the id of an upload: {e}"
    if slot.state in CHECKPOINTS and slot.attempt and not slot.files_digest:
        return "expected the digest of a file table, got none"
    return ""


def next_epoch(run: RunName, slot: pb.CheckpointRecord | None, *, floor: int) -> int:
    """Returns the epoch of an upload that takes the slot over.

    Args:
        floor: ``RunRecord.epoch_floor``, read after the slot.

    Raises:
        CheckpointExistsError: The step is committed.
    """
    if slot is None:
        return floor + 1
    match slot_state(slot):
        case SlotState.COMMITTED | SlotState.DELETED | SlotState.PURGING:
            raise exists(run, slot)
        case SlotState.UPLOADING | SlotState.FREE:
            return slot.epoch + 1
        case state:
            assert_never(state)


def predecessor(slot: pb.CheckpointRecord | None) -> str:
    """Returns the unfinished upload that loses a slot to a new owner; "" for none."""
    return slot.upload if slot and slot.state == UPLOADING else ""


def reservation(upload: str, record: pb.UploadRecord) -> pb.CheckpointRecord:
    """Returns the slot that reserves a step for an upload."""
    return pb.CheckpointRecord(
        state=UPLOADING,
        step=record.step,
        upload=upload,
        epoch=record.epoch,
        create_time=record.create_time,
        owner=record.owner,
    )


def owns(name: UploadName, record: pb.UploadRecord, slot: pb.CheckpointRecord) -> bool:
    """Returns whether an upload was the last to reserve a slot."""
    return slot.upload == name.upload and slot.epoch == record.epoch


def holds(name: UploadName, record: pb.UploadRecord, slot: pb.CheckpointRecord) -> bool:
    """Returns whether an upload owns a slot, committed or not."""
    return owns(name, record, slot) and slot.state != FREE


def check_owner(
    name: UploadName, record: pb.UploadRecord, slot: pb.CheckpointRecord | None
) -> pb.CheckpointRecord:
    """Returns the slot; rejects an upload that does not own it.

    Raises:
        UploadNotFoundError: The upload was aborted.
        UploadSupersededError: Another upload owns the slot.
        CheckpointExistsError: Another upload has committed the step.
    """
    if slot is None:  # its reservation was never written
        raise absent(name)
    if owns(name, record, slot):
        if slot.state == FREE:
            raise absent(name)
        return slot
    if slot.state in CHECKPOINTS:
        raise exists(name.run, slot)
    raise lost(name, record, slot)


def check_epoch(name: UploadName, record: pb.UploadRecord, epoch: int) -> None:
    """Rejects a caller whose epoch differs from its upload's."""
    if epoch != record.epoch:
        raise UploadSupersededError(
            f"{name}: expected epoch {record.epoch}, got {epoch}; begin a new upload",
            upload=name.upload,
            epoch=str(record.epoch),
        )


def check_complete(
    name: UploadName,
    tree: Tree,
    receipts: Mapping[int, tuple[Sums, ChunkLocations]],
    *,
    writer_count: int,
) -> list[tuple[Sums, ChunkLocations]]:
    """Returns the chunks of all writers; rejects a commit unless exactly one writer
    holds each chunk."""
    if len(receipts) < writer_count:
        unfinished = (str(w) for w in range(writer_count) if w not in receipts)
        shown = list(islice(unfinished, _SHOWN))
        raise WriterUnfinishedError(
            f"{name}: expected {writer_count} finished writers, but "
            f"{writer_count - len(receipts)} have not finished (writer "
            f"{', '.join(shown)}); finish them, then commit again",
            writers=",".join(shown),
        )
    held = np.zeros(tree.chunk_count, np.int64)
    stored = [receipts[writer] for writer in sorted(receipts)]
    for sums, _ in stored:
        held[sums.ordinal] += 1
    wrong = np.flatnonzero(held != 1)
    if len(wrong):
        first = ", ".join(tree.describe_chunk(int(c)) for c in wrong[:_SHOWN])
        raise ChunksIncompleteError(
            f"{name}: expected each of {tree.chunk_count} chunks from one writer, but "
            f"{int((held == 0).sum())} are missing and {int((held > 1).sum())} came "
            f"from several ({first}); send what is missing, then commit again",
            missing=str(int((held == 0).sum())),
        )
    return stored


def exists(run: RunName, slot: pb.CheckpointRecord) -> CheckpointExistsError:
    """Returns the error of a second commit."""
    match slot_state(slot):
        case SlotState.COMMITTED:
            text = (
                f"exists already, saved{_by(slot)} at {_moment(slot.commit_time)}, and "
                "checkpoints are write-once; save another step"
            )
        case SlotState.DELETED | SlotState.PURGING:
            text = "was deleted; undelete it, purge it, or save another step"
        case SlotState.UPLOADING | SlotState.FREE as state:
            raise AssertionError(state)
        case state:
            assert_never(state)
    return CheckpointExistsError(
        f"{run}@{slot.step} {text}", run=str(run), step=str(slot.step)
    )


def lost(
    name: UploadName, record: pb.UploadRecord, slot: pb.CheckpointRecord | None
) -> UploadNotFoundError | UploadSupersededError:
    """Returns the error of an upload that has lost its slot, or can never own it."""
    # A slot that is freed for another upload has its epoch, which may be the same if
    # neither has held the slot.
    never_held = slot is not None and slot.state == FREE and slot.epoch <= record.epoch
    if slot is None or slot.upload == name.upload or never_held:
        return absent(name)
    return UploadSupersededError(
        f"{name}: {name.run}@{record.step} is being saved{_by(slot)} since "
        f"{_moment(slot.create_time)}, as upload {slot.upload}, which took the step "
        "over from this one; let one job alone save this run, and do not repeat this "
        "save",
        upload=name.upload,
        owner=slot.upload,
        by=slot.owner,
        epoch=str(slot.epoch),
    )


def not_begun(
    name: UploadName, record: pb.UploadRecord, slot: pb.CheckpointRecord | None
) -> CheckpointExistsError | ConflictError | UploadNotFoundError:
    """Returns the error of an upload whose slot changed while it began."""
    if slot is None or slot.state == FREE or slot.upload == name.upload:
        return absent(name)
    if slot.state in CHECKPOINTS:
        return exists(name.run, slot)
    return ConflictError(
        f"{name}: {name.run}@{record.step} is being saved{_by(slot)}, which began at "
        "the same moment; let one job alone save this run",
        upload=name.upload,
        by=slot.owner,
    )


def _by(slot: pb.CheckpointRecord) -> str:
    """The owner of a slot as a phrase, if it is known."""
    return f" by {slot.owner}" if slot.owner else ""


def _moment(time: Timestamp) -> str:
    return time.ToDatetime(UTC).isoformat(sep=" ", timespec="seconds")


def absent(name: UploadName) -> UploadNotFoundError:
    """Returns the error of an upload that does not exist."""
    return UploadNotFoundError(
        f"{name}: no such upload, or it was aborted; begin a new one",
        upload=name.upload,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """New values of a checkpoint; None leaves a value unchanged."""

    labels: Mapping[str, str] | None = None
    metrics: Mapping[str, float] | None = None
    pinned: bool | None = None


def update_slot(
    run: RunName, slot: pb.CheckpointRecord, change: Change, *, etag: str, write_id: str
) -> pb.CheckpointRecord:
    """Returns the slot with new labels, metrics or pin.

    Raises:
        CheckpointDeletedError: The checkpoint is deleted.
        EtagMismatchError: It has changed since the etag was read.
        RequestIdReusedError: The request id was used for another change of it.
    """
    if is_repeated(slot.write_id, write_id):
        return slot
    if slot.state != COMMITTED:
        raise is_deleted(run, slot)
    check_etag(f"{run}@{slot.step}", etag, record_etag(slot))
    changed = _change(slot, write_id=write_id)
    if change.labels is not None:
        changed.ClearField("labels")
        changed.labels.update(change.labels)
    if change.metrics is not None:
        changed.ClearField("metrics")
        changed.metrics.update(change.metrics)
    if change.pinned is not None:
        changed.pinned = change.pinned
    return changed


def delete_slot(
    run: RunName,
    slot: pb.CheckpointRecord,
    *,
    tagged: Mapping[str, str],
    when: datetime,
    purge_time: datetime,
    etag: str,
    write_id: str,
) -> pb.CheckpointRecord:
    """Returns the slot of a deleted checkpoint.

    Args:
        tagged: Tags, by the uid of the checkpoint that they name.
        etag: The etag that the caller read, or "".
        write_id: Id of the request; see ``is_repeated``.

    Raises:
        CheckpointInUseError: The checkpoint is pinned or tagged.
        EtagMismatchError: It has changed since the etag was read.
        RequestIdReusedError: The request id was used for another change of it.
    """
    if is_repeated(slot.write_id, write_id) and slot.state != COMMITTED:
        return slot
    check_etag(f"{run}@{slot.step}", etag, record_etag(slot))
    if slot.state != COMMITTED:
        return slot
    if slot.pinned:
        raise in_use(run, slot, "a pin", "unpin it")
    if slot.upload in tagged:
        tag = f"tag {tagged[slot.upload]}"
        raise in_use(run, slot, tag, "move or delete the tag")
    changed = _change(slot, write_id=write_id, state=DELETED)
    changed.delete_time.CopyFrom(timestamp(when))
    changed.purge_time.CopyFrom(timestamp(purge_time))
    return changed


def undelete_slot(
    run: RunName, slot: pb.CheckpointRecord, *, write_id: str
) -> pb.CheckpointRecord:
    """Returns the slot of a checkpoint whose deletion is reverted.

    Raises:
        ConflictError: The checkpoint is being purged.
        RequestIdReusedError: The request id was used for another change of it.
    """
    is_repeated(slot.write_id, write_id)  # only for its check: the state is enough
    match slot_state(slot):
        case SlotState.COMMITTED:
            return slot
        case SlotState.DELETED:
            changed = _change(slot, write_id=write_id, state=COMMITTED)
            changed.ClearField("delete_time")
            changed.ClearField("purge_time")
            return changed
        case SlotState.PURGING:
            raise being_purged(run, slot)
        case SlotState.UPLOADING | SlotState.FREE as state:
            raise AssertionError(state)
        case state:
            assert_never(state)


def purging(
    run: RunName, slot: pb.CheckpointRecord, *, etag: str
) -> pb.CheckpointRecord:
    """Returns the slot of a checkpoint while its references are searched.

    Raises:
        CheckpointNotDeletedError: The checkpoint is not deleted.
        EtagMismatchError: It has changed since the etag was read.
    """
    state = slot_state(slot)
    if state is SlotState.COMMITTED:
        raise CheckpointNotDeletedError(
            f"{run}@{slot.step} is not deleted, and only a deleted checkpoint can be "
            "purged; delete it first",
            run=str(run),
            step=str(slot.step),
        )
    # An interrupted purge is no change: the checkpoint stays deleted, so its etag fits.
    check_etag(
        f"{run}@{slot.step}", etag, record_etag(slot), record_etag(spare_slot(slot))
    )
    match state:
        case SlotState.PURGING:
            return slot
        case SlotState.DELETED:
            return _change(slot, state=PURGING)
        case SlotState.UPLOADING | SlotState.FREE:
            raise AssertionError(state)
        case _:
            assert_never(state)


def spare_slot(slot: pb.CheckpointRecord) -> pb.CheckpointRecord:
    """Returns the slot of a checkpoint that is referenced, and so is not purged."""
    return _change(slot, state=DELETED)


def free_slot(slot: pb.CheckpointRecord, *, when: datetime) -> pb.CheckpointRecord:
    """Returns the slot of a step whose checkpoint was purged, or whose upload was
    aborted."""
    return pb.CheckpointRecord(
        state=FREE,
        step=slot.step,
        upload=slot.upload,
        epoch=slot.epoch,
        delete_time=timestamp(when),
    )


def is_due(slot: pb.CheckpointRecord, now: datetime) -> bool:
    """Returns whether a purge of the checkpoint may begin, or must be finished."""
    match slot_state(slot):
        case SlotState.PURGING:
            return True
        case SlotState.DELETED:
            return slot.purge_time.ToDatetime(UTC) <= now
        case SlotState.COMMITTED | SlotState.UPLOADING | SlotState.FREE:
            return False
        case state:
            assert_never(state)


def check_etag(what: str, given: str, *expected: str) -> None:
    """Rejects a change of an object that is not the version that its caller read.

    Args:
        given: The etag of the request; "" matches any version.
    """
    if given and given not in expected:
        raise EtagMismatchError(
            f"{what}: expected the etag {expected[0]}, got {given[:80]}; it has "
            "changed since, read it again",
            etag=expected[0],
        )


def is_repeated(stored: str, given: str) -> bool:
    """Returns whether the last change was made by the same request, sent again.

    Args:
        stored: The ``write_id`` of the object's last change.
        given: The ``write_id`` of the request: its id and, after a colon, a digest of
            its body. One without a digest, as older releases stored it, matches any.
    """
    stored_id, _, stored_body = stored.partition(":")
    given_id, _, given_body = given.partition(":")
    if stored_id != given_id:
        return False
    if stored_body and given_body and stored_body != given_body:
        raise RequestIdReusedError(
            f"request_id {given_id}: expected the request that it was first used for, "
            "got another one; use a new id",
            request_id=given_id,
        )
    return True


def is_deleted(run: RunName, slot: pb.CheckpointRecord) -> CheckpointDeletedError:
    """Returns the error of a checkpoint that was deleted."""
    until = slot.purge_time.ToDatetime(UTC).isoformat(timespec="seconds")
    fate = (
        f"was deleted; undelete it before {until}, or use another checkpoint"
        if slot.state == DELETED
        else "was deleted and is being purged; use another checkpoint"
    )
    return CheckpointDeletedError(
        f"{run}@{slot.step} {fate}",
        run=str(run),
        step=str(slot.step),
        uid=slot.upload,
        purge_time=until,
    )


def replaced_error(
    run: RunName, slot: pb.CheckpointRecord, uid: str
) -> CheckpointNotFoundError:
    """Returns the error of a checkpoint whose step holds another one by now."""
    return CheckpointNotFoundError(
        f"{run}@{slot.step}: the checkpoint with uid {uid[:80]!r} was replaced by "
        f"{slot.upload!r}; open that one, or use another step",
        run=str(run),
        step=str(slot.step),
        nearest="",
    )


def being_purged(run: RunName, slot: pb.CheckpointRecord) -> ConflictError:
    """Returns the error of a change while a checkpoint is being purged."""
    return ConflictError(
        f"{run}@{slot.step} is being purged; try again, and purge it again if it stays "
        "in this state",
        run=str(run),
        step=str(slot.step),
    )


def in_use(
    run: RunName, slot: pb.CheckpointRecord, by: str, remedy: str
) -> CheckpointInUseError:
    """Returns the error of the deletion or purge of a checkpoint in use."""
    return CheckpointInUseError(
        f"{run}@{slot.step} is kept by {by}; {remedy}, then try again",
        run=str(run),
        step=str(slot.step),
        by=by,
    )


def _change(slot: pb.CheckpointRecord, **values: Any) -> pb.CheckpointRecord:
    """Returns a copy with other values of some fields, all of them scalars."""
    changed = pb.CheckpointRecord()
    changed.CopyFrom(slot)
    for name, value in values.items():
        setattr(changed, name, value)
    return changed
