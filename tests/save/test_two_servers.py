"""Uploads whose calls go to two servers of one bucket.

On a bucket a server assumes what it wrote itself a moment ago, and finds out at the
same time whether the other server has changed it.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest

from storesvc import failpoints
from storesvc.catalog import slots
from storesvc.errors import (
    CheckpointExistsError,
    ChunksIncompleteError,
    InvalidChunkError,
    StoreError,
)
from storesvc.format.chunks import Sums
from storesvc.format.names import RunName
from storesvc.inspect.rules import Damage
from storesvc.save.uploads import OpenUpload
from storesvc.store import Store
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1.upload_service_pb2_grpc import UploadServiceStub
from tests.conftest import gcs_root
from tests.fake_gcs import FakeGcs
from tests.save.uploads_in_process import begin, committed_chunks, finish, send
from tests.support.contract import WHOLE, Writer, frame, mixed_sums, stored, sums
from tests.support.examples import sampled
from tests.support.faulty_bucket import (
    Call,
    Calls,
    Fault,
    FaultyBucket,
    no_faults,
)
from tests.support.restrictions import channel
from tests.support.server_process import ServerProcess

RUN = RunName("tests", "two-servers")
SECONDS = 60.0

T = TypeVar("T")


class InterruptedCalls(Calls):
    """Calls of a bucket, in one of which something else happens."""

    def __init__(self) -> None:
        super().__init__(no_faults)
        self.count = 0
        self._at: int | None = None

    def interrupt(
        self, at: int, between: Callable[[], Awaitable[None]], *, after: bool
    ) -> None:
        """Waits for `between` before a call by number, or after it; the first call
        from now on is 0."""
        self.count, self._at = 0, at
        self._between, self._after = between, after

    async def make(
        self, operation: str, path: str, call: Coroutine[Any, Any, T], **how: bool
    ) -> T:
        is_hit = self.count == self._at
        self.count += 1
        if is_hit and not self._after:
            await self._between()
        answer = await super().make(operation, path, call, **how)
        if is_hit and self._after:
            await self._between()
        return answer


@dataclass
class Servers:
    """Two servers of a bucket in memory."""

    calls: InterruptedCalls
    """Calls of both to the bucket."""
    here: Store
    there: Store

    @property
    def both(self) -> tuple[Store, Store]:
        return self.here, self.there

    async def names(self, prefix: str) -> list[str]:
        """Returns the paths in the bucket that begin with a prefix."""
        return await self.here.bucket.list(prefix)


@asynccontextmanager
async def servers() -> AsyncIterator[Servers]:
    bucket = await FaultyBucket.faulty("memory://")
    other = bucket.reopened()
    calls = bucket.calls = other.calls = InterruptedCalls()
    async with asyncio.timeout(SECONDS):
        here, there = await Store.open(bucket), await Store.open(other)
        await here.runs.create(RUN)
        yield Servers(calls, here, there)


def key_spaces(upload: OpenUpload) -> str:
    """Returns where each full commit of an upload writes one object."""
    return upload.places.key_space(upload.name.upload, "").removesuffix("/")


async def commit(server: Store, upload: OpenUpload) -> pb.CheckpointRecord:
    return await server.commits.commit(upload.name, upload.record.epoch)


async def damages(server: Store, record: pb.CheckpointRecord) -> list[Damage]:
    """Returns what a complete check of a checkpoint finds, with its key space."""
    verified = server.verifier.verify(RUN, record)
    return [damage async for report in verified for damage in report.damages]


# Receipts


async def test_a_receipt_without_a_chunk_of_another_server_fails_the_commit() -> None:
    async with servers() as two:
        upload = await begin(two.here, RUN, 1)
        await send(two.here, upload, (0, 1))
        await send(two.there, upload, (2,))

        await finish(two.here, upload, sums(0, 1))
        for server in two.both:
            with pytest.raises(ChunksIncompleteError, match="1 are missing"):
                await commit(server, upload)
        # Where the tables are listed, it is found at once.
        with pytest.raises(InvalidChunkError, match="finish with all of them"):
            await finish(two.there, upload, sums(0, 1))

        await finish(two.here, upload, sums(0, 1, 2))
        await commit(two.there, upload)
        assert [stored(n) for n in range(3)] == await committed_chunks(two.here, RUN, 1)


# Commits that are prepared early


async def _commit_while_replaced(at: int, *, by_other: bool, after: bool) -> int | None:
    """Commits an upload of two writers at a server that wrote their receipts; at a call
    of the commit, the first writer finishes again, with other bytes.

    Returns:
        The version of the first writer's chunks in the checkpoint; None if the commit
        makes fewer calls.
    """
    async with servers() as two:
        upload = await begin(two.here, RUN, 1, writer_count=2)
        other = two.there if by_other else two.here
        await send(two.here, upload, (0, 1))
        await send(two.here, upload, (2,), writer=1)
        await send(other, upload, (0, 1), version=1)
        await finish(two.here, upload, sums(2), writer=1)
        await finish(two.here, upload, sums(0, 1))
        replaced: list[bool] = []

        async def between() -> None:
            try:
                await finish(other, upload, sums(0, 1, version=1))
                replaced.append(True)
            except CheckpointExistsError:
                replaced.append(False)

        two.calls.interrupt(at, between, after=after)
        record = await commit(two.here, upload)

        assert slots.COMMITTED == record.state
        if not replaced:
            return None
        found = await committed_chunks(two.there, RUN, 1)
        version = 1 if found[0] == stored(0, 1) else 0
        assert [stored(0, version), stored(1, version), stored(2)] == found
        assert replaced[0] or not version
        manifest = await two.there.catalog.manifest(RUN, record)
        expected = mixed_sums({0: version, 1: version, 2: 0})
        assert _rows(expected) == _rows(manifest.sums)
        assert [] == await damages(two.there, record)
        # A repeated commit at either server returns the same.
        assert [record] * 2 == [await commit(server, upload) for server in two.both]
        return version


def _rows(some: Sums) -> list[tuple[int, int, bytes]]:
    digests = [bytes(digest) for digest in some.digests]
    return list(zip(some.ordinal.tolist(), some.crc32c.tolist(), digests, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("by_other", [False, True])
def test_a_commit_during_which_a_receipt_is_replaced_has_the_one_or_the_other(
    *, by_other: bool
) -> None:
    found = set()
    for after in (False, True):
        for at in itertools.count():
            outcome = asyncio.run(
                _commit_while_replaced(at, by_other=by_other, after=after)
            )
            if outcome is None:
                break
            found.add(outcome)

    assert {0, 1} == found


# Two commits at once


async def _commit_while_committed(at: int, *, after: bool) -> tuple[int, int] | None:
    """Commits an upload, whose writers finished at different servers, at both of them:
    at the second one within a call of the first one's commit.

    Returns:
        The key spaces and the announcements that were written; None if the commit makes
        fewer calls.
    """
    async with servers() as two:
        upload = await begin(two.here, RUN, 1, writer_count=2)
        await send(two.here, upload, (0, 1))
        await finish(two.here, upload, sums(0, 1))
        await send(two.there, upload, (2,), writer=1)
        await finish(two.there, upload, sums(2), writer=1)
        others: list[pb.CheckpointRecord] = []

        async def between() -> None:
            others.append(await commit(two.there, upload))

        two.calls.interrupt(at, between, after=after)
        record = await commit(two.here, upload)

        if not others:
            return None
        assert [record] == others
        assert [stored(n) for n in range(3)] == await committed_chunks(
            two.there, RUN, 1
        )
        assert [] == await damages(two.here, record)
        assert record == await commit(two.there, upload)
        spaces = await two.names(key_spaces(upload))
        return len(spaces), len(await two.names("journal/"))


@pytest.mark.slow
def test_two_commits_at_once_make_one_checkpoint() -> None:
    found = set()
    for after in (False, True):
        for at in itertools.count():
            made = asyncio.run(_commit_while_committed(at, after=after))
            if made is None:
                break
            found.add(made)

    # One has committed before the other begins, or both write their objects.
    assert {1, 2} == {spaces for spaces, _ in found}


@pytest.mark.parametrize(
    "point", [p for p in failpoints.Failpoint if p.startswith("commit.")]
)
async def test_another_server_makes_a_commit_that_one_has_begun(
    point: failpoints.Failpoint,
) -> None:
    async with servers() as two:
        upload = await begin(two.here, RUN, 1, writer_count=2)
        for server, writer, chunks in ((two.here, 0, (0, 1)), (two.there, 1, (2,))):
            await send(server, upload, chunks, writer=writer)
            await finish(server, upload, sums(*chunks), writer=writer)
        with failpoints.arm_points(f"{point}=raise@1"), suppress(StoreError):
            await commit(two.here, upload)
        assert 1 >= len(await two.names(key_spaces(upload)))

        record = await commit(two.there, upload)

        assert [stored(n) for n in range(3)] == await committed_chunks(two.here, RUN, 1)
        assert [] == await damages(two.there, record)
        assert record == await commit(two.here, upload)


# Lost replies


@dataclass
class Tries:
    """Calls that are made at one server, and again at the other one if they fail."""

    two: Servers
    failed: int = 0

    async def make(self, call: Callable[[Store], Coroutine[Any, Any, T]], at: int) -> T:
        """Makes a call first at the server of a number."""
        first, second = self.two.both[at % 2], self.two.both[1 - at % 2]
        try:
            return await call(first)
        except StoreError:
            self.failed += 1
            return await call(second)


async def _save_with(two: Servers, first: int) -> int:
    """Saves a checkpoint of two writers, whose calls alternate between the servers, and
    checks it; returns the number of calls that were repeated.

    Args:
        two: The servers.
        first: Server of the first call.
    """
    tries = Tries(two)
    upload = await tries.make(partial(begin, run=RUN, step=1, writer_count=2), first)
    parts = {0: (0, 1), 1: (2,)}
    for writer, chunks in parts.items():
        sending = partial(send, upload=upload, chunks=chunks, writer=writer)
        await tries.make(sending, first + writer)
    for writer, chunks in parts.items():
        receipt = sums(*chunks)
        finishing = partial(finish, upload=upload, receipt=receipt, writer=writer)
        await tries.make(finishing, first + writer)
    record = await tries.make(partial(commit, upload=upload), first)

    two.calls.follow(no_faults)
    for server in two.both:
        found = await committed_chunks(server, RUN, 1)
        assert [stored(n) for n in range(3)] == found
        # The record is the one that every reader gets, whatever the reply was.
        assert record == await commit(server, upload)
    assert [] == await damages(two.here, record)
    last = await two.here.journal.read(RUN.namespace, record.commit_sequence)
    assert last is not None
    assert (1, upload.name.upload) == (last.step, last.upload)
    return tries.failed


async def _save_at_fault(at: int, fault: Fault, first: int) -> bool:
    """Saves with a fault at a request to the bucket, by number; returns whether there
    were as many."""
    async with servers() as two:
        count = itertools.count()

        def plan(call: Call) -> Fault:
            del call
            return fault if next(count) == at else Fault.NONE

        two.calls.follow(plan)
        await _save_with(two, first)
        return next(count) > at + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "offset"),
    sampled(
        [
            (fault, offset)
            for fault in (Fault.LOST, Fault.RETRIED, Fault.UNAVAILABLE)
            for offset in range(4)
        ],
        every=5,
    ),
)
def test_no_reply_of_the_bucket_that_is_lost_loses_anything(
    fault: Fault, offset: int
) -> None:
    for first in (0, 1):
        at = offset
        while asyncio.run(_save_at_fault(at, fault, first)):
            at += 4
        assert at > 20, "a save has more requests"


REPLIES = ("begin", "write", "finish", "commit")


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    "reply", ["begin@1", "write@1", "write@2", "finish@1", "finish@2", "commit@1"]
)
async def test_no_reply_of_a_server_that_is_lost_loses_anything(
    reply: str, first: int
) -> None:
    call, _, time = reply.partition("@")
    with failpoints.arm_points(f"{call}.before_reply=drop_reply@{time}"):
        async with servers() as two:
            assert 1 == await _save_with(two, first)


async def test_a_save_of_which_every_first_reply_is_lost_loses_nothing() -> None:
    points = ",".join(f"{reply}.before_reply=drop_reply@1" for reply in REPLIES)
    with failpoints.arm_points(points):
        async with servers() as two:
            assert len(REPLIES) == await _save_with(two, 0)


@pytest.mark.emulated
@pytest.mark.slow
def test_two_processes_lose_nothing_if_the_replies_of_the_first_are_lost(
    gcs: FakeGcs, tmp_path: Path
) -> None:
    gcs.clear()
    root = gcs_root()
    both = []
    for number in range(2):
        directory = tmp_path / str(number)
        directory.mkdir()
        both.append(ServerProcess(directory, directory, uri=root))
    lossy, other = both
    points = (f"{reply}.before_reply=drop_reply" for reply in REPLIES)
    lossy.environment[failpoints.VARIABLE] = ",".join(points)
    with ExitStack() as ended:
        for server in both:
            server.start()
            ended.callback(server.kill)
        stubs = [UploadServiceStub(channel(server.address)) for server in both]
        writer = Writer(lossy.address, str(RUN), 1, writers=2)

        def repeated(call: Callable[[], Any]) -> None:
            writer.stub = stubs[0]
            with pytest.raises(grpc.RpcError, match="the reply was lost"):
                call()
            writer.stub = stubs[1]
            call()

        repeated(writer.begin)
        repeated(lambda: writer.write(frame(0, 1), writer=0))
        repeated(lambda: writer.write(frame(2), writer=1))
        repeated(lambda: writer.finish(sums(0, 1), writer=0))
        repeated(lambda: writer.finish(sums(2), writer=1))
        repeated(writer.commit)

        with other.connect() as client:
            ((_, array),) = client.run(str(RUN)).open(1).read(["x"])
            assert WHOLE == array.tobytes()
            assert client.run(str(RUN)).verify(1).ok
