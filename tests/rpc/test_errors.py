"""The tables of errors are total: contract, service, client."""

from typing import TypeVar

import grpc
import pytest
from google.rpc import error_details_pb2

import storesvc.errors
import storesvc.rpc.status
import storesvc_client as store
import storesvc_client.errors
import storesvc_client.orbax
from storesvc.errors import StorageDeniedError
from storesvc.storage import bucket as storage_errors
from storesvc.storage.location import storage_at
from storesvc_client.errors import translated
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from storesvc_proto.v1.errors_pb2 import ErrorReason

T = TypeVar("T")

REASONS = {
    name.removeprefix("ERROR_REASON_") for name, number in ErrorReason.items() if number
}


def subclasses(base: type[T]) -> set[type[T]]:
    found = set(base.__subclasses__())
    return found.union(*(subclasses(below) for below in found))


def test_every_error_of_the_service_has_its_own_reason() -> None:
    wire = storesvc.rpc.status.WIRE

    assert subclasses(storesvc.errors.StoreError) == set(wire)
    assert [storesvc.rpc.status.reason_name(w.reason) for w in wire.values()] == list(
        dict.fromkeys(storesvc.rpc.status.reason_name(w.reason) for w in wire.values())
    )
    assert {storesvc.rpc.status.reason_name(w.reason) for w in wire.values()} == REASONS


def test_every_reason_of_the_contract_has_an_error_of_the_client() -> None:
    assert set(storesvc_client.errors.BY_REASON) == REASONS


def test_every_error_of_the_client_is_public() -> None:
    errors = subclasses(storesvc_client.errors.StoreError)
    public = {*storesvc_client.__all__, *storesvc_client.orbax.__all__}

    assert {e.__name__ for e in errors} <= public


def test_a_status_carries_one_error_info_with_what_the_message_mentions() -> None:
    error = storesvc.errors.RunNotFoundError("run a/b is absent", run="a/b")

    status = storesvc.rpc.status.status_of(error)

    assert status.message == "run a/b is absent"
    (detail,) = status.details
    info = error_details_pb2.ErrorInfo()
    detail.Unpack(info)
    assert (info.reason, info.domain, dict(info.metadata)) == (
        "RUN_NOT_FOUND",
        "storesvc",
        {"run": "a/b"},
    )


def test_a_long_text_is_cut_so_that_its_reason_arrives(run: store.Run) -> None:
    key = "é" * 2000
    run.save(0, {key: 1}).result()

    with pytest.raises(store.MismatchError):
        run.restore(0, like={})
    error = storesvc.errors.CorruptDataError(f"leaf {key!r} is damaged", leaf=key)
    status = storesvc.rpc.status.status_of(error)
    assert status.message.startswith("leaf 'é")
    assert status.message.endswith("' is damaged")
    assert status.ByteSize() < 1500


@pytest.mark.parametrize("name", ["x" * 6000, "a/" + "é" * 3000, "\n" * 5000])
def test_a_long_name_is_rejected_with_its_reason(
    server_address: str, name: str
) -> None:
    stub = CheckpointServiceStub(grpc.insecure_channel(server_address))

    with pytest.raises(store.InvalidRequestError) as caught, translated("here"):
        stub.GetRun(api.GetRunRequest(name=name), timeout=10)
    assert "INVALID_FIELD" == caught.value.reason


def test_a_status_says_when_to_try_again_where_time_is_all_that_it_takes() -> None:
    status = storesvc.rpc.status.status_of(storesvc.errors.StorageFullError("full"))

    retry = error_details_pb2.RetryInfo()
    assert [detail.Unpack(retry) for detail in status.details] == [False, True]
    assert retry.retry_delay.seconds == 60


def test_what_the_user_of_a_server_may_not_touch_is_denied() -> None:
    cause = r"the user of this process \(Permission denied\); let them .* files below"
    with (
        pytest.raises(StorageDeniedError, match=rf"^runs: .* {cause} .*/store"),
        storage_errors.translated(storage_at("file:///store"), "runs"),
    ):
        raise PermissionError(13, "Permission denied", "/store/runs")
