"""Rows, events, hints, uploads and holds of a server with a policy."""

import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask

from storesvc.auth.call import current, may
from storesvc.auth.policy import AllRuns, Authentication, Permission, Policy, Principal
from storesvc.rpc import calls
from storesvc.rpc.calls import Security
from storesvc_proto.v1 import access_service_pb2 as access_api
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1 import maintenance_service_pb2 as maintenance_api
from storesvc_proto.v1 import upload_service_pb2 as upload_api
from storesvc_proto.v1.access_service_pb2_grpc import AccessServiceStub
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from storesvc_proto.v1.maintenance_service_pb2_grpc import MaintenanceServiceStub
from storesvc_proto.v1.upload_service_pb2_grpc import UploadServiceStub
from tests.support.contract import Writer, frame, sums
from tests.support.faulty_server import serving
from tests.support.policies import Restricted, restricted
from tests.support.rpcs import outcome_of, reason_of


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restricted]:
    """Serves six runs of two namespaces."""
    with restricted(tmp_path_factory.mktemp("restricted")) as server:
        server.policies.policy = Policy(anonymous="admin")
        for namespace in ("aaa", "bbb"):
            for run in ("llama", "llama-2", "mamba"):
                Writer(server.address, f"{namespace}/{run}", 1).save()
        yield server


def refused(call: Callable[..., Any], request: Any) -> tuple[str, str]:
    """Returns the reason and the message of a call that fails."""

    def ended() -> None:
        found: Any = call(request)
        if hasattr(found, "__next__"):
            list(found)

    with pytest.raises(grpc.RpcError) as caught:
        ended()
    assert isinstance(caught.value, grpc.Call)
    return reason_of(caught.value), str(caught.value.details())


def _id() -> str:
    return str(uuid.uuid4())


@pytest.mark.slow
def test_pages_have_only_runs_that_the_caller_may_list(server: Restricted) -> None:
    server.policies.bind(("reader", "aaa/*", "user:a"), ("reader", "bbb/ma*", "user:a"))
    stub = CheckpointServiceStub(server.channel("user:a"))
    found, token, pages = [], "", 0
    while True:
        request = api.ListRunsRequest(
            parent="namespaces/-", page_size=2, page_token=token
        )
        page = stub.ListRuns(request)
        found += [run.name.replace("namespaces/", "") for run in page.runs]
        pages += 1
        if not (token := page.next_page_token):
            break

    assert [
        "aaa/runs/llama",
        "aaa/runs/llama-2",
        "aaa/runs/mamba",
        "bbb/runs/mamba",
    ] == (found)
    assert pages == 2


def test_hints_name_only_runs_that_the_caller_may_list(server: Restricted) -> None:
    server.policies.bind(("reader", "aaa/llama*", "user:a"))
    stub = CheckpointServiceStub(server.channel("user:a"))

    absent = api.GetRunRequest(name="namespaces/aaa/runs/llama-3")
    hidden = api.GetRunRequest(name="namespaces/aaa/runs/mamba")
    reason, message = refused(stub.GetRun, absent)
    assert (reason, "aaa/llama" in message) == ("RUN_NOT_FOUND", True)
    reason, message = refused(stub.GetRun, hidden)
    assert (reason, "aaa/llama" in message) == ("RUN_NOT_FOUND", False)


def test_a_hidden_run_and_an_absent_one_fail_alike(server: Restricted) -> None:
    server.policies.bind(("reader", "aaa/*", "user:a"))
    stub = CheckpointServiceStub(server.channel("user:a"))

    messages = [
        refused(stub.GetRun, api.GetRunRequest(name=f"namespaces/bbb/runs/{run}"))
        for run in ("llama", "absent")
    ]

    assert messages[0] == (messages[1][0], messages[1][1].replace("absent", "llama"))


def test_a_watch_of_a_namespace_has_only_events_that_the_caller_may_see(
    server: Restricted,
) -> None:
    watch = CheckpointServiceStub(server.channel("user:a")).WatchCheckpoints
    server.policies.bind(("reader", "aaa/llama", "user:a"))
    stream = watch(api.WatchCheckpointsRequest(parent="namespaces/aaa"), timeout=60)
    next(stream)
    # The other caller saves to both runs; the events come in this order.
    server.policies.bind(
        ("reader", "aaa/llama", "user:a"), ("admin", "aaa/*", "user:b")
    )
    for run in ("mamba", "llama"):
        channel = server.channel("user:b")
        Writer(server.address, f"aaa/{run}", 5, channel=channel).save()

    seen = next(event for event in stream if event.HasField("event"))

    assert seen.event.checkpoint.name == "namespaces/aaa/runs/llama/checkpoints/5"
    stream.cancel()


def test_uploads_of_a_namespace_are_filtered(server: Restricted) -> None:
    server.policies.policy = Policy(anonymous="admin")
    for run in ("llama", "mamba"):
        Writer(server.address, f"bbb/{run}", 9).begin()
    server.policies.bind(("reader", "bbb/mamba", "user:a"))
    stub = UploadServiceStub(server.channel("user:a"))

    found = stub.ListUploads(upload_api.ListUploadsRequest(parent="namespaces/bbb"))

    assert {each.name.split("/")[3] for each in found.uploads} == {"mamba"}


def test_an_upload_is_written_by_principals_of_one_binding_only(
    server: Restricted,
) -> None:
    server.policies.bind(
        ("writer", "aaa/*", "user:job-*"),
        ("writer", "aaa/*", "user:other"),
        ("manager", "aaa/*", "user:boss"),
    )
    writer = Writer(
        server.address, "aaa/shared", 1, channel=server.channel("user:job-0")
    )
    writer.begin()

    def keep_alive(caller: str) -> str:
        stub = UploadServiceStub(server.channel(caller))
        request = upload_api.KeepUploadAliveRequest(
            name=writer.name, epoch=writer.epoch
        )
        return outcome_of(lambda: stub.KeepUploadAlive(request))

    callers = ("user:job-0", "user:job-1", "user:other", "user:boss")
    found = {caller: keep_alive(caller) for caller in callers}
    assert found == {
        "user:job-0": "OK",
        "user:job-1": "OK",
        "user:other": "PERMISSION_DENIED",
        "user:boss": "OK",
    }

    other = UploadServiceStub(server.channel("user:other"))
    commit = upload_api.CommitUploadRequest(name=writer.name, epoch=writer.epoch)
    abort = upload_api.AbortUploadRequest(name=writer.name)
    assert refused(other.CommitUpload, commit)[0] == "PERMISSION_DENIED"
    assert refused(other.AbortUpload, abort)[0] == "PERMISSION_DENIED"
    opening = upload_api.WriteChunksRequest(open=writer.ref())
    stream = iter([opening, upload_api.WriteChunksRequest(frame=frame(0))])
    assert refused(other.WriteChunks, stream)[0] == "PERMISSION_DENIED"
    writer.write(frame(0, 1, 2))
    writer.finish(sums(0, 1, 2))
    UploadServiceStub(server.channel("user:job-1")).CommitUpload(commit)


def test_a_hold_is_released_by_its_own_principal_or_a_manager(
    server: Restricted,
) -> None:
    server.policies.bind(
        ("reader", "aaa/*", "user:a"),
        ("reader", "aaa/*", "user:b"),
        ("manager", "aaa/*", "user:boss"),
    )
    stub = CheckpointServiceStub(server.channel("user:a"))
    create = api.CreateHoldRequest(
        parent="namespaces/aaa/runs/llama/checkpoints/1",
        request_id=_id(),
        owner="me",
        ttl=Duration(seconds=60),
    )
    name = stub.CreateHold(create).hold.name
    other = CheckpointServiceStub(server.channel("user:b"))

    renew, delete = api.RenewHoldRequest(name=name), api.DeleteHoldRequest(name=name)
    assert refused(other.RenewHold, renew)[0] == "PERMISSION_DENIED"
    assert refused(other.DeleteHold, delete)[0] == "PERMISSION_DENIED"
    stub.RenewHold(renew)
    CheckpointServiceStub(server.channel("user:boss")).DeleteHold(delete)


def test_protected_tags_pins_and_policies_need_a_manager(server: Restricted) -> None:
    server.policies.bind(
        ("writer", "aaa/*", "user:a"), ("manager", "aaa/*", "user:boss")
    )
    stub = CheckpointServiceStub(server.channel("user:a"))
    boss = CheckpointServiceStub(server.channel("user:boss"))
    checkpoint = "namespaces/aaa/runs/llama/checkpoints/1"

    def tag(*, protected: bool | None = None, etag: str = "") -> Any:
        return api.SetTagRequest(
            name="namespaces/aaa/runs/llama/tags/prod",
            checkpoint=checkpoint,
            protected=protected,
            etag=etag,
            request_id=_id(),
        )

    stub.SetTag(tag())
    assert refused(stub.SetTag, tag(protected=True))[0] == "PERMISSION_DENIED"
    etag = boss.SetTag(tag(protected=True)).tag.etag
    assert refused(stub.SetTag, tag(etag=etag))[0] == "PERMISSION_DENIED"

    def update(path: str) -> Any:
        return api.UpdateCheckpointRequest(
            checkpoint=api.Checkpoint(name=checkpoint, pinned=True, labels={"a": "b"}),
            update_mask=FieldMask(paths=path.split(",")),
            request_id=_id(),
        )

    stub.UpdateCheckpoint(update("labels"))
    for paths in ("pinned", "labels,pinned"):
        assert refused(stub.UpdateCheckpoint, update(paths))[0] == "PERMISSION_DENIED"
    boss.UpdateCheckpoint(update("pinned"))

    purge_delay = api.UpdateRunRequest(
        run=api.Run(name="namespaces/aaa/runs/llama", purge_delay=Duration(seconds=9)),
        update_mask=FieldMask(paths=["purge_delay"]),
        request_id=_id(),
    )
    migrations = api.UpdateRunRequest(
        run=api.Run(name="namespaces/aaa/runs/llama", migrations=[b"{}"]),
        update_mask=FieldMask(paths=["migrations"]),
        request_id=_id(),
    )
    for request in purge_delay, migrations:
        assert refused(stub.UpdateRun, request)[0] == "PERMISSION_DENIED"
        boss.UpdateRun(request)


def test_a_namespace_is_collected_by_callers_who_manage_all_of_it(
    server: Restricted,
) -> None:
    request = maintenance_api.CollectGarbageRequest(parent="namespaces/aaa")
    stub = MaintenanceServiceStub(server.channel("user:a"))

    for runs, is_permitted in (("aaa/llama", False), ("aaa/*", True), ("**", True)):
        server.policies.bind(("manager", runs, "user:a"))
        if is_permitted:
            list(stub.CollectGarbage(request))
        else:
            assert refused(stub.CollectGarbage, request)[0] == "PERMISSION_DENIED"


def test_permissions_are_tested_on_runs_namespaces_and_all(server: Restricted) -> None:
    server.policies.bind(("writer", "aaa/*", "user:a"))
    stub = AccessServiceStub(server.channel("user:a"))

    def permitted(resource: str) -> list[str]:
        request = access_api.TestPermissionsRequest(
            resource=resource, permissions=["checkpoints.purge", "uploads.begin"]
        )
        return [*stub.TestPermissions(request).permissions]

    assert permitted("namespaces/aaa/runs/any") == ["uploads.begin"]
    assert permitted("namespaces/aaa") == ["uploads.begin"]
    assert permitted("namespaces/bbb/runs/llama") == permitted("namespaces/-") == []
    wrong = access_api.TestPermissionsRequest(
        resource="namespaces/aaa", permissions=["checkpoints.reed"]
    )
    reason, message = refused(stub.TestPermissions, wrong)
    assert (reason, "did you mean checkpoints.read?" in message) == (
        "INVALID_FIELD",
        True,
    )


def test_a_caller_learns_its_identity(server: Restricted) -> None:
    server.policies.bind()
    identity = AccessServiceStub(server.channel("user:a")).GetIdentity(
        access_api.GetIdentityRequest()
    )

    assert (identity.principal, identity.is_restricted) == ("user:a", True)
    assert identity.authentication == access_api.AUTHENTICATION_TOKEN


def test_a_handler_whose_permissions_were_not_checked_fails(
    server: Restricted, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forgets(rpc: str, request: Any) -> None:
        """Checks nothing."""

    stub = CheckpointServiceStub(server.channel("user:a"))
    server.policies.bind(("admin", "**", "user:a"))
    stub.ListRuns(api.ListRunsRequest(parent="namespaces/-"))
    monkeypatch.setattr("storesvc.rpc.registry.authorize", forgets)

    with pytest.raises(grpc.RpcError) as caught:
        stub.ListRuns(api.ListRunsRequest(parent="namespaces/-"))

    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() is grpc.StatusCode.INTERNAL


@pytest.mark.slow
def test_a_call_ends_when_the_credential_of_its_caller_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "LEEWAY_SECONDS", 0.0)

    async def soon(_: Any) -> Principal:
        return Principal(
            name="user:a",
            authentication=Authentication.TOKEN,
            expire_time=datetime.now(UTC) + timedelta(seconds=1),
        )

    security = Security(authenticate=soon, policy=lambda: None)
    with serving(tmp_path / "store", security=security) as address:
        stub = CheckpointServiceStub(grpc.insecure_channel(address))
        request = api.WatchCheckpointsRequest(parent="namespaces/aaa")
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.WatchCheckpoints(request, timeout=30))

    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert reason_of(caught.value) == "TOKEN_EXPIRED"


def test_work_of_the_server_itself_is_permitted() -> None:
    assert current.get() is None
    assert may(Permission.RUNS_LIST, AllRuns())


def test_a_watch_of_a_namespace_names_no_damaged_run_that_is_hidden(
    tmp_path: Path,
) -> None:
    with restricted(tmp_path / "store") as server:
        server.policies.policy = Policy(anonymous="admin")
        stub = CheckpointServiceStub(grpc.insecure_channel(server.address))
        request = api.WatchCheckpointsRequest(parent="namespaces/aaa")
        first = stub.WatchCheckpoints(request, timeout=30)
        token = next(first).resume_token
        first.cancel()
        Writer(server.address, "aaa/hidden", 1).save()
        (record,) = (tmp_path / "store").glob("**/hidden/checkpoints/*")
        record.write_bytes(b"damaged")

        def watched(caller: str) -> tuple[str, str]:
            watch = CheckpointServiceStub(server.channel(caller)).WatchCheckpoints
            again = api.WatchCheckpointsRequest(
                parent="namespaces/aaa", resume_token=token
            )
            return refused(partial(watch, timeout=30), again)

        server.policies.bind(
            ("reader", "aaa/other", "user:a"), ("reader", "aaa/*", "user:b")
        )
        some, everything = watched("user:a"), watched("user:b")

    assert (some[0], everything[0]) == ("CORRUPT_DATA", "CORRUPT_DATA")
    assert "hidden" in everything[1]
    assert "hidden" not in some[1]
