"""Agreement of two reads of all slots: whatever runs concurrently, no file that a
checkpoint needs is taken for garbage; and saves do not disturb it."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storesvc.catalog.slots import CHECKPOINTS, COMMITTED, DELETED, FREE, UPLOADING
from storesvc.gc.mark import agree
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.support.examples import examples

STEPS = 4


class Run:
    """A run that changes: each upload writes one file with its own name."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.slots: dict[int, pb.CheckpointRecord] = {}
        self.bases: dict[str, str] = {}
        self.predecessors: dict[str, str] = {}
        self.tables: dict[str, set[str]] = {}

    def go_on(self) -> None:
        """Does anything that is allowed, or nothing."""
        step = self.dice.randrange(STEPS)
        moves: list[Callable[[int], None]] = [self.begin, self.commit, self.end]
        moves.append(self.move)
        self.dice.choice(moves)(step)

    def begin(self, step: int) -> None:
        slot = self.slots.get(step)
        if slot and slot.state in CHECKPOINTS:
            return
        upload = str(len(self.bases))
        kept = [s.upload for s in self.slots.values() if s.state == COMMITTED]
        self.bases[upload] = self.dice.choice([*kept, ""])
        is_taken = slot is not None and slot.state == UPLOADING
        self.predecessors[upload] = slot.upload if slot and is_taken else ""
        epoch = slot.epoch + 1 if slot else 1
        self._set(step, UPLOADING, upload, epoch)

    def commit(self, step: int) -> None:
        slot = self.slots.get(step)
        if not slot or slot.state != UPLOADING:
            return
        claimed = {self.predecessors[slot.upload]} - {""}
        claimed |= self.tables.get(self.bases[slot.upload], set())
        self.tables[slot.upload] = {slot.upload, *claimed}
        self._set(step, COMMITTED, slot.upload, slot.epoch)

    def end(self, step: int) -> None:
        """Aborts an upload, or purges a checkpoint that none may claim from."""
        slot = self.slots.get(step)
        live = [s.upload for s in self.slots.values() if s.state == UPLOADING]
        if slot and slot.upload not in map(self.bases.__getitem__, live):
            self._set(step, FREE, slot.upload, slot.epoch)

    def move(self, step: int) -> None:
        """Saves a step with another as its base, and ends the other."""
        self.end(step)
        self.begin(step)
        slot = self.slots[step]
        base = self.bases[slot.upload]
        self.commit(step)
        for other in [s.step for s in self.slots.values() if s.upload == base]:
            self.end(other)

    def read(self, steps: list[int]) -> dict[int, pb.CheckpointRecord]:
        """Reads slots, in any order, while all goes on."""
        found = {}
        for step in self.dice.sample(steps, len(steps)):
            self.wait()
            found[step] = self.slots[step]
        return found

    def steps(self) -> list[int]:
        self.wait()
        return list(self.slots)

    def wait(self) -> None:
        for _ in range(self.dice.choice([0, 0, 0, 1, 3, 8])):
            self.go_on()

    def iterate_needed(self, slots: dict[int, pb.CheckpointRecord]) -> set[str]:
        """Returns the objects that ``mark`` keeps in the state read."""
        found = set()
        for slot in slots.values():
            if slot.state in CHECKPOINTS:
                found |= self.tables[slot.upload]
            elif slot.state == UPLOADING:
                found |= {slot.upload, self.predecessors[slot.upload]}
        return found

    def _set(
        self,
        step: int,
        state: "pb.CheckpointRecord.State.ValueType",
        upload: str,
        epoch: int,
    ) -> None:
        self.slots[step] = pb.CheckpointRecord(
            state=state, step=step, upload=upload, epoch=epoch
        )


@settings(max_examples=examples(5000))
@given(st.integers(0, 2**64))
def test_what_is_needed_later_is_needed_by_reads_that_agree(seed: int) -> None:
    run = Run(random.Random(seed))
    for _ in range(10):
        run.go_on()
    listed = set(run.bases)
    first = run.read(run.steps())
    while set(steps := run.steps()) - set(first):
        first |= run.read([step for step in steps if step not in first])
    second = run.read(steps)
    if not agree(first, second):
        return
    garbage = listed - run.iterate_needed(second)

    for _ in range(20):
        assert not garbage & run.iterate_needed(run.slots)
        run.go_on()


def slot(
    state: "pb.CheckpointRecord.State.ValueType", upload: str = "a", epoch: int = 1
) -> pb.CheckpointRecord:
    return pb.CheckpointRecord(state=state, upload=upload, epoch=epoch)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (slot(UPLOADING), slot(COMMITTED)),
        (slot(COMMITTED), slot(DELETED)),
        (slot(DELETED), slot(COMMITTED)),
        (slot(FREE), slot(FREE)),
        (slot(FREE), slot(UPLOADING, "b", 2)),
        (slot(FREE), slot(COMMITTED, "b", 2)),
    ],
    ids=["a commit", "a deletion", "its undoing", "nothing", "a begin", "a save"],
)
def test_saves_and_deletions_disturb_nothing(
    first: pb.CheckpointRecord, second: pb.CheckpointRecord
) -> None:
    assert agree({7: first}, {7: second})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (slot(COMMITTED), slot(FREE)),
        (slot(UPLOADING), slot(FREE)),
        (slot(UPLOADING), slot(UPLOADING, "b", 2)),
        (slot(FREE), slot(COMMITTED, "b", 3)),
        (slot(FREE), slot(FREE, "b", 2)),
    ],
    ids=["a purge", "an abort", "a takeover", "two saves", "a save and its end"],
)
def test_what_lost_its_slot_is_looked_for_again(
    first: pb.CheckpointRecord, second: pb.CheckpointRecord
) -> None:
    assert not agree({7: first}, {7: second})


def test_a_slot_that_one_read_lacks_is_looked_at_again() -> None:
    assert not agree({7: slot(FREE)}, {})
    assert not agree({}, {7: slot(UPLOADING)})
