"""Holds: what they keep, and how they end."""

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import grpc
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given, settings
from hypothesis import strategies as st

import storesvc_client as store
from storesvc.catalog.slots import CHECKPOINTS, DELETED, FREE, MARGIN, PURGING
from storesvc.errors import CheckpointDeletedError, HoldExpiredError, StoreError
from storesvc.failpoints import arm_points
from storesvc.format.names import CheckpointName, HoldName, RunName
from storesvc.rpc.paging import page_token
from storesvc_client.errors import translate_rpc_errors
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from tests.support.examples import examples
from tests.support.in_process_server import InProcessServer
from tests.support.interleaving import (
    LONG_TURNS,
    RUN,
    Process,
    World,
    freed_uid,
    new_id,
    put_state,
    slot_of,
    together,
    uid_of,
    world_of,
)
from tests.support.refusals import rejected
from tests.support.server_process import ServerProcess
from tests.support.stored_files import unchanged

TTL = 30.0
TREE = {"x": 1.0}
SETTLED: Final = "namespaces/tests/runs/settled"


@pytest.fixture
def run(run: store.Run) -> store.Run:
    """A run with checkpoints at the steps 1 and 2."""
    for step in (1, 2):
        run.save(step, TREE)
    run.wait()
    return run


@pytest.fixture(scope="module")
def settled(server_address: str) -> Iterator[store.Run]:
    """A run that no test changes: 1 is deleted."""
    with store.connect(server_address) as client:
        run = client.run("tests/settled")
        for step in (1, 2, 3):
            run.save(step, TREE)
        run.wait()
        run.delete(1)
        yield run


def create(run: store.Run, step: int | str, **fields: Any) -> api.CreateHoldRequest:
    """The request for a hold."""
    parent = f"{RunName.parse(run.name).resource}/checkpoints/{step}"
    good = {"parent": parent, "request_id": new_id(), "owner": "eval"}
    return api.CreateHoldRequest(**(good | fields))


def test_what_is_held_may_be_deleted_and_read_but_not_purged(run: store.Run) -> None:
    with run.holds.create(2, owner="eval-1") as hold:
        run.delete(2)

        assert 2 == hold.checkpoint.step
        assert TREE == hold.open().restore()
        assert [("x", 1.0)] == [
            (leaf.key, array.item()) for leaf, array in hold.open().read(["x"])
        ]
        with rejected(
            "CHECKPOINT_IN_USE", store.PreconditionError, match="by eval-1; end that"
        ):
            run.purge(2)
        assert [2] == [c.step for c in run.checkpoints(deleted=True)]
    run.purge(2)


def test_a_hold_names_its_checkpoint_and_its_expire_time(run: store.Run) -> None:
    with run.holds.create(owner="eval-1", ttl=timedelta(hours=1)) as hold:
        (info,) = run.holds.list()

        assert (2, run.latest().uid) == (info.step, info.uid)
        assert ("eval-1", timedelta(hours=1)) == (info.owner, info.ttl)
        assert info.create_time + info.ttl == info.expire_time == hold.expire_time
        assert run.latest() == hold.checkpoint
        assert "hold" in repr(hold).lower()
    assert [] == list(run.holds.list())


@pytest.mark.slow
def test_a_hold_lives_as_long_as_it_is_kept_open(run: store.Run) -> None:
    # Its ttl is longer than a busy machine delays a renewal.
    with run.holds.create(2, ttl=timedelta(seconds=6)) as hold:
        run.delete(2)
        for _ in range(4):  # more renewals than a ttl has
            _await_renewal(hold)
            with pytest.raises(store.PreconditionError, match="kept by hold"):
                run.purge(2)
        hold.check()


def test_a_hold_is_renewed_although_a_purge_was_interrupted(
    serve: Callable[[], InProcessServer],
) -> None:
    server = serve()
    stub = CheckpointServiceStub(grpc.insecure_channel(server.address))
    with store.connect(server.address) as client:
        run = client.run("tests/interrupted")
        run.save(1, TREE).result()
        request = create(run, 1)
        hold = stub.CreateHold(request).hold
        run.delete(1)
        with arm_points("purge.before_free=raise"), pytest.raises(grpc.RpcError):
            stub.PurgeCheckpoint(api.PurgeCheckpointRequest(name=hold.checkpoint))

        renewed = stub.RenewHold(api.RenewHoldRequest(name=hold.name))
        assert hold.uid == renewed.hold.uid == stub.CreateHold(request).hold.uid
        assert [1] == [c.step for c in run.checkpoints(deleted=True)]
        run.undelete(1)
        assert TREE == run.restore(1)


@pytest.mark.slow
def test_a_hold_that_was_ended_behind_its_back_says_so(
    run: store.Run, stub: CheckpointServiceStub
) -> None:
    hold = run.holds.create(2, ttl=timedelta(seconds=0.3))
    (info,) = run.holds.list()
    name = f"{RunName.parse(run.name).resource}/holds/{info.id}"
    stub.DeleteHold(api.DeleteHoldRequest(name=name))
    time.sleep(0.5)

    for call in (hold.check, hold.open, hold.close):
        with rejected("HOLD_NOT_FOUND", store.NotFoundError):
            call()


def test_the_error_that_ends_a_block_is_the_one_to_see(run: store.Run) -> None:
    with pytest.raises(ZeroDivisionError), run.holds.create(1):
        raise ZeroDivisionError

    assert [] == list(run.holds.list())


def test_a_renewal_that_fails_for_a_passing_reason_is_tried_again(
    run: store.Run, server: ServerProcess
) -> None:
    with run.holds.create(2, ttl=timedelta(seconds=0.3)) as hold:
        (info,) = run.holds.list()
        (file,) = server.root.rglob(f"{info.id}*")
        good = file.read_bytes()
        file.write_bytes(b"damaged")
        _wait_until(lambda: _error_of(hold) is not None)
        assert isinstance(_error_of(hold), store.DataLossError)

        file.write_bytes(good)

        _wait_until(lambda: _error_of(hold) is None)


def _error_of(hold: store.Hold) -> store.StoreError | None:
    try:
        hold.check()
    except store.StoreError as e:
        return e
    return None


def _await_renewal(hold: store.Hold) -> None:
    before = hold.expire_time
    _wait_until(lambda: hold.expire_time > before)


def _wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_a_hold_that_is_not_renewed_expires_and_keeps_nothing(
    run: store.Run, stub: CheckpointServiceStub
) -> None:
    request = create(run, 2, ttl=Duration(seconds=1))
    name = stub.CreateHold(request).hold.name
    run.delete(2)
    with pytest.raises(store.PreconditionError):
        run.purge(2)
    time.sleep(1.1)
    run.purge(2)

    with rejected("HOLD_EXPIRED", store.PreconditionError, match="create another one"):
        stub.RenewHold(api.RenewHoldRequest(name=name))
    assert 1 == len(list(run.holds.list()))


def test_what_is_deleted_is_held_by_its_uid_until_it_is_purged(
    run: store.Run, stub: CheckpointServiceStub
) -> None:
    uid = run.delete(2).uid
    request = create(run, 2, uid=uid)
    hold = stub.CreateHold(request).hold

    assert uid == hold.uid == stub.CreateHold(request).hold.uid
    with pytest.raises(store.PreconditionError, match="by eval"):
        run.purge(2)
    request.uid = "f" * 32
    assert "REQUEST_ID_REUSED" == _refusal(stub, request)
    stub.DeleteHold(api.DeleteHoldRequest(name=hold.name))
    run.purge(2)
    assert "CHECKPOINT_NOT_FOUND" == _refusal(stub, create(run, 2, uid=uid))
    run.save(2, TREE).result()
    assert "CHECKPOINT_NOT_FOUND" == _refusal(stub, create(run, 2, uid=uid))
    assert [] == list(run.holds.list())


def _refusal(stub: CheckpointServiceStub, request: api.CreateHoldRequest) -> str:
    with pytest.raises(store.StoreError) as caught, translate_rpc_errors("here"):
        stub.CreateHold(request)
    return caught.value.reason


def test_a_hold_that_is_asked_for_again_is_the_same_one(
    run: store.Run, stub: CheckpointServiceStub
) -> None:
    request = create(run, "latest")
    first = stub.CreateHold(request).hold
    run.save(3, TREE).result()

    again = stub.CreateHold(request).hold

    assert (first.name, first.uid) == (again.name, again.uid)
    assert again.expire_time.ToDatetime() >= first.expire_time.ToDatetime()
    assert 1 == len(list(run.holds.list()))
    with rejected("REQUEST_ID_REUSED", store.InvalidRequestError, match="use a new id"):
        stub.CreateHold(create(run, 1, request_id=request.request_id))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"parent": "9"}, "CHECKPOINT_NOT_FOUND"),
        ({"parent": "1"}, "CHECKPOINT_DELETED"),
        ({"parent": "best"}, "TAG_NOT_FOUND"),
        ({"parent": "-1"}, "INVALID_FIELD"),
        ({"request_id": "1"}, "INVALID_FIELD"),
        ({"owner": "é" * 129}, "INVALID_FIELD"),
        ({"ttl": Duration(seconds=0)}, "INVALID_FIELD"),
        ({"ttl": Duration(nanos=1)}, "INVALID_FIELD"),
        ({"ttl": Duration(seconds=-1)}, "INVALID_FIELD"),
        ({"ttl": Duration(seconds=30 * 86400 + 1)}, "INVALID_FIELD"),
    ],
)
def test_a_hold_that_cannot_be_is_rejected_for_its_own_reason(
    settled: store.Run,
    stub: CheckpointServiceStub,
    server: ServerProcess,
    fields: dict[str, Any],
    reason: str,
) -> None:
    request = create(settled, fields.pop("parent", 2), **fields)

    with unchanged(server.root), rejected(reason):
        stub.CreateHold(request)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("f" * 32, "HOLD_NOT_FOUND"), ("F" * 32, "INVALID_FIELD"), ("", "INVALID_FIELD")],
)
def test_a_hold_that_does_not_exist_is_not_renewed(
    settled: store.Run, stub: CheckpointServiceStub, name: str, reason: str
) -> None:
    resource = f"{RunName.parse(settled.name).resource}/holds/{name}"

    with rejected(reason):
        stub.RenewHold(api.RenewHoldRequest(name=resource))


def test_ending_a_hold_twice_changes_nothing(
    run: store.Run, stub: CheckpointServiceStub
) -> None:
    request = api.DeleteHoldRequest(name=stub.CreateHold(create(run, 1)).hold.name)

    stub.DeleteHold(request)
    stub.DeleteHold(request)

    assert [] == list(run.holds.list())


def test_holds_are_listed_page_by_page(
    run: store.Run, stub: CheckpointServiceStub
) -> None:
    made = {stub.CreateHold(create(run, 1)).hold.name for _ in range(5)}
    parent = RunName.parse(run.name).resource

    listed, token = [], ""
    for _ in range(3):
        request = api.ListHoldsRequest(parent=parent, page_size=2, page_token=token)
        page = stub.ListHolds(request)
        listed += [hold.name for hold in page.holds]
        token = page.next_page_token

    assert sorted(made) == listed
    assert "" == token


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"page_size": -1}, "INVALID_FIELD"),
        ({"page_token": "AAAA"}, "INVALID_PAGE_TOKEN"),
        ({"page_token": page_token(f"{SETTLED}/tags", "a")}, "INVALID_PAGE_TOKEN"),
        ({"parent": "namespaces/tests/runs/missing"}, "RUN_NOT_FOUND"),
        ({"parent": "tests/one"}, "INVALID_FIELD"),
    ],
)
def test_a_list_of_holds_that_cannot_be_is_rejected(
    settled: store.Run, stub: CheckpointServiceStub, fields: dict[str, Any], reason: str
) -> None:
    with rejected(reason):
        stub.ListHolds(api.ListHoldsRequest(**({"parent": SETTLED} | fields)))


@pytest.mark.parametrize("ttl", [timedelta(0), timedelta(days=31), -timedelta(days=1)])
def test_a_hold_for_no_time_or_too_long_is_rejected(
    settled: store.Run, ttl: timedelta
) -> None:
    with pytest.raises(store.InvalidRequestError, match="ttl"):
        settled.holds.create(ttl=ttl)


@pytest.mark.slow
def test_a_hold_outlives_the_server_that_made_it(start_server: Any) -> None:
    first = start_server()
    with store.connect(first.address) as client:
        run = client.run("tests/restart")
        run.save(1, TREE).result()
        with run.holds.create(1, ttl=timedelta(minutes=1)) as hold:
            run.delete(1)
            first.kill()
            first.start()
            with pytest.raises(store.PreconditionError):
                run.purge(1)
            hold.check()


@dataclass
class Promises:
    """Holds that were answered: until when, in the true time, each must last."""

    world: World
    until: dict[str, float] = field(default_factory=dict)

    def add(self, name: HoldName, began: float) -> None:
        """A call that began then was answered."""
        self.until[name.hold] = began + TTL
        if self.until[name.hold] > self.world.seconds:
            assert slot_of(self.world, 0).state in CHECKPOINTS

    def check(self, place: str, data: bytes) -> None:
        """Rejects a write that frees what is held."""
        if freed_uid(place, data) == uid_of(0):
            assert not any(t > self.world.seconds for t in self.until.values())


async def _hold(
    process: Process, other: Process, promises: Promises, *, pauses: list[float]
) -> None:
    """Holds a checkpoint, renews the hold at another process, and ends it."""
    name = HoldName(RUN, uuid.uuid4().hex)
    with suppress(StoreError):
        await _create(process, promises, name)
        for pause in pauses:
            promises.world.seconds += pause * TTL
            await promises.world.turns(LONG_TURNS)
            began = promises.world.seconds
            await other.holds.renew(name)
            promises.add(name, began)
        promises.until.pop(name.hold)
        await other.holds.delete(name)


async def _create(process: Process, promises: Promises, name: HoldName) -> None:
    began, ttl = promises.world.seconds, timedelta(seconds=TTL)
    uid = promises.world.rng.choice(("", uid_of(0)))
    await process.holds.create(name, CheckpointName(RUN, 0), owner="", ttl=ttl, uid=uid)
    promises.add(name, began)


async def _create_again(process: Process, promises: Promises, name: HoldName) -> None:
    with suppress(StoreError):
        await _create(process, promises, name)


async def _collect_often(process: Process) -> None:
    for _ in range(6):
        with suppress(StoreError):
            await process.collect()


@given(
    st.integers(0, 2**63),
    st.lists(
        st.lists(st.sampled_from([0.3, 0.9, 1.5]), max_size=3), min_size=1, max_size=3
    ),
    st.timedeltas(-MARGIN, MARGIN),
)
@settings(max_examples=examples(150), deadline=None)
def test_what_is_held_is_never_purged_whatever_the_order_and_the_clocks(
    seed: int, holders: list[list[float]], skew: timedelta
) -> None:
    world = world_of(seed, steps=1)
    promises = Promises(world)
    world.watch = promises.check
    one, two, three = (Process(world, skew=s) for s in (timedelta(), skew, skew / 2))

    together(
        *(_hold(one, two, promises, pauses=pauses) for pauses in holders),
        one.remove(0),
        _collect_often(three),
    )

    world.seconds += 2 * TTL
    together(three.remove(0))
    world.seconds += 2 * TTL
    together(three.remove(0))
    assert FREE == slot_of(world, 0).state


@given(st.integers(0, 2**63))
@settings(max_examples=examples(150), deadline=None)
def test_a_hold_that_is_asked_for_again_is_not_taken_back_by_the_first_call(
    seed: int,
) -> None:
    world = world_of(seed, steps=1)
    promises = Promises(world)
    world.watch = promises.check
    one, two = Process(world), Process(world)
    name = HoldName(RUN, uuid.uuid4().hex)

    together(
        *(_create_again(process, promises, name) for process in (one, two, one)),
        two.remove(0),
    )


def test_a_hold_that_is_made_again_during_a_purge_ends_the_purge() -> None:
    world = world_of(0, steps=1)
    process = Process(world)
    name = HoldName(RUN, uuid.uuid4().hex)
    together(_create(process, Promises(world), name))
    put_state(world, 0, PURGING)

    assert uid_of(0) == asyncio.run(_made(process, name)).upload
    assert DELETED == slot_of(world, 0).state


def test_a_new_hold_does_not_end_a_purge() -> None:
    world = world_of(0, steps=1)
    process = Process(world)
    put_state(world, 0, PURGING)

    with pytest.raises(CheckpointDeletedError, match="is being purged"):
        asyncio.run(_made(process, HoldName(RUN, uuid.uuid4().hex)))
    assert PURGING == slot_of(world, 0).state
    together(process.collect())
    assert FREE == slot_of(world, 0).state


async def _made(process: Process, name: HoldName) -> pb.HoldRecord:
    return await process.holds.create(
        name,
        CheckpointName(RUN, 0),
        owner="",
        ttl=timedelta(seconds=TTL),
        uid=uid_of(0),
    )


@pytest.mark.parametrize(
    "ahead", [timedelta(hours=-1), timedelta(hours=1), MARGIN - timedelta(hours=1)]
)
def test_a_hold_is_renewed_by_a_server_whose_clock_is_another(ahead: timedelta) -> None:
    world = world_of(0, steps=1)
    maker, purger, other = Process(world), Process(world), Process(world, skew=ahead)
    name = HoldName(RUN, uuid.uuid4().hex)
    together(_create(maker, Promises(world), name))

    for _ in range(4):  # each is late, and no purge came first
        together(purger.remove(0))
        assert DELETED == slot_of(world, 0).state
        world.seconds += TTL * 1.1
        asyncio.run(other.holds.renew(name))


def test_a_hold_that_ended_longer_ago_than_any_clock_is_wrong_is_not_renewed() -> None:
    world = world_of(0, steps=1)
    process = Process(world)
    name = HoldName(RUN, uuid.uuid4().hex)
    together(_create(process, Promises(world), name))
    world.seconds += TTL + MARGIN.total_seconds()
    writes = world.writes

    with pytest.raises(HoldExpiredError, match="create another one"):
        asyncio.run(process.holds.renew(name))
    assert writes == world.writes


def test_a_renewal_after_another_process_purged_is_rejected_whatever_its_clock() -> (
    None
):
    world = world_of(0, steps=1)
    maker, purger = Process(world), Process(world)
    behind = Process(world, skew=timedelta(days=-1))
    name = HoldName(RUN, uuid.uuid4().hex)
    promises = Promises(world)
    together(_create(maker, promises, name))
    together(purger.remove(0))
    assert DELETED == slot_of(world, 0).state

    world.seconds += TTL
    put_state(world, 0, PURGING)  # that purge counted the hold as expired
    asyncio.run(behind.holds.renew(name))
    assert DELETED == slot_of(world, 0).state
    world.seconds += TTL
    together(purger.remove(0))  # it starts over: that renewal was written
    assert DELETED == slot_of(world, 0).state
    world.seconds += TTL
    together(purger.remove(0))
    assert FREE == slot_of(world, 0).state
    with pytest.raises(HoldExpiredError, match="may have been purged"):
        asyncio.run(behind.holds.renew(name))


@given(st.integers(0, 2**63))
@settings(max_examples=examples(150), deadline=None)
def test_no_renewal_fails_because_of_a_purge(seed: int) -> None:
    world = world_of(seed, steps=1)
    one, two, three = Process(world), Process(world), Process(world)
    name = HoldName(RUN, uuid.uuid4().hex)
    ttl = timedelta(days=1)

    async def hold_often() -> None:
        for _ in range(6):
            await one.holds.renew(name)

    checkpoint = CheckpointName(RUN, 0)
    asyncio.run(one.holds.create(name, checkpoint, owner="", ttl=ttl))
    together(hold_often(), two.remove(0), three.remove(0), _collect_often(three))

    assert DELETED == slot_of(world, 0).state


@pytest.mark.slow
def test_a_hold_that_was_not_renewed_in_time_says_so(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    with store.connect(server.address) as client:
        run = client.run("tests/late")
        run.save(1, {"x": np.ones(3)}).result()
        hold = run.holds.create(1, ttl=timedelta(seconds=1))
        hold.check()
        server.kill()
        time.sleep(1.1)
        with rejected("HOLD_EXPIRED", store.PreconditionError, match="not renewed"):
            hold.check()
        server.start()


def test_a_closed_hold_opens_nothing(run: store.Run) -> None:
    run.save(77, {"x": np.ones(3)}).result()
    with run.holds.create(77) as hold:
        opened = hold.open()
    with pytest.raises(store.InvalidRequestError, match="is closed"):
        hold.open()
    assert 3 == len(opened.restore()["x"])  # it takes a hold of its own


class _LateRenewals(grpc.UnaryUnaryClientInterceptor):
    """Sends each renewal late; notes which calls are begun and ended."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.renews = threading.Event()
        """Set once a renewal is under way."""

    def intercept_unary_unary(
        self,
        continuation: Callable[[grpc.ClientCallDetails, Any], Any],
        client_call_details: grpc.ClientCallDetails,
        request: Any,
    ) -> Any:
        method = client_call_details.method.rpartition("/")[2]
        self.made.append(method)
        if method == "RenewHold":
            self.renews.set()
            time.sleep(0.5)
        call = continuation(client_call_details, request)
        call.code()  # once it is answered
        self.made.append("answer")
        return call


@pytest.mark.slow
def test_a_hold_that_is_closed_during_a_renewal_is_not_renewed_after_it(
    run: store.Run, server_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = run.holds.create(2, ttl=timedelta(seconds=3))
    calls = _LateRenewals()
    channel = grpc.intercept_channel(grpc.insecure_channel(server_address), calls)
    monkeypatch.setattr(hold._lease, "_stub", CheckpointServiceStub(channel))
    assert calls.renews.wait(10)

    hold.close()
    time.sleep(1.5)  # longer than from one renewal to the next

    assert ["RenewHold", "answer", "DeleteHold", "answer"] == calls.made
    hold.check()
    assert [] == list(run.holds.list())


class _CollectingRenewals(grpc.UnaryUnaryClientInterceptor):
    """Ends a lease within a renewal of it, as a collection of garbage may."""

    def __init__(self, lease: Any) -> None:
        self.ended = threading.Event()
        self._lease = lease

    def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        """Goes on with the call."""
        if client_call_details.method.endswith("/RenewHold"):
            self._lease.end()
            self.ended.set()
        return continuation(client_call_details, request)


def test_a_lease_that_is_ended_within_its_own_renewal_ends(
    run: store.Run, server_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = run.holds.create(2, ttl=timedelta(seconds=1))
    calls = _CollectingRenewals(hold._lease)
    channel = grpc.intercept_channel(grpc.insecure_channel(server_address), calls)
    monkeypatch.setattr(hold._lease, "_stub", CheckpointServiceStub(channel))

    assert calls.ended.wait(10)
    hold.close()
    assert [] == list(run.holds.list())


@pytest.mark.slow
def test_a_hold_that_is_closed_too_late_says_so(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    with store.connect(server.address) as client:
        run = client.run("tests/late")
        run.save(1, {"x": np.ones(3)}).result()
        hold = run.holds.create(1, ttl=timedelta(seconds=1))
        server.kill()
        time.sleep(1.1)  # its renewal is still being tried again

        with rejected("HOLD_EXPIRED", store.PreconditionError, match="not renewed"):
            hold.close()
        server.start()
