"""Decides which objects of a run are garbage, from the state that was read.

A collector lists the objects of a run, then reads all its slots until two reads agree.
The second read then shows everything that needed an object at one moment (proof below).
What these functions mark as garbage may be deleted at any later time, whatever runs
concurrently, because they follow these rules:

1. An upload is *live* while its slot is UPLOADING by it. All objects with its id are
   kept, and all objects with the id of its predecessor, whose chunks it may claim.
2. An upload is *kept* while its slot holds the checkpoint that it became, deleted or
   not. The objects that the slot names are kept.
3. An upload has *begun* if it has a record, and its slot neither holds a checkpoint nor
   has reached its epoch: it may still reserve the slot. All its objects are kept, until
   a write of the slot has made that impossible.
4. Any other upload has *ended*, and no slot will name it again: its slot has a later
   owner or is FREE, or it has no record any more, and it never gets one, because a
   record is written before everything else. A reader without a hold may still use it,
   so its objects are kept for a grace period.
5. A data file is kept while a file table names it, whichever upload wrote it: the file
   table of a kept upload, or of one that ended less than a grace period ago.
6. The record of an upload is deleted after its other objects, because it answers
   repeated requests. A FREE slot is deleted after all other objects of the uploads of
   its step: no object is ever without an owner, and an upload that read an empty slot
   long ago cannot reserve it any more.
7. Objects that no list shows (leftovers of a killed write, directories) are deleted
   together with the last listed object of an upload, and before it: its record, or the
   FREE slot.
8. An object without the id of an upload is never garbage.

`agree` decides when two reads of all slots show everything that a run needs. The proof:
Slots are read one after another while they change. A file can move, during the reads,
from a slot that is read late to a slot that was read early: a new checkpoint claims it
and is committed, and its base is purged. A collector must not take such a file for
garbage. So all slots are read twice, with a list of the slots in between that has none
that the first read lacks. Let T be the moment at which that list began.

1. A slot that is not in the list was empty at T. Every other slot was read before T and
   again after T.
2. If both reads name the same upload, it owned the slot at T, because an upload that
   lost its slot never gets it back. If the first read is FREE and the second names an
   upload of the next epoch, one of the two owned it at T, and a FREE slot needs
   nothing.
3. So if no slot became FREE or was taken over between the reads, the second read
   contains everything that needed an object at T. An upload that was committed since
   names all its files there.
4. A file is claimed only from an upload whose slot needs it at that moment: the base,
   which is not purged while another upload may claim from it, or the predecessor in the
   same slot. So whatever is needed after T was needed at T, or was written by an upload
   that owned its slot, or could still reserve it, when the slot was read.

Saves, commits and deletions do not disturb this. Only a purge, an abort or a takeover
between the two reads of its slot requires another read.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from functools import cached_property
from typing import NamedTuple, assert_never

from google.protobuf.timestamp_pb2 import Timestamp

from storesvc.catalog.slots import CHECKPOINTS, FREE, SlotState, slot_state
from storesvc.format.checksums import hash_name
from storesvc.format.layout import RunPaths
from storesvc_proto.v1 import bucket_pb2 as pb


def agree(
    first: Mapping[int, pb.CheckpointRecord], second: Mapping[int, pb.CheckpointRecord]
) -> bool:
    """Returns whether the second read shows everything that was needed at a moment
    between the two reads. Both map steps to slots; an empty slot is absent."""
    return all(_agree(first.get(step), second.get(step)) for step in {*first, *second})


def _agree(
    first: pb.CheckpointRecord | None, second: pb.CheckpointRecord | None
) -> bool:
    if first is None or second is None:
        return first is second
    if first.upload == second.upload:
        return second.state != FREE or first.state == FREE
    is_next = second.epoch == first.epoch + 1
    return first.state == FREE and second.state != FREE and is_next


class State(Enum):
    """The state of an upload; see the rules above."""

    LIVE = "live"
    KEPT = "kept"
    BEGUN = "begun"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """The state of an upload, with its slot and its time."""

    state: State
    slot: pb.CheckpointRecord | None = None
    """The slot that names the upload."""
    since: datetime | None = None
    """Time of the state or later, by the clock of the process that recorded it."""


class Names(NamedTuple):
    """A set of data files. Two that are equal have, but for collisions of hashes, the
    same names; a collision keeps garbage, and deletes nothing."""

    number: int
    total: int
    """Sum of the hashes of the names, relative to the pool, modulo 2**64."""


def sum_hashes(hashes: Iterable[int]) -> int:
    """Returns ``Names.total``."""
    return sum(hashes) % 2**64


class Listing:
    """The list of a run's objects, page by page.

    An upload may have many data files, staging tables and receipts, so of these only
    one entry is kept for each upload: its memory is that of the uploads.
    """

    def __init__(self, places: RunPaths) -> None:
        self._places = places
        self.listed: list[str] = []
        """Paths of all other objects."""
        self._ranges: dict[str, Names] = {}

    @property
    def ranges(self) -> Mapping[str, Names]:
        """The data files, staging tables and receipts of uploads, by prefix."""
        return self._ranges

    def add(self, page: Iterable[str]) -> None:
        """Adds the next paths, in ascending order."""
        prefix, count, total = "\0", 0, 0
        at = len(self._places.pool)
        for path in page:
            if not path.startswith(prefix):
                self._end(prefix, count, total)
                prefix, count, total = self._places.parse_range(path) or "\0", 0, 0
            if prefix == "\0":
                self.listed.append(path)
            else:
                count += 1
                if path.startswith(self._places.pool):
                    total += hash_name(path[at:])
        self._end(prefix, count, total)

    def _end(self, prefix: str, count: int, total: int) -> None:
        if count:
            before = self._ranges.get(prefix, Names(0, 0))
            both = sum_hashes((before.total, total))
            self._ranges[prefix] = Names(before.number + count, both)


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run, as it was read."""

    places: RunPaths
    listed: Sequence[str]
    """Paths of all objects outside ``ranges``, listed before the slots were read."""
    ranges: Mapping[str, Names]
    """The data files, staging tables and receipts of uploads, by prefix, from the same
    list."""
    slots: Mapping[int, pb.CheckpointRecord]
    """All slots by step. `mark` requires that two reads of them agreed."""
    records: Mapping[str, pb.UploadRecord]
    """Records by upload: of live uploads, and of those that no slot names."""

    @cached_property
    def objects(self) -> Mapping[str, Sequence[str]]:
        """The objects of ``listed`` by the upload whose id their path contains; also
        uploads with nothing but ranges."""
        found: dict[str, list[str]] = {upload: [] for upload in self.upload_ranges}
        for place in self.listed:
            upload = self.places.parse_upload(place)
            if upload is not None:
                found.setdefault(upload, []).append(place)
        return found

    @cached_property
    def upload_ranges(self) -> Mapping[str, Sequence[str]]:
        """The prefixes of ``ranges`` by upload."""
        found: dict[str, list[str]] = {}
        for prefix in self.ranges:
            found.setdefault(self.places.parse_upload(prefix) or "", []).append(prefix)
        return found

    @cached_property
    def owners(self) -> Mapping[str, pb.CheckpointRecord]:
        """The slots by the upload that they name."""
        return {slot.upload: slot for slot in self.slots.values()}

    def uploads(self) -> list[str]:
        """Returns all uploads that a slot names or that have an object."""
        return sorted({*self.objects, *self.owners})

    def with_slots(self, slots: Iterable[pb.CheckpointRecord]) -> "RunState":
        """Returns the state as if these slots had been written before the read."""
        return replace(self, slots={**self.slots, **{s.step: s for s in slots}})


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Objects that may be deleted, in the order of the fields, and waiting uploads."""

    garbage: Sequence[str]
    """Objects of uploads outside ranges, such as file tables."""
    ranges: Sequence[str]
    """Prefixes below which everything may be deleted, those in the pool last."""
    partial: Sequence[str]
    """Prefixes of data files of which file tables name some: the others, if there are
    any, may be deleted."""
    gone: Sequence[str]
    """Uploads without a listed object after this pass. Whatever remains of them below
    ``RunPaths.list_prefixes`` is deleted before their records."""
    records: Sequence[str]
    """Records of uploads that are kept, or of which nothing else is left."""
    free_steps: Sequence[int]
    """Steps of FREE slots of uploads of which nothing else is left. They may be deleted
    only after the run's ``epoch_floor`` was raised to their epochs."""
    waiting: Sequence[str]
    """Uploads with garbage that ended less than a grace period ago."""


def uploads_needing_records(state: RunState) -> list[str]:
    """Returns the uploads whose records must be read: those that are live, and those
    that no slot names."""
    settled = CHECKPOINTS | {FREE}
    owners = state.owners
    return [
        upload
        for upload in state.uploads()
        if upload not in owners or owners[upload].state not in settled
    ]


def fates(state: RunState) -> dict[str, Fate]:
    return {upload: _fate(state, upload) for upload in state.uploads()}


def list_unrecorded(state: RunState, known: Mapping[str, Fate]) -> list[str]:
    """Returns the live uploads without a record: the chunks that they may claim are
    unknown, so nothing may be deleted."""
    return [
        upload
        for upload, fate in known.items()
        if fate.state is State.LIVE and upload not in state.records
    ]


def list_unfinished(known: Mapping[str, Fate]) -> list[str]:
    """Returns the uploads that are live or have begun. None of them was ever committed,
    unless a slot was rolled back."""
    return [u for u, f in known.items() if f.state in (State.LIVE, State.BEGUN)]


def list_ended(known: Mapping[str, Fate]) -> set[str]:
    return {upload for upload, fate in known.items() if fate.state is State.ENDED}


def orphans(state: RunState, known: Mapping[str, Fate]) -> set[str]:
    """Returns the ended uploads with neither a slot nor a record."""
    return {
        upload
        for upload in list_ended(known)
        if known[upload].slot is None and upload not in state.records
    }


def upload_step(state: RunState, upload: str, fate: Fate) -> int:
    """Returns the step of an upload that is live or has begun."""
    return fate.slot.step if fate.slot else state.records[upload].step


def leases(state: RunState, known: Mapping[str, Fate]) -> list[str]:
    """Returns the uploads that are to be aborted once their lease is over.

    These are the live ones, and of those that have begun, if their slot can still be
    reserved, the one with the highest epoch per step. Aborting it ends the others too;
    in the opposite order the epoch of the slot would go backwards.
    """
    found, begun = [], dict[int, str]()
    for upload, fate in known.items():
        if fate.state is State.LIVE:
            found.append(upload)
        elif fate.state is State.BEGUN:
            record = state.records[upload]
            slot = state.slots.get(record.step)
            if slot is not None and slot.state != FREE:
                continue
            other = begun.get(record.step)
            if other is None or state.records[other].epoch < record.epoch:
                begun[record.step] = upload
    return [*found, *begun.values()]


def tables(
    state: RunState, known: Mapping[str, Fate], *, past_grace: Container[str]
) -> dict[str, bool]:
    """Returns the paths of the file tables whose data files are kept.

    Args:
        past_grace: Uploads that ended longer than a grace period ago.

    Returns:
        For each path, whether it must exist. That of an ended upload may be missing:
        the grace period of another collector may be over.
    """
    found: dict[str, bool] = {}
    for upload, fate in known.items():
        if fate.state is State.KEPT and fate.slot and fate.slot.files_digest:
            found[state.places.file_table(upload, fate.slot.files_digest)] = True
        elif fate.state is State.ENDED and upload not in past_grace:
            written = state.objects.get(upload, ())
            prefix = state.places.file_table(upload, b"").rpartition("-")[0] + "-"
            found |= dict.fromkeys((p for p in written if p.startswith(prefix)), False)
    return found


def mark(
    state: RunState,
    known: Mapping[str, Fate],
    *,
    past_grace: Container[str],
    past_retries: Container[str],
    named: "Naming",
) -> Marks:
    """Returns what may be deleted.

    Args:
        state: The state read, with slots that agree.
        past_grace: Uploads that ended longer than a grace period ago.
        past_retries: Uploads whose record is no longer needed for repeated requests.
        named: Data files that the file tables of ``tables`` name.
    """
    view = _View(
        state=state,
        past_grace=past_grace,
        past_retries=past_retries,
        named=named,
        predecessors={
            state.records[upload].predecessor
            for upload, fate in known.items()
            if fate.state is State.LIVE and upload in state.records
        },
        listed=set(state.listed),
        recorded=_recorded_steps(state),
    )
    ends = [_find_garbage(view, upload, fate) for upload, fate in known.items()]
    ranges = [prefix for end in ends for prefix in end.ranges]
    # The objects in the pool last: a file table that is found never names a data file
    # that was deleted before it.
    return Marks(
        garbage=[place for end in ends for place in end.garbage],
        ranges=sorted(ranges, key=lambda p: p.startswith(state.places.pool)),
        partial=[end.partial for end in ends if end.partial],
        gone=[end.upload for end in ends if end.is_gone],
        records=[state.places.upload(end.upload) for end in ends if end.ends_record],
        free_steps=sorted(e.free_step for e in ends if e.free_step is not None),
        waiting=[end.upload for end in ends if end.is_waiting],
    )


class Naming:
    """The data files that file tables name, by the upload that wrote them."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self.tables: dict[str, list[str]] = {}
        """For each upload, the tables that name some of its files."""
        self._whole: set[str] = set()

    def add(self, table: str, groups: Mapping[str, Names]) -> None:
        """Adds a table with the files that it names, by upload."""
        places = self._state.places
        for upload, names in groups.items():
            self.tables.setdefault(upload, []).append(table)
            prefix = f"{places.pool}{places.data_prefix(upload)}"
            if self._state.ranges.get(prefix) == names:
                self._whole.add(upload)

    def is_whole(self, upload: str) -> bool:
        """Returns whether one table names all the listed files of an upload."""
        return upload in self._whole


def moment(stamp: Timestamp) -> datetime | None:
    """Returns a time stamp as a datetime; None: it is not set."""
    return stamp.ToDatetime(UTC) if stamp.ByteSize() else None


def _fate(state: RunState, upload: str) -> Fate:
    slot = state.owners.get(upload)
    if slot is not None:
        return _owner_fate(slot)
    # Rule 4: the record is written first, so an upload without one never gets a slot.
    record = state.records.get(upload)
    if record is None:
        return Fate(state=State.ENDED)
    other = state.slots.get(record.step)
    # Rule 4: the slot has reached the epoch of this upload, which can no longer reserve
    # it. Equal epochs suffice: another upload was faster with the same one.
    if other is not None and (
        other.state in CHECKPOINTS or other.epoch >= record.epoch
    ):
        lost = other.delete_time if other.state == FREE else other.create_time
        return Fate(state=State.ENDED, since=moment(lost))
    # Rule 3: its reservation may still be on its way.
    return Fate(state=State.BEGUN, since=moment(record.create_time))


def _owner_fate(slot: pb.CheckpointRecord) -> Fate:
    match slot_state(slot):
        case SlotState.COMMITTED | SlotState.DELETED | SlotState.PURGING:
            return Fate(state=State.KEPT, slot=slot, since=moment(slot.commit_time))
        case SlotState.FREE:
            return Fate(state=State.ENDED, slot=slot, since=moment(slot.delete_time))
        case SlotState.UPLOADING:
            return Fate(state=State.LIVE, slot=slot, since=moment(slot.create_time))
        case state:
            assert_never(state)


def _recorded_steps(state: RunState) -> set[int]:
    listed = set(state.listed)
    owned = {
        slot.step
        for upload, slot in state.owners.items()
        if state.places.upload(upload) in listed
    }
    return owned | {record.step for record in state.records.values()}


def _is_unused(places: RunPaths, place: str, fate: Fate) -> bool:
    """Returns whether the upload itself no longer needs one of its objects."""
    match fate.state:
        case State.LIVE | State.BEGUN:
            return False
        case State.ENDED:
            return True
        case State.KEPT:
            # Rule 2. Other manifests and key spaces of the upload are of commits that
            # were slower or were cut off; data files are kept by rule 5.
            slot = fate.slot
            assert slot is not None
            return not (
                place == places.manifest(slot.upload, slot.manifest_digest)
                or place == places.file_table(slot.upload, slot.files_digest)
                or place.startswith(places.key_space(slot.upload, slot.attempt))
            )
        case state:
            assert_never(state)


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """The inputs of the decision on one upload."""

    state: RunState
    past_grace: Container[str]
    past_retries: Container[str]
    named: Naming
    predecessors: Container[str]
    """Uploads that live ones took over from."""
    listed: Container[str]
    recorded: Container[int]
    """Steps for which an upload has a record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _UploadGarbage:
    """The parts of one upload that may be deleted."""

    upload: str
    garbage: Sequence[str] = ()
    ranges: Sequence[str] = ()
    partial: str = ""
    is_gone: bool = False
    ends_record: bool = False
    free_step: int | None = None
    is_waiting: bool = False


def _find_garbage(view: _View, upload: str, fate: Fate) -> _UploadGarbage:
    """Decides which parts of an upload may be deleted."""
    places = view.state.places
    has_ended = fate.state is State.ENDED
    # 1. A live upload may claim the chunks of its predecessor (rule 1).
    if has_ended and upload in view.predecessors:
        return _UploadGarbage(upload=upload)
    record = places.upload(upload)
    written = [p for p in view.state.objects.get(upload, ()) if p != record]
    # 2. An object is unused if neither the upload nor a file table needs it (rule 5).
    unused = [place for place in written if _is_unused(places, place, fate)]
    ranges = view.state.upload_ranges.get(upload, ())
    unused_ranges = [p for p in ranges if _is_unused(places, p, fate)]
    partial, is_shared = "", upload in view.named.tables
    data_files = f"{places.pool}{places.data_prefix(upload)}"
    if is_shared and data_files in unused_ranges:
        unused_ranges.remove(data_files)
        partial = "" if view.named.is_whole(upload) else data_files
    # 3. A reader without a hold may still use it (rule 4).
    if has_ended and upload not in view.past_grace:
        is_waiting = bool(unused or unused_ranges)
        return _UploadGarbage(upload=upload, is_waiting=is_waiting)
    # 4. The record goes last (rule 6). A file may have been claimed since the list: it
    #    is named by a file table, but not listed.
    is_empty = has_ended and len(unused) == len(written) and not is_shared
    has_record, is_answered = record in view.listed, upload in view.past_retries
    ends_record = has_record and is_answered and (is_empty or fate.state is State.KEPT)
    # 5. The FREE slot goes after all uploads of its step (rule 6).
    free_step = None
    if is_empty and fate.slot and fate.slot.step not in view.recorded:
        free_step = fate.slot.step
    # 6. Unlisted objects go with the last listed one (rule 7).
    is_last = ends_record or (
        not has_record and (bool(written or ranges) or free_step is not None)
    )
    return _UploadGarbage(
        upload=upload,
        garbage=unused,
        ranges=unused_ranges,
        partial=partial,
        is_gone=is_empty and is_last,
        ends_record=ends_record,
        free_step=free_step,
    )
