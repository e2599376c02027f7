"""A process that saves and collects in a bucket, with clocks that a test controls."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from storesvc.format.chunks import ChunkLocations, pack_placed
from storesvc.format.layout import RunPaths
from storesvc.format.names import CheckpointName, RunName, TagName, UploadName
from storesvc.format.trees import pack_leaves
from storesvc.gc.collector import Progress
from storesvc.save.commit import WriterEnd
from storesvc.save.uploads import DEFAULT_LEASE, NewUpload
from storesvc.store import Store
from storesvc_proto.v1 import chunk_service_pb2 as chunk_api
from tests.support.contract import LENGTH, frame, mixed_sums, received, tree_of
from tests.support.faulty_bucket import DiedError, FaultyBucket

RUN = RunName("tests", "collection")
PLACES = RunPaths(RUN)
CHUNKS = 3
NOW = timedelta(0)


class Hands:
    """Two clocks that a test controls."""

    def __init__(self) -> None:
        self.time = datetime(2030, 1, 1, tzinfo=UTC)
        self.seconds = 0.0

    def now(self) -> datetime:
        """Returns the time of day."""
        return self.time

    def elapsed(self) -> float:
        """Returns seconds."""
        return self.seconds

    def turn(self, by: timedelta) -> None:
        """Advances both clocks."""
        self.time += by
        self.seconds += by.total_seconds()


@dataclass
class Process:
    """A process that serves a bucket, and the content of its checkpoints."""

    bucket: FaultyBucket
    clock: Hands
    store: Store
    contents: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Version of each chunk, by step."""

    @classmethod
    async def over(cls, bucket: FaultyBucket, clock: Hands | None = None) -> "Process":
        clock = clock or Hands()
        return cls(bucket, clock, await Store.open(bucket, clock=clock))

    async def beside(self, clock: Hands | None = None) -> "Process":
        """Returns another process on the same bucket."""
        other = await Process.over(self.bucket.reopened(), clock or self.clock)
        other.contents = self.contents
        return other

    async def begin(
        self, step: int, *, base: int | None = None, upload: str = ""
    ) -> UploadName:
        name = UploadName(RUN, upload or uuid.uuid4().hex)
        new = NewUpload(
            step=step,
            writer_count=1,
            labels={},
            metrics={},
            lease=DEFAULT_LEASE,
            base=None if base is None else CheckpointName(RUN, base),
            body=str(step).encode(),
        )
        table = b"".join(pack_leaves(tree_of(CHUNKS)))
        await self.store.uploads.begin(name, new, table)
        return name

    async def send(self, name: UploadName, versions: Mapping[int, int]) -> None:
        opened = await self._open(name)

        async def frames() -> Any:
            for chunk, version in versions.items():
                yield received(frame(chunk, version=version))

        async for _ in self.store.receiver.write(opened, 0, frames()):
            pass

    async def finish(self, name: UploadName, content: Sequence[int]) -> None:
        opened = await self._open(name)
        sums = mixed_sums(dict(enumerate(content)))
        receipts = self.store.receipts
        staged = receipts.staged(name, 0, chunk_count=len(sums))
        await receipts.finish(opened, 0, sums, staged)

    async def commit(self, name: UploadName, content: Sequence[int]) -> None:
        record = await self.store.uploads.record(name)
        await self.store.commits.commit(name, record.epoch)
        self.contents[record.step] = tuple(content)

    async def save(
        self, step: int, content: Sequence[int] = (0, 0, 0), *, base: int | None = None
    ) -> UploadName:
        """Saves a step; with a base, sends only the different chunks."""
        name = await self.begin(step, base=base)
        before = self.contents[base] if base is not None else (None,) * CHUNKS
        versions = {
            chunk: version
            for chunk, version in enumerate(content)
            if version != before[chunk]
        }
        if versions:
            await self.send(name, versions)
        await self.finish(name, content)
        await self.commit(name, content)
        return name

    async def create(
        self, step: int, content: Sequence[int] = (0, 0, 0), *, upload: str = ""
    ) -> UploadName:
        """Saves a step in one call; `upload` is the id of an earlier try."""
        name = UploadName(RUN, upload or uuid.uuid4().hex)
        new = NewUpload(
            step=step,
            writer_count=1,
            labels={},
            metrics={},
            lease=DEFAULT_LEASE,
            base=None,
            body=str(step).encode(),
        )

        async def reserve(_: int) -> None:
            pass

        data = b"".join(frame(c, version=v).data for c, v in enumerate(content))
        table = b"".join(pack_leaves(tree_of(CHUNKS)))
        await self.store.commits.create(
            name, new, table, data, reserve=reserve, report=None
        )
        self.contents[step] = tuple(content)
        return name

    async def end(
        self, step: int, content: Sequence[int] = (0, 0, 0), *, upload: str = ""
    ) -> UploadName:
        """Saves a step as a direct writer that ends in the call that commits."""
        name = await self.begin(step, upload=upload)
        file = f"{name.upload}/{uuid.uuid4().hex}"
        data = b"".join(frame(c, version=v).data for c, v in enumerate(content))
        await self.bucket.write_new(PLACES.data_file(file), [data])
        record = await self.store.uploads.record(name)
        end = end_of(file, content)
        await self.store.commits.commit(name, record.epoch, end)
        self.contents[step] = tuple(content)
        return name

    async def delete(self, step: int, *, purge_delay: timedelta = NOW) -> None:
        await self.store.lifecycle.delete(
            RUN, step, purge_delay=purge_delay, etag="", write_id=str(uuid.uuid4())
        )

    async def tag(self, step: int) -> None:
        """Points the tag "best" to a checkpoint."""
        await self.store.tags.set(
            TagName(RUN, "best"),
            CheckpointName(RUN, step),
            protected=None,
            etag="",
            write_id=str(uuid.uuid4()),
        )

    async def dies_in_collection(self) -> bool:
        """Collects, and returns whether the process died on the way."""
        try:
            await self.collect()
        except DiedError:
            return True
        return False

    async def collect(self, *, grace: timedelta = NOW) -> Progress:
        progress = [p async for p in self.store.collector.collect(RUN, grace=grace)]
        assert [False] * (len(progress) - 1) + [True] == [p.is_done for p in progress]
        return progress[-1]

    async def preview(self, *, grace: timedelta = NOW) -> Progress:
        progress = [p async for p in self.store.collector.preview(RUN, grace=grace)]
        return progress[-1]

    async def check(self, *, with_deleted: bool = True) -> None:
        """Asserts that every checkpoint has the saved content, in both views.

        Args:
            with_deleted: Whether deleted ones have it too; a collector that runs at the
                same time may be purging them.
        """
        found = await self.store.catalog.checkpoints(
            RUN, before=None, limit=100, show_deleted=with_deleted
        )
        for record in found:
            content = self.contents[record.step]
            manifest = await self.store.catalog.manifest(RUN, record)
            sent = self.store.sender.send(RUN, manifest, range(CHUNKS))
            pieces = {
                chunk: f.data[at * 1004 : (at + 1) * 1004]
                async for response in sent
                for f in (chunk_api.ReadChunksResponse.FromString(response).frame,)
                for at, chunk in enumerate(f.chunk)
            }
            expected = [frame(c, version=v).data for c, v in enumerate(content)]
            assert expected == [pieces[chunk] for chunk in range(CHUNKS)]
            space = self.bucket.key_space(
                path=PLACES.key_space(record.upload, record.attempt), pool=PLACES.pool
            )
            keys = list(map(tree_of(CHUNKS).chunk_key, range(CHUNKS)))
            reads = [space.opened().read(key) for key in keys]
            values = [(await read).value for read in reads]
            assert expected == values
            assert await self.bucket.read(
                PLACES.manifest(record.upload, record.manifest_digest)
            )

    async def objects(self, upload: UploadName) -> list[str]:
        """Returns the objects with an upload's id in the name, except its record."""
        listed = await self.bucket.list(PLACES.root)
        found = [p for p in listed if PLACES.parse_upload(p) == upload.upload]
        return [p for p in found if p != PLACES.upload(upload.upload)]

    async def steps(self) -> list[int]:
        found = await self.store.catalog.checkpoints(RUN, before=None, limit=100)
        return [record.step for record in found]

    async def _open(self, name: UploadName) -> Any:
        record = await self.store.uploads.record(name)
        return await self.store.uploads.open(name, record.epoch)


def end_of(file: str, content: Sequence[int]) -> WriterEnd:
    """Returns the end of a writer with all chunks in one data file."""

    async def reserve(*_: int) -> None:
        pass

    sums = mixed_sums(dict(enumerate(content)))
    rows = [(file, LENGTH * chunk, LENGTH) for chunk in range(len(content))]
    places = ChunkLocations.of_rows(rows)
    (placed,) = pack_placed(sums, places, with_ordinals=True)
    return WriterEnd(sums=sums, placed=placed, report=None, reserve=reserve)


async def started(root: str = "memory://") -> Process:
    return await Process.over(await FaultyBucket.faulty(root))


async def history(process: Process) -> None:
    """Makes a run with all kinds of garbage, and of objects that must stay."""
    await process.save(1)
    await process.save(2, (1, 0, 0), base=1)
    await process.save(3, (1, 2, 0), base=2)
    cut_off = await process.begin(4, base=3)
    await process.send(cut_off, {0: 2})
    successor = await process.begin(4, base=3)
    await process.send(successor, {1: 2})
    aborted = await process.begin(5)
    await process.send(aborted, {0: 1})
    await process.store.uploads.abort(aborted)
    await process.begin(6, base=1)
    await process.delete(1)
    await process.delete(2)
