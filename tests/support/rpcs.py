"""The services and the rpcs of the contract, and the reasons of their errors."""

from collections.abc import Callable
from typing import Any, Final

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from storesvc_proto.v1 import (
    access_service_pb2,
    checkpoint_service_pb2,
    chunk_service_pb2,
    maintenance_service_pb2,
    upload_service_pb2,
)

SERVICES: Final = tuple(
    service
    for file in (
        access_service_pb2,
        checkpoint_service_pb2,
        chunk_service_pb2,
        maintenance_service_pb2,
        upload_service_pb2,
    )
    for service in file.DESCRIPTOR.services_by_name.values()
)

METHODS: Final = tuple(method for service in SERVICES for method in service.methods)

NAMES: Final = frozenset(method.name for method in METHODS)
"""Names of all rpcs; they are unique over the services."""


def error_info(error: Any) -> error_details_pb2.ErrorInfo | None:
    """Returns what the status of an error has about its cause; None: it has none."""
    status = rpc_status.from_call(error)
    if status is None:
        return None
    info = error_details_pb2.ErrorInfo()
    status.details[0].Unpack(info)
    return info


def reason_of(error: Any) -> str:
    """Returns the reason of an error."""
    info = error_info(error)
    assert info is not None, error
    return str(info.reason)


def outcome_of(call: Callable[[], object]) -> str:
    """Makes a call; returns "OK", or the reason of its error."""
    try:
        call()
    except grpc.RpcError as e:
        return reason_of(e)
    return "OK"
