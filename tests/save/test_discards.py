"""A server answers a commit before it deletes what the upload left."""

import asyncio
from typing import Any

from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName, UploadName
from storesvc.save.commit import MAX_DEFERRED, Discards
from storesvc.storage.object_bucket import TensorStoreBucket

RUN = RunName.parse("tests/discards")


class HeldBucket(TensorStoreBucket):
    """Deletes only once it is released."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.released = asyncio.Event()

    async def delete_below(self, prefix: str) -> None:
        await self.released.wait()
        await super().delete_below(prefix)


async def opened(uploads: int) -> tuple[HeldBucket, list[UploadName]]:
    """Returns a bucket with the staging of some uploads."""
    bucket = await HeldBucket.open("memory://")
    names = [UploadName(RUN, f"{number:032x}") for number in range(uploads)]
    for name in names:
        for prefix in prefixes(name):
            await bucket.write(f"{prefix}x.bin", b"left")
    return bucket, names


def prefixes(name: UploadName) -> tuple[str, str]:
    places = RunPaths(name.run)
    return places.staging_prefix(name.upload), places.upload_parts(name.upload)


async def left(bucket: TensorStoreBucket) -> int:
    return len(await bucket.list(RunPaths(RUN).root))


async def test_a_deletion_is_waited_for_unless_it_is_deferred() -> None:
    bucket, (name,) = await opened(1)
    deletion = asyncio.create_task(Discards(bucket).delete(name))
    assert 2 == await left(bucket)
    assert not deletion.done()
    bucket.released.set()
    await deletion
    assert 0 == await left(bucket)


async def test_a_deferred_deletion_is_not_waited_for_and_drained() -> None:
    bucket, (name,) = await opened(1)
    discards = Discards(bucket)
    discards.defer()
    await discards.delete(name)
    assert 2 == await left(bucket)

    await discards.drain(0.01)  # gives up
    assert 2 == await left(bucket)
    bucket.released.set()
    await discards.drain(60)
    assert 0 == await left(bucket)


async def test_a_commit_waits_for_its_own_deletion_if_too_many_are_left() -> None:
    bucket, names = await opened(MAX_DEFERRED + 1)
    discards = Discards(bucket)
    discards.defer()
    for name in names[:-1]:
        await discards.delete(name)
    last = asyncio.create_task(discards.delete(names[-1]))
    assert 2 * len(names) == await left(bucket)
    assert not last.done()
    bucket.released.set()
    await last
    await discards.drain(60)
    assert 0 == await left(bucket)
