"""Quotas: what they admit, and that every call gives back what it took."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import storesvc_client as store
from storesvc import quota
from storesvc.auth.call import Call
from storesvc.auth.policy import Authentication, Permission, Principal
from storesvc.auth.policy_file import QuotaRule
from storesvc.errors import PermissionDeniedError, QuotaExceededError
from storesvc.format.names import RunName, UploadName
from storesvc.gc.run_state import StoredBytes
from storesvc.quota import BURST_SECONDS, Bucket, Quotas, find_rule
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from tests.support.rpcs import outcome_of, reason_of
from tests.support.server_process import ServerProcess

POLICY = """
[[bindings]]
role = "admin"
runs = ["**"]
who = ["local"]

[[quotas]]
namespaces = ["limited"]
"""


@given(st.integers(1, 100), st.lists(st.floats(0, 2), min_size=1, max_size=200))
def test_a_rate_admits_no_more_than_it_says(rate: int, pauses: list[float]) -> None:
    bucket, now, turns = Bucket(now=0.0), 0.0, list[float]()
    for pause in pauses:
        now += pause
        wait = bucket.take(rate, now=now, most_seconds=2.0)
        if wait is not None:
            assert 0.0 <= wait <= 2.0
            turns.append(now + wait)

    assert turns == sorted(turns)
    for count, turn in enumerate(turns, 1):
        assert count <= rate * turn + max(1.0, rate * BURST_SECONDS) + 1e-6


@given(st.integers(1, 100))
def test_a_call_that_would_wait_too_long_takes_no_turn(rate: int) -> None:
    bucket, taken = Bucket(now=0.0), 0
    while bucket.take(rate, now=0.0, most_seconds=1.0) is not None:
        taken += 1

    assert taken == max(1, int(rate * BURST_SECONDS)) + rate
    assert bucket.take(rate, now=0.0, most_seconds=1.0) is None
    assert bucket.take(rate, now=1 / rate + 1e-6, most_seconds=1.0) is not None


def test_the_first_rule_that_matches_a_namespace_applies() -> None:
    rules = [QuotaRule(namespaces=("prod",)), QuotaRule(namespaces=("*",), streams=1)]

    assert find_rule(rules, "prod") is rules[0]
    assert find_rule(rules, "lab") is rules[1]
    assert find_rule(rules[:1], "lab") is None


def call_of(method: str, number: int, principal: str = "user:a") -> Call:
    """Returns a call of a run."""
    run = RunName("limited", f"run-{number % 3}")
    return Call(
        principal=Principal(name=principal, authentication=Authentication.TOKEN),
        policy=None,
        method=method,
        request_id=str(number),
        peer="",
        granted=[(Permission.RUNS_LIST, run)],
        detail={"name": f"{run.resource}/uploads/{number}"},
    )


async def nothing_stored(_: str) -> StoredBytes:
    return StoredBytes()


METHODS = [
    *("ReadChunks", "WatchCheckpoints", "BeginUpload", "WriteChunks", "GetRun"),
    "CreateCheckpoint",
]


@given(st.lists(st.tuples(st.sampled_from(METHODS), st.booleans()), max_size=40))
def test_counts_return_to_zero_however_calls_end(made: list[tuple[str, bool]]) -> None:
    asyncio.run(count_calls(made))


async def count_calls(made: list[tuple[str, bool]]) -> None:
    """Counts calls, some of which end early."""
    rule = QuotaRule(
        namespaces=("*",), streams=3, watches=2, uploads=2, bytes_in_flight=100 << 20
    )

    found = Quotas(lambda: ((rule,), rule), nothing_stored)
    open_calls = []
    for number, (method, is_ended_early) in enumerate(made):
        call = call_of(method, number)
        error: Exception | None = None
        try:
            await found.on_permitted(call)
        except QuotaExceededError as e:
            error = e
        if error is not None or is_ended_early:
            await found.ended(call, error or asyncio.CancelledError())
        else:
            open_calls.append(call)
    rows = await found.describe("limited")
    assert all(row.used <= row.limit for row in rows)
    for call in open_calls:
        await found.ended(call, None)
        end = call_of("AbortUpload", int(call.request_id))
        await found.on_permitted(end)
        await found.ended(end, None)

    rows = await found.describe("limited")
    assert not any(row.used for row in rows if row.name != "uploads")


async def test_a_retry_of_a_begin_is_the_same_upload() -> None:
    rule = QuotaRule(namespaces=("*",), uploads=1)
    found = Quotas(lambda: ((rule,), None), nothing_stored)
    for _ in range(3):
        await found.on_permitted(call_of("BeginUpload", 1))
    with pytest.raises(QuotaExceededError, match="1 uploads"):
        await found.on_permitted(call_of("BeginUpload", 2))


@pytest.mark.parametrize("error", [None, asyncio.CancelledError()])
async def test_a_save_in_one_call_is_an_upload_while_it_runs(
    error: BaseException | None,
) -> None:
    rule = QuotaRule(namespaces=("*",), uploads=1)
    found = Quotas(lambda: ((rule,), rule), nothing_stored)
    small = call_of("CreateCheckpoint", 1)
    await found.on_permitted(small)
    with pytest.raises(QuotaExceededError, match="1 uploads"):
        await found.on_permitted(call_of("BeginUpload", 2))
    await found.ended(small, error)
    await found.on_permitted(call_of("CreateCheckpoint", 3))


async def test_what_a_save_in_one_call_stores_counts_until_it_is_listed() -> None:
    rule = QuotaRule(namespaces=("*",), stored_bytes=1000)
    found = Quotas(lambda: ((rule,), None), nothing_stored)
    for number, is_admitted in ((1, True), (2, False)):
        call = call_of("CreateCheckpoint", number)
        upload = UploadName(RunName("limited", "run"), f"{number:032x}")
        call.detail["name"] = upload.resource
        await found.on_permitted(call)
        with nullcontext() if is_admitted else pytest.raises(QuotaExceededError):
            await found.send(upload, 600, 600)
        await found.ended(call, None if is_admitted else PermissionDeniedError("no"))


@pytest.mark.parametrize("is_permitted", [True, False])
async def test_a_begin_that_fails_leaves_the_upload_of_another_call_counted(
    is_permitted: bool,
) -> None:
    rule = QuotaRule(namespaces=("*",), uploads=1)
    found = Quotas(lambda: ((rule,), None), nothing_stored)
    begun, again = call_of("BeginUpload", 1), call_of("BeginUpload", 1, "user:b")
    await found.on_permitted(begun)
    await found.ended(begun, None)
    again.request_id = "another call"
    if is_permitted:
        await found.on_permitted(again)
    await found.ended(again, PermissionDeniedError("denied"))
    with pytest.raises(QuotaExceededError, match="1 uploads"):
        await found.on_permitted(call_of("BeginUpload", 2))


@pytest.mark.parametrize("first", ["cancelled", "ended"])
@pytest.mark.parametrize("second", ["cancelled", "ended"])
async def test_an_upload_is_counted_if_its_begin_or_the_retry_of_it_ends_well(
    first: str, second: str
) -> None:
    rule = QuotaRule(namespaces=("*",), uploads=1)
    found = Quotas(lambda: ((rule,), None), nothing_stored)
    begun, retry = call_of("BeginUpload", 1), call_of("BeginUpload", 1)
    retry.request_id = "its retry"
    await found.on_permitted(begun)
    await found.on_permitted(retry)
    for call, end in ((begun, first), (retry, second)):
        is_lost = end == "cancelled"
        await found.ended(call, asyncio.CancelledError() if is_lost else None)
    (row,) = await found.describe("limited")

    assert (row.used == 1) == ("ended" in (first, second))


async def test_a_begin_that_fails_is_no_longer_counted() -> None:
    rule = QuotaRule(namespaces=("*",), uploads=1)
    found = Quotas(lambda: ((rule,), rule), nothing_stored)
    failed = call_of("BeginUpload", 1)
    await found.on_permitted(failed)
    await found.ended(failed, asyncio.CancelledError())
    await found.on_permitted(call_of("BeginUpload", 2))


async def test_idle_scopes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "MAX_SCOPES", 10)

    found = Quotas(lambda: ((), QuotaRule(requests_per_second=5)), nothing_stored)
    for number in range(1000):
        call = call_of("GetRun", number, f"user:{number}")
        await found.on_permitted(call)
        await found.ended(call, None)

    assert len(found._scopes) <= 11


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Callable[[str], ServerProcess]]:
    """Starts a server with quotas of a namespace."""
    made: list[ServerProcess] = []

    def start(quota: str) -> ServerProcess:
        policy = tmp_path / "policy.toml"
        policy.write_text(POLICY + quota)
        server = ServerProcess(tmp_path / "store", tmp_path, "--policy", str(policy))
        made.append(server)
        server.start()
        return server

    yield start
    for server in made:
        server.stop()


@pytest.mark.slow
def test_a_rate_slows_a_save_and_fails_none(
    limited: Callable[[str], ServerProcess],
) -> None:
    server = limited("requests_per_second = 10")
    with store.connect(server.address) as client:
        run = client.run("limited/run")
        for step in range(4):
            run.save(step, {"w": np.arange(9)}).result()
        assert run.steps() == [0, 1, 2, 3]

        stub = CheckpointServiceStub(grpc.insecure_channel(server.address))
        request = api.GetRunRequest(name="namespaces/limited/runs/run")

        for _ in range(30):  # each waits for its turn
            assert run.latest_step() == 3
        future = stub.GetRun.future
        calls = [future(request) for _ in range(100)]
        errors = [call.exception(timeout=60) for call in calls]
        reasons = {reason_of(error) for error in errors if error is not None}
        assert reasons == {"QUOTA_EXCEEDED"}
        assert errors.count(None) >= 20
        other = api.ListRunsRequest(parent="namespaces/-")
        for _ in range(100):
            stub.ListRuns(other)


@pytest.mark.slow
def test_watches_are_limited_and_given_back(
    limited: Callable[[str], ServerProcess],
) -> None:
    server = limited("watches = 2")
    with store.connect(server.address) as client:
        run = client.run("limited/run")
        run.save(0, {"w": np.arange(9)}).result()
        stub = CheckpointServiceStub(grpc.insecure_channel(server.address))
        request = api.WatchCheckpointsRequest(parent="namespaces/limited/runs/run")

        def watch() -> Any:
            stream = stub.WatchCheckpoints(request, timeout=60)
            next(stream)
            return stream

        first, second = watch(), watch()
        assert outcome_of(watch) == "QUOTA_EXCEEDED"
        used = {q.name: (q.used, q.limit) for q in client.quotas("limited")}
        assert used["watches"] == (2, 2)

        first.cancel()
        for _ in range(1000):
            used = {q.name: (q.used, q.limit) for q in client.quotas("limited")}
            if used["watches"] == (1, 2):
                break
            time.sleep(0.01)
        assert used["watches"] == (1, 2)
        watch().cancel()
        second.cancel()


def test_quotas_are_none_without_a_policy(tmp_path: Path) -> None:
    with store.connect((tmp_path / "store").as_uri()) as client:
        assert client.quotas("any") == []
        with pytest.raises(store.InvalidRequestError):
            client.quotas("not valid")


@pytest.mark.slow
def test_threads_that_save_together_wait_for_a_free_upload(
    limited: Callable[[str], ServerProcess],
) -> None:
    server = limited("uploads = 1")
    errors: list[Exception] = []

    def save(number: int) -> None:
        try:
            with store.connect(server.address) as client:
                client.run(f"limited/run-{number}").save(0, {"w": number}).result()
        except store.StoreError as e:
            errors.append(e)

    threads = [threading.Thread(target=save, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
