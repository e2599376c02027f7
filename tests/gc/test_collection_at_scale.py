"""Collection of runs with many data files: memory, and lists that change."""

import itertools
import tracemalloc
import uuid
from collections.abc import Awaitable, Callable

import pytest

from storesvc.format.names import UploadName
from storesvc.storage import bucket as buckets
from tests.support.collecting_process import PLACES, RUN, Process
from tests.support.crowded_bucket import CrowdedBucket, name_all
from tests.support.faulty_bucket import FaultyBucket

MIB = 1 << 20
UPLOADS = 10


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        (50_000, 6 * MIB),
        pytest.param(1_000_000, 64 * MIB, marks=[pytest.mark.slow, pytest.mark.soak]),
    ],
)
async def test_memory_does_not_grow_with_data_files(
    files: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, bucket = await crowded()
    bucket.files = files // UPLOADS
    name_all(monkeypatch, bucket.files)

    tracemalloc.start()
    try:
        progress = await process.collect()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert "" == progress.postponed
    assert 0 == progress.garbage_objects
    assert peak < limit


async def test_files_that_no_table_names_are_deleted_without_a_list_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One upload is gone, of one a table names a half, of the others all is named."""
    process, bucket = await crowded()
    await process.delete(0)
    (second,) = await process.store.catalog.checkpoints(RUN, before=2, limit=1)
    name_all(monkeypatch, 3000, {second.upload: 1500})
    bucket.files = 3000
    bucket.deleted = 0

    progress = await process.collect()

    assert 4500 <= progress.garbage_objects <= 4520
    assert progress.deleted_objects == progress.garbage_objects
    assert 4500 <= bucket.deleted <= 4530


async def crowded() -> tuple[Process, CrowdedBucket]:
    bucket = await CrowdedBucket.faulty("memory://")
    assert isinstance(bucket, CrowdedBucket)
    process = await Process.over(bucket)
    for step in range(UPLOADS):
        await process.save(step)
    await process.collect()
    return process, bucket


class PagedBucket(FaultyBucket):
    """A bucket that is listed two paths at a time, as a bucket with thousands is."""

    pages_read = 0
    cut: int | None = None
    change: Callable[[], Awaitable[None]] | None = None
    """Called once ``cut`` pages were read."""

    async def list(
        self, prefix: str, *, after: str = "", limit: int | None = None
    ) -> list[str]:
        page = (await super().list(prefix, after=after))[:limit]
        if limit is not None:
            self.pages_read += 1
            if self.pages_read == self.cut and self.change is not None:
                await self.change()
        return page


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "NAMES_A_PAGE", 2)


@pytest.mark.slow
@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("is_purged", [False, True])
async def test_an_upload_that_commits_while_the_files_are_listed_loses_nothing(
    *, is_purged: bool
) -> None:
    for cut in itertools.count(1):
        bucket = await PagedBucket.faulty("memory://")
        assert isinstance(bucket, PagedBucket)
        process = await Process.over(bucket)
        other = await process.beside()
        await other.save(1)
        name = await other.begin(2, base=1)
        await other.send(name, {0: 2})
        bucket.cut = cut

        async def change(other: Process = other, name: UploadName = name) -> None:
            await other.send(name, {1: 2})
            await other.finish(name, (2, 2, 0))
            await other.commit(name, (2, 2, 0))
            if is_purged:
                await other.delete(1)
                await other.store.lifecycle.purge(RUN, 1, etag="")
            await other.save(3, (1, 1, 1))

        bucket.change = change
        await process.collect()
        if bucket.pages_read < cut:
            break
        await other.check()
        bucket.cut = None
        await process.collect()
        await other.check()
        assert 0 == (await process.collect()).garbage_objects
    assert cut > 5


@pytest.mark.usefixtures("small_pages")
async def test_a_file_that_appears_in_the_range_of_an_ended_upload_goes_with_it() -> (
    None
):
    bucket = await PagedBucket.faulty("memory://")
    assert isinstance(bucket, PagedBucket)
    process = await Process.over(bucket)
    name = await process.save(1)
    await process.save(2)
    await process.delete(1)
    await process.collect()
    late = f"{PLACES.pool}{PLACES.data_prefix(name.upload)}{uuid.uuid4().hex}"

    await process.bucket.write(late, b"late")
    await process.collect()

    assert late not in await process.bucket.list(PLACES.root)
    await process.check()
