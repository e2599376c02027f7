"""Marking: of any set of uploads and slots nothing that is reachable is garbage, and
all that is not goes, once it is old."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from storesvc.catalog import slots
from storesvc.catalog.records import timestamp
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName
from storesvc.gc import mark
from storesvc.gc.mark import Marks, RunState, State
from storesvc.gc.run_state import hash_files, summarize
from storesvc_proto.v1 import bucket_pb2 as pb

PLACES = RunPaths(RunName("tests", "marking"))
THEN = timestamp(datetime(2026, 1, 1, tzinfo=UTC))
EVERYTHING = frozenset(f"{number:032x}" for number in range(100))


def upload_id(number: int) -> str:
    return f"{number:032x}"


@dataclass(kw_only=True)
class World:
    """A run, as it may be found."""

    listed: set[str] = field(default_factory=set)
    slots: dict[int, pb.CheckpointRecord] = field(default_factory=dict)
    records: dict[str, pb.UploadRecord] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)
    """Place of a file table, to its data files."""
    named: set[str] = field(default_factory=set)
    """The data files that the tables named when it was marked."""

    def state(self) -> RunState:
        listing = mark.Listing(PLACES)
        paths = sorted(self.listed)
        listing.add(paths[: len(paths) // 2])
        listing.add(paths[len(paths) // 2 :])
        bare = RunState(
            places=PLACES,
            listed=listing.listed,
            ranges=listing.ranges,
            slots=self.slots,
            records={},
        )
        return replace(
            bare,
            records={
                upload: self.records[upload]
                for upload in mark.uploads_needing_records(bare)
                if upload in self.records
            },
        )

    def marks(
        self,
        *,
        past_grace: Collection[str] = EVERYTHING,
        past_retries: Collection[str] = EVERYTHING,
    ) -> Marks:
        state = self.state()
        known = mark.fates(state)
        tables = mark.tables(state, known, past_grace=past_grace)
        named = mark.Naming(state)
        self.named = set()
        for table in tables:
            hashes = hash_files(self.tables.get(table, ()))
            named.add(table, {u: summarize(group) for u, group in hashes.items()})
            self.named |= {f"{PLACES.pool}{f}" for f in self.tables.get(table, ())}
        return mark.mark(
            state, known, past_grace=past_grace, past_retries=past_retries, named=named
        )

    def garbage(self, marks: Marks) -> list[str]:
        """Returns the objects that a pass deletes before the records, in order."""
        found = list(marks.garbage)
        for prefix in (*marks.ranges, *marks.partial):
            below = sorted(p for p in self.listed if p.startswith(prefix))
            keep = self.named if prefix in marks.partial else set()
            found += [p for p in below if p not in keep]
        return found

    def all_of(self, marks: Marks) -> list[str]:
        """Returns the objects that a pass deletes, in order."""
        return [*self.garbage(marks), *marks.records]

    def sweep(self, marks: Marks) -> None:
        self.listed -= set(self.all_of(marks))
        for step in marks.free_steps:
            self.listed.discard(PLACES.checkpoint(step))
            del self.slots[step]
        for upload in list(self.records):
            if PLACES.upload(upload) not in self.listed:
                del self.records[upload]

    def add_upload(self, number: int, record: pb.UploadRecord) -> str:
        upload = upload_id(number)
        self.records[upload] = record
        self.listed |= {PLACES.upload(upload), PLACES.tree(upload, b"tree")}
        return upload

    def store(self, upload: str, files: int = 2) -> None:
        """Adds the objects that an upload writes while it is live."""
        self.listed |= {
            PLACES.lease(upload),
            PLACES.receipt(upload, 0),
            f"{PLACES.staging(upload, 0)}manifest.ocdbt",
            *(self.file(upload, at) for at in range(files)),
        }

    def file(self, upload: str, at: int) -> str:
        return f"{PLACES.pool}{PLACES.data_prefix(upload)}{at:032x}"

    def describe(self, upload: str, attempt: str, files: Collection[str]) -> None:
        """Adds the objects that a commit writes before its record."""
        table = PLACES.file_table(upload, attempt.encode())
        self.tables[table] = [file.removeprefix(PLACES.pool) for file in files]
        self.listed |= {
            table,
            PLACES.manifest(upload, attempt.encode()),
            f"{PLACES.key_space(upload, attempt)}manifest.ocdbt",
        }

    def set_slot(self, state: int, upload: str, **fields: object) -> None:
        record = self.records[upload]
        slot = pb.CheckpointRecord(
            state=state,  # type: ignore[arg-type]  # a value of the enum
            step=record.step,
            upload=upload,
            epoch=record.epoch,
            **fields,  # type: ignore[arg-type]  # fields of the record
        )
        if state == slots.FREE:
            slot.delete_time.CopyFrom(THEN)
        self.slots[record.step] = slot
        self.listed.add(PLACES.checkpoint(record.step))

    def commit(self, upload: str, files: Collection[str], state: int) -> None:
        self.describe(upload, "good", files)
        self.set_slot(
            state,
            upload,
            attempt="good",
            manifest_digest=b"good",
            files_digest=b"good",
            create_time=THEN,
            commit_time=THEN,
        )


STATES = [*sorted(slots.CHECKPOINTS), slots.UPLOADING, slots.FREE]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Runs as saves, crashes, deletions and takeovers leave them."""
    world = World()
    owners: dict[int, str] = {}
    for number in range(draw(st.integers(0, 8))):
        step = draw(st.integers(0, 3))
        owner = owners.get(step)
        slot = world.slots.get(step)
        if slot is not None and slot.state in slots.CHECKPOINTS:
            continue
        taken_from = owner if slot and slot.state == slots.UPLOADING else None
        upload = world.add_upload(
            number,
            pb.UploadRecord(
                step=step,
                epoch=slot.epoch + 1 if slot else 1,
                predecessor=taken_from or "",
                create_time=THEN,
            ),
        )
        if draw(st.booleans()) and draw(st.booleans()):
            continue  # died before it had its slot
        owners[step] = upload
        world.set_slot(slots.UPLOADING, upload, create_time=THEN)
        world.store(upload)
        if draw(st.booleans()):
            world.describe(upload, "bad", [world.file(upload, 0)])
        pool = sorted(p for p in world.listed if p.startswith(PLACES.pool))
        needed = {*draw(st.sets(st.sampled_from(pool))), world.file(upload, 0)}
        state = draw(st.sampled_from(STATES))
        if state in slots.CHECKPOINTS:
            # only of what stands, or stood until this upload began
            alive = {s.upload for s in world.slots.values() if s.state != slots.FREE}
            alive |= {taken_from or upload}
            needed = {f for f in needed if PLACES.parse_upload(f) in alive}
            world.commit(upload, needed, state)
        elif state == slots.FREE:
            world.set_slot(slots.FREE, upload)
        if draw(st.booleans()) and state != slots.UPLOADING:
            world.listed.discard(PLACES.upload(upload))
            world.records.pop(upload)
    world.listed |= draw(
        st.sets(
            st.sampled_from(
                [
                    f"{PLACES.root}stray",
                    f"{PLACES.pool}d/0123",
                    f"{PLACES.checkpoints}stray",
                    PLACES.tag("best"),
                    PLACES.hold("a" * 32),
                ]
            )
        )
    )
    return world


def reachable(world: World) -> set[str]:
    """Returns the objects that must be kept, by the words of the contract."""
    kept = set()
    for slot in world.slots.values():
        if slot.state == slots.UPLOADING:
            owners = {slot.upload, world.records[slot.upload].predecessor} - {""}
            kept |= {p for p in world.listed if PLACES.parse_upload(p) in owners}
        elif slot.state in slots.CHECKPOINTS:
            table = PLACES.file_table(slot.upload, slot.files_digest)
            kept |= {
                table,
                PLACES.manifest(slot.upload, slot.manifest_digest),
                f"{PLACES.key_space(slot.upload, slot.attempt)}manifest.ocdbt",
                *(f"{PLACES.pool}{file}" for file in world.tables[table]),
            }
    return kept & world.listed


@given(worlds(), st.sets(st.sampled_from(sorted(EVERYTHING)[:8])))
def test_nothing_reachable_is_garbage(world: World, past_grace: set[str]) -> None:
    marks = world.marks(past_grace=past_grace, past_retries=past_grace)

    assert not set(world.all_of(marks)) & reachable(world)


@given(worlds())
def test_all_that_is_unreachable_and_old_is_garbage(world: World) -> None:
    world.sweep(world.marks())
    known = mark.fates(world.state())
    kept = reachable(world)
    sharing = {PLACES.parse_upload(p) for p in kept if p.startswith(PLACES.pool)}

    for place in world.listed - kept:
        upload = PLACES.parse_upload(place)
        if upload is None:
            continue
        # the record identifies the upload of the shared files
        is_record = place == PLACES.upload(upload) and upload in sharing
        assert is_record or known[upload].state is State.BEGUN


@given(worlds(), st.sets(st.sampled_from(sorted(EVERYTHING)[:8])))
def test_what_was_swept_leaves_nothing_more_to_sweep(
    world: World, past_grace: set[str]
) -> None:
    world.sweep(world.marks(past_grace=past_grace, past_retries=past_grace))

    again = world.marks(past_grace=past_grace, past_retries=past_grace)

    assert [] == world.all_of(again)


@given(worlds(), st.data())
def test_a_sweep_that_is_cut_off_is_gone_on_with(
    world: World, data: st.DataObject
) -> None:
    marks = world.marks()
    objects = world.all_of(marks)
    cut = data.draw(st.integers(0, len(objects)))
    whole = world.listed - set(objects)
    kept = reachable(world)
    world.listed -= set(objects[:cut])
    world.records = {
        u: r for u, r in world.records.items() if PLACES.upload(u) in world.listed
    }

    world.sweep(world.marks())

    assert kept <= world.listed
    slots_gone = {p for p in whole if p.startswith(PLACES.checkpoints)}
    assert world.listed - slots_gone <= whole


@given(worlds(), st.integers(4, 5))
def test_another_checkpoint_makes_no_more_garbage_of_others(
    world: World, step: int
) -> None:
    before = set(world.all_of(world.marks()))
    new = world.add_upload(50, pb.UploadRecord(step=step, epoch=1))
    world.store(new)
    files = [p for p in world.listed if p.startswith(PLACES.pool)]
    world.commit(new, files, slots.COMMITTED)

    marks = world.marks()
    after = {p for p in world.all_of(marks) if PLACES.parse_upload(p) != new}

    assert after <= before
    assert not after & set(files)


@given(worlds())
def test_what_carries_no_upload_is_never_garbage(world: World) -> None:
    assert all(PLACES.parse_upload(p) for p in world.all_of(world.marks()))


@given(worlds())
def test_a_free_slot_goes_last(world: World) -> None:
    marks = world.marks()
    emptied = {world.slots[step].upload for step in marks.free_steps}
    steps = {record.step for record in world.records.values()}

    left = world.listed - set(world.garbage(marks))
    assert not emptied & {PLACES.parse_upload(place) for place in left}
    assert not steps & set(marks.free_steps)


@given(worlds(), st.sets(st.sampled_from(sorted(EVERYTHING)[:8])))
def test_what_no_list_shows_goes_before_the_last_that_a_list_shows(
    world: World, past_retries: set[str]
) -> None:
    def shown() -> set[str]:
        return {*world.state().objects, *world.state().owners}

    before = shown()
    marks = world.marks(past_retries=past_retries)
    needed = {u for p in reachable(world) if (u := PLACES.parse_upload(p))}
    world.sweep(marks)

    assert before - shown() <= set(marks.gone)
    assert not needed & set(marks.gone)


def test_an_upload_is_not_gone_while_a_file_is_named_that_came_after_the_list() -> None:
    world = World()
    first = world.add_upload(1, pb.UploadRecord(step=0, epoch=1))
    second = world.add_upload(2, pb.UploadRecord(step=0, epoch=2, predecessor=first))
    world.commit(second, [world.file(first, 0)], slots.COMMITTED)

    marks = world.marks()

    assert first not in marks.gone
    assert PLACES.upload(first) not in marks.records


def test_an_upload_that_has_begun_stays_until_its_slot_says_otherwise() -> None:
    world = World()
    begun = world.add_upload(1, pb.UploadRecord(step=0, epoch=1))
    assert State.BEGUN is mark.fates(world.state())[begun].state
    assert [] == world.all_of(world.marks())

    world.set_slot(slots.FREE, begun)

    assert [PLACES.tree(begun, b"tree"), PLACES.upload(begun)] == world.all_of(
        world.marks()
    )


def test_a_begun_upload_ends_with_the_commit_of_another() -> None:
    world = World()
    owner = world.add_upload(1, pb.UploadRecord(step=0, epoch=1))
    begun = world.add_upload(2, pb.UploadRecord(step=0, epoch=2, predecessor=owner))
    world.set_slot(slots.UPLOADING, owner)
    assert State.BEGUN is mark.fates(world.state())[begun].state
    assert [] == [u for u in mark.leases(world.state(), _known(world)) if u == begun]

    world.commit(owner, [], slots.COMMITTED)

    assert State.ENDED is mark.fates(world.state())[begun].state


def _known(world: World) -> Mapping[str, mark.Fate]:
    return mark.fates(world.state())


def test_a_slot_is_not_emptied_while_an_upload_may_have_found_it_empty() -> None:
    world = World()
    late = world.add_upload(1, pb.UploadRecord(step=0, epoch=1))
    owner = world.add_upload(2, pb.UploadRecord(step=0, epoch=1))
    world.set_slot(slots.FREE, owner)

    world.sweep(world.marks(past_retries=[owner]))
    assert PLACES.tree(late, b"tree") not in world.listed
    assert [] == list(world.marks(past_retries=[owner]).free_steps)

    world.sweep(world.marks())
    assert [0] == list(world.marks().free_steps)


def test_data_files_outlast_an_upload_whose_chunks_were_claimed() -> None:
    world = World()
    first = world.add_upload(1, pb.UploadRecord(step=0, epoch=1))
    world.store(first)
    world.set_slot(slots.FREE, first)
    second = world.add_upload(2, pb.UploadRecord(step=1, epoch=1))
    world.store(second)
    shared = world.file(first, 0)
    world.commit(second, [shared, world.file(second, 0)], slots.COMMITTED)

    marks = world.marks()
    world.sweep(marks)

    assert shared in world.listed
    assert world.file(first, 1) not in world.listed
    assert () == tuple(marks.free_steps)  # it identifies the upload of the file


def test_files_of_a_purged_checkpoint_stay_for_its_grace_period() -> None:
    world = World()
    first = world.add_upload(1, pb.UploadRecord(step=0, epoch=1))
    world.store(first)
    second = world.add_upload(2, pb.UploadRecord(step=1, epoch=1))
    world.store(second)
    shared = world.file(first, 0)
    world.commit(second, [shared, world.file(second, 0)], slots.COMMITTED)
    world.set_slot(slots.FREE, first)
    world.set_slot(slots.FREE, second)  # purged now; the other one long ago

    assert shared not in world.garbage(world.marks(past_grace=[first]))
    assert shared in world.garbage(world.marks(past_grace=[first, second]))


def test_a_checkpoint_of_the_first_release_keeps_all_that_it_has() -> None:
    world = World()
    old = world.add_upload(1, pb.UploadRecord(step=0, epoch=1))
    world.listed |= {
        f"{PLACES.pool}d/0",
        f"{PLACES.key_space(old, '')}manifest.ocdbt",
        PLACES.manifest(old, b"m"),
        PLACES.manifest(old, b"other"),
    }
    world.set_slot(slots.COMMITTED, old, manifest_digest=b"m")

    marks = world.marks(past_retries=[])

    assert [PLACES.manifest(old, b"other"), PLACES.tree(old, b"tree")] == world.all_of(
        marks
    )


def test_pointers_go_before_what_they_point_to() -> None:
    world = World()
    upload = world.add_upload(1, pb.UploadRecord(step=0, epoch=1))
    world.store(upload)
    world.describe(upload, "bad", [world.file(upload, 0)])
    world.set_slot(slots.FREE, upload)

    garbage = world.garbage(world.marks())
    kinds = [bool(re.search("/pool/", place)) for place in garbage]

    assert sorted(kinds) == kinds


def test_a_live_upload_without_a_record_is_reported() -> None:
    world = World()
    upload = world.add_upload(1, pb.UploadRecord(step=0, epoch=1))
    world.set_slot(slots.UPLOADING, upload)
    del world.records[upload]

    assert [upload] == mark.list_unrecorded(world.state(), _known(world))
