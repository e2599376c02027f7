"""The records of runs: set up, labelled, and changed by several at once."""

import asyncio
import random
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import storesvc_client as store
from storesvc.catalog.runs import Runs, run_etag
from storesvc.errors import EtagMismatchError
from storesvc.format.names import RunName
from storesvc_client.errors import translate_rpc_errors
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from tests.support.examples import examples
from tests.support.interleaving import RUN, Process, ShuffledBucket, World, together
from tests.support.refusals import rejected
from tests.support.server_process import ServerProcess


def request_of(run: store.Run, *paths: str, **fields: Any) -> api.UpdateRunRequest:
    """A request that sets fields of a run."""
    namespace, name = run.name.split("/")
    resource = f"namespaces/{namespace}/runs/{name}"
    request = api.UpdateRunRequest(
        run=api.Run(name=resource, **fields), request_id=str(uuid.uuid4())
    )
    request.update_mask.paths.extend(paths)
    return request


def refusal(call: Callable[[], object]) -> str:
    """The reason with which a call is rejected."""
    with pytest.raises(store.StoreError) as caught, translate_rpc_errors("here"):
        call()
    return caught.value.reason


def test_a_run_is_set_up_before_its_first_save(
    client: store.Client, run: store.Run
) -> None:
    info = run.configure(labels={"team": "a"}, purge_delay=timedelta(hours=1))

    assert ({"team": "a"}, timedelta(hours=1)) == (info.labels, info.purge_delay)
    assert None is info.latest_step
    assert info == run.info()
    assert info in list(client.runs("tests"))
    assert [] == list(run.checkpoints())
    run.save(3, {"x": 1}).result()
    assert 3 == run.info().latest_step
    assert info.uid == run.info().uid
    assert info.etag == run.info().etag


def test_what_is_not_named_stays(run: store.Run) -> None:
    run.retention.set(store.KeepLatest(2), purge_delay=timedelta(days=1))
    run.configure(labels={"a": "1", "b": "2"})
    run.configure(labels={"b": "3"})

    info = run.info()
    assert {"b": "3"} == info.labels
    assert timedelta(days=1) == info.purge_delay
    assert store.KeepLatest(2) == run.retention.get()
    run.retention.set(None)
    assert None is run.retention.get()
    assert timedelta(days=1) == run.info().purge_delay


def test_a_field_that_is_named_and_not_given_is_cleared(
    stub: CheckpointServiceStub, run: store.Run
) -> None:
    run.retention.set(store.KeepLatest(2), purge_delay=timedelta(days=1))
    run.configure(labels={"a": "1"})

    # what is given and not named is not looked at
    cleared = stub.UpdateRun(
        request_of(run, "labels", "purge_delay", uid="mine", create_time=None)
    ).run

    assert not cleared.labels
    assert not cleared.HasField("purge_delay")
    assert cleared.HasField("retention")
    assert cleared.uid == run.info().uid != "mine"


def test_a_stale_etag_is_rejected_and_changes_nothing(run: store.Run) -> None:
    first = run.configure(labels={"n": "1"})
    second = run.configure(labels={"n": "2"}, etag=first.etag)

    assert first.etag != second.etag
    with rejected("ETAG_MISMATCH", store.ConflictError, match="read it again"):
        run.configure(labels={"n": "3"}, etag=first.etag)
    with pytest.raises(store.ConflictError):
        run.retention.set(None, etag=first.etag)
    assert second == run.info()


def test_an_etag_of_a_run_that_does_not_exist_is_rejected(run: store.Run) -> None:
    with pytest.raises(store.ConflictError, match="does not exist"):
        run.configure(labels={}, etag='"abc"')
    with pytest.raises(store.NotFoundError):
        run.info()


def test_a_repeated_request_answers_as_the_first_time(
    stub: CheckpointServiceStub, run: store.Run
) -> None:
    etag = run.configure(labels={"n": "1"}).etag
    request = request_of(run, "labels", labels={"n": "2"})
    request.etag = etag

    first = stub.UpdateRun(request)

    assert first == stub.UpdateRun(request)
    assert first.run.etag == run.info().etag
    run.configure(labels={"n": "3"})
    assert "ETAG_MISMATCH" == refusal(lambda: stub.UpdateRun(request))


WIDE = {str(number): "" for number in range(65)}


YEAR = timedelta(days=365)
BROKEN: dict[str, tuple[list[str], dict[str, Any]]] = {
    "no field": ([], {}),
    "output only": (["uid"], {}),
    "one unknown": (["labels", "latest_step"], {}),
    "all": (["*"], {}),
    "many labels": (["labels"], {"labels": WIDE}),
    "empty key": (["labels"], {"labels": {"": "x"}}),
    "long label": (["labels"], {"labels": {"x": "é" * 129}}),
    "long delay": (["purge_delay"], {"purge_delay": YEAR + timedelta(seconds=1)}),
    "past delay": (["purge_delay"], {"purge_delay": timedelta(seconds=-1)}),
}


@pytest.mark.parametrize(("paths", "fields"), BROKEN.values(), ids=BROKEN)
def test_an_update_that_breaks_a_bound_is_rejected(
    stub: CheckpointServiceStub,
    run: store.Run,
    paths: list[str],
    fields: dict[str, Any],
) -> None:
    request = request_of(run, *paths, **fields)

    assert "INVALID_FIELD" == refusal(lambda: stub.UpdateRun(request))
    with pytest.raises(store.NotFoundError):
        run.info()


def test_a_request_without_a_uuid_is_rejected(
    stub: CheckpointServiceStub, run: store.Run
) -> None:
    request = request_of(run, "labels")
    request.request_id = "1"

    assert "INVALID_FIELD" == refusal(lambda: stub.UpdateRun(request))


@pytest.mark.parametrize("delay", [timedelta(), YEAR], ids=["none", "most"])
def test_a_purge_delay_at_its_bounds_is_taken(run: store.Run, delay: timedelta) -> None:
    run.configure(purge_delay=delay)
    for step in (1, 2):
        run.save(step, {"x": step}).result()

    deleted = run.delete(1)

    assert deleted.delete_time is not None
    assert deleted.purge_time == deleted.delete_time + delay


def test_wrong_types_are_rejected_before_anything_is_sent(run: store.Run) -> None:
    caller: Any = run  # without a type checker
    calls: list[Callable[[], object]] = [
        caller.configure,
        lambda: caller.configure(labels={"a": 1}),
        lambda: caller.configure(labels={"a": "\ud800"}),
        lambda: caller.configure(purge_delay="3"),
        lambda: caller.configure(purge_delay=timedelta.max),
        lambda: caller.retention.set("latest(3)"),
    ]
    for call in calls:
        with pytest.raises(store.InvalidRequestError, match="expected"):
            call()
    with pytest.raises(store.NotFoundError):
        run.info()


@pytest.mark.slow
def test_a_run_survives_a_restart_of_its_server(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    with store.connect(server.address) as client:
        run = client.run("a/b")
        info = run.retention.set(store.KeepLatest(2) | store.KeepPinned())
        server.kill()
        server.start()

        assert info == run.info()
        assert store.KeepLatest(2) | store.KeepPinned() == run.retention.get()


# --- several at once --------------------------------------------------------------


def runs_of(world: World) -> Runs:
    process = Process(world)
    return Runs(ShuffledBucket(world), process.catalog, clock=process.clock)


async def _update(runs: Runs, number: int, *, etag: str = "") -> None:
    given = pb.RunRecord(labels={"n": str(number)})
    await runs.update(RUN, given, ["labels"], etag=etag, write_id=str(number))


async def _read(world: World) -> pb.RunRecord:
    return await runs_of(world).create(RUN)


@given(st.integers(0, 2**63))
@settings(max_examples=examples(300), deadline=None)
def test_an_epoch_floor_only_rises_whatever_else_changes(seed: int) -> None:
    world = World(random.Random(seed), slow_share=0.1)
    ones = [runs_of(world) for _ in range(2)]

    together(
        ones[0].raise_epoch_floor(RUN, 5),
        ones[1].raise_epoch_floor(RUN, 3),
        ones[0].raise_epoch_floor(RUN, 7),
        _update(ones[1], 1),
        _update(ones[0], 2),
    )

    record = asyncio.run(_read(world))
    assert 7 == record.epoch_floor
    assert record.write_id in ("1", "2")
    assert {"n": record.write_id} == dict(record.labels)
    assert record.uid


@given(st.integers(0, 2**63))
@settings(max_examples=examples(300), deadline=None)
def test_of_several_updates_by_one_etag_one_lands(seed: int) -> None:
    world = World(random.Random(seed), slow_share=0.1)
    asyncio.run(_update(runs_of(world), 0))
    etag = run_etag(asyncio.run(_read(world)))
    landed: list[int] = []

    async def attempt(number: int) -> None:
        try:
            await _update(runs_of(world), number, etag=etag)
        except EtagMismatchError:
            return
        landed.append(number)

    floor = runs_of(world).raise_epoch_floor(RUN, 9)
    together(*map(attempt, range(1, 5)), floor)

    (winner,) = landed
    assert str(winner) == asyncio.run(_read(world)).write_id


async def test_a_floor_leaves_the_etag_alone() -> None:
    world = World(random.Random(0), slow_share=0.1)
    runs = runs_of(world)
    await _update(runs, 1)
    etag = run_etag(await runs.create(RUN))
    await runs.raise_epoch_floor(RUN, 4)
    await runs.raise_epoch_floor(RUN, 2)
    record = await runs.create(RUN)
    assert (4, etag) == (record.epoch_floor, run_etag(record))

    other = RunName("tests", "none-yet")
    await runs.raise_epoch_floor(other, 1)
    assert 1 == (await runs.create(other)).epoch_floor


def test_a_run_that_only_case_distinguishes_from_another_is_rejected() -> None:
    with store.connect("memory://") as client:
        client.run("prod/Llama-3.1").save(1, {"x": 1}).result()

        for name in ("prod/llama-3.1", "prod/LLAMA-3.1"):
            wrong = f"run {name}: prod/Llama-3.1 exists, and names that differ in case"
            with pytest.raises(store.InvalidRequestError, match=wrong):
                client.run(name).save(1, {"x": 1}).result()
            with pytest.raises(store.InvalidRequestError, match=wrong):
                client.run(name).configure(labels={"a": "b"})
        with pytest.raises(store.InvalidRequestError, match="run Prod/x: prod exists"):
            client.run("Prod/x").save(1, {"x": 1}).result()

        client.run("prod/llama-3.2").save(1, {"x": 1}).result()
        names = [found.name for found in client.runs()]
        assert ["prod/Llama-3.1", "prod/llama-3.2"] == names


def test_a_tag_that_only_case_distinguishes_from_another_is_rejected() -> None:
    with store.connect("memory://") as client:
        run = client.run("prod/llama")
        run.save(1, {"x": 1}).result()
        run.tags.set("Best_v1.0", 1)

        wrong = "has, or had, the tag Best_v1.0, .*; use Best_v1.0, or another name"
        with pytest.raises(store.InvalidRequestError, match=wrong):
            run.tags.set("best_v1.0", 1)
        run.tags.delete("Best_v1.0")
        with pytest.raises(store.InvalidRequestError, match=wrong):
            run.tags.set("best_v1.0", 1)
        run.tags.set("Best_v1.0", 1)

        assert run.restore("Best_v1.0") == {"x": 1}
