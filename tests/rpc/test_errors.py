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
from storesvc_client.errors import error_class, translate_rpc_errors
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


GOLDEN = {
    "AUDIT_LOG_DISABLED": ("FAILED_PRECONDITION", store.PreconditionError),
    "AUDIT_UNAVAILABLE": ("UNAVAILABLE", store.UnavailableError),
    "CERTIFICATE_INVALID": ("UNAUTHENTICATED", store.UnauthenticatedError),
    "CHECKPOINT_DELETED": ("NOT_FOUND", store.NotFoundError),
    "CHECKPOINT_EXISTS": ("ALREADY_EXISTS", store.AlreadyExistsError),
    "CHECKPOINT_IN_USE": ("FAILED_PRECONDITION", store.PreconditionError),
    "CHECKPOINT_NOT_DELETED": ("FAILED_PRECONDITION", store.PreconditionError),
    "CHECKPOINT_NOT_FOUND": ("NOT_FOUND", store.NotFoundError),
    "CHUNKS_INCOMPLETE": ("FAILED_PRECONDITION", store.PreconditionError),
    "CONFLICT": ("ABORTED", store.ConflictError),
    "CORRUPT_DATA": ("DATA_LOSS", store.DataLossError),
    "ETAG_MISMATCH": ("ABORTED", store.ConflictError),
    "FORMAT_UNSUPPORTED": ("FAILED_PRECONDITION", store.PreconditionError),
    "HOLD_EXPIRED": ("FAILED_PRECONDITION", store.PreconditionError),
    "HOLD_NOT_FOUND": ("NOT_FOUND", store.NotFoundError),
    "IDENTITY_REQUIRED": ("UNAUTHENTICATED", store.UnauthenticatedError),
    "INVALID_CHUNK": ("INVALID_ARGUMENT", store.InvalidRequestError),
    "INVALID_FIELD": ("INVALID_ARGUMENT", store.InvalidRequestError),
    "INVALID_ITEM": ("INVALID_ARGUMENT", store.InvalidRequestError),
    "INVALID_PAGE_TOKEN": ("INVALID_ARGUMENT", store.InvalidRequestError),
    "INVALID_POLICY": ("INVALID_ARGUMENT", store.InvalidRequestError),
    "INVALID_RESUME_TOKEN": ("INVALID_ARGUMENT", store.InvalidRequestError),
    "INVALID_TREE": ("INVALID_ARGUMENT", store.InvalidRequestError),
    "ISSUER_UNKNOWN": ("UNAUTHENTICATED", store.UnauthenticatedError),
    "ISSUER_UNREACHABLE": ("UNAVAILABLE", store.UnavailableError),
    "LENDING_UNSUPPORTED": ("FAILED_PRECONDITION", store.PreconditionError),
    "LIMIT_EXCEEDED": ("RESOURCE_EXHAUSTED", store.LimitError),
    "PERMISSION_DENIED": ("PERMISSION_DENIED", store.PermissionDeniedError),
    "PLAN_MISMATCH": ("FAILED_PRECONDITION", store.PreconditionError),
    "POLICY_KEEPS_NOTHING": ("INVALID_ARGUMENT", store.InvalidRequestError),
    "PROCESSES_DIFFER": ("FAILED_PRECONDITION", store.PreconditionError),
    "QUOTA_EXCEEDED": ("RESOURCE_EXHAUSTED", store.LimitError),
    "REQUEST_ID_REUSED": ("INVALID_ARGUMENT", store.InvalidRequestError),
    "RESUME_TOKEN_EXPIRED": ("FAILED_PRECONDITION", store.PreconditionError),
    "RUN_NOT_FOUND": ("NOT_FOUND", store.NotFoundError),
    "STALLED": ("DEADLINE_EXCEEDED", store.UnavailableError),
    "STORAGE_DENIED": ("FAILED_PRECONDITION", store.PreconditionError),
    "STORAGE_FULL": ("RESOURCE_EXHAUSTED", store.LimitError),
    "STORAGE_UNAVAILABLE": ("UNAVAILABLE", store.UnavailableError),
    "TAG_NOT_FOUND": ("NOT_FOUND", store.NotFoundError),
    "TAG_PROTECTED": ("FAILED_PRECONDITION", store.PreconditionError),
    "TOKEN_AUDIENCE_MISMATCH": ("UNAUTHENTICATED", store.UnauthenticatedError),
    "TOKEN_EXPIRED": ("UNAUTHENTICATED", store.TokenExpiredError),
    "TOKEN_INVALID": ("UNAUTHENTICATED", store.UnauthenticatedError),
    "UPLOAD_NOT_FOUND": ("NOT_FOUND", store.ConflictError),
    "UPLOAD_SUPERSEDED": ("ABORTED", store.ConflictError),
    "WRITER_UNFINISHED": ("FAILED_PRECONDITION", store.PreconditionError),
}
"""Code and error class of the client of each reason."""


def test_every_reason_of_the_contract_has_one_error_of_the_service() -> None:
    found = subclasses(storesvc.errors.StoreError)

    assert sorted(e.reason for e in found) == sorted(REASONS)


def test_code_and_client_class_of_a_reason_stay() -> None:
    found = {
        e.reason: (e.code, error_class(e.code, e.reason))
        for e in subclasses(storesvc.errors.StoreError)
    }

    assert found == GOLDEN


def test_every_error_of_the_client_is_public() -> None:
    errors = subclasses(storesvc_client.errors.StoreError)
    public = {*dir(storesvc_client), *storesvc_client.orbax.__all__}

    assert {e.__name__ for e in errors} <= public


def test_a_status_carries_one_error_info_with_what_the_message_mentions() -> None:
    error = storesvc.errors.RunNotFoundError("run a/b is absent", run="a/b")

    status = storesvc.rpc.status.make_status(error)

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
    status = storesvc.rpc.status.make_status(error)
    assert status.message.startswith("leaf 'é")
    assert status.message.endswith("' is damaged")
    assert status.ByteSize() < 1500


@pytest.mark.parametrize("name", ["x" * 6000, "a/" + "é" * 3000, "\n" * 5000])
def test_a_long_name_is_rejected_with_its_reason(
    server_address: str, name: str
) -> None:
    stub = CheckpointServiceStub(grpc.insecure_channel(server_address))

    with (
        pytest.raises(store.InvalidRequestError) as caught,
        translate_rpc_errors("here"),
    ):
        stub.GetRun(api.GetRunRequest(name=name), timeout=10)
    assert "INVALID_FIELD" == caught.value.reason


def test_a_status_says_when_to_try_again_where_time_is_all_that_it_takes() -> None:
    status = storesvc.rpc.status.make_status(storesvc.errors.StorageFullError("full"))

    retry = error_details_pb2.RetryInfo()
    assert [detail.Unpack(retry) for detail in status.details] == [False, True]
    assert retry.retry_delay.seconds == 60


def test_what_the_user_of_a_server_may_not_touch_is_denied() -> None:
    cause = r"the user of this process \(Permission denied\); let them .* files below"
    with (
        pytest.raises(StorageDeniedError, match=rf"^runs: .* {cause} .*/store"),
        storage_errors.translate_errors(storage_at("file:///store"), "runs"),
    ):
        raise PermissionError(13, "Permission denied", "/store/runs")
