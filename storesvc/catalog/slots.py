"""Decides what may happen to the slot of a step until it is committed; pure.

The slot (``CheckpointRecord``) is the only arbiter of a step. These functions take the
slot that was read and return the slot to be written, or raise; the caller writes it on
the condition that the slot has not changed since. So the rules hold for any clocks and
any number of processes:

1. The contents of a committed slot never change; ``transitions`` decides the rest.
2. An upload owns the slot from its reservation until a later upload takes it over or it
   is aborted. The epoch of each owner is above all earlier ones, also where the slot
   was emptied in between.
3. Only the owner commits, and only with all chunks of all leaves.
"""

from collections.abc import Mapping
from datetime import UTC
from enum import Enum
from itertools import islice
from typing import Final, assert_never

import numpy as np
from google.protobuf.timestamp_pb2 import Timestamp

from storesvc.errors import (
    CheckpointExistsError,
    ChunksIncompleteError,
    ConflictError,
    FormatUnsupportedError,
    UploadNotFoundError,
    UploadSupersededError,
    WriterUnfinishedError,
)
from storesvc.format.chunks import ChunkLocations, Sums
from storesvc.format.names import InvalidNameError, RunName, UploadName, check_upload
from storesvc.format.trees import Tree
from storesvc_proto.v1 import bucket_pb2 as pb

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


def state_of(slot: pb.CheckpointRecord) -> SlotState:
    """Returns the state of a slot.

    Raises:
        FormatUnsupportedError: This release does not know the state.
    """
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
    id of an upload. ``state_of`` rejects unknown states.
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
        run: The run.
        slot: The contents of the step's slot.
        floor: ``RunRecord.epoch_floor``, read after the slot.

    Raises:
        CheckpointExistsError: The step is committed.
    """
    if slot is None:
        return floor + 1
    match state_of(slot):
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


def released(slot: pb.CheckpointRecord, when: Timestamp) -> pb.CheckpointRecord:
    """Returns the slot after the abort of its owner."""
    return pb.CheckpointRecord(
        state=FREE,
        step=slot.step,
        upload=slot.upload,
        epoch=slot.epoch,
        delete_time=when,
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
    """Rejects a caller whose epoch differs from its upload's.

    Raises:
        UploadSupersededError: The epochs differ.
    """
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
    holds each chunk.

    Args:
        name: The upload.
        tree: Its tree.
        receipts: The chunks of each finished writer.
        writer_count: Number of writers of the upload.

    Raises:
        WriterUnfinishedError: Names the unfinished writers.
        ChunksIncompleteError: Names the chunks.
    """
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
    match state_of(slot):
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
    never_held = slot is not None and slot.state == FREE and slot.epoch < record.epoch
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
