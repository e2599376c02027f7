"""A slot that is put back to before its commit is damage, and costs no data."""

import uuid
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta

import grpc
import pytest

import storesvc_client as store
from storesvc.errors import CheckpointNotFoundError, CorruptDataError
from storesvc.format.layout import RunPaths
from storesvc.format.names import LATEST, CheckpointName, HoldName, RunName, UploadName
from storesvc.format.seal import seal, unseal
from storesvc.gc.collector import RETRY_PERIOD
from storesvc.save.uploads import DEFAULT_LEASE
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.support.collecting_process import NOW, PLACES, RUN, Process, started
from tests.support.contract import Writer, frame, sums
from tests.support.server_process import ServerProcess

STEP = 2
SLOT = PLACES.checkpoint(STEP)
CONTENT = (0, 2, 0)
Naming = Callable[[Process], Awaitable[None]]
Objects = dict[str, bytes]


async def tagged(process: Process) -> None:
    await process.tag(STEP)


async def held(process: Process) -> None:
    await process.store.holds.create(
        HoldName(RUN, uuid.uuid4().hex),
        CheckpointName(RUN, STEP),
        owner="me",
        ttl=timedelta(days=9),
        uid="",
    )


async def announced(process: Process) -> None:
    """Leaves nothing but two announcements of it."""
    await process.delete(STEP, purge_delay=timedelta(days=1))
    await process.store.lifecycle.undelete(RUN, STEP, write_id=str(uuid.uuid4()))


async def unnamed(process: Process) -> None:
    """Leaves nothing but what its commit left."""


async def objects(process: Process) -> Objects:
    found = {}
    for place in await process.bucket.list(PLACES.root):
        stored = await process.bucket.read(place)
        assert stored is not None
        found[place] = stored.data
    return found


async def committed(process: Process) -> tuple[UploadName, Objects, Objects]:
    """Saves two steps, the second of which shares chunks with the first, and took its
    step over from another upload; returns it, and the objects of the run before it
    began and right before its commit."""
    await process.save(1)
    lost = await process.begin(STEP)
    await process.send(lost, {0: 1})
    early = await objects(process)
    upload = await process.begin(STEP, base=1)
    await process.send(upload, {1: 2})
    await process.finish(upload, CONTENT)
    late = await objects(process)
    await process.commit(upload, CONTENT)
    return upload, early, late


async def put(process: Process, place: str, data: bytes | None) -> None:
    if data is None:
        await process.bucket.delete(place)
    else:
        await process.bucket.write(place, data)


async def collect_often(
    process: Process, *, apart: timedelta = DEFAULT_LEASE
) -> list[str]:
    """Collects until every lease is over; returns why each pass was postponed."""
    reasons = []
    for _ in range(4):
        previewed = await process.preview()
        made = await process.collect()
        assert previewed.postponed == made.postponed
        reasons.append(made.postponed)
        process.clock.turn(apart)
    return reasons


@pytest.mark.parametrize("back_to", ["its own upload", "the upload before it"])
@pytest.mark.parametrize(
    ("name", "leaf_table"),
    [
        (tagged, "gone"),
        (held, "gone"),
        (announced, "gone"),
        (unnamed, "gone"),
        (tagged, "put back"),
        (held, "put back"),
        (announced, "put back"),
    ],
)
async def test_a_committed_upload_is_never_ended_whatever_its_slot_says(
    name: Naming, back_to: str, leaf_table: str
) -> None:
    process = await started()
    upload, early, late = await committed(process)
    await name(process)
    await process.delete(1)  # what it shares with it has no other owner
    newest = await objects(process)
    (tree,) = (p for p in late if p.startswith(PLACES.tree(upload.upload, b"")[:-6]))
    if leaf_table == "put back":
        await put(process, tree, late[tree])
    await put(process, SLOT, (late if back_to == "its own upload" else early)[SLOT])
    before = await objects(process)

    reasons = await collect_often(process)

    # The journal is read only for what is about to end.
    needs_journal = name is announced and leaf_table == "put back"
    for reason in reasons[-1:] if needs_journal else reasons:
        reported = f"the record of {RUN}@{STEP} is damaged ({SLOT}: an earlier version"
        assert reported in reason
        assert upload.upload in reason
    own = {place for place in before if upload.upload in place}
    assert own <= set(await objects(process))
    await put(process, SLOT, newest[SLOT])
    await process.check()
    assert STEP in await process.steps()


@pytest.mark.parametrize("deleted", [False, True])
async def test_the_journal_outlives_the_record_of_an_upload(*, deleted: bool) -> None:
    process = await started()
    upload, early, _ = await committed(process)
    for _ in range(2):
        process.clock.turn(2 * RETRY_PERIOD)
        await process.collect()
    assert PLACES.upload(upload.upload) not in await objects(process)
    newest = await objects(process)
    if deleted:
        await process.delete(STEP)
    await put(process, SLOT, early[SLOT])

    reasons = await collect_often(process)

    reported = f"the record of {RUN}@{STEP} is damaged ({SLOT}: an earlier version"
    assert [not deleted] * 4 == [reported in reason for reason in reasons]
    if not deleted:
        await put(process, SLOT, newest[SLOT])
        await process.check()
        assert [2, 1] == await process.steps()


@pytest.mark.parametrize("name", [tagged, held])
async def test_a_slot_that_was_removed_gives_nothing_up_that_is_named(
    name: Naming,
) -> None:
    process = await started()
    upload, _, _ = await committed(process)
    await name(process)
    newest = await objects(process)
    await put(process, SLOT, None)

    reasons = await collect_often(process)

    for reason in reasons:
        assert f"the record of {RUN}@{STEP} is missing ({SLOT}), but " in reason
    await put(process, SLOT, newest[SLOT])
    await process.check()

    await put(process, SLOT, None)
    for place in newest:
        if place.startswith((PLACES.tags, PLACES.holds)):
            await put(process, place, None)
    assert [""] * 4 == await collect_often(process)
    assert [] == await process.objects(upload)


@pytest.mark.parametrize("name", [tagged, held])
async def test_what_is_named_outlives_the_upload_that_takes_its_step_over(
    name: Naming,
) -> None:
    process = await started()
    upload, _, late = await committed(process)
    await name(process)
    await process.delete(1)
    newest = await objects(process)
    await put(process, SLOT, late[SLOT])
    # Nothing shows the next upload that this was committed.
    (tree,) = (p for p in late if p.startswith(PLACES.tree(upload.upload, b"")[:-6]))
    await put(process, tree, late[tree])
    await process.save(STEP, (1, 1, 1))

    reasons = await collect_often(process)

    for reason in reasons:
        assert f"upload {upload.upload} lost its step to another one, and" in reason
    await process.check()
    process.contents[STEP] = CONTENT
    await put(process, SLOT, newest[SLOT])
    await process.check()


async def test_nothing_takes_over_or_aborts_what_was_committed() -> None:
    process = await started()
    upload, _, late = await committed(process)
    newest = await objects(process)
    await put(process, SLOT, late[SLOT])

    for call in (
        process.begin(STEP),
        process.store.uploads.abort(upload),
        process.store.catalog.checkpoint(CheckpointName(RUN, LATEST)),
        process.store.catalog.checkpoint(CheckpointName(RUN, STEP)),
        process.store.catalog.checkpoints(RUN, before=None, limit=9),
    ):
        with pytest.raises(CorruptDataError, match="an earlier version of it was"):
            await call
    await process.save(STEP + 1)  # other steps can be used as before
    await put(process, SLOT, newest[SLOT])
    await process.check()


async def test_a_slot_that_was_rolled_back_is_abandoned_by_removing_it() -> None:
    process = await started()
    upload, _, late = await committed(process)
    await put(process, SLOT, late[SLOT])
    await put(process, SLOT, None)

    assert [""] * 4 == await collect_often(process)
    assert [] == await process.objects(upload)
    await process.save(STEP, (2, 2, 2))
    await process.check()


async def test_an_upload_that_was_aborted_and_rolled_back_ends_as_any_other() -> None:
    process = await started()
    await process.save(1)
    upload = await process.begin(STEP)
    await process.send(upload, {0: 1})
    late = await objects(process)
    await process.store.uploads.abort(upload)
    await put(process, SLOT, late[SLOT])

    with pytest.raises(CheckpointNotFoundError):
        await process.store.catalog.checkpoint(CheckpointName(RUN, STEP))
    assert "" == (await collect_often(process))[-1]
    assert [] == await process.objects(upload)
    await process.save(STEP)
    await process.check()


async def test_a_commit_and_a_tag_during_a_pass_are_no_damage() -> None:
    process = await started()
    await process.save(1)
    upload = await process.begin(STEP, base=1)
    await process.send(upload, {1: 2})
    await process.finish(upload, CONTENT)
    collector = process.store.collector
    seen = await collector._reader.read_once(RUN)
    await process.commit(upload, CONTENT)
    await tagged(process)
    await held(process)

    assert [] == (await collector._expiry.apply(RUN, seen)).slots
    assert "" == (await process.collect()).postponed
    await process.check()


def no_state(slot: pb.CheckpointRecord, other: str) -> None:
    slot.state = pb.CheckpointRecord.STATE_UNSPECIFIED


def unknown_state(slot: pb.CheckpointRecord, other: str) -> None:
    slot.state = 17  # type: ignore[assignment]  # of a later release


def free_of_nobody(slot: pb.CheckpointRecord, other: str) -> None:
    slot.state, slot.upload = pb.CheckpointRecord.STATE_FREE, ""


def free_of_many(slot: pb.CheckpointRecord, other: str) -> None:
    """An id that is a prefix of several uploads' objects."""
    slot.state, slot.upload = pb.CheckpointRecord.STATE_FREE, other[:1]


def free_of_another_step(slot: pb.CheckpointRecord, other: str) -> None:
    slot.state, slot.upload = pb.CheckpointRecord.STATE_FREE, other


def without_file_table(slot: pb.CheckpointRecord, other: str) -> None:
    slot.ClearField("files_digest")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (no_state, "the slot of step 2: expected a state that this release knows"),
        (unknown_state, "the slot of step 2: expected a state that this release knows"),
        (free_of_nobody, ".binpb: expected the id of an upload"),
        (free_of_many, ".binpb: expected the id of an upload"),
        (free_of_another_step, ".binpb: expected an upload of its own"),
        (without_file_table, ".binpb: expected the digest of a file table"),
    ],
)
async def test_a_slot_that_no_release_writes_costs_no_data(
    change: Callable[[pb.CheckpointRecord, str], None], said: str
) -> None:
    process = await started()
    other = await process.save(3)
    await committed(process)
    newest = await objects(process)
    slot = unseal(newest[SLOT], pb.CheckpointRecord, place=SLOT)
    change(slot, other.upload)
    await put(process, SLOT, seal(slot, place=SLOT))

    # The records of uploads are collected by then.
    reasons = await collect_often(process, apart=2 * RETRY_PERIOD)

    for reason in reasons:
        assert said in reason
    await put(process, SLOT, newest[SLOT])
    await process.check()
    assert [3, 2, 1] == await process.steps()


async def test_a_rolled_back_record_of_a_purged_checkpoint_says_what_it_lacks() -> None:
    process = await started()
    _, _, _ = await committed(process)
    newest = await objects(process)
    await process.delete(STEP)
    await process.collect()
    await put(process, SLOT, newest[SLOT])

    found = await process.store.catalog.checkpoint(CheckpointName(RUN, STEP))
    reported = f"{RUN}@{STEP}: its manifest is missing, like all that its record names"
    with pytest.raises(CorruptDataError, match=reported):
        await process.store.catalog.manifest_bytes(RUN, found)
    assert reported in (await process.collect()).postponed

    await process.delete(STEP)
    assert "" == (await process.collect()).postponed
    assert [1] == await process.steps()
    await process.save(STEP, (2, 2, 2))
    await process.check()


@pytest.fixture
def server(start_server: Callable[..., ServerProcess]) -> ServerProcess:
    return start_server("--gc-interval", "0s")


@pytest.fixture
def client(server: ServerProcess) -> Iterator[store.Client]:
    with store.connect(server.address) as client:
        yield client


@pytest.mark.slow
def test_a_client_gets_an_error_for_a_slot_that_was_rolled_back(
    server: ServerProcess, client: store.Client
) -> None:
    name = "tests/put-back"
    run, place = client.run(name), RunPaths(RunName.parse(name)).checkpoint(1)
    Writer(server.address, name, 0).save()
    writer = Writer(server.address, name, 1)
    writer.begin()
    writer.write(frame(0, 1, 2))
    writer.finish(sums(0, 1, 2))
    before = (server.root / place).read_bytes()
    writer.commit()
    run.tags.set("best", 1)
    after = (server.root / place).read_bytes()
    (server.root / place).write_bytes(before)

    reported = "the record of tests/put-back@1 is damaged"
    damaged: list[store.DataLossError] = []
    assert [0] == [c.step for c in run.checkpoints(on_damage=damaged.append)]
    assert [True] == [reported in str(error) for error in damaged]
    for which in ("latest", "best", 1):
        with pytest.raises(store.DataLossError, match=reported):
            run.checkpoint(which)
        with pytest.raises(store.DataLossError, match=reported):
            run.verify(which)
    with pytest.raises(grpc.RpcError, match=reported):
        writer.abort()
    with pytest.raises(grpc.RpcError, match=reported):
        Writer(server.address, name, 1).begin()
    (made,) = client.collect(name, grace=NOW)
    assert reported in made.postponed
    (server.root / place).write_bytes(after)
    assert run.verify("best").ok
    assert 1 == run.latest().step
