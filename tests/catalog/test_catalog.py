"""The catalog: lists, pages, latest, and what is said of what is not there."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import numpy as np
import pytest

import storesvc_client as store
from storesvc.catalog import catalog as slot_reader
from storesvc.catalog.catalog import Catalog
from storesvc.catalog.records import timestamp
from storesvc.errors import (
    CheckpointNotFoundError,
    ConflictError,
    CorruptDataError,
    RunNotFoundError,
)
from storesvc.format import layout
from storesvc.format.layout import RunPaths
from storesvc.format.names import CheckpointName, RunName
from storesvc.format.seal import seal
from storesvc.rpc import paging
from storesvc.rpc.paging import page_token
from storesvc.storage.bucket import Stored
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.store import Store
from storesvc_client.errors import translate_rpc_errors
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1 import chunk_service_pb2 as chunk_api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from storesvc_proto.v1.chunk_service_pb2_grpc import ChunkServiceStub
from tests.support.contract import Writer
from tests.support.faulty_bucket import FaultyBucket
from tests.support.refusals import rejected
from tests.support.server_process import ServerProcess

LLAMA = "namespaces/prod/runs/llama-8b"
STEPS = [0, 1, 5, 10, 2**63 - 1]


@pytest.fixture(scope="module")
def address(server_address: str) -> str:
    """A server with three runs, one of them of several steps."""
    with store.connect(server_address) as client:
        for name in ("eval/one", "eval/two", "prod/llama-8b"):
            run = client.run(name)
            for step in STEPS if name == "prod/llama-8b" else [3]:
                run.save(
                    step,
                    {"x": np.arange(step % 7), "y": 1.0},
                    metrics={"loss": step / 2, "nan": float("nan")},
                    labels={"note": f"é {step}"},
                )
    return server_address


@pytest.fixture
def client(address: str) -> Iterator[store.Client]:
    with store.connect(address) as connected:
        yield connected


@pytest.fixture
def stub(address: str) -> CheckpointServiceStub:
    return CheckpointServiceStub(grpc.insecure_channel(address))


@pytest.mark.slow
def test_runs_are_listed_by_name(client: store.Client) -> None:
    assert ["eval/one", "eval/two", "prod/llama-8b"] == [r.name for r in client.runs()]
    assert ["eval/one", "eval/two"] == [r.name for r in client.runs("eval")]
    assert [] == list(client.runs("nobody"))
    assert [3, 3, 2**63 - 1] == [r.latest_step for r in client.runs()]


def test_checkpoints_are_listed_newest_first(client: store.Client) -> None:
    checkpoints = list(client.run("prod/llama-8b").checkpoints())

    assert STEPS[::-1] == [c.step for c in checkpoints]
    assert {"note": "é 5"} == checkpoints[2].labels
    assert 2.5 == checkpoints[2].metrics["loss"]
    assert np.isnan(checkpoints[2].metrics["nan"])
    assert 2 == checkpoints[2].leaf_count
    assert 5 * 8 + 8 == checkpoints[2].size_bytes
    assert checkpoints[2].create_time <= checkpoints[2].commit_time


def test_pages_join_to_the_whole_list(stub: CheckpointServiceStub) -> None:
    parent = "namespaces/prod/runs/llama-8b"
    steps, token = [], ""
    for _ in range(3):
        page = stub.ListCheckpoints(
            api.ListCheckpointsRequest(parent=parent, page_size=2, page_token=token)
        )
        steps += [c.step for c in page.checkpoints]
        token = page.next_page_token
    assert STEPS[::-1] == steps
    assert "" == token

    first = stub.ListRuns(api.ListRunsRequest(parent="namespaces/-", page_size=1))
    request = api.ListRunsRequest(
        parent="namespaces/-", page_size=100, page_token=first.next_page_token
    )
    names = [r.name.rpartition("/")[2] for r in stub.ListRuns(request).runs]
    assert ["two", "llama-8b"] == names


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"page_size": -1}, "INVALID_FIELD"),
        ({"page_token": "!"}, "INVALID_PAGE_TOKEN"),
        ({"page_token": "AAAA"}, "INVALID_PAGE_TOKEN"),
        ({"page_token": page_token(LLAMA, "abc")}, "INVALID_PAGE_TOKEN"),
        ({"page_token": page_token(LLAMA, "9" * 5000)}, "INVALID_PAGE_TOKEN"),
        ({"parent": "namespaces/prod"}, "INVALID_FIELD"),
        ({"parent": "namespaces/../runs/x"}, "INVALID_FIELD"),
        ({"parent": "namespaces/prod/runs/nobody"}, "RUN_NOT_FOUND"),
    ],
)
def test_a_list_that_cannot_be_is_rejected(
    stub: CheckpointServiceStub, fields: dict[str, str | int], reason: str
) -> None:
    request = {"parent": "namespaces/prod/runs/llama-8b"} | fields

    with rejected(reason):
        stub.ListCheckpoints(api.ListCheckpointsRequest(**request))  # type: ignore[arg-type]  # fields of several types


def test_a_token_of_a_list_without_the_deleted_is_none_of_one_with_them(
    stub: CheckpointServiceStub,
) -> None:
    page = stub.ListCheckpoints(api.ListCheckpointsRequest(parent=LLAMA, page_size=2))
    request = api.ListCheckpointsRequest(
        parent=LLAMA, page_size=2, page_token=page.next_page_token, show_deleted=True
    )

    with rejected("INVALID_PAGE_TOKEN", store.InvalidRequestError):
        stub.ListCheckpoints(request)


def test_deleted_checkpoints_are_listed_page_by_page_where_they_are_asked_for(
    client: store.Client, stub: CheckpointServiceStub
) -> None:
    run = client.run("deleted/run")
    for step in range(5):
        run.save(step, {"x": step})
    run.wait()
    for step in (4, 1):
        run.delete(step)
    run.delete(2)
    run.purge(2)

    steps, token = [], ""
    for _ in range(2):
        request = api.ListCheckpointsRequest(
            parent="namespaces/deleted/runs/run",
            page_size=2,
            page_token=token,
            show_deleted=True,
        )
        page = stub.ListCheckpoints(request)
        steps += [(c.step, c.HasField("purge_time")) for c in page.checkpoints]
        token = page.next_page_token

    assert [(4, True), (3, False), (1, True), (0, False)] == steps
    assert "" == token
    assert 3 == run.latest().step
    assert [3] == [r.latest_step for r in client.runs("deleted")]


def test_a_checkpoint_has_its_key_space_and_its_own_bytes(
    server: ServerProcess, client: store.Client
) -> None:
    found = client.run("prod/llama-8b").checkpoint(10)

    assert found.key_space.startswith(f"{found.uid}-")
    tree = server.root / "data/prod/llama-8b/trees" / found.key_space
    assert (tree / "manifest.ocdbt").is_file()
    assert 0 < found.own_bytes <= found.stored_bytes
    assert (None, None, False) == (found.delete_time, found.purge_time, found.pinned)


def test_a_deleted_checkpoint_is_read_by_its_uid_until_it_is_purged(
    client: store.Client, stub: CheckpointServiceStub, address: str
) -> None:
    run = client.run("uid/run")
    saved = run.save(1, {"x": np.arange(3)}).result()
    name = "namespaces/uid/runs/run/checkpoints/1"
    request = api.ReadManifestRequest(name=name, uid=saved.uid)
    chunks = chunk_api.ReadChunksRequest(name=name, uid=saved.uid, chunk=[0])
    chunk_stub = ChunkServiceStub(grpc.insecure_channel(address))
    manifest = list(stub.ReadManifest(request))
    data = list(chunk_stub.ReadChunks(chunks))
    run.delete(1)

    read = list(stub.ReadManifest(request))
    assert manifest[1:] == read[1:]
    assert read[0].checkpoint.HasField("delete_time")
    assert data == list(chunk_stub.ReadChunks(chunks))
    for uid in ("", "0" * 32):
        request.uid = uid
        with pytest.raises(store.NotFoundError) as caught, translate_rpc_errors("here"):
            list(stub.ReadManifest(request))
        reason = "CHECKPOINT_NOT_FOUND" if uid else "CHECKPOINT_DELETED"
        assert reason == caught.value.reason

    run.purge(1)
    with pytest.raises(store.NotFoundError), translate_rpc_errors("here"):
        list(chunk_stub.ReadChunks(chunks))


async def test_a_run_that_was_set_up_is_listed_without_a_checkpoint(
    tmp_path: Path,
) -> None:
    opened = await Store.open(await TensorStoreBucket.open(tmp_path.as_uri()))
    set_up, begun = RunName("tests", "set-up"), RunName("tests", "begun")
    record = pb.RunRecord(uid="u", labels={"a": "b"})
    place = layout.run_record(set_up)
    await opened.bucket.write(place, seal(record, place=place))
    record.ClearField("labels")
    place = layout.run_record(begun)
    await opened.bucket.write(place, seal(record, place=place))

    listed = await opened.catalog.runs(None, after=None, limit=9)
    assert [set_up] == [name for name, _ in listed]
    assert (await opened.catalog.run(set_up)).latest is None
    assert [] == await opened.catalog.checkpoints(set_up, before=None, limit=1)
    latest = opened.catalog.checkpoint(CheckpointName(set_up, "latest"))
    with pytest.raises(CheckpointNotFoundError, match="save one"):
        await latest
    with pytest.raises(RunNotFoundError, match="begun has no checkpoint: none was"):
        await opened.catalog.run(begun)
    with pytest.raises(RunNotFoundError, match=r"begin does not exist.*tests/begun"):
        await opened.catalog.run(RunName("tests", "begin"))


def test_a_token_of_another_list_is_rejected(stub: CheckpointServiceStub) -> None:
    page = stub.ListRuns(api.ListRunsRequest(parent="namespaces/-", page_size=1))
    request = api.ListRunsRequest(
        parent="namespaces/eval", page_token=page.next_page_token
    )

    with (
        pytest.raises(store.InvalidRequestError, match="start without a token"),
        translate_rpc_errors("here"),
    ):
        stub.ListRuns(request)


def test_other_namespaces_are_not_named_but_the_store_that_was_searched(
    client: store.Client,
) -> None:
    expected = r"^store [^ ]+: run prof/llama-8b does not exist \(no run is similar\)"
    with pytest.raises(store.NotFoundError, match=expected):
        client.run("prof/llama-8b").latest()


def test_a_mistyped_directory_is_named_by_a_restore(tmp_path: Path) -> None:
    place = (tmp_path / "ckptz").as_uri()
    with (
        store.connect(place) as client,
        pytest.raises(store.NotFoundError, match=f"^store {place}: run prod/llama-8b "),
    ):
        client.run("prod/llama-8b").restore()


def test_stray_objects_are_no_checkpoints(
    server: ServerProcess, client: store.Client
) -> None:
    run = client.run("stray/run")
    run.save(1, {"x": 1}).result()
    (server.root / "data/stray/run/checkpoints/.DS_Store").write_bytes(b"?")
    (server.root / "runs/stray/.DS_Store").write_bytes(b"?")
    (server.root / "runs/README").write_bytes(b"?")

    assert [1] == [c.step for c in run.checkpoints()]
    assert ["stray/run"] == [r.name for r in client.runs("stray")]


def test_an_unknown_run_is_named_with_those_most_like_it(client: store.Client) -> None:
    with pytest.raises(LookupError, match=r"run prod/llama-8 .*nearest: prod/llama-8b"):
        client.run("prod/llama-8").latest()


def test_an_unknown_step_is_named_with_those_nearest(client: store.Client) -> None:
    with rejected(
        "CHECKPOINT_NOT_FOUND",
        store.NotFoundError,
        match=r"@7 does not exist.* 1, 5, 10",
    ) as e:
        client.run("prod/llama-8b").restore(7)
    assert "1,5,10" == e.value.metadata["nearest"]


@pytest.mark.parametrize("which", [-1, 2**63, True, "Latest", "1st", 1.5, None])
def test_what_is_no_step_is_rejected_before_anything_is_asked(
    client: store.Client, which: object
) -> None:
    with pytest.raises(store.InvalidRequestError):
        client.run("prod/llama-8b").checkpoint(which)  # type: ignore[arg-type]  # that is the point


def test_latest_and_lists_do_not_see_a_save_that_is_under_way(
    client: store.Client, address: str
) -> None:
    run = client.run("eval/one")
    before = [c.uid for c in run.checkpoints()]
    writer = Writer(address, "eval/one", 4)
    writer.begin()

    assert 3 == run.latest().step
    assert before == [c.uid for c in run.checkpoints()]
    with pytest.raises(store.NotFoundError):
        run.checkpoint(4)


def test_a_run_that_never_committed_is_not_found(
    client: store.Client, address: str
) -> None:
    writer = Writer(address, "eval/three", 4)
    writer.begin()

    assert "eval/three" not in [r.name for r in client.runs()]
    with pytest.raises(store.NotFoundError, match="eval/three"):
        client.run("eval/three").latest()


@pytest.mark.parametrize(
    ("chunks", "match"),
    [
        ([1, 0], "ascending"),
        ([0, 0], "ascending"),
        ([2], "2 chunks, got 2"),
        ([2**64 - 1], "2 chunks"),
        (range(65537), "65536"),
    ],
)
def test_chunks_that_a_checkpoint_does_not_have_are_rejected(
    client: store.Client, address: str, chunks: list[int], match: str
) -> None:
    stub = ChunkServiceStub(grpc.insecure_channel(address))
    found = client.run("eval/one").latest()
    name = f"namespaces/eval/runs/one/checkpoints/{found.step}"

    with (
        pytest.raises(store.InvalidRequestError, match=match),
        translate_rpc_errors("here"),
    ):
        list(
            stub.ReadChunks(
                chunk_api.ReadChunksRequest(name=name, uid=found.uid, chunk=chunks)
            )
        )


def test_chunks_of_another_checkpoint_at_the_step_are_rejected(address: str) -> None:
    stub = ChunkServiceStub(grpc.insecure_channel(address))
    request = chunk_api.ReadChunksRequest(
        name="namespaces/eval/runs/one/checkpoints/3", uid="0" * 32, chunk=[0]
    )

    with (
        pytest.raises(store.NotFoundError, match="replaced"),
        translate_rpc_errors("here"),
    ):
        list(stub.ReadChunks(request))
    request.uid = ""
    with (
        pytest.raises(store.InvalidRequestError, match="got none"),
        translate_rpc_errors("here"),
    ):
        list(stub.ReadChunks(request))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nobody/checkpoints/3", "RUN_NOT_FOUND"),
        ("one/checkpoints/9", "CHECKPOINT_NOT_FOUND"),
        ("one/checkpoints/best", "TAG_NOT_FOUND"),
    ],
)
def test_chunks_of_what_is_not_there_are_rejected_for_its_own_reason(
    address: str, name: str, reason: str
) -> None:
    stub = ChunkServiceStub(grpc.insecure_channel(address))
    request = chunk_api.ReadChunksRequest(
        name=f"namespaces/eval/runs/{name}", uid="0" * 32, chunk=[0]
    )

    with rejected(reason, store.NotFoundError):
        list(stub.ReadChunks(request))


async def test_a_page_is_cut_short_where_its_rows_would_not_fit_a_message() -> None:
    rows = [
        (
            RunName("tests", f"r{i}"),
            api.Run(labels={f"{k}": "x" * 200 for k in range(64)}),
        )
        for i in range(1001)
    ]
    names = [str(name) for name, _ in rows]

    async def find(
        last: str | None, limit: int
    ) -> Sequence[tuple[RunName, api.Run | CorruptDataError]]:
        start = 0 if last is None else names.index(last) + 1
        return rows[start : start + limit]

    request, found = api.ListRunsRequest(page_size=1000), list[api.Run]()
    while request.page_token or not found:
        made = await paging.list_page(
            request, "runs", find=find, parse=str, key=str, show=lambda _, run: run
        )
        assert 0 < sum(row.ByteSize() for row in made.rows) <= paging.MAX_PAGE_BYTES
        found += made.rows
        request.page_token = made.token
    assert [row for _, row in rows] == found


# --- Reads between whose calls others make changes ---------------------------------

RUN = RunName("tests", "overtaken")
COMMITTED = pb.CheckpointRecord.STATE_COMMITTED
DELETED = pb.CheckpointRecord.STATE_DELETED
UPLOADING = pb.CheckpointRecord.STATE_UPLOADING
NEWEST = CheckpointName(RUN, "latest")


class Overtaken(FaultyBucket):
    """A bucket as a process sees it that others overtake, once."""

    after: str
    """The place after whose read they do."""
    overtake: Callable[[], Awaitable[None]] | None = None

    async def read(self, place: str) -> Stored | None:
        found = await super().read(place)
        overtake = self.overtake
        if overtake is not None and place == self.after:
            self.overtake = None
            await overtake()
        return found


async def put(
    bucket: FaultyBucket, *steps: int, state: pb.CheckpointRecord.State.ValueType
) -> None:
    """Makes slots what they are, from now on."""
    for step in steps:
        slot = pb.CheckpointRecord(state=state, step=step, upload=f"{step:032x}")
        if state == DELETED:
            slot.delete_time.CopyFrom(timestamp(datetime.now(UTC)))
        place = RunPaths(RUN).checkpoint(step)
        await bucket.write(place, seal(slot, place=place))


async def overtaken(
    bucket: FaultyBucket, after: int, overtake: Callable[[], Awaitable[None]]
) -> Overtaken:
    """The bucket of a process that others overtake once it has read a step."""
    place = layout.run_record(RUN)
    await bucket.write(place, seal(pb.RunRecord(uid="u"), place=place))
    process = Overtaken(bucket.opened)
    process.calls = bucket.calls
    process.after, process.overtake = RunPaths(RUN).checkpoint(after), overtake
    return process


@pytest.mark.parametrize("limit", [None, 1, 9])
async def test_a_run_that_always_had_a_checkpoint_is_never_without_one(
    limit: int | None,
) -> None:
    bucket = await FaultyBucket.faulty("memory://")
    await put(bucket, 4, 5, state=COMMITTED)
    await put(bucket, 6, state=UPLOADING)

    async def overtake() -> None:  # a policy keeps the newest
        await put(bucket, 6, state=COMMITTED)
        await put(bucket, 5, 4, state=DELETED)

    catalog = Catalog(await overtaken(bucket, 6, overtake))
    if limit is None:
        assert 6 == (await catalog.checkpoint(NEWEST)).step
    else:
        listed = await catalog.checkpoints(RUN, before=None, limit=limit)
        assert 6 == listed[0].step


async def test_a_checkpoint_that_was_never_the_latest_is_not_returned_as_such() -> None:
    bucket = await FaultyBucket.faulty("memory://")
    await put(bucket, 4, 5, 6, state=COMMITTED)
    await put(bucket, 7, state=UPLOADING)

    async def overtake() -> None:  # a policy keeps every fourth, and the newest
        await put(bucket, 8, state=COMMITTED)
        await put(bucket, 6, 5, state=DELETED)

    catalog = Catalog(await overtaken(bucket, 7, overtake))
    assert 8 == (await catalog.checkpoint(NEWEST)).step


@pytest.mark.parametrize("age", [timedelta(hours=1), timedelta(days=30)])
async def test_what_is_undeleted_while_it_is_passed_over_is_found(
    age: timedelta,
) -> None:
    bucket = await FaultyBucket.faulty("memory://")
    await put(bucket, 4, state=COMMITTED)
    deleted = pb.CheckpointRecord(state=DELETED, step=5, upload="u")
    deleted.delete_time.CopyFrom(timestamp(datetime.now(UTC) - age))
    place = RunPaths(RUN).checkpoint(5)
    await bucket.write(place, seal(deleted, place=place))

    async def overtake() -> None:
        await put(bucket, 5, state=COMMITTED)
        await put(bucket, 4, state=DELETED)

    catalog = Catalog(await overtaken(bucket, 5, overtake))
    assert 5 == (await catalog.checkpoint(NEWEST)).step


async def test_what_is_damaged_while_it_is_passed_over_is_a_row_like_others() -> None:
    bucket = await FaultyBucket.faulty("memory://")
    await put(bucket, 4, 5, state=COMMITTED)
    await put(bucket, 6, state=UPLOADING)

    async def overtake() -> None:
        await bucket.write(RunPaths(RUN).checkpoint(6), b"noise")

    catalog = Catalog(await overtaken(bucket, 6, overtake))
    rows = await catalog.checkpoint_rows(RUN, before=None, limit=9)
    assert [6, 5, 4] == [step for step, _ in rows]
    assert isinstance(rows[0][1], CorruptDataError)


@pytest.mark.parametrize("turns", [40, 1_000_000])
def test_no_checkpoint_is_not_reported_before_it_is_certain(
    monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """A list finds a checkpoint although slots change during each of its reads."""
    monkeypatch.setattr(slot_reader, "_PAUSE_SECONDS", 0)
    taken = itertools.count(1)

    async def main() -> int:
        bucket = await FaultyBucket.faulty("memory://")
        await put(bucket, 5, state=UPLOADING)

        async def again() -> None:
            if next(taken) == turns:
                await put(bucket, 5, state=COMMITTED)
            else:
                await put(bucket, 5, state=UPLOADING)
                process.overtake = again

        process = await overtaken(bucket, 5, again)
        return (await Catalog(process).checkpoint(NEWEST)).step

    if turns == 40:
        assert 5 == asyncio.run(main())
    else:
        with pytest.raises(ConflictError, match="try again"):
            asyncio.run(main())


async def test_a_run_that_never_stands_still_is_answered_all_the_same() -> None:
    bucket = await FaultyBucket.faulty("memory://")
    await put(bucket, 4, state=COMMITTED)
    await put(bucket, 5, state=UPLOADING)

    async def again() -> None:
        await put(bucket, 5, state=UPLOADING)
        process.overtake = again

    process = await overtaken(bucket, 5, again)
    assert 4 == (await Catalog(process).checkpoint(NEWEST)).step
