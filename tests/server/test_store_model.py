"""Compares the store with a model, under random sequences of calls and faults.

The calls belong to several uploads and steps. The bucket fails, loses responses, and
outlives the processes that use it. Each call may meet a fault at any of its changes. If
the storage did not answer, or the process died, the same request is retried, as a
client does, and must return the result of an undisturbed call. Garbage collection runs
between and during other calls. Hypothesis prints the steps that reproduce a failure.
"""

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, ClassVar, Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from storesvc.errors import (
    CheckpointDeletedError,
    CheckpointExistsError,
    CheckpointInUseError,
    CheckpointNotDeletedError,
    CheckpointNotFoundError,
    RunNotFoundError,
    StorageUnavailableError,
    StoreError,
    TagNotFoundError,
    UploadNotFoundError,
    UploadSupersededError,
)
from storesvc.format.layout import RunPaths
from storesvc.format.names import CheckpointName, HoldName, RunName, TagName, UploadName
from storesvc.format.trees import pack_leaves
from storesvc.save.uploads import NewUpload
from storesvc.store import Store
from storesvc.watch.watcher import Watcher, WatchLimits
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import chunk_service_pb2 as chunk_api
from tests.conftest import GIVEN_BUCKET, gcs_root, s3_root
from tests.fake_s3 import FakeS3
from tests.server.store_model import CHUNKS, Checkpoint, Hold, Model, Upload
from tests.support.contract import elements, frame, mixed_sums, received, tree_of
from tests.support.examples import examples
from tests.support.faulty_bucket import (
    DiedError,
    Fault,
    FaultyBucket,
    at_change,
    no_faults,
    ordered_calls,
)

RUN: Final = RunName("tests", "model")
LEASE: Final = timedelta(minutes=10)
DAY: Final = 86400.0
ABSENT: Final = (RunNotFoundError, CheckpointNotFoundError)
ENDED: Final = (UploadNotFoundError, UploadSupersededError, CheckpointExistsError)

LAST_STEP: Final = 3
STEPS = st.integers(0, LAST_STEP)
VERSIONS = st.integers(0, 1)
CONTENTS = st.tuples(*[VERSIONS] * CHUNKS)
TAGS = st.sampled_from(["best", "live"])


async def collect(store: Store, grace: timedelta) -> Any:
    """Collects the run; returns the last progress report."""
    reported = [p async for p in store.collector.collect(RUN, grace=grace)]
    if reported[-1].is_unavailable:
        raise StorageUnavailableError(
            reported[-1].postponed
        )  # made again, as by a caller
    return reported[-1]


class FakeClock:
    """Clocks that a test controls."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.offset = timedelta()

    def now(self) -> datetime:
        moment = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.seconds)
        return moment + self.offset

    def elapsed(self) -> float:
        return self.seconds


@dataclass(frozen=True)
class Trouble:
    """Fault of a call."""

    fault: Fault
    at: int
    """Number of the change with the fault."""
    is_concurrent: bool = False
    """True if another process collects garbage during the call."""


TROUBLES = st.one_of(
    st.just(Trouble(Fault.NONE, 0)),
    st.builds(
        Trouble,
        st.sampled_from(
            [Fault.UNAVAILABLE, Fault.LOST, Fault.RETRIED, Fault.DEATH, Fault.LATE]
        ),
        st.integers(0, 8),
        st.booleans(),
    ),
    st.just(Trouble(Fault.LATE, 0, is_concurrent=True)),
)


class StoreMachine(RuleBasedStateMachine):
    """Drives a store and the model with the same calls."""

    uploads = Bundle("uploads")

    def root(self) -> str:
        """Returns the root of a new storage."""
        return "memory://"

    @initialize()
    def start(self) -> None:
        """Opens a fresh storage."""
        self._loop = asyncio.new_event_loop()
        self._order = ordered_calls() if self.root() == "memory://" else nullcontext()
        self._order.__enter__()
        self._clock = FakeClock()
        self._model = Model()
        self._server = 0
        self._bucket: FaultyBucket = self._do(FaultyBucket.faulty(self.root()))
        self.restart()
        # a second process, which only collects, and keeps its state between passes
        opening = Store.open(self._bucket.reopened(), clock=self._clock)
        self._other: Store = self._do(opening)
        self._token, self._reported = "", list[str]()
        self._collected_beside = False
        self.watch()

    def teardown(self) -> None:
        """Checks that the watch missed no event, and closes the processes."""
        try:
            self.watch()
        finally:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:
                self._do(asyncio.wait(left))
            self._loop.close()
            self._order.__exit__(None, None, None)

    @rule()
    def restart(self) -> None:
        """Opens the same storage in another process."""
        self._server += 1
        self._bucket = self._bucket.reopened()
        self._store: Store = self._do(Store.open(self._bucket, clock=self._clock))

    # --- Calls ----------------------------------------------------------------

    def _do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(coroutine)

    def _answer(
        self, make: Callable[[], Coroutine[Any, Any, Any]], trouble: Trouble
    ) -> Any:
        """Returns the result of a call, or the class of its error; retries it if its
        outcome is unknown."""
        self._bucket.calls.follow(at_change(trouble.at, trouble.fault))
        try:
            if trouble.is_concurrent and not self._may_be_over():
                return self._do(self._beside_a_collection(make()))
            return self._do(make())
        except StorageUnavailableError:
            self._bucket.calls.follow(no_faults)
        except DiedError:
            self.restart()
        except StoreError as e:
            return type(e)
        finally:
            self._bucket.calls.follow(no_faults)
        try:
            return self._do(make())
        except StoreError as e:
            return type(e)

    async def _beside_a_collection(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Returns the result of a call while the other process collects."""
        collecting = asyncio.ensure_future(collect(self._other, timedelta()))
        try:
            return await call
        finally:
            await collecting
            self._collected_beside = True

    def _may_be_over(self) -> bool:
        """Returns whether a collection may abort or purge, so that the result of a
        concurrent call is uncertain."""
        return bool(self._due()) or any(map(self._is_idle, self._model.live()))

    def _due(self) -> list[Checkpoint]:
        now = self._clock.now()
        kept = self._model.checkpoints.values()
        return [c for c in kept if c.deleted and c.purge_time and c.purge_time <= now]

    def _end_idle_holds(self, kept: Checkpoint) -> None:
        """Removes the holds of a purged checkpoint from the model."""
        for hold in [h for h in self._model.holds.values() if self._is_idle(h)]:
            if hold.checkpoint is kept:
                del self._model.holds[hold.id]

    def _is_idle(self, leased: Upload | Hold) -> bool:
        # not every sign of progress is written
        idle = self._clock.elapsed() - leased.last_sign
        # progress renews the lease of an upload now and then only
        least = 1 if isinstance(leased, Hold) else 5 / 6
        return idle >= LEASE.total_seconds() * least

    def _observed(
        self, call: Coroutine[Any, Any, Any], step: int, died_at: int
    ) -> pb.CheckpointRecord | None:
        """Returns the slot after a call whose process died and was not restarted."""
        self._bucket.calls.follow(at_change(died_at, Fault.DEATH))
        with suppress(DiedError, StoreError):
            self._do(call)
        self.restart()
        found = self._do(self._store.catalog.slot(RUN, step))
        return found[0] if found else None

    # --- Uploads --------------------------------------------------------------

    @rule(
        target=uploads,
        step=STEPS,
        base=st.sampled_from(["latest", None, 0, 1]),
        trouble=TROUBLES,
    )
    def begin(self, step: int, base: int | str | None, trouble: Trouble) -> Any:
        known = self._base(base)
        name, answer = self._begin_as_clients_do(step, base, trouble)
        if step in self._model.checkpoints:
            assert answer is CheckpointExistsError
            return multiple()
        if isinstance(base, int) and known is None:
            assert answer in (*ABSENT, CheckpointDeletedError)
            return multiple()
        return self._begun(name, step, known, answer)

    def _base(self, base: int | str | None) -> Checkpoint | None:
        committed = {c.step: c for c in self._model.committed}
        if base == "latest":
            return self._model.committed[0] if committed else None
        return committed.get(base) if isinstance(base, int) else None

    def _begun(
        self,
        name: UploadName,
        step: int,
        base: Checkpoint | None,
        record: pb.UploadRecord,
    ) -> Upload:
        before = self._model.owners.get(step)
        live = before if before and before.state == "live" else None
        assert (base.uid if base else "") == record.base
        assert (live.uid if live else "") == record.predecessor
        if before is not None:
            assert record.epoch > before.epoch
        upload = Upload(
            name.upload, step, record.epoch, base, live, self._clock.elapsed()
        )
        self._model.begun(upload)
        return upload

    async def _begin(self, name: UploadName, step: int, base: int | str | None) -> Any:
        new = NewUpload(
            step=step,
            writer_count=1,
            labels={},
            metrics={},
            lease=LEASE,
            base=None if base is None else CheckpointName(RUN, base),
            body=f"{step} {base}".encode(),
        )
        table = b"".join(pack_leaves(tree_of(CHUNKS)))
        record, _ = await self._store.uploads.begin(name, new, table)
        return record

    def _begin_as_clients_do(
        self, step: int, base: int | str | None, trouble: Trouble
    ) -> tuple[UploadName, Any]:
        """Returns the response to a begin; repeats it with another request id if a
        collection emptied the slot between two attempts of the first."""
        for last_try in (False, True):
            name = UploadName(RUN, uuid.uuid4().hex)
            begin = partial(self._begin, name, step, base)
            answer = self._answer(begin, trouble)
            if answer is not UploadNotFoundError or last_try:
                break
            assert trouble.is_concurrent
            trouble = Trouble(Fault.NONE, 0)
        return name, answer

    def _name(self, upload: Upload) -> UploadName:
        return UploadName(RUN, upload.uid)

    def _ended(self, upload: Upload, answer: Any) -> bool:
        """Returns whether an upload is not live; then its call must have failed."""
        if upload.state == "live":
            return False
        assert answer in ENDED
        return True

    @rule(
        upload=uploads,
        versions=st.dictionaries(st.integers(0, CHUNKS - 1), VERSIONS, min_size=1),
        trouble=TROUBLES,
    )
    def send(self, upload: Upload, versions: dict[int, int], trouble: Trouble) -> None:
        self._send_all(upload, versions, trouble)

    def _send_all(
        self, upload: Upload, versions: dict[int, int], trouble: Trouble
    ) -> None:
        if not versions:
            return
        answer = self._answer(lambda: self._send(upload, versions), trouble)
        if not self._ended(upload, answer):
            assert answer is None
            upload.send(versions, self._server)
            upload.last_sign = self._clock.elapsed()

    async def _send(self, upload: Upload, versions: dict[int, int]) -> None:
        opened = await self._store.uploads.open(self._name(upload), upload.epoch)

        async def frames() -> Any:
            for chunk, version in versions.items():
                yield received(frame(chunk, version=version))

        async for _ in self._store.receiver.write(opened, 0, frames()):
            pass

    @rule(upload=uploads, content=CONTENTS)
    def find(self, upload: Upload, content: tuple[int, ...]) -> None:
        """Compares the chunks that need not be sent with the model."""

        async def call() -> list[int]:
            opened = await self._store.uploads.open(self._name(upload), upload.epoch)

            async def parts() -> Any:
                yield mixed_sums(dict(enumerate(content)))

            found = self._store.receipts.find(opened, 0, parts())
            return [int(o) async for ordinals in found for o in ordinals]

        answer = self._answer(call, Trouble(Fault.NONE, 0))
        if upload.state != "live":
            assert answer in ENDED
            return
        needed = upload.iterate_needed(dict(enumerate(content)))
        assert set(range(CHUNKS)) - needed.keys() == set(answer)

    @rule(
        upload=uploads,
        receipt=st.dictionaries(st.integers(0, CHUNKS - 1), VERSIONS),
        trouble=TROUBLES,
    )
    def finish(self, upload: Upload, receipt: dict[int, int], trouble: Trouble) -> None:
        self._finish(upload, receipt, trouble)

    def _finish(
        self, upload: Upload, receipt: dict[int, int], trouble: Trouble
    ) -> None:
        async def call() -> None:
            opened = await self._store.uploads.open(self._name(upload), upload.epoch)
            sums = mixed_sums(dict(sorted(receipt.items())))
            receipts = self._store.receipts
            staged = receipts.staged(opened.name, 0, chunk_count=len(sums))
            await receipts.finish(opened, 0, sums, staged)

        answer = self._answer(call, trouble)
        if self._ended(upload, answer):
            return
        if answer is not None or not upload.may_omit(receipt, self._server):
            assert upload.finish_refusal(receipt) == answer
        if answer is None:
            upload.receipt = receipt
            upload.last_sign = self._clock.elapsed()

    @rule(upload=uploads, trouble=TROUBLES)
    def commit(self, upload: Upload, trouble: Trouble) -> None:
        self._commit(upload, trouble)

    def _commit(self, upload: Upload, trouble: Trouble) -> None:
        answer = self._answer(
            lambda: self._store.commits.commit(self._name(upload), upload.epoch),
            trouble,
        )
        kept = self._model.checkpoints.get(upload.step)
        if upload.state == "committed":
            assert kept is not None
            assert kept.uid == answer.upload == upload.uid
        elif upload.state != "live":
            assert answer in ENDED
        elif upload.commit_refusal():
            assert upload.commit_refusal() == answer
        else:
            assert upload.uid == answer.upload
            self._model.commit(upload)

    @rule(upload=uploads, died_at=st.integers(0, 8))
    def die_in_commit(self, upload: Upload, died_at: int) -> None:
        """Commits without a retry: the checkpoint is absent or complete."""
        if upload.state != "live":
            return
        call = self._store.commits.commit(self._name(upload), upload.epoch)
        slot = self._observed(call, upload.step, died_at)
        assert slot is not None
        assert upload.uid == slot.upload
        if slot.state == pb.CheckpointRecord.STATE_COMMITTED:
            assert upload.commit_refusal() is None
            self._model.commit(upload)

    @rule(step=STEPS, died_at=st.integers(0, 3))
    def die_in_begin(self, step: int, died_at: int) -> None:
        """Begins without a retry: the step is taken, or unchanged."""
        if step in self._model.checkpoints:
            return
        name = UploadName(RUN, uuid.uuid4().hex)
        slot = self._observed(self._begin(name, step, None), step, died_at)
        if slot is not None and slot.upload == name.upload:
            record = self._do(self._store.uploads.record(name))
            self._begun(name, step, None, record)

    @rule(upload=uploads, trouble=TROUBLES)
    def abort(self, upload: Upload, trouble: Trouble) -> None:
        answer = self._answer(
            lambda: self._store.uploads.abort(self._name(upload)), trouble
        )
        if upload.state == "committed":
            assert answer is CheckpointExistsError
            return
        assert answer is None
        if upload.state == "live":
            upload.state = "aborted"

    @precondition(lambda self: len(self._model.checkpoints) <= LAST_STEP)
    @rule(
        content=CONTENTS,
        base=st.sampled_from(["latest", None]),
        trouble=TROUBLES,
        earlier=st.dictionaries(st.integers(0, CHUNKS - 1), VERSIONS),
        later=st.dictionaries(st.integers(0, CHUNKS - 1), VERSIONS),
        data=st.data(),
    )
    def save(
        self,
        content: tuple[int, ...],
        base: str | None,
        trouble: Trouble,
        earlier: dict[int, int],
        later: dict[int, int],
        data: st.DataObject,
    ) -> None:
        """Sends all chunks, as the client does, and superfluous ones, which must have
        no effect."""
        taken = self._model.checkpoints
        free = [step for step in range(LAST_STEP + 1) if step not in taken]
        step = data.draw(st.sampled_from(free))
        known = self._base(base)
        name, answer = self._begin_as_clients_do(step, base, trouble)
        upload = self._begun(name, step, known, answer)
        for others in (earlier, upload.iterate_needed(dict(enumerate(content)))):
            self._send_all(upload, others, trouble)
        self._finish(upload, dict(enumerate(content)), trouble)
        self._send_all(upload, later, trouble)
        self._commit(upload, trouble)
        assert upload.state == "committed"

    # --- The life of checkpoints ----------------------------------------------

    @rule(step=STEPS, hours=st.sampled_from([0, 1, 100]), trouble=TROUBLES)
    def delete(self, step: int, hours: int, trouble: Trouble) -> None:
        write_id = str(uuid.uuid4())
        delay = timedelta(hours=hours)
        answer = self._answer(
            lambda: self._store.lifecycle.delete(
                RUN, step, purge_delay=delay, etag="", write_id=write_id
            ),
            trouble,
        )
        kept = self._model.checkpoints.get(step)
        if kept is None:
            assert answer in ABSENT
        elif kept.deleted:
            assert kept.uid == answer.upload
        elif kept in self._model.tags.values():
            assert answer is CheckpointInUseError
        else:
            assert pb.CheckpointRecord.STATE_DELETED == answer.state
            kept.deleted, kept.purge_time = True, self._clock.now() + delay

    @rule(step=STEPS, trouble=TROUBLES)
    def undelete(self, step: int, trouble: Trouble) -> None:
        write_id = str(uuid.uuid4())
        answer = self._answer(
            lambda: self._store.lifecycle.undelete(RUN, step, write_id=write_id),
            trouble,
        )
        kept = self._model.checkpoints.get(step)
        if kept is None:
            assert answer in ABSENT
            return
        assert pb.CheckpointRecord.STATE_COMMITTED == answer.state
        kept.deleted = False

    @rule(step=STEPS, trouble=TROUBLES)
    def purge(self, step: int, trouble: Trouble) -> None:
        answer = self._answer(
            lambda: self._store.lifecycle.purge(RUN, step, etag=""), trouble
        )
        kept = self._model.checkpoints.get(step)
        if kept is None:
            assert answer in ABSENT
        elif not kept.deleted:
            assert answer is CheckpointNotDeletedError
        elif answer is CheckpointInUseError:
            assert self._model.users(kept)
        else:
            # the purge may have landed before its answer was lost
            assert answer in (None, *ABSENT)
            self._end_idle_holds(kept)
            assert not self._model.users(kept)
            self._model.purge(kept)

    @rule(tag=TAGS, step=STEPS, trouble=TROUBLES)
    def tag(self, tag: str, step: int, trouble: Trouble) -> None:
        write_id = str(uuid.uuid4())
        answer = self._answer(
            lambda: self._store.tags.set(
                TagName(RUN, tag),
                CheckpointName(RUN, step),
                protected=False,
                etag="",
                write_id=write_id,
            ),
            trouble,
        )
        kept = self._model.checkpoints.get(step)
        if kept is None:
            assert answer in ABSENT
        elif kept.deleted:
            assert answer is CheckpointDeletedError
        else:
            assert kept.uid == answer.upload
            self._model.tags[tag] = kept

    @rule(tag=TAGS, trouble=TROUBLES)
    def untag(self, tag: str, trouble: Trouble) -> None:
        write_id = str(uuid.uuid4())
        answer = self._answer(
            lambda: self._store.tags.delete(
                TagName(RUN, tag), etag="", write_id=write_id
            ),
            trouble,
        )
        if self._model.tags.pop(tag, None) is None:
            assert answer is TagNotFoundError
        else:
            assert answer is None

    @rule(step=STEPS, trouble=TROUBLES)
    def hold(self, step: int, trouble: Trouble) -> None:
        name = HoldName(RUN, uuid.uuid4().hex)
        answer = self._answer(
            lambda: self._store.holds.create(
                name, CheckpointName(RUN, step), owner="", ttl=LEASE
            ),
            trouble,
        )
        kept = self._model.checkpoints.get(step)
        if kept is None:
            assert answer in ABSENT
        elif kept.deleted:
            assert answer is CheckpointDeletedError
        else:
            assert kept.uid == answer.upload
            sign = self._clock.elapsed()
            self._model.holds[name.hold] = Hold(name.hold, kept, LEASE, sign)

    @precondition(lambda self: self._model.holds)
    @rule(data=st.data(), trouble=TROUBLES)
    def release(self, data: st.DataObject, trouble: Trouble) -> None:
        hold = data.draw(st.sampled_from(sorted(self._model.holds)))
        name = HoldName(RUN, hold)
        assert self._answer(lambda: self._store.holds.delete(name), trouble) is None
        del self._model.holds[hold]

    # --- Collection -----------------------------------------------------------

    @rule(hours=st.sampled_from([0, 0, 1]), trouble=TROUBLES)
    def gc(self, hours: int, trouble: Trouble) -> None:
        """Collects: aborts and purges everything that is due, and nothing else."""
        grace = timedelta(hours=hours)
        once = Trouble(trouble.fault, trouble.at * 3)
        last = self._answer(lambda: collect(self._store, grace), once)
        due = self._due()
        self._do(self._look_at_slots())
        assert hours or not last.postponed, last.postponed
        for kept in due:
            assert kept.is_gone or self._model.users(kept)
        if not hours:
            self._only_what_is_used_is_left()

    @invariant()
    def a_collection_beside_a_call_ends_nothing_that_is_used(self) -> None:
        if self._collected_beside:
            self._do(self._look_at_slots())
        self._collected_beside = False

    async def _look_at_slots(self) -> None:
        """Updates the model by the effects of a collection, and checks that each was
        allowed."""
        model = self._model
        for upload in list(model.live()):
            found = await self._other.catalog.slot(RUN, upload.step)
            if found is None or found[0].state == pb.CheckpointRecord.STATE_FREE:
                assert self._is_idle(upload)
                upload.state = "aborted"
        for kept in list(model.checkpoints.values()):
            found = await self._other.catalog.slot(RUN, kept.step)
            if found is None or found[0].state == pb.CheckpointRecord.STATE_FREE:
                assert kept in self._due()
                self._end_idle_holds(kept)
                assert not model.users(kept)
                model.purge(kept)

    def _only_what_is_used_is_left(self) -> None:
        live = {upload.uid for upload in self._model.live()}
        live |= {u.predecessor.uid for u in self._model.live() if u.predecessor}
        kept = {checkpoint.uid for checkpoint in self._model.checkpoints.values()}
        places = RunPaths(RUN)
        tables, found = set[str](), dict[str, list[str]]()
        for place in self._do(self._bucket.list(places.root)):
            owner = places.parse_upload(place)
            kind = place.removeprefix(places.root).partition("/")[0]
            if owner is None or owner in live:
                continue
            if kind == "uploads":
                # records for repeated requests, and begins that died
                assert "/writers/" not in place
                continue
            found.setdefault(kind, []).append(place)
            if kind != "pool":
                assert owner in kept
        for kind in ("manifests", "files", "trees"):
            assert len(kept) == len(found.get(kind, []))
        for checkpoint in self._model.checkpoints.values():
            record = self._do(self._store.catalog.slot(RUN, checkpoint.step))[0]
            place = places.file_table(record.upload, record.files_digest)
            stored = self._do(self._bucket.read(place))
            tables |= {
                places.pool + f for f in pb.FileTable.FromString(stored.data).file
            }
        assert set(found.get("pool", [])) <= tables

    # --- Watch ----------------------------------------------------------------

    @rule()
    def watch(self) -> None:
        """Resumes the watch from its token; it must report each commit once."""
        self._do(self._go_on_watching())
        assert len(self._reported) == len(set(self._reported))
        gone = {uid for _, uid in self._model.events} - {
            kept.uid for kept in self._model.checkpoints.values()
        }
        expected = [uid for _, uid in self._model.events if uid not in gone]
        assert expected == [uid for uid in self._reported if uid not in gone]

    async def _go_on_watching(self) -> None:
        """Reads all events of a watch until there are none."""
        # With no time between tokens, one comes after the last event.
        watcher = Watcher(
            self._store.catalog,
            self._store.journal,
            bucket=self._store.bucket,
            clock=self._clock,
            limits=WatchLimits(token_seconds=0),
        )
        watch = watcher.watch(RUN, self._token)
        self._token = (await anext(watch)).token
        async for reported in watch:
            self._token = reported.token
            if reported.change is None:
                break
            announced = reported.change.announcement
            if announced.kind == pb.Announcement.KIND_COMMIT:
                self._reported.append(announced.upload)
        await watch.aclose()
        await asyncio.sleep(0)  # its poll ends

    # --- Time -----------------------------------------------------------------

    @rule(minutes=st.sampled_from([1, 4, 11, 90]))
    def time_passes(self, minutes: int) -> None:
        self._clock.seconds += 60 * minutes

    @rule(hours=st.integers(-24, 24))
    def the_clock_is_set(self, hours: int) -> None:
        self._clock.offset = timedelta(hours=hours)

    # --- What holds -----------------------------------------------------------

    @invariant()
    def the_catalog_is_the_models(self) -> None:
        catalog = self._store.catalog
        expected = self._model.committed
        latest = CheckpointName(RUN, "latest")
        if not expected:
            answer = self._answer(
                lambda: catalog.checkpoint(latest), Trouble(Fault.NONE, 0)
            )
            assert answer in ABSENT
        else:
            listed = self._do(catalog.checkpoints(RUN, before=None, limit=10))
            assert [c.uid for c in expected] == [c.upload for c in listed]
            assert expected[0].uid == self._do(catalog.checkpoint(latest)).upload
        for tag, kept in self._model.tags.items():
            found = self._do(catalog.checkpoint(CheckpointName(RUN, tag)))
            assert kept.uid == found.upload

    @invariant()
    def every_checkpoint_is_whole(self) -> None:
        for kept in self._model.checkpoints.values():
            name = CheckpointName(RUN, kept.step)
            record = self._do(self._store.catalog.checkpoint_with_uid(name, kept.uid))
            assert self._content(record) == kept.content

    def _content(self, record: pb.CheckpointRecord) -> tuple[int, ...]:
        """Returns the version of each chunk, as a restore reads it."""

        async def read() -> tuple[int, ...]:
            manifest = await self._store.catalog.manifest(RUN, record)
            versions = {}
            async for sent in self._store.sender.send(RUN, manifest, range(CHUNKS)):
                piece, at = chunk_api.ReadChunksResponse.FromString(sent).frame, 0
                for chunk, length in zip(piece.chunk, piece.length, strict=True):
                    data = piece.data[at : at + length - 4]
                    at += length
                    versions[chunk] = (data[0] - chunk) // 100
                    assert elements(chunk, versions[chunk]) == data
            return tuple(versions[chunk] for chunk in range(CHUNKS))

        content: tuple[int, ...] = self._do(read())
        return content

    @invariant()
    def every_object_is_of_an_upload_that_we_know(self) -> None:
        """Checks that every object in the bucket is expected."""
        places = RunPaths(RUN)
        for place in self._do(self._bucket.list(places.root)):
            rest = place.removeprefix(places.root)
            kind = rest.partition("/")[0]
            if places.parse_upload(place) is None:
                assert kind in ("checkpoints", "tags", "holds")


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=examples(60), stateful_step_count=60, deadline=None, print_blob=True
)


class DrawnStep(st.DataObject):
    """Draws the last step."""

    def __init__(self) -> None:
        pass

    def draw(self, strategy: Any, label: Any = None) -> Any:
        del strategy, label
        return LAST_STEP


def test_a_step_that_a_collection_frees_between_two_tries_of_a_begin_can_be_begun() -> (
    None
):
    machine = StoreMachine()
    machine.start()
    try:
        machine.die_in_begin(died_at=2, step=LAST_STEP)
        beside = Trouble(Fault.LATE, 0, is_concurrent=True)
        machine.purge(step=0, trouble=beside)  # the collection sees the dead upload
        machine.time_passes(minutes=11)
        machine.save(
            content=(0,) * CHUNKS,
            base=None,
            trouble=Trouble(Fault.LOST, 0, is_concurrent=True),
            earlier={},
            later={},
            data=DrawnStep(),
        )
    finally:
        machine.teardown()


class GcsStoreMachine(StoreMachine):
    """The same test in a bucket."""

    def root(self) -> str:
        return gcs_root()


TestGcsStore = pytest.mark.usefixtures("bucket_storage")(GcsStoreMachine.TestCase)
TestGcsStore.settings = settings(
    # a real bucket takes half a minute for one
    max_examples=2 if GIVEN_BUCKET else examples(6),
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
)


class S3StoreMachine(StoreMachine):
    """The same test in an emulated bucket on S3, whose generations are checksums."""

    emulator: ClassVar[FakeS3]

    def root(self) -> str:
        return s3_root(self.emulator)


@pytest.fixture(scope="module")
def s3_machine(s3: FakeS3) -> None:
    """Passes the emulator to the machine."""
    S3StoreMachine.emulator = s3


TestS3Store = pytest.mark.usefixtures("s3_machine")(S3StoreMachine.TestCase)
TestS3Store.settings = settings(
    max_examples=examples(4), stateful_step_count=40, deadline=None, print_blob=True
)
