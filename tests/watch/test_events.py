"""A watch reports each commit once, even if servers crash, and if the watch ends and
resumes at another server."""

import secrets
import string
from base64 import urlsafe_b64decode
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

from storesvc.catalog import slots
from storesvc.catalog.records import record_etag, timestamp
from storesvc.catalog.slots import NOTHING, PATIENCE
from storesvc.errors import InvalidResumeTokenError
from storesvc.watch import events
from storesvc.watch.events import (
    MAX_PENDING,
    NONCE_BYTES,
    Held,
    Outcome,
    Position,
    advance,
    is_full,
    numbers_to_resolve,
    pack_token,
    resolve,
    unpack_token,
)
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.support.examples import examples

PARENT, KEY = "namespaces/n", b"a key of the store"
NOW = datetime(2030, 1, 1, tzinfo=UTC)
COMMIT = pb.Announcement.KIND_COMMIT
DELETE = pb.Announcement.KIND_DELETE
UNDELETE = pb.Announcement.KIND_UNDELETE
TAG = pb.Announcement.KIND_TAG
UNTAG = pb.Announcement.KIND_UNTAG
UPDATE = pb.Announcement.KIND_UPDATE
LANDED, SUPERSEDED, PENDING = Outcome.LANDED, Outcome.SUPERSEDED, Outcome.PENDING


def slot(
    state: int,
    *,
    upload: str = "u",
    commit_sequence: int = 0,
    sequence: int = 0,
    update_sequence: int = 0,
) -> pb.CheckpointRecord:
    return pb.CheckpointRecord(
        state=pb.CheckpointRecord.State.ValueType(state),
        upload=upload,
        commit_sequence=commit_sequence,
        sequence=sequence,
        update_sequence=update_sequence,
    )


def tag(sequence: int, upload: str = "u") -> pb.TagRecord:
    return pb.TagRecord(upload=upload, sequence=sequence)


HELD: dict[str, pb.CheckpointRecord | pb.TagRecord] = {
    "uploading": slot(slots.UPLOADING),
    "committed": slot(slots.COMMITTED, commit_sequence=5, sequence=5),
    "deleted": slot(slots.DELETED, commit_sequence=2, sequence=5),
    "undeleted": slot(slots.COMMITTED, commit_sequence=2, sequence=5),
    "updated": slot(slots.COMMITTED, commit_sequence=2, update_sequence=5),
    "updated, then deleted": slot(slots.DELETED, sequence=9, update_sequence=5),
    "purging": slot(slots.PURGING, commit_sequence=2, sequence=5),
    "free": slot(slots.FREE),
    "another's": slot(slots.COMMITTED, upload="v", commit_sequence=9, sequence=9),
    "a tag": tag(5),
    "a deleted tag": tag(5, ""),
}


REPLACED = {
    "COMMIT": "",
    "DELETE": record_etag(HELD["committed"]),
    "UNDELETE": record_etag(HELD["deleted"]),
    "TAG": NOTHING,
    "UNTAG": record_etag(HELD["a tag"]),
    "UPDATE": record_etag(HELD["updated"]),
}
"""The record that the announced change of each kind replaces."""


@pytest.mark.parametrize(
    ("kind", "held", "expected"),
    [
        ("COMMIT", "absent", (SUPERSEDED, SUPERSEDED, SUPERSEDED)),
        ("COMMIT", "uploading", (PENDING, PENDING, PENDING)),
        ("COMMIT", "committed", (SUPERSEDED, LANDED, SUPERSEDED)),
        ("COMMIT", "deleted", (SUPERSEDED, SUPERSEDED, SUPERSEDED)),
        ("COMMIT", "free", (SUPERSEDED, SUPERSEDED, SUPERSEDED)),
        ("COMMIT", "another's", (SUPERSEDED, SUPERSEDED, SUPERSEDED)),
        ("DELETE", "committed", (SUPERSEDED, LANDED, PENDING)),
        ("DELETE", "deleted", (SUPERSEDED, LANDED, SUPERSEDED)),
        ("DELETE", "purging", (SUPERSEDED, LANDED, SUPERSEDED)),
        ("DELETE", "free", (LANDED, LANDED, LANDED)),
        ("DELETE", "another's", (LANDED, LANDED, LANDED)),
        ("DELETE", "absent", (LANDED, LANDED, LANDED)),
        ("UNDELETE", "undeleted", (SUPERSEDED, LANDED, SUPERSEDED)),
        ("UNDELETE", "deleted", (SUPERSEDED, LANDED, PENDING)),
        ("UNDELETE", "purging", (SUPERSEDED, LANDED, SUPERSEDED)),
        ("UNDELETE", "free", (SUPERSEDED, SUPERSEDED, SUPERSEDED)),
        ("UNDELETE", "absent", (SUPERSEDED, SUPERSEDED, SUPERSEDED)),
        ("UPDATE", "updated", (SUPERSEDED, LANDED, PENDING)),
        ("UPDATE", "updated, then deleted", (SUPERSEDED, LANDED, SUPERSEDED)),
        ("UPDATE", "free", (SUPERSEDED, SUPERSEDED, SUPERSEDED)),
        ("UPDATE", "another's", (SUPERSEDED, SUPERSEDED, SUPERSEDED)),
        ("UPDATE", "absent", (SUPERSEDED, SUPERSEDED, SUPERSEDED)),
        ("TAG", "absent", (PENDING, PENDING, PENDING)),
        ("TAG", "a tag", (SUPERSEDED, LANDED, SUPERSEDED)),
        ("TAG", "a deleted tag", (SUPERSEDED, LANDED, SUPERSEDED)),
        ("UNTAG", "absent", (LANDED, LANDED, LANDED)),
        ("UNTAG", "a tag", (SUPERSEDED, LANDED, PENDING)),
        ("UNTAG", "a deleted tag", (SUPERSEDED, LANDED, SUPERSEDED)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_object_shows_the_outcome_of_announcements_4_5_and_6(
    kind: str, held: str, expected: tuple[Outcome, ...]
) -> None:
    announced = pb.Announcement(
        kind=pb.Announcement.Kind.Value(f"KIND_{kind}"),
        upload="u",
        create_time=timestamp(NOW),
        replaces=REPLACED[kind],
    )

    def outcomes(now: datetime) -> tuple[Outcome, ...]:
        return tuple(resolve(n, announced, HELD.get(held), now=now) for n in (4, 5, 6))

    assert expected == outcomes(NOW)
    if kind != "COMMIT":
        expected = tuple(SUPERSEDED if o is PENDING else o for o in expected)
    assert expected == outcomes(NOW + PATIENCE * 2)


@pytest.mark.parametrize("kind", [DELETE, UNDELETE, TAG, UNTAG, UPDATE])
def test_a_change_is_never_made_once_another_has_replaced_what_it_was_to_replace(
    kind: "pb.Announcement.Kind.ValueType",
) -> None:
    is_tag = kind in (TAG, UNTAG)
    before: pb.TagRecord | pb.CheckpointRecord = (
        tag(5)
        if is_tag
        else slot(slots.DELETED if kind == UNDELETE else slots.COMMITTED, sequence=5)
    )
    announced = pb.Announcement(
        kind=kind, upload="u", create_time=timestamp(NOW), replaces=record_etag(before)
    )
    assert PENDING is resolve(6, announced, before, now=NOW)

    before.write_id = "another's"
    assert SUPERSEDED is resolve(6, announced, before, now=NOW)
    if kind == TAG:
        assert SUPERSEDED is resolve(6, announced, None, now=NOW)
    announced.replaces = ""  # as servers before 0.2 announced
    assert PENDING is resolve(6, announced, before, now=NOW)


def test_a_change_that_a_slow_clock_has_announced_may_still_be_made() -> None:
    announced = pb.Announcement(
        kind=UNDELETE,
        upload="u",
        create_time=timestamp(NOW - timedelta(hours=47)),
        replaces=REPLACED["UNDELETE"],
    )

    assert PENDING is resolve(6, announced, HELD["deleted"], now=NOW)


positions = st.builds(
    lambda pending, more: Position(max(pending, default=0) + more, pending),
    st.sets(st.integers(1, 10**12), max_size=MAX_PENDING).map(
        lambda numbers: tuple(sorted(numbers))
    ),
    st.integers(0, 10**6),
)


def packed(position: Position) -> str:
    return pack_token(
        position, parent=PARENT, key=KEY, nonce=secrets.token_bytes(NONCE_BYTES)
    )


@given(positions)
def test_a_token_brings_its_position_back(position: Position) -> None:
    token = packed(position)

    assert position == unpack_token(token, parent=PARENT, key=KEY)
    assert set(token) <= set(string.ascii_letters + string.digits + "-_=")


def test_the_largest_token_is_small() -> None:
    last = 10**9
    pending = tuple(range(last - 4 * MAX_PENDING, last, 4))
    token = packed(Position(last, pending))

    assert MAX_PENDING == len(pending)
    assert 900 > len(token)
    assert 140 > len(packed(Position(last)))


@given(positions, st.data())
def test_a_foreign_or_cut_token_is_rejected(
    position: Position, data: st.DataObject
) -> None:
    token = packed(position)
    cut = token[: data.draw(st.integers(0, len(token) - 1))]

    for other, parent, key in (
        (token, "namespaces/m", KEY),
        (token, f"{PARENT}/runs/r", KEY),
        (token, PARENT, b"another"),
        (cut, PARENT, KEY),
        (token[:-6] + "AAAA", PARENT, KEY),
        ("?" + token[1:], PARENT, KEY),
    ):
        with pytest.raises(InvalidResumeTokenError, match="watch without a token"):
            unpack_token(other, parent=parent, key=key)


def test_tokens_show_nothing_of_their_positions() -> None:
    few, many = (packed(Position(last)) for last in (1, 10**9))

    assert len(few) == len(many)
    assert few != packed(Position(1))
    for token in (few, many):
        data = urlsafe_b64decode(token)
        assert b"1" + b" " * 8 not in data
        assert b"1000000000" not in data


@given(st.text())
@example("")
@example("é")
def test_any_other_text_is_rejected(text: str) -> None:
    with pytest.raises(InvalidResumeTokenError):
        unpack_token(text, parent=PARENT, key=KEY)


# --- Announcers and watches, step by step ----------------------------------------


@dataclass(eq=False)
class Underway:
    """A change that was announced and not made yet."""

    number: int
    announcement: pb.Announcement
    place: int | str
    generation: int
    changed: pb.CheckpointRecord | pb.TagRecord


@dataclass(eq=False)
class Watch:
    """A watch, and the changes that it has reported."""

    token: str
    position: Position
    to_look_at: list[int] = field(default_factory=list)
    reported: list[tuple[int, pb.Announcement]] = field(default_factory=list)


class WatchMachine(RuleBasedStateMachine):
    """Steps and tags of one run, and the processes that change and watch them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = NOW
        self.journal: list[pb.Announcement] = []
        self.objects: dict[int | str, Held] = {}
        self.generations: Counter[int | str] = Counter()
        self.underway: list[Underway] = []
        self.committed: dict[str, int] = {}
        self.purged: set[str] = set()
        self.uploads = 0
        start = packed(Position(0))
        self.watches = [Watch(start, Position(0)) for _ in range(2)]

    steps = st.integers(0, 1)
    tags = st.sampled_from(["best", "prod"])

    def _write(self, place: int | str, held: Held) -> None:
        self.objects[place] = held
        self.generations[place] += 1

    def _slot(self, step: int) -> pb.CheckpointRecord:
        held = self.objects.get(step)
        return held if isinstance(held, pb.CheckpointRecord) else pb.CheckpointRecord()

    def _tag(self, name: str) -> pb.TagRecord:
        held = self.objects.get(name)
        return held if isinstance(held, pb.TagRecord) else pb.TagRecord()

    def _announce(
        self,
        kind: "pb.Announcement.Kind.ValueType",
        place: int | str,
        changed: pb.CheckpointRecord | pb.TagRecord,
        upload: str,
    ) -> None:
        announced = pb.Announcement(
            kind=kind,
            upload=upload,
            tag=place if isinstance(place, str) else "",
            step=place if isinstance(place, int) else 0,
            create_time=timestamp(self.now),
        )
        replaced = self.objects.get(place)
        if kind != COMMIT:
            announced.replaces = record_etag(replaced) if replaced else NOTHING
        self.journal.append(announced)
        number = len(self.journal)
        made = type(changed)()
        made.MergeFrom(changed)  # type: ignore[arg-type]  # of the same type
        if kind == UPDATE and isinstance(made, pb.CheckpointRecord):
            made.update_sequence = number
        else:
            made.sequence = number
        if kind == COMMIT and isinstance(made, pb.CheckpointRecord):
            made.commit_sequence = number
        self.underway.append(
            Underway(number, announced, place, self.generations[place], made)
        )

    @rule(step=steps)
    def begin(self, step: int) -> None:
        """An upload takes a step over that is no checkpoint."""
        if self._slot(step).state not in slots.CHECKPOINTS:
            self.uploads += 1
            self._write(step, slot(slots.UPLOADING, upload=f"u{self.uploads}"))

    @rule(step=steps)
    def save(self, step: int) -> None:
        """A whole one."""
        self.begin(step)
        self.commit(step)
        if self.underway:
            self.land(-1)

    @rule(step=steps)
    def commit(self, step: int) -> None:
        found = self._slot(step)
        if found.state == slots.UPLOADING:
            changed = slot(slots.COMMITTED, upload=found.upload)
            self._announce(COMMIT, step, changed, found.upload)

    @rule(step=steps)
    def delete_or_undelete(self, step: int) -> None:
        found = self._slot(step)
        if found.state not in (slots.COMMITTED, slots.DELETED):
            return
        deletes = found.state == slots.COMMITTED
        changed = slot(
            slots.DELETED if deletes else slots.COMMITTED,
            upload=found.upload,
            commit_sequence=found.commit_sequence,
            update_sequence=found.update_sequence,
        )
        self._announce(DELETE if deletes else UNDELETE, step, changed, found.upload)

    @rule(step=steps)
    def update(self, step: int) -> None:
        found = self._slot(step)
        if found.state == slots.COMMITTED:
            self._announce(UPDATE, step, found, found.upload)

    @rule(step=steps)
    def touch(self, step: int) -> None:
        """A change that is not announced, such as a repeated write, or an abort."""
        found = self._slot(step)
        if found.state in slots.CHECKPOINTS:
            self._write(step, found)
        elif found.state == slots.UPLOADING:
            self._write(step, slot(slots.FREE, upload=found.upload))

    @rule(step=steps, turns=st.integers(1, 3))
    def purge(self, step: int, turns: int) -> None:
        for _ in range(turns):
            found = self._slot(step)
            if found.state == slots.DELETED:
                changed = pb.CheckpointRecord()
                changed.CopyFrom(found)
                changed.state = slots.PURGING
                self._write(step, changed)
            elif found.state == slots.PURGING:
                self.purged.add(found.upload)
                self._write(step, slot(slots.FREE, upload=found.upload))
            elif found.state == slots.FREE:
                self._write(step, None)

    @rule(name=tags, step=steps)
    def set_tag(self, name: str, step: int) -> None:
        found = self._slot(step)
        if found.state == slots.COMMITTED:
            self._announce(TAG, name, tag(0, found.upload), found.upload)

    @rule(name=tags)
    def delete_tag(self, name: str) -> None:
        found = self._tag(name)
        if found.upload:
            self._announce(UNTAG, name, tag(0, ""), found.upload)

    @precondition(lambda self: self.underway)
    @rule(which=st.integers(-3, 2))
    def land(self, which: int) -> None:
        """The write of an announced change, on its condition."""
        change = self.underway.pop(which % len(self.underway))
        if self.generations[change.place] != change.generation:
            return
        self._write(change.place, change.changed)
        if change.announcement.kind == COMMIT:
            self.committed[change.announcement.upload] = change.number

    @precondition(lambda self: self.underway)
    @rule(which=st.integers(-3, 2))
    def crash(self, which: int) -> None:
        self.underway.pop(which % len(self.underway))

    @rule()
    def sleep(self) -> None:
        """A day passes, in which every change but a commit ends, one way or other."""
        self.underway = [c for c in self.underway if c.announcement.kind == COMMIT]
        self.now += PATIENCE + timedelta(minutes=1)

    @rule(which=st.integers(0, 1), numbers=st.integers(1, 20))
    def look(self, which: int, numbers: int) -> None:
        """A watch goes on by some numbers, with changes between any two of them."""
        watch = self.watches[which]
        if not watch.to_look_at:
            watch.to_look_at = list(
                numbers_to_resolve(watch.position, len(self.journal))
            )
        for _ in range(min(numbers, len(watch.to_look_at))):
            number = watch.to_look_at.pop(0)
            if number > watch.position.last and is_full(watch.position):
                watch.to_look_at = []
                return
            announced = self.journal[number - 1]
            held = self.objects.get(announced.tag or announced.step)
            outcome = resolve(number, announced, held, now=self.now)
            watch.position = advance(watch.position, number, outcome)
            if outcome is LANDED:
                watch.reported.append((number, announced))
                self.get_token(which)

    @rule(which=st.integers(0, 1))
    def get_token(self, which: int) -> None:
        watch = self.watches[which]
        watch.token = packed(watch.position)

    @rule(which=st.integers(0, 1))
    def reconnect(self, which: int) -> None:
        """The watch ends, and goes on at a server that knows nothing of it."""
        watch = self.watches[which]
        watch.position = unpack_token(watch.token, parent=PARENT, key=KEY)
        watch.to_look_at = []

    def teardown(self) -> None:
        """All announcers crash, all changes are reported, and none is missing."""
        self.underway = []
        for step in (0, 1):
            if self._slot(step).state == slots.UPLOADING:
                self.touch(step)
        self.sleep()
        for which, watch in enumerate(self.watches):
            self.reconnect(which)
            while watch.to_look_at or list(
                numbers_to_resolve(watch.position, len(self.journal))
            ):
                self.look(which, 10**6)
            self._check(watch)

    def _check(self, watch: Watch) -> None:
        assert Position(len(self.journal)) == watch.position
        numbers = [number for number, _ in watch.reported]
        assert len(set(numbers)) == len(numbers)
        commits = [a.upload for _, a in watch.reported if a.kind == COMMIT]
        assert len(set(commits)) == len(commits)
        assert set(self.committed) - self.purged <= set(commits) <= set(self.committed)
        last: dict[str, pb.Announcement] = {}
        for _, announced in watch.reported:
            if announced.kind != UPDATE:  # which hides no deletion or undeletion
                last[announced.tag or announced.upload] = announced
        for upload in self.purged:
            assert DELETE == last[upload].kind
        for step in (0, 1):
            found = self._slot(step)
            if found.state in slots.CHECKPOINTS:
                assert found.update_sequence in (0, *numbers)
                deleted = found.state != slots.COMMITTED
                assert deleted == (last[found.upload].kind == DELETE)
        for name in ("best", "prod"):
            found_tag = self.objects.get(name)
            if isinstance(found_tag, pb.TagRecord):
                named = last[name].upload if last[name].kind == TAG else ""
                assert found_tag.upload == named
            else:
                assert name not in last


@pytest.mark.slow
@pytest.mark.parametrize("most", [2, MAX_PENDING])
def test_no_commit_is_missed_or_repeated(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_PENDING", most)
    run_state_machine_as_test(
        WatchMachine,
        settings=settings(
            max_examples=examples(150), stateful_step_count=60, deadline=None
        ),
    )
