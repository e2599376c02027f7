"""Watches of restricted callers: who may watch, how many, and what tokens show."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from storesvc.rpc import registry
from storesvc.watch.watcher import Watcher, WatchLimits
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from tests.support.contract import Writer
from tests.support.faulty_server import serving
from tests.support.policies import Restricted, restricted
from tests.support.rpcs import reason_of


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Restricted]:
    """A server with an administrator, and readers of a run and of a namespace."""
    with restricted(tmp_path / "store") as server:
        server.policies.bind(
            ("admin", "**", "user:root"),
            ("reader", "a/shown", "user:one"),
            ("reader", "a/*", "user:all"),
        )
        yield server


def watch(server: Restricted, caller: str, parent: str, token: str = "") -> Any:
    """Returns a watch and its first response."""
    stub = CheckpointServiceStub(server.channel(caller))
    request = api.WatchCheckpointsRequest(parent=parent, resume_token=token)
    stream = stub.WatchCheckpoints(request, timeout=60)
    return stream, next(stream)


def save(server: Restricted, run: str, step: int) -> None:
    """Saves a step as the administrator."""
    Writer(server.address, run, step, channel=server.channel("user:root")).save()


def reason_for(server: Restricted, caller: str, parent: str) -> str:
    """Returns why a watch is rejected; empty: it is not."""
    try:
        watch(server, caller, parent)[0].cancel()
    except grpc.RpcError as e:
        return reason_of(e)
    return ""


def test_a_namespace_is_watched_by_those_who_may_see_a_run_of_it(
    server: Restricted,
) -> None:
    save(server, "b/hidden", 1)
    for namespace in ("a", "b", "absent"):
        parent = f"namespaces/{namespace}"
        assert reason_for(server, "user:nobody", parent) == "PERMISSION_DENIED"
        assert reason_for(server, "user:root", parent) == ""
        for caller in ("user:one", "user:all"):
            expected = "" if namespace == "a" else "PERMISSION_DENIED"
            assert reason_for(server, caller, parent) == expected


@pytest.fixture
def few_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each server have eight watches at most."""
    limited = partial(Watcher, limits=WatchLimits(max_watches=8))
    monkeypatch.setattr("storesvc.store.Watcher", limited)


def test_one_caller_leaves_watches_to_others(
    few_watches: None, server: Restricted
) -> None:
    streams, parent = [], "namespaces/a"
    for caller, count in (("user:one", 4), ("user:all", 2), ("user:root", 1)):
        streams += [watch(server, caller, parent)[0] for _ in range(count)]
        assert reason_for(server, caller, parent) == "LIMIT_EXCEEDED"
    for stream in streams:
        stream.cancel()


def test_one_host_leaves_health_watches_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MAX_WATCHES", 8)
    with serving(tmp_path / "store") as address:
        stub: Any = health_pb2_grpc.HealthStub(grpc.insecure_channel(address))
        streams = []
        for _ in range(4):
            streams.append(stub.Watch(health_pb2.HealthCheckRequest()))
            assert next(streams[-1]).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.Watch(health_pb2.HealthCheckRequest()))
        # by which a client of gRPC goes on as if the server were healthy
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        for stream in streams:
            stream.cancel()


def test_changes_of_hidden_runs_show_in_no_token(server: Restricted) -> None:
    save(server, "a/shown", 1)
    stream, first = watch(server, "user:one", "namespaces/a")
    sizes = {len(first.resume_token)}
    for step in range(1, 13):
        save(server, "a/hidden", step)
    save(server, "a/shown", 2)
    response = next(stream)
    event = response.event
    assert event.checkpoint.name.endswith("runs/shown/checkpoints/2")
    assert sizes == {len(response.resume_token)}
    stream.cancel()

    again, resumed = watch(server, "user:one", "namespaces/a", first.resume_token)
    assert sizes == {len(resumed.resume_token)}
    assert next(again).event.checkpoint.name == event.checkpoint.name
    again.cancel()


def test_a_token_resumes_at_another_server(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with restricted(root) as one, restricted(root) as other:
        for server in (one, other):
            server.policies.bind(("admin", "**", "user:root"))
        stream, first = watch(one, "user:root", "namespaces/a")
        stream.cancel()
        save(one, "a/shown", 1)

        again, _ = watch(other, "user:root", "namespaces/a", first.resume_token)
        assert next(again).event.checkpoint.name.endswith("checkpoints/1")
        again.cancel()
