"""The memory of a run, for its policy, equals a fresh read of all its slots."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

import storesvc_client as store
from storesvc.catalog.records import read_record, record_etag, write_record
from storesvc.catalog.slots import COMMITTED, Change
from storesvc.errors import StoreError
from storesvc.format import layout
from storesvc.format.layout import RunPaths
from storesvc.format.names import MAX_STEP, CheckpointName, TagName, UploadName
from storesvc.format.seal import seal
from storesvc.retention import committed as module
from storesvc.retention.committed import Committed, CommittedCheckpoints, Known
from storesvc.retention.enforcement import Outcome
from storesvc.store import Store
from storesvc.watch.events import Position
from storesvc_client._values.policies import policy_message
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.server.test_scale import save
from tests.support.examples import sampled
from tests.support.interleaving import RUN, Process, new_id, world_of
from tests.support.paged_bucket import PagedBucket

PLACES = RunPaths(RUN)
DELETED = pb.CheckpointRecord.STATE_DELETED


def memory(opened: Store | Process) -> CommittedCheckpoints:
    return CommittedCheckpoints(
        opened.bucket, opened.catalog, opened.references, opened.journal, opened.clock
    )


async def put(bucket: PagedBucket, steps: range) -> None:
    for step in steps:
        record = pb.CheckpointRecord(
            state=COMMITTED, step=step, upload=uuid.uuid4().hex, epoch=1
        )
        record.commit_time.FromDatetime(datetime(2029, 1, 1, tzinfo=UTC))
        place = PLACES.checkpoint(step)
        await bucket.write(place, seal(record, place=place))


async def set_policy(opened: Store, policy: store.RetentionPolicy) -> None:
    record = pb.RunRecord(retention=policy_message(policy))
    await opened.runs.update(RUN, record, ["retention"], etag="", write_id="w")


async def retained(opened: Store) -> list[Outcome]:
    """Applies the policy as a server does after a commit."""
    outcomes = await opened.collector._expiry.retain(RUN)
    await opened.retention.committed.write(RUN)
    return outcomes


async def retain(opened: Store) -> list[Outcome]:
    found = await opened.runs.create(RUN)
    pages = opened.retention.apply(RUN, found)
    return [outcome async for page in pages for outcome in page]


def equal(one: Committed, other: Committed) -> bool:
    return (one.known, one.tags) == (other.known, other.tags)


# --- requests ---------------------------------------------------------------------


async def test_retention_after_a_commit_reads_only_what_it_changed() -> None:
    bucket = await PagedBucket.open("memory://")
    opened = await Store.open(bucket)
    await put(bucket, range(1500))
    await set_policy(opened, store.KeepLatest(10_000))
    assert 1500 == len(await retained(opened))
    await save(RUN, 20_000)(opened)
    bucket.clear()

    outcomes = await retained(opened)

    assert 1501 == len(outcomes)
    # the record of the run, and the slot
    assert (1, 2, 1) == (bucket.lists, bucket.reads, bucket.writes)


async def test_a_new_process_reads_what_another_one_has_written() -> None:
    bucket = await PagedBucket.open("memory://")
    opened = await Store.open(bucket)
    await put(bucket, range(1500))
    await set_policy(opened, store.KeepLatest(10_000))
    await retained(opened)
    started = await Store.open(bucket)
    await save(RUN, 20_000)(started)
    bucket.clear()

    outcomes = await retained(started)

    assert 1501 == len(outcomes)
    assert (1, 3, 1) == (bucket.lists, bucket.reads, bucket.writes)


async def test_many_commits_of_another_process_are_read_as_one() -> None:
    bucket = await PagedBucket.open("memory://")
    opened, other = await Store.open(bucket), await Store.open(bucket)
    await put(bucket, range(100))
    await set_policy(opened, store.KeepLatest(10_000))
    await retained(opened)
    for step in range(200, 210):
        await save(RUN, step)(other)
        await retained(other)
    bucket.clear()

    assert 110 == len(await retained(opened))
    assert (1, 2, 0) == (bucket.lists, bucket.reads, bucket.writes)


async def test_few_checkpoints_are_not_written() -> None:
    bucket = await PagedBucket.open("memory://")
    opened = await Store.open(bucket)
    await put(bucket, range(20))
    await set_policy(opened, store.KeepLatest(10_000))
    await retained(opened)

    assert await bucket.read(PLACES.committed) is None


async def test_a_run_without_a_policy_costs_one_read() -> None:
    bucket = await PagedBucket.open("memory://")
    opened = await Store.open(bucket)
    await save(RUN, 1)(opened)
    bucket.clear()

    await opened.collector.retain(RUN)

    assert (0, 1) == (bucket.lists, bucket.reads)


async def test_only_the_process_that_committed_applies_the_policy() -> None:
    bucket = await PagedBucket.open("memory://")
    winner, other = await Store.open(bucket), await Store.open(bucket)
    await save(RUN, 1)(winner)
    made = await winner.catalog.checkpoint(CheckpointName(RUN, 1))

    again = await other.commits.commit(UploadName(RUN, made.upload), made.epoch)

    assert made == again
    assert [RUN] == winner.recent_commits.runs
    assert [] == other.recent_commits.runs


# --- what is remembered -----------------------------------------------------------


METRICS = st.dictionaries(
    st.sampled_from(["loss", "accuracy"]), st.floats(allow_nan=False)
)
KNOWN = st.builds(
    Known,
    step=st.integers(0, MAX_STEP),
    uid=st.uuids().map(lambda uid: uid.hex),
    etag=st.binary(min_size=16, max_size=16).map(lambda made: f'"{made.hex()}"'),
    own_bytes=st.integers(0, 2**63 - 1),
    commit_time=st.datetimes(timezones=st.just(UTC)),
    pinned=st.booleans(),
    metrics=METRICS,
)


@given(
    st.lists(KNOWN, min_size=1, unique_by=lambda one: one.step),
    st.dictionaries(st.uuids().map(lambda uid: uid.hex), st.just("best"), max_size=9),
)
def test_another_process_reads_what_was_written(
    checkpoints: list[Known], tags: dict[str, str]
) -> None:
    made = Committed(
        known={one.step: one for one in checkpoints},
        tags=tags,
        position=Position(0),
        elapsed=0.0,
    )

    async def main() -> None:
        opened = await Store.open(await PagedBucket.open("memory://"))
        made.elapsed = opened.clock.elapsed()
        written = memory(opened)
        written._kept[RUN] = made
        await written.write(RUN)
        found = await memory(opened).update(RUN)
        assert equal(made, found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LEAST_WRITTEN", 1)
        asyncio.run(main())


@pytest.mark.parametrize("kind", ["damaged", "uneven", "old", "ahead", "of tomorrow"])
async def test_all_slots_are_read_where_what_was_written_is_not_valid(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = await PagedBucket.open("memory://")
    opened = await Store.open(bucket)
    await put(bucket, range(70))
    await opened.runs.create(RUN)
    written = memory(opened)
    await written.read(RUN)
    await written.write(RUN)
    await bucket.delete(PLACES.checkpoint(3))  # so that a read of all differs
    path = PLACES.committed
    found = await read_record(bucket, path, pb.CommittedCheckpoints)
    assert found is not None
    assert 70 == len((await memory(opened).update(RUN)).known)

    record, time = found[0], found[0].read_time.ToDatetime(UTC)
    match kind:
        case "uneven":
            record.step.append(1)
        case "old":
            record.read_time.FromDatetime(time - timedelta(days=1))
        case "of tomorrow":
            record.read_time.FromDatetime(time + timedelta(days=1.1))
        case "ahead":  # as in a copy that was made while the bucket changed
            record.last += 1
    data = b"damaged" if kind == "damaged" else seal(record, place=path)
    await bucket.write(path, data)

    assert {*range(70)} - {3} == (await memory(opened).update(RUN)).known.keys()
    assert (kind in ("damaged", "uneven")) == ("all slots" in caplog.text)


@pytest.mark.parametrize("seed", sampled(range(40), every=4))
def test_what_is_remembered_is_what_is_stored_whatever_the_order(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAST_WRITTEN", 1)
    monkeypatch.setattr(module, "FEW_CHANGES", seed % 2)
    world = world_of(seed, steps=6)
    watching, writers = Process(world), [Process(world) for _ in range(3)]
    reader, second = memory(watching), memory(Process(world))

    async def change(process: Process) -> None:
        step = world.rng.randrange(6)
        tag = TagName(RUN, world.rng.choice("ab"))
        changes: list[Callable[[], Awaitable[object]]] = [
            lambda: process.lifecycle.delete(
                RUN, step, purge_delay=timedelta(1), etag="", write_id=new_id()
            ),
            lambda: process.lifecycle.undelete(RUN, step, write_id=new_id()),
            lambda: process.lifecycle.update(
                RUN, step, Change(pinned=True), etag="", write_id=new_id()
            ),
            lambda: process.tags.set(
                tag,
                CheckpointName(RUN, step),
                protected=False,
                etag="",
                write_id=new_id(),
            ),
            lambda: process.tags.delete(tag, etag="", write_id=new_id()),
        ]
        for _ in range(5):
            with suppress(StoreError):
                await world.rng.choice(changes)()

    async def read(by: CommittedCheckpoints) -> None:
        for _ in range(3):
            await by.update(RUN)
            await by.write(RUN)

    async def main() -> None:
        await asyncio.gather(read(reader), read(second), *map(change, writers))
        expected = await memory(Process(world)).read(RUN)
        for one in (reader, second, memory(Process(world))):
            assert equal(expected, await one.update(RUN))

    asyncio.run(main())


async def test_a_change_that_is_made_long_after_it_was_announced_is_seen() -> None:
    bucket = await PagedBucket.open("memory://")
    opened, other = await Store.open(bucket), await Store.open(bucket)
    for step in (1, 2):
        await save(RUN, step)(opened)
    reader = memory(opened)
    assert {1, 2} == (await reader.update(RUN)).known.keys()
    found = await opened.catalog.slot(RUN, 1)
    assert found is not None
    announced = pb.Announcement(
        kind=pb.Announcement.KIND_DELETE,
        run=RUN.run,
        step=1,
        upload=found[0].upload,
        replaces=record_etag(found[0]),
    )
    number = await other.journal.announce(RUN.namespace, announced)
    for _ in range(2):
        assert {1, 2} == (await reader.update(RUN)).known.keys()

    deleted = found[0]
    deleted.state, deleted.sequence = DELETED, number
    place = PLACES.checkpoint(1)
    await write_record(bucket, place, deleted, condition=found[1])

    assert {2} == (await reader.update(RUN)).known.keys()


async def test_a_change_that_was_announced_before_the_first_read_is_seen() -> None:
    bucket = await PagedBucket.open("memory://")
    opened = await Store.open(bucket)
    for step in (1, 2):
        await save(RUN, step)(opened)
    found = await opened.catalog.slot(RUN, 1)
    assert found is not None
    announced = pb.Announcement(
        kind=pb.Announcement.KIND_DELETE,
        run=RUN.run,
        step=1,
        upload=found[0].upload,
        replaces=record_etag(found[0]),
    )
    number = await opened.journal.announce(RUN.namespace, announced)
    reader = memory(await Store.open(bucket))
    assert {1, 2} == (await reader.update(RUN)).known.keys()

    deleted = found[0]
    deleted.state, deleted.sequence = DELETED, number
    place = PLACES.checkpoint(1)
    await write_record(bucket, place, deleted, condition=found[1])

    assert {2} == (await reader.update(RUN)).known.keys()


@pytest.mark.parametrize("lost", ["trimmed", "damaged"])
async def test_without_the_announcements_all_is_read_again(lost: str) -> None:
    bucket = await PagedBucket.open("memory://")
    opened, other = await Store.open(bucket), await Store.open(bucket)
    await save(RUN, 1)(opened)
    reader = memory(opened)
    await reader.update(RUN)
    for step in (2, 3):
        await save(RUN, step)(other)
    place = layout.announcement(RUN.namespace, 2)
    if lost == "trimmed":
        await bucket.delete(place)
    else:
        await bucket.write(place, b"damaged")

    assert {1, 2, 3} == (await reader.update(RUN)).known.keys()
    assert {1, 2, 3} == (await reader.update(RUN)).known.keys()


async def test_a_slot_that_a_person_deleted_does_not_count_as_kept() -> None:
    bucket = await PagedBucket.open("memory://")
    opened = await Store.open(bucket)
    await set_policy(opened, store.KeepLatest(2))
    for step in (1, 2):
        await save(RUN, step)(opened)
    assert [True, True] == [one.kept for one in await retain(opened)]
    await bucket.delete(PLACES.checkpoint(2))  # as its error advises if it is damaged
    await save(RUN, 3)(opened)

    assert {3: True, 1: True} == {o.step: o.kept for o in await retain(opened)}
    assert 1 == (await opened.catalog.checkpoint(CheckpointName(RUN, 1))).step
