"""Each rpc of the contract requires the permissions of its rule, and nothing less."""

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import grpc
import pytest

from storesvc.auth.policy import ROLES, Policy
from storesvc.rpc import registry
from storesvc.rpc.methods import RULES
from storesvc.telemetry.events import CallEnded, Event, subscribe, unsubscribe
from storesvc_proto.v1.maintenance_service_pb2 import CollectGarbageRequest
from storesvc_proto.v1.maintenance_service_pb2_grpc import MaintenanceServiceStub
from storesvc_proto.v1.upload_service_pb2 import KeepUploadAliveRequest
from storesvc_proto.v1.upload_service_pb2_grpc import UploadServiceStub
from tests.support.every_call import CALLS, Saved
from tests.support.examples import sampled
from tests.support.policies import Restricted, restricted
from tests.support.rpcs import NAMES, SERVICES, outcome_of, reason_of

ME: Final = "user:me"

# The least role on the run that a call needs; None: an identity is enough, because the
# call names no run, or has only rows that the caller may see.
LEAST: Final[dict[str, str | None]] = {
    "ListRuns": None,
    "GetRun": "reader",
    "UpdateRun": "writer",
    "ApplyRetention": "manager",
    "ListCheckpoints": "reader",
    "GetCheckpoint": "reader",
    "ReadManifest": "reader",
    "DiffCheckpoints": "reader",
    "UpdateCheckpoint": "writer",
    "DeleteCheckpoint": "manager",
    "UndeleteCheckpoint": "manager",
    "PurgeCheckpoint": "manager",
    "WatchCheckpoints": "reader",
    "SetTag": "writer",
    "DeleteTag": "writer",
    "ListTags": "reader",
    "CreateHold": "reader",
    "RenewHold": "reader",
    "DeleteHold": "reader",
    "ListHolds": "reader",
    "BeginUpload": "writer",
    "JoinUpload": "writer",
    "GetUpload": "reader",
    "ListUploads": "reader",
    "KeepUploadAlive": "writer",
    "FindChunks": "writer",
    "WriteChunks": "writer",
    "FinishWriter": "writer",
    "CommitUpload": "writer",
    "CreateCheckpoint": "writer",
    "AbortUpload": "writer",
    "ReadChunks": "reader",
    "GetServerInfo": None,
    "VerifyCheckpoint": "reader",
    "CollectGarbage": "admin",  # the call asks for no grace period
    "GetUsage": "reader",
    "UpgradeStore": "admin",
    "GetLoginOptions": None,
    "GetIdentity": None,
    "TestPermissions": None,
    "LendCredentials": "writer",  # for an upload
    "GetQuota": "reader",
    "ListAuditEntries": "admin",  # and on all runs: see WHOLE_STORE
}

WHOLE_STORE: Final = frozenset({"ListAuditEntries", "UpgradeStore"})
"""Calls about the whole store: a role in one namespace does not permit them."""

RANKS: Final = ["", *ROLES]
"""Roles by what they permit, the least first; "": none."""

PLACES: Final = ["own", "listable", "unlistable"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restricted]:
    with restricted(tmp_path_factory.mktemp("restricted")) as server:
        yield server


def test_each_rpc_of_the_contract_has_a_rule() -> None:
    assert NAMES == set(RULES) == set(LEAST)
    assert {service.full_name for service in SERVICES} == set(registry.SERVICES)


def outcome(server: Restricted, rpc: str, role: str, place: str) -> str:
    """Makes a call with a role in the own namespace of the caller."""
    server.policies.policy = Policy(anonymous="admin")
    saved = Saved(server.address, server.channel(ME))
    start = CALLS[rpc][0](saved)
    mine = saved.run.namespace if place == "own" else "elsewhere"
    bindings = [(role, f"{mine}/*", ME)] if role else []
    if place == "listable":
        bindings.append(("reader", f"{saved.run.namespace}/*", ME))
    server.policies.bind(*bindings)
    return outcome_of(partial(run_call, start))


def run_call(start: Any) -> None:
    """Starts a call, and waits for its end."""
    start().end()


def expected(rpc: str, role: str, place: str) -> str:
    """Returns the outcome of a call."""
    least = LEAST[rpc]
    here = {"own": role, "listable": "reader", "unlistable": ""}[place]
    if rpc in WHOLE_STORE:
        return "PERMISSION_DENIED"
    if least is None or (here and RANKS.index(here) >= RANKS.index(least)):
        return "OK"
    # The quota of a namespace names no run, so there is none to conceal.
    return "PERMISSION_DENIED" if here or rpc == "GetQuota" else "RUN_NOT_FOUND"


@pytest.mark.parametrize("rpc", sampled(sorted(LEAST), every=48, checked_every=4))
def test_each_role_permits_its_calls_in_its_own_namespace_only(
    server: Restricted, rpc: str
) -> None:
    cells = [(role, place) for role in RANKS for place in PLACES]

    found = {cell: outcome(server, rpc, *cell) for cell in cells}

    print(f"\n{rpc}: {found}")
    assert {cell: expected(rpc, *cell) for cell in cells} == found


@pytest.mark.slow
@pytest.mark.parametrize("rpc", sorted(WHOLE_STORE))
def test_a_call_about_the_whole_store_needs_its_role_on_all_runs(
    server: Restricted, rpc: str
) -> None:
    found = {}
    for role in ROLES:
        for runs in ("*", "*/*", "**"):
            server.policies.policy = Policy(anonymous="admin")
            start = CALLS[rpc][0](Saved(server.address, server.channel(ME)))
            server.policies.bind((role, runs, ME))
            found[role, runs] = outcome_of(partial(run_call, start))

    permitted = {cell for cell, result in found.items() if result == "OK"}
    assert {(str(LEAST[rpc]), "*/*"), (str(LEAST[rpc]), "**")} == permitted
    assert {"OK", "PERMISSION_DENIED"} == {*found.values()}


@pytest.mark.parametrize("role", ["reader", "admin"])
def test_a_grace_period_that_is_too_long_is_rejected(
    server: Restricted, role: str
) -> None:
    server.policies.bind((role, "prod/*", ME))
    stub = MaintenanceServiceStub(server.channel(ME))
    request = CollectGarbageRequest(parent="namespaces/prod")
    request.grace.seconds = 2**62

    with pytest.raises(grpc.RpcError, match="grace: expected 0 to") as caught:
        list(stub.CollectGarbage(request))

    assert "INVALID_FIELD" == reason_of(caught.value)


@pytest.mark.parametrize("role", ["reader", "writer"])
def test_only_a_permitted_call_has_the_upload_that_it_names_as_its_subject(
    server: Restricted, role: str
) -> None:
    server.policies.bind((role, "prod/*", ME))
    name = f"namespaces/prod/runs/llama/uploads/{'a' * 32}"
    ended: list[CallEnded] = []
    is_over = threading.Event()

    def record(event: Event) -> None:
        if isinstance(event, CallEnded) and event.method.endswith("Alive"):
            ended.append(event)
            is_over.set()

    subscribe(record)
    try:
        with pytest.raises(grpc.RpcError):
            UploadServiceStub(server.channel(ME)).KeepUploadAlive(
                KeepUploadAliveRequest(name=name)
            )
        assert is_over.wait(10)
    finally:
        unsubscribe(record)

    (event,) = ended
    assert ({"name": name} if role == "writer" else {}) == event.subject
