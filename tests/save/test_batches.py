"""A batch stays as small as it may be, wherever the frames of a client end."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from storesvc.errors import InvalidChunkError
from storesvc.format.names import RunName
from storesvc.format.wire import Frame
from storesvc.save import batches
from storesvc.save.receiver import PARTS_AHEAD
from storesvc.save.uploads import OpenUpload
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.store import Store
from storesvc_proto.v1 import upload_service_pb2 as api
from tests.save.uploads_in_process import begin, committed_chunks, finish
from tests.support.contract import LENGTH, received, stored, sums

RUN = RunName("tests", "batches")
CHUNKS = 40
HALF = LENGTH // 2


def spanning(chunk: int, last: int = CHUNKS - 1) -> Frame:
    """Returns the end of a chunk, and the beginning of the next one."""
    parts = [(chunk, HALF, stored(chunk)[HALF:])]
    if chunk < last:
        parts.append((chunk + 1, 0, stored(chunk + 1)[:HALF]))
    numbers, offsets, data = zip(*parts, strict=True)
    return received(
        api.ChunkFrame(
            chunk=numbers,
            offset=offsets,
            length=list(map(len, data)),
            data=b"".join(data),
        )
    )


async def opened(root: str) -> tuple[Store, OpenUpload]:
    store = await Store.open(await TensorStoreBucket.open(root))
    upload = await begin(store, RUN, 1, chunks=CHUNKS)
    return store, await store.uploads.open(upload.name, upload.record.epoch)


@pytest.mark.parametrize("root", ["memory://", "file://"])
async def test_a_batch_ends_although_no_frame_ends_with_a_chunk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, root: str
) -> None:
    monkeypatch.setattr(batches, "BATCH_BYTES", 4 * LENGTH)
    store, upload = await opened(root if root == "memory://" else tmp_path.as_uri())

    async def frames() -> AsyncIterator[Frame]:
        beginning = api.ChunkFrame(
            chunk=[0], offset=[0], length=[HALF], data=stored(0)[:HALF]
        )
        yield received(beginning)
        for chunk in range(CHUNKS):
            yield spanning(chunk)

    durable = [n async for n in store.receiver.write(upload, 0, frames())]

    # A chunk counts with some bytes more than it has.
    assert len(durable) >= CHUNKS / 5
    assert CHUNKS == durable[-1]
    await finish(store, upload, sums(*range(CHUNKS)))
    await store.commits.commit(upload.name, upload.record.epoch)
    expected = [stored(chunk) for chunk in range(CHUNKS)]
    assert expected == await committed_chunks(store, RUN, 1)


async def test_a_frame_that_breaks_off_a_chunk_is_rejected_in_a_full_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "BATCH_BYTES", 1)
    store, upload = await opened("memory://")

    async def frames() -> AsyncIterator[Frame]:
        data = stored(0)[:HALF]
        yield received(api.ChunkFrame(chunk=[0], offset=[0], length=[HALF], data=data))
        pieces = stored(0)[HALF : HALF + 10] + stored(1)
        lengths, numbers, offsets = [10, LENGTH], [0, 1], [HALF, 0]
        yield received(
            api.ChunkFrame(chunk=numbers, offset=offsets, length=lengths, data=pieces)
        )

    with pytest.raises(InvalidChunkError, match="expected the rest of"):
        async for _ in store.receiver.write(upload, 0, frames()):
            pass


async def test_a_stream_that_waits_for_its_turn_holds_few_frames() -> None:
    store, upload = await opened("memory://")
    admission = store.receiver.admission
    held = [
        await admission.acquire(peer="other", namespace="other", recall=lambda: None)
        for _ in range(admission.free)
    ]
    arrived = 0

    async def frames() -> AsyncIterator[Frame]:
        nonlocal arrived
        for chunk in range(CHUNKS):
            arrived += 1
            yield received(
                api.ChunkFrame(
                    chunk=[chunk], offset=[0], length=[LENGTH], data=stored(chunk)
                )
            )

    durable = store.receiver.write(upload, 0, frames())
    first = asyncio.ensure_future(anext(durable))
    await asyncio.sleep(0.1)

    assert (1, PARTS_AHEAD) == (admission.waiting, arrived)
    for permit in held:
        admission.release(permit)
    assert CHUNKS == [await first, *[count async for count in durable]][-1]
