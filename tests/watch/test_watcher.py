"""Watches of a process: one poll for all, each at its own pace, whatever fails."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from storesvc.catalog import slots
from storesvc.catalog.catalog import Catalog
from storesvc.catalog.journal import Journal
from storesvc.catalog.records import read_record, record_etag, timestamp, write_record
from storesvc.clock import Clock, SystemClock
from storesvc.errors import (
    CorruptDataError,
    InvalidResumeTokenError,
    LimitExceededError,
    ResumeTokenExpiredError,
    StorageUnavailableError,
)
from storesvc.format import layout
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName
from storesvc.format.seal import seal
from storesvc.storage.bucket import PreconditionError
from storesvc.watch.watcher import Watcher, WatchEvent, WatchLimits
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.support.faulty_bucket import (
    Call,
    Fault,
    FaultyBucket,
    no_faults,
    random_faults,
    record_calls,
)

RUN = RunName("n", "r")
Watch: TypeAlias = AsyncGenerator[WatchEvent]
COMMIT = pb.Announcement.KIND_COMMIT


class Process:
    """A process that changes a bucket, change by change, and watches it."""

    def __init__(
        self,
        bucket: FaultyBucket,
        *,
        poll_seconds: float = 0.01,
        clock: Clock | None = None,
        **limits: Any,
    ) -> None:
        self.bucket = bucket.reopened()
        self.journal = Journal(self.bucket, clock=clock or SystemClock())
        self.watcher = Watcher(
            Catalog(self.bucket),
            self.journal,
            bucket=self.bucket,
            clock=SystemClock(),
            limits=WatchLimits(poll_seconds=poll_seconds, **limits),
        )

    async def begin(self, step: int, run: RunName = RUN) -> pb.CheckpointRecord:
        """Reserves a step."""
        slot = pb.CheckpointRecord(
            state=slots.UPLOADING, step=step, upload=uuid.uuid4().hex, epoch=1
        )
        place = RunPaths(run).checkpoint(step)
        await self.bucket.write(place, seal(slot, place=place))
        return slot

    async def announce(
        self,
        slot: pb.CheckpointRecord,
        kind: "pb.Announcement.Kind.ValueType" = COMMIT,
        run: RunName = RUN,
    ) -> pb.CheckpointRecord:
        """Announces a change, and returns what is to be written."""
        announced = pb.Announcement(
            kind=kind,
            run=run.run,
            step=slot.step,
            upload=slot.upload,
            replaces="" if kind == COMMIT else record_etag(slot),
        )
        number = await self.journal.announce(run.namespace, announced)
        changed = pb.CheckpointRecord()
        changed.CopyFrom(slot)
        changed.sequence = number
        changed.state = slots.COMMITTED
        if kind == COMMIT:
            changed.commit_sequence = number
            changed.commit_time.CopyFrom(timestamp(datetime.now(UTC)))
        elif kind == pb.Announcement.KIND_DELETE:
            changed.state = slots.DELETED
        return changed

    async def land(self, changed: pb.CheckpointRecord, run: RunName = RUN) -> None:
        """Makes an announced change."""
        place = RunPaths(run).checkpoint(changed.step)
        await self.bucket.write(place, seal(changed, place=place))
        self.journal.notify_landed(run.namespace)

    async def commit(self, step: int, run: RunName = RUN) -> pb.CheckpointRecord:
        """Does all of it."""
        changed = await self.announce(await self.begin(step, run), run=run)
        await self.land(changed, run)
        return changed

    def watch(self, of: RunName | str = RUN, token: str = "") -> Watch:
        """Watches."""
        return self.watcher.watch(of, token)


class SlowClock(SystemClock):
    """A clock that is hours behind."""

    def now(self) -> datetime:
        """Returns what it takes for the time of day."""
        return super().now() - timedelta(hours=5)


async def new_store(root: str) -> FaultyBucket:
    """Returns the bucket of a store."""
    bucket = await FaultyBucket.faulty(root)
    record = seal(pb.StoreRecord(uid="store"), place=layout.STORE)
    await bucket.write(layout.STORE, record)
    return bucket


@pytest.fixture(params=["memory", "file"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Awaitable[FaultyBucket]:
    """The bucket of a fresh store, of each kind."""
    root = "memory://" if request.param == "memory" else tmp_path.as_uri()
    return new_store(root)


async def take(watch: Watch, count: int) -> list[int]:
    """The steps of the next events."""
    return [step for step, _ in await take_events(watch, count)]


async def take_events(watch: Watch, count: int) -> list[tuple[int, WatchEvent]]:
    found: list[tuple[int, WatchEvent]] = []
    while len(found) < count:
        event = await anext(watch)
        if event.change is not None:
            found.append((event.change.announcement.step, event))
    return found


async def begun(watch: Watch) -> str:
    """The token that a watch begins with."""
    event = await anext(watch)
    assert event.change is None
    return event.token


@asynccontextmanager
async def watching(
    process: Process, of: RunName | str = RUN, token: str = ""
) -> AsyncIterator[Watch]:
    """Yields a watch that has begun."""
    async with aclosing(process.watch(of, token)) as watch:
        await begun(watch)
        yield watch


async def test_a_watch_begins_with_a_token_and_reports_only_later_changes(
    bucket: FaultyBucket,
) -> None:
    process = Process(bucket)
    await process.commit(1)
    async with aclosing(process.watch()) as watch:
        assert await begun(watch)
        await process.commit(2)
        await process.commit(3)

        assert [2, 3] == await take(watch, 2)


async def test_a_change_of_this_process_is_reported_without_waiting_for_a_poll(
    bucket: FaultyBucket,
) -> None:
    process = Process(bucket, poll_seconds=1000)
    async with watching(process) as watch:
        for step in range(5):
            committed = await process.commit(step)
            assert [step] == await take(watch, 1)
            changed = await process.announce(committed, pb.Announcement.KIND_DELETE)
            await process.land(changed)
            ((event_step, event),) = await take_events(watch, 1)
            assert step == event_step
            assert event.change is not None
            assert event.change.checkpoint == changed


async def test_a_change_of_another_process_is_reported_by_the_next_poll(
    bucket: FaultyBucket,
) -> None:
    here, there = Process(bucket), Process(bucket)
    async with watching(here) as watch:
        for step in range(20):
            await there.commit(step)

        assert list(range(20)) == await take(watch, 20)


async def test_a_change_announced_before_a_watch_that_lands_later_is_reported(
    bucket: FaultyBucket,
) -> None:
    process = Process(bucket)
    await process.commit(1)
    underway = await process.announce(await process.begin(2))
    crashed = await process.announce(await process.begin(3))
    async with aclosing(process.watch()) as watch:
        token = await begun(watch)
        await process.commit(4)
        assert [4] == await take(watch, 1)
        await process.land(underway)
        assert [2] == await take(watch, 1)
    async with watching(Process(bucket), token=token) as watch:
        assert [2, 4] == await take(watch, 2)
        await process.land(crashed)
        assert [3] == await take(watch, 1)


async def test_a_commit_is_reported_even_if_the_clock_of_its_process_is_far_behind(
    bucket: FaultyBucket,
) -> None:
    process = Process(bucket, clock=SlowClock())
    underway = await process.announce(await process.begin(1))
    for step in range(2, 100):
        await process.commit(step)
    async with watching(Process(bucket)) as watch:
        await process.land(underway)

        assert [1] == await take(watch, 1)


async def test_a_token_that_waits_for_a_change_expires_with_its_announcement(
    bucket: FaultyBucket,
) -> None:
    process = Process(bucket)
    async with watching(process) as watch:
        underway = await process.announce(await process.begin(1))
        await process.commit(2)
        ((_, event),) = await take_events(watch, 1)
    await process.land(underway)
    await bucket.delete(layout.announcement("n", 1))

    with pytest.raises(ResumeTokenExpiredError, match="list the checkpoints"):
        async with aclosing(Process(bucket).watch(token=event.token)) as watch:
            await take(watch, 1)


async def test_a_watch_begins_while_old_announcements_are_trimmed(
    bucket: FaultyBucket,
) -> None:
    process, there = Process(bucket), Process(bucket)
    await there.announce(await there.begin(1))
    await there.commit(2)
    async with watching(process):
        (feed,) = process.watcher._feeds.values()
        feed._cache._resolved.clear()
        feed._cache._announced.clear()
        await bucket.delete(layout.announcement("n", 1))
        async with watching(process) as watch:
            await there.commit(3)
            assert [3] == await take(watch, 1)


async def test_a_watch_of_a_run_leaves_out_the_others(bucket: FaultyBucket) -> None:
    process, other = Process(bucket), RunName("n", "other")
    async with aclosing(process.watch()) as one, aclosing(process.watch("n")) as all_:
        token, token_of_all = await begun(one), await begun(all_)
        await process.commit(1)
        await process.commit(2, other)
        await process.commit(3)
        await process.commit(4, RunName("m", "r"))

        assert [1, 3] == await take(one, 2)
        assert [1, 2, 3] == await take(all_, 3)
    async with aclosing(Process(bucket).watch("n", token_of_all)) as all_:
        assert [1, 2, 3] == await take(all_, 3)
    async with aclosing(Process(bucket).watch(RUN, token)) as one:
        assert [1, 3] == await take(one, 2)


async def test_every_token_goes_on_where_it_was_got(bucket: FaultyBucket) -> None:
    process = Process(bucket)
    async with aclosing(process.watch()) as watch:
        tokens = [await begun(watch)]
        for step in range(10):
            await process.commit(step)
        tokens += [event.token for _, event in await take_events(watch, 10)]

    for at, token in enumerate(tokens):
        async with aclosing(Process(bucket).watch(token=token)) as watch:
            await process.commit(100 + at)
            expected = [*range(at, 10), *range(100, 101 + at)]
            assert expected == await take(watch, len(expected))


@pytest.mark.slow
async def test_a_poll_costs_the_same_for_one_watch_and_for_many() -> None:
    bucket = await new_store("memory://")
    for number in range(1, 10_001):
        announced = pb.Announcement(kind=COMMIT, run="r", step=number)
        place = layout.announcement("n", number)
        await bucket.write(place, seal(announced, place=place))
    process = Process(bucket)
    calls: list[Call] = []

    watches = [process.watch() for _ in range(50)]
    for watch in watches:
        await begun(watch)
    process.bucket.calls.follow(record_calls(calls))
    waiting = [asyncio.create_task(take(watch, 1)) for watch in watches]
    await asyncio.sleep(0.3)
    # the next number, and the last one, which is there as long as nothing follows
    idle = {(call.operation, call.path[-26:]) for call in calls}
    assert idle == {
        ("read", "00000000000000010000.binpb"),
        ("read", "00000000000000010001.binpb"),
    }
    assert len(calls) <= 2 * 31
    calls.clear()
    await process.commit(7)
    assert [[7]] * 50 == await asyncio.gather(*waiting)
    place = RunPaths(RUN).checkpoint(7)
    reads = [call for call in calls if (call.operation, call.path) == ("read", place)]
    assert 10 > len(reads)
    for watch in watches:
        await watch.aclose()
    await asyncio.sleep(0)
    calls.clear()
    await asyncio.sleep(0.1)
    assert [] == calls  # there is no watch


async def test_a_slow_watch_neither_delays_others_nor_takes_more_memory(
    bucket: FaultyBucket,
) -> None:
    process = Process(bucket, kept=20)
    async with watching(process) as slow, watching(process) as fast:
        for step in range(100):
            await process.commit(step)
            assert [step] == await take(fast, 1)
        (feed,) = process.watcher._feeds.values()
        assert 20 >= len(feed._cache._resolved)
        assert 20 >= len(feed._cache._announced)

        assert list(range(100)) == await take(slow, 100)
        assert 20 >= len(feed._cache._resolved)


async def test_a_token_comes_from_time_to_time(bucket: FaultyBucket) -> None:
    process = Process(bucket, token_seconds=0.05)
    async with watching(process) as watch:
        await process.commit(1, RunName("n", "other"))
        for _ in range(3):
            token = await begun(watch)
        await process.commit(2)
        assert [2] == await take(watch, 1)
    async with watching(Process(bucket), token=token) as watch:
        assert [2] == await take(watch, 1)


async def test_a_token_comes_also_while_only_others_have_events(
    bucket: FaultyBucket,
) -> None:
    process = Process(bucket, token_seconds=0.05)

    async def others() -> None:
        for step in range(1000):
            await process.commit(step, RunName("n", "other"))

    async with aclosing(process.watch()) as watch:
        busy = asyncio.create_task(others())
        tokens = set[str]()
        while len(tokens) < 3:  # or the test times out
            tokens.add(await begun(watch))
        busy.cancel()


async def test_a_storage_that_fails_ends_the_watches_and_they_go_on_later(
    bucket: FaultyBucket,
) -> None:
    process, there = Process(bucket), Process(bucket)
    watches = [process.watch() for _ in range(3)]
    tokens = [await begun(watch) for watch in watches]
    process.bucket.calls.follow(lambda _: Fault.UNAVAILABLE)

    for watch in watches:
        with pytest.raises(StorageUnavailableError):
            await anext(watch)
    with pytest.raises(StorageUnavailableError):
        await anext(process.watch())
    assert {} == process.watcher._feeds
    process.bucket.calls.follow(no_faults)
    await there.commit(1)
    for token in tokens:
        async with aclosing(process.watch(token=token)) as watch:
            assert [1] == await take(watch, 1)


async def test_a_server_that_stops_ends_its_watches_at_once(
    bucket: FaultyBucket,
) -> None:
    process = Process(bucket, poll_seconds=1000, token_seconds=1000)
    watches = [process.watch() for _ in range(3)]
    for watch in watches:
        await begun(watch)
    waiting = [asyncio.create_task(take(watch, 1)) for watch in watches]
    await asyncio.sleep(0.05)

    process.watcher.close()

    for task in waiting:
        with pytest.raises(StorageUnavailableError, match="the server stops"):
            await task
    with pytest.raises(StorageUnavailableError, match="the server stops"):
        await anext(process.watch())


async def test_a_token_of_elsewhere_or_of_long_ago_is_rejected(
    bucket: FaultyBucket,
) -> None:
    process = Process(bucket)
    async with aclosing(process.watch()) as watch:
        old = await begun(watch)
        for step in range(3):
            await process.commit(step)
        first, _, last = [event.token for _, event in await take_events(watch, 3)]
    for of, token in (("n", old), (RunName("n", "x"), old), (RUN, old[:-8])):
        with pytest.raises(InvalidResumeTokenError):
            await anext(process.watch(of, token))
    await bucket.delete(layout.announcement("n", 1))
    await bucket.delete(layout.announcement("n", 2))

    for token in (old, first):
        with pytest.raises(ResumeTokenExpiredError, match="list the checkpoints"):
            await anext(process.watch(RUN, token))
    async with watching(process, RUN, last):
        pass
    await bucket.delete(layout.announcement("n", 3))
    with pytest.raises(InvalidResumeTokenError, match="got announcement 3"):
        await anext(Process(bucket).watch(RUN, last))


async def test_a_purged_checkpoint_is_reported_as_deleted(bucket: FaultyBucket) -> None:
    process = Process(bucket)
    async with aclosing(process.watch()) as watch:
        token = await begun(watch)
    slot = await process.commit(5)
    await process.announce(slot, pb.Announcement.KIND_DELETE)
    await bucket.delete(RunPaths(RUN).checkpoint(5))

    async with aclosing(process.watch(RUN, token)) as watch:
        ((step, event),) = await take_events(watch, 1)

    assert event.change is not None
    assert (5, slot.upload) == (step, event.change.announcement.upload)
    assert pb.Announcement.KIND_DELETE == event.change.announcement.kind
    assert event.change.checkpoint is None


async def test_a_damaged_checkpoint_fails_the_watch_of_its_run_and_no_other(
    bucket: FaultyBucket,
) -> None:
    process, other = Process(bucket), RunName("n", "other")
    await process.commit(1)
    async with (
        aclosing(process.watch()) as hurt,
        aclosing(process.watch(other)) as well,
    ):
        await begun(hurt)
        await begun(well)
        await process.announce(await process.begin(2))
        await bucket.write(RunPaths(RUN).checkpoint(2), b"noise")
        await process.commit(3, other)

        assert [3] == await take(well, 1)
        with pytest.raises(CorruptDataError, match="is damaged"):
            await take(hurt, 1)


async def test_after_damage_a_watch_goes_on_with_the_last_token(
    bucket: FaultyBucket,
) -> None:
    process, other = Process(bucket), RunName("n", "other")
    async with aclosing(process.watch("n")) as watch:
        token = await begun(watch)
    await process.commit(1)
    await bucket.write(RunPaths(RUN).checkpoint(1), b"noise")
    await process.commit(2, other)
    await process.commit(3, other)
    await bucket.write(layout.announcement("n", 3), b"noise")
    await process.commit(4, other)

    steps: list[int] = []
    for expected in ([], [2], [2, 4]):
        with suppress(CorruptDataError):
            async with aclosing(Process(bucket).watch("n", token)) as watch:
                async for message in watch:
                    token = message.token
                    if message.change is not None:
                        steps.append(message.change.announcement.step)
                    if len(steps) == 2:
                        break
        assert expected == steps
    async with watching(Process(bucket), "n") as watch:
        await process.commit(5)
        assert [5] == await take(watch, 1)


async def test_a_damaged_announcement_ends_the_watches_once(
    bucket: FaultyBucket,
) -> None:
    process = Process(bucket)
    async with watching(process) as watch:
        await bucket.write(layout.announcement("n", 1), b"noise")
        token = await begun(watch)
        with pytest.raises(CorruptDataError, match="is damaged"):
            await anext(watch)
    async with watching(process, token=token) as watch:
        await process.commit(2)
        assert [2] == await take(watch, 1)


async def test_a_process_has_a_limit_of_watches(bucket: FaultyBucket) -> None:
    process = Process(bucket, max_watches=2)
    async with watching(process), watching(process, "m"):
        with pytest.raises(LimitExceededError, match="at most 2 watches"):
            await anext(process.watch())
    async with aclosing(process.watch()) as watch:
        await begun(watch)


async def committed_at_last(process: Process, step: int) -> None:
    """Commits as a server does whose calls are repeated until one is answered."""
    place = RunPaths(RUN).checkpoint(step)
    while True:
        with suppress(StorageUnavailableError, PreconditionError):
            found = await read_record(process.bucket, place, pb.CheckpointRecord)
            assert found is not None
            if found[0].state == slots.COMMITTED:
                return
            changed = await process.announce(found[0])
            await write_record(process.bucket, place, changed, condition=found[1])
            process.journal.notify_landed(RUN.namespace)


@pytest.mark.parametrize("seed", range(10))
def test_no_commit_is_missed_or_repeated_whatever_calls_fail(seed: int) -> None:
    async def test() -> None:
        bucket = await new_store("memory://")
        here, there = Process(bucket), Process(bucket)
        async with aclosing(here.watch()) as watch:
            token = await begun(watch)
        for step in range(30):
            await here.begin(step)
        for process in (here, there):
            process.bucket.calls.follow(random_faults(seed, share=0.03))

        async def commit_all() -> None:
            await asyncio.gather(
                *(committed_at_last((here, there)[s % 2], s) for s in range(30)),
                *(committed_at_last((there, here)[s % 2], s) for s in range(30)),
            )
            here.bucket.calls.follow(no_faults)

        committing = asyncio.create_task(commit_all())
        steps: list[int] = []
        while len(steps) < 30:
            with suppress(StorageUnavailableError):
                async with aclosing(here.watch(token=token)) as watch:
                    async for message in watch:
                        token = message.token
                        if message.change is not None:
                            steps.append(message.change.announcement.step)
                        if len(steps) == 30:
                            break
        await committing
        assert list(range(30)) == sorted(steps)

    asyncio.run(asyncio.wait_for(test(), 60))
