"""What is garbage: from what was read of a run.

A collector lists the objects of a run, and then reads all its slots until two reads
agree. ``read_agreement`` says when they do, and why the second one then has all that
needed anything at one moment. What these functions call garbage may be deleted at any
time after that, whatever else goes on, for they keep to these rules:

1. An upload *lives* while its slot is UPLOADING by it. All that carries its id stays,
   and all that carries the id of its predecessor, which it may claim.
2. An upload is *kept* while its slot holds the checkpoint that it became, deleted or
   not. What the slot names stays.
3. An upload whose record its slot does not know yet has *begun*: it may still reserve
   the slot. All of it stays, until a write of the slot has made that impossible.
4. Any other upload has *ended*, and no slot will name it again: a later owner of its
   slot, or its own end, stands there, or its record is gone, which came before all that
   it stored. A reader that has no hold may still be at it: it stays for a grace.
5. A data file stays while the file table of an upload that is kept, or of one that
   ended less than a grace ago, names it, whichever upload wrote it.
6. The record of an upload outlives it, to answer repeated requests. A FREE slot
   outlives all else of the uploads of its step: nothing is ever without an owner, and
   no upload that found the slot empty once finds it empty again.
7. What no list shows (what a killed write left, and directories) goes with the last
   of an upload that a list shows, and before it: its record, or the FREE slot.
8. What carries no upload's id is never garbage.
"""

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from functools import cached_property
from typing import assert_never

from google.protobuf.timestamp_pb2 import Timestamp

from storesvc.catalog.slots import CHECKPOINTS, FREE, SlotState, state_of
from storesvc.format.layout import RunPlaces
from storesvc_proto.v1 import bucket_pb2 as pb


class State(Enum):
    """What became of an upload."""

    LIVE = "live"
    KEPT = "kept"
    BEGUN = "begun"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What became of an upload."""

    state: State
    slot: pb.CheckpointRecord | None = None
    """The slot that names it."""
    since: datetime | None = None
    """When it became so, or later, by the clock of whoever wrote that down."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What was read of a run."""

    places: RunPlaces
    listed: Sequence[str]
    """All its objects, listed before the slots were read."""
    slots: Mapping[int, pb.CheckpointRecord]
    """By step: all its slots; what is marked as garbage needs that they agree."""
    records: Mapping[str, pb.UploadRecord]
    """By upload: the records of those that no slot names, and of those that live."""

    @cached_property
    def objects(self) -> Mapping[str, Sequence[str]]:
        """The listed objects by the upload whose id they carry."""
        found: dict[str, list[str]] = {}
        for place in self.listed:
            upload = self.places.upload_of(place)
            if upload is not None:
                found.setdefault(upload, []).append(place)
        return found

    @cached_property
    def owners(self) -> Mapping[str, pb.CheckpointRecord]:
        """The slots by the upload that they name."""
        return {slot.upload: slot for slot in self.slots.values()}

    def uploads(self) -> list[str]:
        """Returns all uploads that a slot names, or that stored something."""
        return sorted({*self.objects, *self.owners})

    def with_slots(self, slots: Iterable[pb.CheckpointRecord]) -> "Snapshot":
        """Returns what would have been read, had these slots been written."""
        return replace(self, slots={**self.slots, **{s.step: s for s in slots}})


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What may be deleted, in this order; each part after the one before."""

    garbage: Sequence[str]
    """What points to data files before data files."""
    gone: Sequence[str]
    """Uploads of which no list shows anything after the rest of this: whatever is left
    of them below ``RunPlaces.all_of`` goes first."""
    records: Sequence[str]
    """Records of uploads of which nothing else is left, or that are kept."""
    free_steps: Sequence[int]
    """FREE slots of uploads of which nothing else is left: to be emptied only after the
    run's ``epoch_floor`` was raised to their epochs."""
    waiting: Sequence[str]
    """Uploads that ended less than a grace ago, and left something."""


def unnamed(snapshot: Snapshot) -> list[str]:
    """Returns the uploads whose records a snapshot needs: those that no slot names,
    and those that live."""
    ended = CHECKPOINTS | {FREE}
    owners = snapshot.owners
    return [
        upload
        for upload in snapshot.uploads()
        if upload not in owners or owners[upload].state not in ended
    ]


def fates(snapshot: Snapshot) -> dict[str, Fate]:
    """Returns what became of each upload."""
    return {upload: _fate(snapshot, upload) for upload in snapshot.uploads()}


def blind(snapshot: Snapshot, known: Mapping[str, Fate]) -> list[str]:
    """Returns the live uploads that have no record: what they may claim is unknown, and
    nothing may be deleted while they live."""
    return [
        upload
        for upload, fate in known.items()
        if fate.state is State.LIVE and upload not in snapshot.records
    ]


def unfinished(known: Mapping[str, Fate]) -> list[str]:
    """Returns the uploads that live or have begun: those that were never committed,
    unless a slot was put back."""
    return [u for u, f in known.items() if f.state in (State.LIVE, State.BEGUN)]


def ended(known: Mapping[str, Fate]) -> set[str]:
    """Returns the uploads that have ended."""
    return {upload for upload, fate in known.items() if fate.state is State.ENDED}


def orphans(snapshot: Snapshot, known: Mapping[str, Fate]) -> set[str]:
    """Returns the uploads that have ended and have neither a slot nor a record."""
    return {
        upload
        for upload in ended(known)
        if known[upload].slot is None and upload not in snapshot.records
    }


def step_of(snapshot: Snapshot, upload: str, fate: Fate) -> int:
    """Returns the step of an upload that lives or has begun."""
    return fate.slot.step if fate.slot else snapshot.records[upload].step


def leases(snapshot: Snapshot, known: Mapping[str, Fate]) -> list[str]:
    """Returns the uploads that are to be ended once their lease is over: those that
    live, and of those that have begun, where their slot is there to be reserved, the
    one with the highest epoch of each step. Its end is that of the others; the other
    way round, the slot would be left with a lower epoch than it had."""
    found, begun = [], dict[int, str]()
    for upload, fate in known.items():
        if fate.state is State.LIVE:
            found.append(upload)
        elif fate.state is State.BEGUN:
            record = snapshot.records[upload]
            slot = snapshot.slots.get(record.step)
            if slot is not None and slot.state != FREE:
                continue
            other = begun.get(record.step)
            if other is None or snapshot.records[other].epoch < record.epoch:
                begun[record.step] = upload
    return [*found, *begun.values()]


def tables(
    snapshot: Snapshot, known: Mapping[str, Fate], *, over: Container[str]
) -> dict[str, bool]:
    """Returns the places of the file tables whose data files stay, and whether each
    must be there: for another collector an upload may have ended long enough ago.

    Args:
        snapshot: What was read.
        known: The fates of its uploads.
        over: Uploads that ended longer than a grace ago.
    """
    found: dict[str, bool] = {}
    for upload, fate in known.items():
        if fate.state is State.KEPT and fate.slot and fate.slot.files_digest:
            found[snapshot.places.file_table(upload, fate.slot.files_digest)] = True
        elif fate.state is State.ENDED and upload not in over:
            written = snapshot.objects.get(upload, ())
            prefix = _before_digest(snapshot.places.file_table(upload, b""))
            found |= dict.fromkeys((p for p in written if p.startswith(prefix)), False)
    return found


def mark(
    snapshot: Snapshot,
    known: Mapping[str, Fate],
    *,
    over: Container[str],
    answered: Container[str],
    named: Collection[str],
) -> Marks:
    """Returns what may be deleted.

    Args:
        snapshot: What was read.
        known: The fates of its uploads.
        over: Uploads that ended longer than a grace ago.
        answered: Uploads whose record has answered for long enough.
        named: The data files, relative to the pool, in the file tables of ``tables``.
    """
    view = _View(
        snapshot=snapshot,
        over=over,
        answered=answered,
        named=named,
        sharing={file.partition("/")[0] for file in named},
        claimed=_predecessors(snapshot, known),
        listed=set(snapshot.listed),
        recorded=_recorded(snapshot),
    )
    ends = [_end(view, upload, fate) for upload, fate in known.items()]
    garbage = [place for end in ends for place in end.garbage]
    return Marks(
        garbage=sorted(garbage, key=lambda p: p.startswith(snapshot.places.pool)),
        gone=[end.upload for end in ends if end.is_gone],
        records=[snapshot.places.upload(end.upload) for end in ends if end.ends_record],
        free_steps=sorted(e.free_step for e in ends if e.free_step is not None),
        waiting=[end.upload for end in ends if end.is_waiting],
    )


def moment(stamp: Timestamp) -> datetime | None:
    """Returns the moment of a time stamp; None where it is not set."""
    return stamp.ToDatetime(UTC) if stamp.ByteSize() else None


def _fate(snapshot: Snapshot, upload: str) -> Fate:
    slot = snapshot.owners.get(upload)
    if slot is not None:
        return _fate_of_owner(slot)
    record = snapshot.records.get(upload)
    if record is None:
        return Fate(state=State.ENDED)
    other = snapshot.slots.get(record.step)
    if other is not None and (
        other.state in CHECKPOINTS or other.epoch >= record.epoch
    ):
        lost = other.delete_time if other.state == FREE else other.create_time
        return Fate(state=State.ENDED, since=moment(lost))
    return Fate(state=State.BEGUN, since=moment(record.create_time))


def _fate_of_owner(slot: pb.CheckpointRecord) -> Fate:
    """Returns the fate of the upload that owns a slot."""
    match state_of(slot):
        case SlotState.COMMITTED | SlotState.DELETED | SlotState.PURGING:
            return Fate(state=State.KEPT, slot=slot, since=moment(slot.commit_time))
        case SlotState.FREE:
            return Fate(state=State.ENDED, slot=slot, since=moment(slot.delete_time))
        case SlotState.UPLOADING:
            return Fate(state=State.LIVE, slot=slot, since=moment(slot.create_time))
        case state:
            assert_never(state)


def _before_digest(place: str) -> str:
    """What places begin with that differ only in their digest."""
    return place.rpartition("-")[0] + "-"


def _predecessors(snapshot: Snapshot, known: Mapping[str, Fate]) -> set[str]:
    """The uploads that live ones took over from."""
    return {
        snapshot.records[upload].predecessor
        for upload, fate in known.items()
        if fate.state is State.LIVE and upload in snapshot.records
    }


def _recorded(snapshot: Snapshot) -> set[int]:
    """The steps that an upload has a record of."""
    listed = set(snapshot.listed)
    owned = {
        slot.step
        for upload, slot in snapshot.owners.items()
        if snapshot.places.upload(upload) in listed
    }
    return owned | {record.step for record in snapshot.records.values()}


def _is_unused(places: RunPlaces, place: str, fate: Fate) -> bool:
    """Whether the upload itself has no more use for an object of it."""
    match fate.state:
        case State.LIVE | State.BEGUN:
            return False
        case State.ENDED:
            return True
        case State.KEPT:
            slot = fate.slot
            assert slot is not None
            return not (
                place == places.manifest(slot.upload, slot.manifest_digest)
                or place == places.file_table(slot.upload, slot.files_digest)
                or place.startswith(places.key_space(slot.upload, slot.attempt))
            )
        case state:
            assert_never(state)


def _file_of(places: RunPlaces, place: str) -> str | None:
    """A data file, as file tables call it; None for what is none."""
    return place.removeprefix(places.pool) if place.startswith(places.pool) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """All that the end of one upload depends on."""

    snapshot: Snapshot
    over: Container[str]
    answered: Container[str]
    named: Container[str]
    sharing: Container[str]
    """Uploads whose data files are named."""
    claimed: Container[str]
    """Uploads that live ones took over from."""
    listed: Container[str]
    recorded: Container[int]
    """Steps that an upload has a record of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """What may be deleted of one upload."""

    upload: str
    garbage: Sequence[str] = ()
    is_gone: bool = False
    ends_record: bool = False
    free_step: int | None = None
    is_waiting: bool = False


def _end(view: _View, upload: str, fate: Fate) -> _End:
    """What may be deleted of an upload."""
    places = view.snapshot.places
    has_ended = fate.state is State.ENDED
    if has_ended and upload in view.claimed:
        return _End(upload=upload)
    record = places.upload(upload)
    written = [p for p in view.snapshot.objects.get(upload, ()) if p != record]
    unused = [
        place
        for place in written
        if _is_unused(places, place, fate) and _file_of(places, place) not in view.named
    ]
    if has_ended and upload not in view.over:
        return _End(upload=upload, is_waiting=bool(unused))
    # Another may have claimed a file since the list: one that is named, not listed.
    is_empty = has_ended and len(unused) == len(written) and upload not in view.sharing
    has_record, is_answered = record in view.listed, upload in view.answered
    ends_record = has_record and is_answered and (is_empty or fate.state is State.KEPT)
    free_step = None
    if is_empty and fate.slot and fate.slot.step not in view.recorded:
        free_step = fate.slot.step
    is_last = ends_record or (
        not has_record and (bool(written) or free_step is not None)
    )
    return _End(
        upload=upload,
        garbage=unused,
        is_gone=is_empty and is_last,
        ends_record=ends_record,
        free_step=free_step,
    )
