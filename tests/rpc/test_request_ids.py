"""Request ids: a repeated request answers as before, and another body is rejected."""

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import grpc
import pytest

import storesvc_client as store
from storesvc.catalog.slots import is_repeated
from storesvc.errors import RequestIdReusedError
from storesvc.format.names import RunName
from storesvc.rpc.requests import make_write_id
from storesvc_client.errors import translate_rpc_errors
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from tests.support.examples import sampled
from tests.support.interleaving import new_id
from tests.support.server_process import ServerProcess
from tests.support.stored_files import unchanged

Request: TypeAlias = Any
"""A call that changes something."""
Change: TypeAlias = Callable[[Request], object]

LABELS: Final = {f"key-{number}": str(number) for number in range(20)}


@pytest.fixture
def run(run: store.Run) -> store.Run:
    """A run with checkpoints at the steps 1 and 2, and a tag of the first."""
    for step in (1, 2):
        run.save(step, {"x": 1.0})
    run.wait()
    run.tags.set("best", 1)
    return run


@pytest.fixture
def stub(server_address: str) -> CheckpointServiceStub:
    return CheckpointServiceStub(grpc.insecure_channel(server_address))


def request_of(method: str, run: store.Run) -> Request:
    """A good request of a method."""
    resource = RunName.parse(run.name).resource
    request: Request = getattr(api, f"{method}Request")(request_id=new_id())
    match method:
        case "SetTag":
            request.name = f"{resource}/tags/best"
            request.checkpoint = f"{resource}/checkpoints/2"
        case "DeleteTag":
            request.name = f"{resource}/tags/best"
        case "UpdateRun":
            request.run.name = resource
            request.run.labels.update(LABELS)
            request.update_mask.paths.append("labels")
        case "UpdateCheckpoint":
            request.checkpoint.name = f"{resource}/checkpoints/2"
            request.checkpoint.labels.update(LABELS)
            request.update_mask.paths.append("labels")
        case _:
            request.name = f"{resource}/checkpoints/2"
    return request


def sent(stub: CheckpointServiceStub, request: Request) -> Any:
    """The answer to a request."""
    method = type(request).__name__.removesuffix("Request")
    return getattr(stub, method)(request, timeout=30)


def refusal(stub: CheckpointServiceStub, request: Request) -> store.StoreError:
    """Returns the reason and message with which a request is rejected."""
    with (
        pytest.raises(store.InvalidRequestError) as caught,
        translate_rpc_errors("here"),
    ):
        sent(stub, request)
    return caught.value


# --- another body -----------------------------------------------------------------

OTHER_BODIES: Final[dict[str, tuple[str, Change]]] = {
    "other step": (
        "SetTag",
        lambda r: setattr(r, "checkpoint", f"{r.checkpoint[:-1]}1"),
    ),
    "latest": (
        "SetTag",
        lambda r: setattr(r, "checkpoint", f"{r.checkpoint[:-1]}latest"),
    ),
    "protected": ("SetTag", lambda r: setattr(r, "protected", False)),
    "tag etag": ("SetTag", lambda r: setattr(r, "etag", '"stale"')),
    "deleted tag etag": ("DeleteTag", lambda r: setattr(r, "etag", '"stale"')),
    "run label": ("UpdateRun", lambda r: r.run.labels.update({"key-1": "2"})),
    "fewer labels": ("UpdateRun", lambda r: r.run.labels.pop("key-1")),
    "run mask": ("UpdateRun", lambda r: r.update_mask.paths.append("purge_delay")),
    "run etag": ("UpdateRun", lambda r: setattr(r, "etag", '"stale"')),
    "label": ("UpdateCheckpoint", lambda r: r.checkpoint.labels.update({"key-1": "2"})),
    "mask": ("UpdateCheckpoint", lambda r: r.update_mask.paths.append("pinned")),
    "etag": ("UpdateCheckpoint", lambda r: setattr(r, "etag", '"stale"')),
    "delay": ("DeleteCheckpoint", lambda r: setattr(r.purge_delay, "seconds", 60)),
    "deletion etag": ("DeleteCheckpoint", lambda r: setattr(r, "etag", '"stale"')),
}


@pytest.mark.parametrize(
    ("method", "change"), sampled(OTHER_BODIES.values(), every=3), ids=OTHER_BODIES
)
def test_a_request_id_with_another_body_is_rejected_and_changes_nothing(
    stub: CheckpointServiceStub,
    server: ServerProcess,
    run: store.Run,
    method: str,
    change: Change,
) -> None:
    request = request_of(method, run)
    sent(stub, request)
    change(request)

    with unchanged(server.root):
        error = refusal(stub, request)

    assert "REQUEST_ID_REUSED" == error.reason
    assert request.request_id in str(error)


def test_a_deletion_is_not_undone_by_a_request_id_with_another_body(
    stub: CheckpointServiceStub, server: ServerProcess, run: store.Run
) -> None:
    run.delete(2)
    request = request_of("UndeleteCheckpoint", run)
    sent(stub, request)
    request.uid = run.checkpoint(2).uid

    with unchanged(server.root):
        assert "REQUEST_ID_REUSED" == refusal(stub, request).reason


@pytest.mark.parametrize(
    "methods",
    [
        ("SetTag", "DeleteTag"),
        ("DeleteTag", "SetTag"),
        ("UpdateCheckpoint", "DeleteCheckpoint"),
        ("UpdateCheckpoint", "UndeleteCheckpoint"),
        # equal bytes: only the rpc distinguishes them
        ("DeleteCheckpoint", "UndeleteCheckpoint"),
    ],
    ids=" then ".join,
)
def test_a_request_id_is_for_one_call(
    stub: CheckpointServiceStub,
    server: ServerProcess,
    run: store.Run,
    methods: tuple[str, str],
) -> None:
    first, second = (request_of(method, run) for method in methods)
    second.request_id = first.request_id
    sent(stub, first)

    with unchanged(server.root):
        assert "REQUEST_ID_REUSED" == refusal(stub, second).reason


# --- the same body ----------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        "SetTag",
        "DeleteTag",
        "UpdateRun",
        "UpdateCheckpoint",
        "DeleteCheckpoint",
        "UndeleteCheckpoint",
    ],
)
def test_a_repeated_request_answers_as_the_first_time_and_changes_nothing(
    stub: CheckpointServiceStub, server: ServerProcess, run: store.Run, method: str
) -> None:
    if method == "UndeleteCheckpoint":
        run.delete(2)
    request = request_of(method, run)
    first = sent(stub, request)

    with unchanged(server.root):
        assert first == sent(stub, request)


@pytest.mark.parametrize("method", ["UpdateRun", "UpdateCheckpoint"])
def test_the_order_of_labels_makes_no_other_body(
    stub: CheckpointServiceStub, run: store.Run, method: str
) -> None:
    request = request_of(method, run)
    first = sent(stub, request)
    labels = (request.run if method == "UpdateRun" else request.checkpoint).labels
    labels.clear()
    labels.update(reversed(LABELS.items()))

    assert first == sent(stub, request)


@pytest.mark.slow
def test_a_repetition_goes_on_after_a_restart(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    with store.connect(server.address) as client:
        request = request_of("UpdateRun", client.run("a/b"))
        with grpc.insecure_channel(server.address) as channel:
            first = CheckpointServiceStub(channel).UpdateRun(request, timeout=30)
    server.kill()
    server.start()

    with grpc.insecure_channel(server.address) as channel:
        stub = CheckpointServiceStub(channel)
        assert first == stub.UpdateRun(request, timeout=30)
        request.run.labels["key-1"] = "2"
        assert "REQUEST_ID_REUSED" == refusal(stub, request).reason


# --- what is stored ---------------------------------------------------------------


def test_a_stored_id_without_a_body_is_a_repetition_of_any() -> None:
    given = make_write_id(api.DeleteTagRequest(request_id=new_id()))

    assert is_repeated(given.partition(":")[0], given)
    assert is_repeated(given, given)
    assert not is_repeated("", given)
    assert not is_repeated(new_id(), given)


def test_one_id_with_two_bodies_is_rejected() -> None:
    request = api.DeleteTagRequest(request_id=new_id())
    stored = make_write_id(request)
    request.etag = "other"

    with pytest.raises(RequestIdReusedError, match="use a new id"):
        is_repeated(stored, make_write_id(request))
