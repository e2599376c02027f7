"""Retention as a run lives it: set, tried, applied; against whatever else goes on."""

import asyncio
import json
import re
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

import storesvc_client as store
from storesvc.catalog.slots import COMMITTED, DELETED, Change
from storesvc.errors import InvalidPolicyError, StoreError
from storesvc.format import layout
from storesvc.format.layout import RunPaths
from storesvc.format.names import CheckpointName, TagName
from storesvc.format.seal import unseal
from storesvc.retention.committed import CommittedCheckpoints
from storesvc.retention.enforcement import PAGE, Outcome, RetentionEnforcer
from storesvc_client._values.policies import policy_message
from storesvc_client.cli import main
from storesvc_client.errors import translate_rpc_errors
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from tests.support.examples import examples
from tests.support.in_process_server import InProcessServer
from tests.support.interleaving import (
    RUN,
    Process,
    World,
    new_id,
    put_record,
    put_state,
    slot_of,
    together,
    world_of,
)
from tests.support.refusals import rejected
from tests.support.server_process import ServerProcess

LOSSES = {0: 5.0, 10: 2.0, 15: 4.0, 20: float("nan"), 30: 1.0, 40: 3.0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessServer]:
    """A server that applies no policy by itself: a process of its own does so soon
    after a commit."""
    served = InProcessServer(tmp_path_factory.mktemp("served") / "store")
    yield served
    served.close()


@pytest.fixture
def saved(run: store.Run) -> store.Run:
    """A run of six checkpoints."""
    for step, loss in LOSSES.items():
        run.save(step, {"x": np.full(100, step)}, metrics={"loss": loss})
    run.wait()
    return run


def files_of(server: InProcessServer, run: store.Run) -> dict[Path, bytes]:
    """Returns all files of a run in the bucket."""
    below = server.root / "data" / run.name
    files = {path: path.read_bytes() for path in below.rglob("*") if path.is_file()}
    assert files
    return files


def steps(run: store.Run) -> list[int]:
    return [checkpoint.step for checkpoint in run.checkpoints()]


# --- through the client -----------------------------------------------------------


def test_a_policy_can_be_set_before_the_first_save(run: store.Run) -> None:
    policy = store.KeepLatest(2) | store.KeepEvery(duration=timedelta(days=1))

    run.retention.set(policy)

    assert policy == run.retention.get()
    assert [] == run.retention.preview()
    assert [] == run.retention.apply()
    run.save(0, {"x": 1}).result()
    assert policy == run.retention.get()
    assert [0] == steps(run)


def test_a_preview_tells_why_each_stays_and_deletes_nothing(
    server: InProcessServer, saved: store.Run
) -> None:
    saved.tags.set("best", 10)
    saved.update(0, pinned=True)
    before = files_of(server, saved)

    decisions = saved.retention.preview(
        store.KeepBest(2, metric="loss", mode="min") | store.KeepEvery(steps=20)
    )

    assert {
        40: ("newest", "every 20 steps"),
        30: ("best 2 by loss (min)",),
        20: ("every 20 steps",),
        15: (),
        10: ("tagged best", "best 2 by loss (min)"),
        0: ("pinned", "every 20 steps"),
    } == {decision.step: decision.reasons for decision in decisions}
    assert [40, 30, 20, 15, 10, 0] == [decision.step for decision in decisions]
    assert [15] == [decision.step for decision in decisions if not decision.kept]
    assert all(decision.own_bytes > 0 for decision in decisions)
    assert saved.checkpoint(15).uid == decisions[3].uid
    assert before == files_of(server, saved)
    assert None is saved.retention.get()


@pytest.mark.slow
def test_what_is_deleted_is_what_was_predicted(saved: store.Run) -> None:
    policy = store.KeepLatest(1) | store.KeepSteps(10, 99)
    predicted = [d.step for d in saved.retention.preview(policy) if d.kept]

    saved.retention.set(policy, purge_delay=timedelta(hours=6))
    applied = saved.retention.apply()

    assert [40, 10] == predicted == steps(saved)
    assert predicted == [d.step for d in applied if d.kept]
    assert {0, 15, 20, 30} == {
        deleted.step for deleted in saved.checkpoints(deleted=True)
    }
    for deleted in saved.checkpoints(deleted=True):
        assert deleted.delete_time
        assert deleted.purge_time == deleted.delete_time + timedelta(hours=6)
    assert [(True, d.step) for d in applied if d.kept] == [
        (d.kept, d.step) for d in saved.retention.apply()
    ]
    saved.undelete(20)
    assert [40, 20, 10] == steps(saved)


def test_without_a_policy_all_stay(saved: store.Run) -> None:
    reasons = {decision.reasons for decision in saved.retention.apply()}

    assert {("no policy",), ("newest", "no policy")} == reasons
    assert sorted(LOSSES, reverse=True) == steps(saved)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (store.KeepLatest(0), "POLICY_KEEPS_NOTHING"),
        (store.KeepSteps(1) & store.KeepSteps(2), "POLICY_KEEPS_NOTHING"),
        (~store.KeepLatest(3), "INVALID_POLICY"),
        (store.KeepLatest(3) | store.KeepEvery(steps=0), "INVALID_POLICY"),
    ],
    ids=str,
)
def test_a_policy_without_sense_is_rejected_and_not_stored(
    run: store.Run, policy: store.RetentionPolicy, reason: str
) -> None:
    with rejected(reason, store.InvalidRequestError, match="retention policy"):
        run.retention.set(policy)
    with pytest.raises(store.NotFoundError):
        run.retention.get()

    run.retention.set(store.KeepLatest(3))
    with pytest.raises(store.InvalidRequestError):
        run.retention.set(policy)
    with pytest.raises(store.InvalidRequestError):
        run.retention.preview(policy)
    assert store.KeepLatest(3) == run.retention.get()


def test_a_policy_is_only_applied_after_it_was_set(
    server_address: str, run: store.Run
) -> None:
    run.retention.set(store.KeepLatest(1))
    stub = CheckpointServiceStub(grpc.insecure_channel(server_address))
    request = api.ApplyRetentionRequest(
        name=f"namespaces/tests/runs/{run.name.rpartition('/')[2]}",
        policy=policy_message(store.KeepLatest(2)),
    )

    with (
        pytest.raises(store.InvalidRequestError, match="validate_only"),
        translate_rpc_errors("here"),
    ):
        list(stub.ApplyRetention(request))


def test_the_retention_of_a_run_that_does_not_exist_is_not_found(
    run: store.Run,
) -> None:
    for call in (run.retention.preview, run.retention.apply, run.retention.get):
        with rejected("RUN_NOT_FOUND", store.NotFoundError):
            call()


# --- storectl ---------------------------------------------------------------------


def storectl(address: str, *arguments: str) -> Result:
    result = CliRunner().invoke(main, ["--store", address, "retain", *arguments])
    assert result.exit_code in (0, 1, 2), result
    return result


@pytest.mark.slow
def test_storectl_sets_and_shows_a_policy(
    server_address: str, saved: store.Run
) -> None:
    bare = storectl(server_address, saved.name)
    assert ("", 0) == (bare.stdout, bare.exit_code)
    assert "no retention policy" in bare.stderr

    policy = "latest(6) | newer-than(2 hours) & ~pinned"
    arguments = [saved.name, "latest(6)|newer-than(2h) & ~ pinned"]
    shown = storectl(server_address, *arguments, "--purge-delay", "36h")

    assert f"{policy}\n" == shown.stdout
    assert store.parse_policy(policy) == saved.retention.get()
    document = json.loads(storectl(server_address, saved.name, "--json").stdout)
    assert (policy, "129600s") == (document["retention"], document["purge_delay"])
    storectl(server_address, saved.name, "--purge-delay", "1d")
    assert timedelta(days=1) == saved.info().purge_delay
    assert store.parse_policy(policy) == saved.retention.get()
    storectl(server_address, saved.name, "--clear")
    assert None is saved.retention.get()


@pytest.mark.slow
def test_storectl_tries_and_applies_a_policy(
    server_address: str, saved: store.Run
) -> None:
    dry = storectl(server_address, saved.name, "latest(2) | steps(10)", "--dry-run")

    header, *rows = [line.split("  ") for line in dry.stdout.splitlines()]
    assert ["STEP", "KEPT", "WHY"] == [cell.strip() for cell in header if cell][:3]
    assert 6 == len(rows)
    assert "newest; latest 2" in dry.stdout
    assert "would delete 3 of 6 checkpoints" not in dry.stdout
    assert "would delete 3 of 6 checkpoints, up to" in dry.stderr
    first, second = dry.stderr.splitlines()
    assert " checkpoints, up to " in first
    cost = r"storectl: deleted checkpoints keep [\d.]+ K?i?B for 3 days; --purge-delay "
    assert re.match(cost, second)
    assert 6 == len(steps(saved))

    arguments = [saved.name, "latest(2) | steps(10)", "--apply", "--json"]
    applied = json.loads(storectl(server_address, *arguments).stdout)
    assert [40, 30, 10] == steps(saved)
    assert [40, 30, 10] == [d["step"] for d in applied if d["kept"]]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["prod"], "expected a run"),
        (["prod/x@3"], "expected a run"),
        (["a/b", "latest(x)"], "expected a whole number at character 8"),
        (["a/b", "--purge-delay", "3"], "expected a number and a unit"),
        (["a/b", "--dry-run", "--apply"], "expected one of"),
        (["a/b", "tagged", "--clear"], "expected one of"),
        (["a/b", "--dry-run", "--purge-delay", "3d"], "changes nothing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_storectl_rejects_what_it_cannot_mean(
    server_address: str, arguments: list[str], complaint: str
) -> None:
    result = storectl(server_address, *arguments)

    assert 2 == result.exit_code
    assert complaint in " ".join(result.stderr.split())


def test_storectl_passes_on_what_the_store_rejects(
    server_address: str, run: store.Run
) -> None:
    result = storectl(server_address, run.name, "latest(0)")

    assert 1 == result.exit_code
    assert result.stderr.startswith("storectl: retention policy: expected one that")


# --- among others -----------------------------------------------------------------


def retained(world: World, policy: store.RetentionPolicy | None) -> World:
    """The world, its run with a policy."""
    record = pb.RunRecord(uid="u", write_id="w")
    if policy is not None:
        record.retention.CopyFrom(policy_message(policy))
    put_record(world, layout.run_record(RUN), record)
    return world


def retaining(process: Process) -> RetentionEnforcer:
    catalog, references, clock = process.catalog, process.references, process.clock
    committed = CommittedCheckpoints(
        process.bucket, catalog, references, process.journal, clock
    )
    return RetentionEnforcer(catalog, process.lifecycle, references, committed, clock)


async def _applied(process: Process) -> dict[int, Outcome]:
    pages = [page async for page in retaining(process).apply(RUN)]
    return {outcome.step: outcome for page in pages for outcome in page}


async def _apply(process: Process) -> None:
    await _applied(process)


async def _tag(process: Process, tag: str, step: int) -> None:
    name = CheckpointName(RUN, step)
    await process.tags.set(
        TagName(RUN, tag), name, protected=False, etag="", write_id=new_id()
    )


async def _update(process: Process, step: int, change: Change) -> None:
    await process.lifecycle.update(RUN, step, change, etag="", write_id=new_id())


async def _delete(process: Process, step: int) -> None:
    await process.lifecycle.delete(
        RUN, step, purge_delay=timedelta(days=1), etag="", write_id=new_id()
    )


@pytest.mark.slow
def test_what_changes_between_the_decision_and_the_deletion_is_left() -> None:
    world = retained(world_of(0, steps=PAGE + 5), store.KeepLatest(PAGE))
    process, other = Process(world), Process(world)

    async def main() -> None:
        pages = retaining(process).apply(RUN)
        first = await anext(pages)
        assert PAGE == len(first)
        assert all(outcome.kept for outcome in first)
        await _update(other, 4, Change(pinned=True))
        await _tag(other, "best", 3)
        await _update(other, 2, Change(labels={"seen": "yes"}))
        await _delete(other, 1)
        (second,) = [page async for page in pages]
        left = ("changed in the meantime",)
        assert [(4, left), (3, left), (2, left), (1, ()), (0, ())] == [
            (outcome.step, outcome.reasons) for outcome in second
        ]

    asyncio.run(main())
    states = [slot_of(world, step).state for step in range(5)]
    assert [DELETED, DELETED, COMMITTED, COMMITTED, COMMITTED] == states
    # the next time, what only got a label goes
    asyncio.run(_apply(process))
    assert DELETED == slot_of(world, 2).state
    assert COMMITTED == slot_of(world, 3).state == slot_of(world, 4).state


async def test_what_another_pass_deletes_first_counts_as_deleted() -> None:
    world = retained(world_of(0, steps=PAGE + 5), store.KeepLatest(PAGE))
    process, other = Process(world), Process(world)

    pages = retaining(process).apply(RUN)
    await anext(pages)
    await _apply(other)
    (second,) = [page async for page in pages]
    assert [(step, ()) for step in (4, 3, 2, 1, 0)] == [
        (outcome.step, outcome.reasons) for outcome in second
    ]


@given(st.integers(0, 2**63))
@settings(max_examples=examples(150), deadline=None)
def test_passes_at_the_same_time_report_what_they_leave(seed: int) -> None:
    world = retained(world_of(seed, steps=4), store.KeepLatest(1))
    outcomes: list[Outcome] = []

    async def apply() -> None:
        outcomes.extend((await _applied(Process(world))).values())

    together(apply(), apply(), apply())

    assert all(outcome.kept == (outcome.step == 3) for outcome in outcomes)
    states = [slot_of(world, step).state for step in range(4)]
    assert [DELETED, DELETED, DELETED, COMMITTED] == states


async def test_a_deletion_by_name_is_not_reverted_by_a_pass() -> None:
    """The newest one goes, too, so the pass undeletes what it deleted itself."""
    world = retained(world_of(0, steps=PAGE + 2), store.KeepLatest(PAGE))
    process, other = Process(world), Process(world)
    emptied: list[str] = []

    def watch(place: str, data: bytes) -> None:
        del data
        if place == RunPaths(RUN).checkpoint(0) and not emptied:
            emptied.append(place)
            put_state(world, PAGE + 1, DELETED)

    pages = retaining(process).apply(RUN)
    await anext(pages)
    await _delete(other, 1)
    world.watch = watch
    (second,) = [page async for page in pages]
    assert [(1, False), (0, True)] == [(o.step, o.kept) for o in second]

    assert [COMMITTED, DELETED] == [slot_of(world, step).state for step in (0, 1)]


async def test_nothing_is_deleted_once_the_newest_one_is_gone() -> None:
    world = retained(world_of(0, steps=PAGE + 2), store.KeepLatest(PAGE))
    process, other = Process(world), Process(world)

    pages = retaining(process).apply(RUN)
    await anext(pages)
    await _delete(other, PAGE + 1)
    writes = world.writes
    (second,) = [page async for page in pages]
    assert [True, True] == [outcome.kept for outcome in second]
    assert writes == world.writes  # not even for a moment

    assert COMMITTED == slot_of(world, 0).state == slot_of(world, 1).state


@pytest.mark.slow
@given(st.integers(0, 2**63))
@settings(max_examples=examples(400), deadline=None)
def test_what_is_tagged_or_pinned_stays_whatever_the_order(seed: int) -> None:
    world = retained(world_of(seed, steps=4), store.KeepSteps(99))
    one, two, three = (
        Process(world, skew=timedelta(days=days)) for days in (0, 30, -30)
    )
    promised: set[int] = set()

    async def promise(step: int, call: Any) -> None:
        try:
            await call
        except StoreError:  # it came too late, and says so
            return
        promised.add(step)

    together(
        _apply(one),
        promise(0, _tag(two, "best", 0)),
        promise(1, _update(three, 1, Change(pinned=True))),
        _apply(three),
    )

    assert all(slot_of(world, step).state == COMMITTED for step in promised)
    assert COMMITTED == slot_of(world, 3).state
    assert DELETED == slot_of(world, 2).state


@given(st.integers(0, 2**63))
@settings(max_examples=examples(400), deadline=None)
def test_the_newest_one_stays_unless_it_was_asked_for_by_name(seed: int) -> None:
    world = retained(world_of(seed, steps=3), store.KeepSteps(99))
    deletions: list[int] = []

    def watch(place: str, data: bytes) -> None:
        if not place.startswith(RunPaths(RUN).checkpoints):
            return
        slot = unseal(data, pb.CheckpointRecord, place=place)
        if slot.state == DELETED:
            deletions.append(slot.step)

    world.watch = watch
    together(_apply(Process(world)), _delete(Process(world), 2))

    if 1 in deletions and deletions.index(2) < deletions.index(1):
        # it was the newest one then
        assert COMMITTED == slot_of(world, 1).state


@pytest.mark.slow
async def test_a_preview_of_a_long_run_comes_in_pages() -> None:
    world = retained(world_of(0, steps=2 * PAGE + 500), None)

    policy = policy_message(store.KeepEvery(steps=5))
    pages = [page async for page in retaining(Process(world)).preview(RUN, policy)]
    assert [PAGE, PAGE, 500] == [len(page) for page in pages]
    outcomes = [outcome for page in pages for outcome in page]
    assert list(range(2 * PAGE + 500))[::-1] == [v.step for v in outcomes]
    assert (2 * PAGE + 500) // 5 + 1 == sum(v.kept for v in outcomes)


def test_a_stored_policy_with_an_unknown_rule_deletes_nothing() -> None:
    world = world_of(0, steps=3)
    # as an older release reads what a newer one stored: a rule that it cannot see
    record = pb.RunRecord(uid="u", write_id=str(uuid.uuid4()))
    record.retention.MergeFromString(b"\xa2\x06\x00")
    put_record(world, layout.run_record(RUN), record)

    with pytest.raises(InvalidPolicyError, match="that this server knows"):
        asyncio.run(_apply(Process(world)))
    assert all(slot_of(world, step).state == COMMITTED for step in range(3))


@pytest.mark.slow
def test_a_policy_is_still_there_after_a_restart_and_applied(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    with store.connect(server.address) as client:
        run = client.run("a/b")
        for step in range(3):
            run.save(step, {"x": step}).result()
        run.retention.set(store.KeepLatest(1))
        server.kill()
        server.start()
        run.retention.apply()

        assert [2] == steps(run)
