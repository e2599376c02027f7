"""What a server over a bucket presumes without a request, and that it does so for a
minute only."""

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import pytest

from storesvc.errors import InvalidChunkError, UploadSupersededError
from storesvc.format.names import RunName
from storesvc.save.uploads import OpenUpload
from storesvc.store import Store
from tests.catalog.test_journal import HandClock
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

RUN = RunName("tests", "presumptions")
MINUTE = timedelta(seconds=60)
LONGER = timedelta(seconds=60.5)
SECONDS = 30.0

T = TypeVar("T")


@dataclass
class Served:
    """A server whose clock stands still, another one, and an upload."""

    clock: HandClock
    bucket: FaultyBucket
    """The bucket of the first server."""
    here: Store
    there: Store
    upload: OpenUpload
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Requests of the first server to the bucket: method and path."""

    async def finish(self) -> None:
        await finish(self.here, self.upload, sums(0, 1, 2))

    async def take_over(self) -> OpenUpload:
        """Begins another upload of the step at the other server."""
        return await begin(self.there, RUN, 1, request=2)

    async def manifests(self) -> list[str]:
        """Returns the manifests of the upload."""
        places, upload = self.upload.places, self.upload.name.upload
        prefix = places.manifest(upload, b"").removesuffix(".binpb")
        return await self.there.bucket.list(prefix)


@asynccontextmanager
async def stored_upload() -> AsyncIterator[Served]:
    """Yields an upload whose chunks are stored."""
    bucket, clock = await FaultyBucket.faulty("memory://"), HandClock()
    here = await Store.open(bucket, clock=clock)
    there = await Store.open(bucket.reopened(), clock=clock)
    upload = await begin(here, RUN, 1)
    await send(here, upload, (0, 1, 2))
    served = Served(clock, bucket, here, there, upload)

    def plan(call: Call) -> Fault:
        served.asked.append((call.operation, call.path))
        # In a bucket, all reads take as long.
        return Fault.LATE if call.path == upload.places.checkpoint(1) else Fault.NONE

    bucket.calls.follow(plan)
    yield served


class WaitingCalls(Calls):
    """Calls of a bucket, of which those for one path wait for something first."""

    def __init__(self, path: str, wait: Callable[[], Awaitable[object]]) -> None:
        super().__init__(no_faults)
        self._path, self._wait = path, wait

    async def make(
        self, operation: str, path: str, call: Coroutine[Any, Any, T], **how: bool
    ) -> T:
        if path == self._path:
            await self._wait()
        return await super().make(operation, path, call, **how)


@pytest.mark.parametrize(("later", "is_asked"), [(MINUTE, False), (LONGER, True)])
async def test_the_bucket_is_asked_for_what_was_stored_if_that_was_over_a_minute_ago(
    later: timedelta, *, is_asked: bool
) -> None:
    async with stored_upload() as served:
        served.clock.turn(later)
        await served.finish()

        listed = [path for how, path in served.asked if how == "list"]
        checked = [path for how, path in served.asked if how == "read_range"]
        staging = served.upload.places.staging(served.upload.name.upload, 0)
        assert ([staging] if is_asked else []) == listed
        assert is_asked == bool(checked)
        await served.here.commits.commit(served.upload.name, served.upload.record.epoch)
        assert [stored(n) for n in range(3)] == await committed_chunks(
            served.there, RUN, 1
        )


async def test_a_data_file_that_is_gone_is_found_after_a_minute() -> None:
    async with stored_upload() as served:
        await served.here.bucket.delete_below(served.upload.places.pool)
        served.clock.turn(LONGER)

        with pytest.raises(InvalidChunkError, match="send it again, then finish"):
            await served.finish()

        await send(served.here, served.upload, (0, 1, 2))
        await served.finish()


@pytest.mark.parametrize(("later", "is_presumed"), [(MINUTE, True), (LONGER, False)])
async def test_work_of_an_upload_that_has_ended_is_not_begun_after_a_minute(
    later: timedelta, *, is_presumed: bool
) -> None:
    async with stored_upload() as served:
        await served.take_over()
        served.clock.turn(later)
        entered: list[str] = []

        with pytest.raises(UploadSupersededError):
            async with served.here.uploads.opened(
                served.upload.name, served.upload.record.epoch
            ) as opened:
                entered.append(opened.name.upload)

        assert is_presumed == bool(entered)


async def test_what_a_commit_without_its_slot_prepared_is_collected() -> None:
    async with stored_upload() as served:
        await served.finish()
        other = await served.take_over()
        # The read of the slot takes as long as what is prepared early.
        served.bucket.calls = WaitingCalls(
            served.upload.places.checkpoint(1),
            partial(becomes_true, served.manifests, seconds=SECONDS),
        )

        with pytest.raises(UploadSupersededError):
            await served.here.commits.commit(
                served.upload.name, served.upload.record.epoch
            )
        assert await served.manifests()

        await finish(served.there, other, sums(0, 1, 2))
        await served.there.commits.commit(other.name, other.record.epoch)
        async for progress in served.there.collector.collect(RUN, grace=timedelta(0)):
            assert not progress.postponed
        assert [] == await served.manifests()
        assert [stored(n) for n in range(3)] == await committed_chunks(
            served.there, RUN, 1
        )
