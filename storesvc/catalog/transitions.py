"""Decides what may happen to a checkpoint after its commit; pure.

As in ``slots``, these functions take the slot that was read and return the slot to be
written, or raise; returning the given slot itself requests no change. The states::

    COMMITTED  --deleted-->  DELETED  --purging-->  PURGING  --freed-->  FREE
               <-undeleted-           <--spared---

The data of a checkpoint never change; these functions change its state, its times, its
labels, its metrics and its pin.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import assert_never

from storesvc.catalog.records import etag_of, timestamp
from storesvc.catalog.slots import (
    COMMITTED,
    DELETED,
    FREE,
    PURGING,
    SlotState,
    state_of,
)
from storesvc.errors import (
    CheckpointDeletedError,
    CheckpointInUseError,
    CheckpointNotDeletedError,
    CheckpointNotFoundError,
    ConflictError,
    EtagMismatchError,
    RequestIdReusedError,
)
from storesvc.format.names import RunName
from storesvc_proto.v1 import bucket_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """New values of a checkpoint; None leaves a value unchanged."""

    labels: Mapping[str, str] | None = None
    metrics: Mapping[str, float] | None = None
    pinned: bool | None = None


def updated(
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
    check_etag(f"{run}@{slot.step}", etag, etag_of(slot))
    changed = _copy(slot, write_id)
    if change.labels is not None:
        changed.ClearField("labels")
        changed.labels.update(change.labels)
    if change.metrics is not None:
        changed.ClearField("metrics")
        changed.metrics.update(change.metrics)
    if change.pinned is not None:
        changed.pinned = change.pinned
    return changed


def deleted(
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
        run: The run.
        slot: The slot that was read.
        tagged: Tags, by the uid of the checkpoint that they name.
        when: Now.
        purge_time: Earliest time of the purge.
        etag: The etag that the caller read, or "".
        write_id: Id of the request; see ``is_repeated``.

    Raises:
        CheckpointInUseError: The checkpoint is pinned or tagged.
        EtagMismatchError: It has changed since the etag was read.
        RequestIdReusedError: The request id was used for another change of it.
    """
    if is_repeated(slot.write_id, write_id) and slot.state != COMMITTED:
        return slot
    check_etag(f"{run}@{slot.step}", etag, etag_of(slot))
    if slot.state != COMMITTED:
        return slot
    if slot.pinned:
        raise in_use(run, slot, "a pin", "unpin it")
    if slot.upload in tagged:
        tag = f"tag {tagged[slot.upload]}"
        raise in_use(run, slot, tag, "move or delete the tag")
    changed = _copy(slot, write_id)
    changed.state = DELETED
    changed.delete_time.CopyFrom(timestamp(when))
    changed.purge_time.CopyFrom(timestamp(purge_time))
    return changed


def undeleted(
    run: RunName, slot: pb.CheckpointRecord, *, write_id: str
) -> pb.CheckpointRecord:
    """Returns the slot of a checkpoint whose deletion is reverted.

    Raises:
        ConflictError: The checkpoint is being purged.
        RequestIdReusedError: The request id was used for another change of it.
    """
    is_repeated(slot.write_id, write_id)  # only for its check: the state is enough
    match state_of(slot):
        case SlotState.COMMITTED:
            return slot
        case SlotState.DELETED:
            changed = _copy(slot, write_id)
            changed.state = COMMITTED
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
    state = state_of(slot)
    if state is SlotState.COMMITTED:
        raise CheckpointNotDeletedError(
            f"{run}@{slot.step} is not deleted, and only a deleted checkpoint can be "
            "purged; delete it first",
            run=str(run),
            step=str(slot.step),
        )
    # An interrupted purge is no change: the checkpoint stays deleted, so its etag fits.
    check_etag(f"{run}@{slot.step}", etag, etag_of(slot), etag_of(spared(slot)))
    match state:
        case SlotState.PURGING:
            return slot
        case SlotState.DELETED:
            changed = pb.CheckpointRecord()
            changed.CopyFrom(slot)
            changed.state = PURGING
            return changed
        case SlotState.UPLOADING | SlotState.FREE:
            raise AssertionError(state)
        case _:
            assert_never(state)


def spared(slot: pb.CheckpointRecord) -> pb.CheckpointRecord:
    """Returns the slot of a checkpoint that is referenced, and so is not purged."""
    changed = pb.CheckpointRecord()
    changed.CopyFrom(slot)
    changed.state = DELETED
    return changed


def freed(slot: pb.CheckpointRecord, *, when: datetime) -> pb.CheckpointRecord:
    """Returns the slot of a step whose checkpoint was purged."""
    return pb.CheckpointRecord(
        state=FREE,
        step=slot.step,
        upload=slot.upload,
        epoch=slot.epoch,
        delete_time=timestamp(when),
    )


def is_due(slot: pb.CheckpointRecord, now: datetime) -> bool:
    """Returns whether a purge of the checkpoint may begin, or must be finished."""
    match state_of(slot):
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
        what: The object's name in messages.
        given: The etag of the request; "" matches any version.
        expected: The etags that match.

    Raises:
        EtagMismatchError: The given etag does not match.
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

    Raises:
        RequestIdReusedError: The ids are equal, and the bodies differ.
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


def replaced(
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


def _copy(slot: pb.CheckpointRecord, write_id: str) -> pb.CheckpointRecord:
    changed = pb.CheckpointRecord()
    changed.CopyFrom(slot)
    changed.write_id = write_id
    return changed
