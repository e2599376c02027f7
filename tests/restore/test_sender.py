"""Streams of one checkpoint share its reads, and no stream waits for another."""

import asyncio
import random
from collections.abc import AsyncGenerator, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

import storesvc_client as store
from storesvc.errors import StorageUnavailableError
from storesvc.format.manifests import Manifest
from storesvc.format.names import CheckpointName, RunName
from storesvc.format.wire import FRAME_BYTES, Part
from storesvc.restore import read_scheduler
from storesvc.restore.sender import Sender
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.store import Store
from storesvc_proto.v1 import chunk_service_pb2 as chunk_api

RUN = RunName("tests", "sending")
LEAVES = 24
READ_BUFFER_BYTES = 8 << 20
"""A third of the checkpoint."""


class CountingBucket(TensorStoreBucket):
    """A bucket that counts reads of data files, and may fail once."""

    bytes_read = 0
    fails = False

    async def read_parts(
        self, place: str, start: int, stop: int, parts: Iterable[Part]
    ) -> list[bytes]:
        self.bytes_read += stop - start
        if self.fails:
            self.fails = False
            raise StorageUnavailableError(f"{place}: the storage failed")
        return await super().read_parts(place, start, stop, parts)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("store")
    rng = np.random.default_rng(0)
    with store.connect(root.as_uri()) as client:
        tree = {f"leaf-{i}": rng.bytes(1 << 20) for i in range(LEAVES)}
        arrays = {key: np.frombuffer(data, np.uint8) for key, data in tree.items()}
        client.run(str(RUN)).save(1, arrays).result()
    return root


class Opened:
    """A store, and a checkpoint to send."""

    def __init__(self, bucket: CountingBucket, sender: Sender, manifest: Manifest):
        self.bucket = bucket
        self.sender = sender
        self.manifest = manifest
        self.size = int(manifest.places.length.sum())

    def stream(self, chunks: Sequence[int] = range(LEAVES)) -> AsyncGenerator[bytes]:
        return self.sender.send(RUN, self.manifest, chunks)

    def check(self, responses: Sequence[bytes]) -> None:
        """Asserts that each chunk was received once, its pieces in order."""
        found = dict.fromkeys(range(LEAVES), 0)
        for response in responses:
            frame = chunk_api.ReadChunksResponse.FromString(response).frame
            for chunk, offset, length in zip(
                frame.chunk, frame.offset, frame.length, strict=True
            ):
                assert found[chunk] == offset
                found[chunk] += length
        assert found == dict(enumerate(self.manifest.places.length.tolist()))


async def opened(root: Path, **limits: float) -> Opened:
    bucket = await CountingBucket.open(root.as_uri())
    assert isinstance(bucket, CountingBucket)
    found = await Store.open(bucket)
    record = await found.catalog.checkpoint(CheckpointName(RUN, 1))
    sender = Sender(bucket, buffer_bytes=READ_BUFFER_BYTES, **limits)
    return Opened(bucket, sender, await found.catalog.manifest(RUN, record))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_scheduler, "WINDOW_BYTES", 2 << 20)


async def test_concurrent_streams_share_one_read_of_the_storage(root: Path) -> None:
    async def restore(checkpoint: Opened, seed: int) -> list[bytes]:
        rng, found = random.Random(seed), []
        async for response in checkpoint.stream():
            found.append(response)
            await asyncio.sleep(rng.random() / 1000)
            assert checkpoint.sender._scheduler.size <= READ_BUFFER_BYTES
        return found

    checkpoint = await opened(root)
    for responses in await asyncio.gather(
        *(restore(checkpoint, seed) for seed in range(8))
    ):
        checkpoint.check(responses)
    assert checkpoint.size == checkpoint.bucket.bytes_read
    assert 0 == checkpoint.sender._scheduler.size
    assert not checkpoint.sender._reads


async def test_a_stalled_stream_delays_no_other_and_holds_no_memory(root: Path) -> None:
    checkpoint = await opened(root, eviction_seconds=0.05)
    stalled = [checkpoint.stream() for _ in range(5)]
    began = [[await anext(stream)] for stream in stalled]
    found = await asyncio.wait_for(_all(checkpoint.stream()), 10)
    checkpoint.check(found)
    assert checkpoint.sender._scheduler.size <= READ_BUFFER_BYTES
    for taken, stream in zip(began, stalled, strict=True):
        checkpoint.check(taken + await _all(stream))
    assert 0 == checkpoint.sender._scheduler.size


async def test_streams_of_different_chunks_share_the_buffer(root: Path) -> None:
    checkpoint = await opened(root, eviction_seconds=0.5)
    parts = [range(at, LEAVES, LEAVES) for at in range(LEAVES)]
    found = await asyncio.gather(*(_all(checkpoint.stream(p)) for p in parts))
    checkpoint.check([response for responses in found for response in responses])
    assert checkpoint.size == checkpoint.bucket.bytes_read


async def test_a_late_stream_takes_units_in_memory_first_and_then_the_rest(
    root: Path,
) -> None:
    checkpoint = await opened(root)
    early = checkpoint.stream()
    taken = [await anext(early) for _ in range(LEAVES // 2)]
    late, rest = await asyncio.gather(_all(checkpoint.stream()), _all(early))
    checkpoint.check(taken + rest)
    checkpoint.check(late)
    assert checkpoint.size < checkpoint.bucket.bytes_read < 2 * checkpoint.size


async def test_a_failed_read_fails_the_streams_that_wait_and_is_not_kept(
    root: Path,
) -> None:
    checkpoint = await opened(root)
    checkpoint.bucket.fails = True
    both = await asyncio.gather(
        *(_all(checkpoint.stream()) for _ in range(2)), return_exceptions=True
    )
    assert any(isinstance(found, StorageUnavailableError) for found in both)
    checkpoint.check(await _all(checkpoint.stream()))


async def test_an_abandoned_stream_releases_its_memory(root: Path) -> None:
    checkpoint = await opened(root)
    stream = checkpoint.stream()
    assert len(await anext(stream)) <= FRAME_BYTES + 100
    await stream.aclose()
    assert 0 == checkpoint.sender._scheduler.size
    assert not checkpoint.sender._reads
    assert [] == await _all(checkpoint.stream([]))


async def _all(stream: AsyncGenerator[bytes]) -> list[bytes]:
    return [response async for response in stream]
