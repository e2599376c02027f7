"""The store against a model: any order of calls, of several uploads and steps,
with servers that restart in between."""

import asyncio
import tempfile
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from storesvc import server, services
from storesvc.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ChunksIncompleteError,
    InvalidChunkError,
    RunNotFoundError,
    StoreError,
    UploadNotFoundError,
    UploadSupersededError,
    WriterUnfinishedError,
)
from storesvc.format.names import CheckpointName, RunName, UploadName
from storesvc.format.trees import pack_leaves
from storesvc.kvbucket import KvBucket
from storesvc.uploads import NewUpload
from storesvc_proto.v1 import bucket_pb2
from tests.contract import frame, sums, tree_of

RUN = RunName("tests", "model")
CHUNKS = 3
STEPS = st.integers(0, 2)
T = TypeVar("T")


@dataclass(eq=False)
class ModelUpload:
    """What the model knows of an upload."""

    name: UploadName
    step: int
    epoch: int
    state: str = "live"  # absent, live, superseded, aborted, committed
    stored: set[int] = field(default_factory=set)
    receipt: set[int] | None = None
    rewritten: bool = False


class StoreMachine(RuleBasedStateMachine):
    """Drives a store and the model with the same calls."""

    uploads = Bundle("uploads")

    def __init__(self) -> None:
        super().__init__()
        self._directory = tempfile.TemporaryDirectory(prefix="storesvc-model-")
        self._loop = asyncio.new_event_loop()
        self._committed: dict[int, ModelUpload] = {}
        self._owner: dict[int, ModelUpload] = {}

    def teardown(self) -> None:
        """Closes what is open."""
        self._loop.close()
        self._directory.cleanup()

    def _do(self, coroutine: Any) -> Any:
        return self._loop.run_until_complete(coroutine)

    def _refusal(self, coroutine: Any) -> type[StoreError] | None:
        try:
            self._do(coroutine)
        except StoreError as e:
            return type(e)
        return None

    @initialize()
    def start(self) -> None:
        """The first process opens a fresh root."""
        self.restart()

    @rule()
    def restart(self) -> None:
        """A new process opens the same root."""
        root = Path(self._directory.name).as_uri()
        bucket = self._do(KvBucket.open(root))
        self._store: services.Store = self._do(server.store_over(bucket))

    @rule(target=uploads, step=STEPS)
    def begin(self, step: int) -> ModelUpload:
        name = UploadName(RUN, uuid.uuid4().hex)
        began = self._begin(name, step)
        if step in self._committed:
            assert CheckpointExistsError is self._refusal(began)
            return ModelUpload(name, step, 0, "absent")
        record: bucket_pb2.UploadRecord = self._do(began)
        before = self._owner.get(step)
        assert record.epoch == (before.epoch + 1 if before else 1)
        if before is not None and before.state == "live":
            before.state = "superseded"
        upload = ModelUpload(name, step, record.epoch)
        self._owner[step] = upload
        assert record.create_time.ToDatetime(UTC) <= datetime.now(UTC)
        return upload

    def _expected(self, upload: ModelUpload) -> type[StoreError] | None:
        """The refusal of any call of an upload that is not live."""
        if upload.state == "absent":
            return UploadNotFoundError
        if self._owner[upload.step] is upload:
            return UploadNotFoundError if upload.state == "aborted" else None
        if upload.step in self._committed:
            return CheckpointExistsError
        return UploadSupersededError

    def _begin(self, name: UploadName, step: int) -> Any:
        new = NewUpload(
            step=step,
            writer_count=1,
            labels={},
            metrics={},
            lease=timedelta(minutes=1),
            body=str(step).encode(),
        )
        table = b"".join(pack_leaves(tree_of(CHUNKS)))
        return self._store.uploads.begin(name, new, table)

    @rule(upload=uploads)
    def begin_again(self, upload: ModelUpload) -> None:
        """The same request once more: never a second life."""
        if upload.state == "absent":
            return
        begun = self._begin(upload.name, upload.step)
        if upload.state in ("live", "committed"):
            assert upload.epoch == self._do(begun).epoch
        elif upload.step in self._committed:
            assert CheckpointExistsError is self._refusal(begun)
        else:
            assert UploadSupersededError is self._refusal(begun)

    @rule(upload=uploads, chunks=st.sets(st.integers(0, CHUNKS - 1), min_size=1))
    def write(self, upload: ModelUpload, chunks: set[int]) -> None:
        async def call() -> None:
            opened = await self._store.uploads.open(upload.name, upload.epoch)

            async def frames() -> Any:
                yield frame(*chunks)

            async for _ in self._store.receiver.write(opened, 0, frames()):
                pass

        refusal = self._refusal(call())
        if upload.state == "committed":
            assert CheckpointExistsError is refusal
            return
        assert self._expected(upload) == refusal
        if refusal is None:
            upload.stored |= chunks
            upload.rewritten = True

    @rule(upload=uploads, chunks=st.sets(st.integers(0, CHUNKS - 1)))
    def finish(self, upload: ModelUpload, chunks: set[int]) -> None:
        async def call() -> None:
            opened = await self._store.uploads.open(upload.name, upload.epoch)
            await self._store.receiver.finish(opened, 0, sums(*sorted(chunks)))

        if upload.state == "committed":
            assert CheckpointExistsError is self._refusal(call())
            return
        expected = self._expected(upload)
        if expected is None and len(chunks) < len(upload.stored):
            expected = InvalidChunkError
        elif expected is None and not chunks <= upload.stored:
            expected = ChunksIncompleteError
        assert expected == self._refusal(call())
        if expected is None:
            upload.receipt = chunks
            upload.rewritten = False

    @rule(upload=uploads)
    def commit(self, upload: ModelUpload) -> None:
        expected = self._expected(upload)
        if expected is None and upload.state == "live":
            if upload.receipt is None:
                expected = WriterUnfinishedError
            elif len(upload.receipt) < CHUNKS:
                expected = ChunksIncompleteError
            elif upload.rewritten:  # since it finished: finish again
                expected = WriterUnfinishedError
        call = self._store.commits.commit(upload.name, upload.epoch)
        assert expected == self._refusal(call)
        if expected is None and upload.state == "live":
            upload.state = "committed"
            self._committed[upload.step] = upload

    @rule(upload=uploads)
    def abort(self, upload: ModelUpload) -> None:
        refusal = self._refusal(self._store.uploads.abort(upload.name))
        if upload.state == "committed":
            assert CheckpointExistsError is refusal
            return
        assert refusal is None
        if upload.state == "live":
            upload.state = "aborted"

    @invariant()
    def the_catalogue_is_the_models(self) -> None:
        catalogue = self._store.catalogue
        if not self._committed:
            latest = catalogue.checkpoint(CheckpointName(RUN, "latest"))
            assert RunNotFoundError is self._refusal(latest)
            return
        listed = self._do(catalogue.checkpoints(RUN, before=None, limit=10))
        assert sorted(self._committed, reverse=True) == [c.step for c in listed]
        for step in range(3):
            found = catalogue.checkpoint(CheckpointName(RUN, step))
            if step not in self._committed:
                assert CheckpointNotFoundError is self._refusal(found)
                continue
            record = self._do(found)
            assert self._committed[step].name.upload == record.upload
            manifest = self._do(catalogue.manifest(RUN, record))
            frames = self._do(self._frames(manifest))
            assert b"".join(f.data for f in frames) == frame(0, 1, 2).data

    async def _frames(self, manifest: Any) -> list[Any]:
        # in the order of the storage, so put in that of the chunks
        found = self._store.sender.send(RUN, manifest, range(CHUNKS))
        pieces = [f async for f in found]
        rows = [
            (chunk, f.data[i * 1004 : (i + 1) * 1004])
            for f in pieces
            for i, chunk in enumerate(f.chunk)
        ]
        return [type(pieces[0])(chunk=[c], data=data) for c, data in sorted(rows)]


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
