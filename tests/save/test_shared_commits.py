"""Calls that commit an upload at the same time, in one process, share one commit."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from storesvc import failpoints
from storesvc.catalog import slots
from storesvc.errors import UploadSupersededError, WriterUnfinishedError
from storesvc.format.names import RunName
from storesvc.save.uploads import OpenUpload
from storesvc.store import Store
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.save.test_two_servers import key_spaces
from tests.save.uploads_in_process import begin, committed_chunks, finish, send
from tests.support.contract import stored, sums
from tests.support.faulty_bucket import (
    Call,
    Calls,
    Fault,
    FaultyBucket,
    becomes_true,
    no_faults,
)

RUN = RunName("tests", "shared")
SECONDS = 30.0

T = TypeVar("T")


@dataclass
class Held:
    """A store in memory, and an upload of two writers whose chunks are stored."""

    store: Store
    bucket: FaultyBucket
    upload: OpenUpload

    def commit(self) -> asyncio.Task[pb.CheckpointRecord]:
        upload = self.upload
        commits = self.store.commits.commit(upload.name, upload.record.epoch)
        return asyncio.create_task(commits)

    async def finish(self, writer: int) -> None:
        await finish(
            self.store, self.upload, sums(*((0, 1), (2,))[writer]), writer=writer
        )

    async def key_spaces(self) -> int:
        """Returns how many full commits there were."""
        return len(await self.bucket.list(key_spaces(self.upload)))

    async def check(self) -> None:
        expected = [stored(n) for n in range(3)]
        assert expected == await committed_chunks(self.store, RUN, 1)
        assert 1 == await self.key_spaces()


@asynccontextmanager
async def held_upload() -> AsyncIterator[Held]:
    async with asyncio.timeout(SECONDS):
        bucket = await FaultyBucket.faulty("memory://")
        opened = await Store.open(bucket)
        upload = await begin(opened, RUN, 1, writer_count=2)
        await send(opened, upload, (0, 1))
        await send(opened, upload, (2,), writer=1)
        yield Held(opened, bucket, upload)


async def test_calls_at_the_same_time_share_one_commit() -> None:
    async with held_upload() as held:
        await held.finish(0)
        await held.finish(1)
        slot, reads = held.upload.places.checkpoint(1), list[str]()

        def plan(call: Call) -> Fault:
            reads.extend([call.path] if call.operation == "read" else [])
            return Fault.NONE

        held.bucket.calls.follow(plan)
        records = await asyncio.gather(*(held.commit() for _ in range(8)))

        assert [slots.COMMITTED] * 8 == [record.state for record in records]
        assert 1 == reads.count(slot)
        await held.check()


async def test_a_call_that_is_cancelled_leaves_the_commit_to_the_others() -> None:
    with failpoints.arm_points("commit.before_record=delay:0.1"):
        async with held_upload() as held:
            await held.finish(0)
            await held.finish(1)
            first, second = held.commit(), held.commit()
            await asyncio.sleep(0.02)
            first.cancel()

            assert slots.COMMITTED == (await second).state
            assert first.cancelled()
            await held.check()


async def is_reached() -> bool:
    return bool(failpoints.times_reached(failpoints.Failpoint.COMMIT_BEFORE_RECORD))


async def test_a_commit_whose_calls_are_all_cancelled_ends_with_them() -> None:
    with failpoints.arm_points("commit.before_record=delay:20@1"):
        async with held_upload() as held:
            await held.finish(0)
            await held.finish(1)
            calls = [held.commit() for _ in range(2)]
            await becomes_true(is_reached, seconds=SECONDS)
            for call in calls:
                call.cancel()
            # one that comes while they end does not share their end
            await asyncio.sleep(0)
            last = held.commit()

            assert slots.COMMITTED == (await last).state
            await asyncio.wait(calls)
            assert all(call.cancelled() for call in calls)
            left = [t for t in asyncio.all_tasks() if "_commit_once" in repr(t)]
            assert [] == left


class HeldRead(Calls):
    """Calls of a bucket, of which the reads of one path are answered late."""

    def __init__(self, path: str) -> None:
        super().__init__(no_faults)
        self._path = path
        self.has_read, self.may_answer = asyncio.Event(), asyncio.Event()

    async def make(
        self, operation: str, path: str, call: Coroutine[Any, Any, T], **how: bool
    ) -> T:
        answer = await super().make(operation, path, call, **how)
        if (operation, path) == ("read", self._path):
            self.has_read.set()
            await self.may_answer.wait()
        return answer


async def test_a_call_shares_no_failure_of_a_commit_that_began_before_it() -> None:
    async with held_upload() as held:
        await held.finish(0)
        receipt = held.upload.places.receipt(held.upload.name.upload, 1)
        held.bucket.calls = calls = HeldRead(receipt)
        early = held.commit()
        await calls.has_read.wait()
        await held.finish(1)
        late = held.commit()
        await asyncio.sleep(0)
        calls.may_answer.set()

        with pytest.raises(WriterUnfinishedError):
            await early
        assert slots.COMMITTED == (await late).state
        await held.check()


async def test_a_call_of_another_epoch_shares_nothing() -> None:
    async with held_upload() as held:
        await held.finish(0)
        await held.finish(1)
        first = held.commit()
        await asyncio.sleep(0)
        with pytest.raises(UploadSupersededError):
            await held.store.commits.commit(
                held.upload.name, held.upload.record.epoch + 1
            )

        assert slots.COMMITTED == (await first).state
