"""Bytes that are no protobuf are a malformed request, whatever method they are for."""

from collections.abc import Callable

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor

from storesvc_proto.v1 import upload_service_pb2
from tests.support.contract import Writer
from tests.support.rpcs import METHODS, error_info
from tests.support.server_process import ServerProcess

MALFORMED = b"\xff\xff\xff\xff"


@pytest.fixture
def server(start_server: Callable[..., ServerProcess]) -> ServerProcess:
    return start_server()


def test_every_method_rejects_malformed_bytes_with_a_reason(
    server: ServerProcess,
) -> None:
    with grpc.insecure_channel(server.address) as channel:
        answers = {
            method.full_name: answer_of(channel, method, [MALFORMED])
            for method in METHODS
        }

    expected = {
        method.full_name: (
            "INVALID_ARGUMENT",
            "INVALID_FIELD",
            method.input_type.full_name,
        )
        for method in METHODS
    }
    assert expected == answers
    lines = [line for line in server.log.splitlines() if "serialized" in line]
    assert 1 == len(lines), server.log
    assert "Traceback" not in server.log
    assert "bug" not in server.log


@pytest.mark.slow
def test_a_later_message_of_a_stream_is_rejected_alike(server: ServerProcess) -> None:
    writer = Writer(server.address, "tests/malformed", 1)
    writer.begin()
    service = upload_service_pb2.DESCRIPTOR.services_by_name["UploadService"]
    firsts = {
        "FindChunks": upload_service_pb2.FindChunksRequest(open=writer.ref()),
        "WriteChunks": upload_service_pb2.WriteChunksRequest(open=writer.ref()),
        "FinishWriter": upload_service_pb2.FinishWriterRequest(open=writer.ref()),
    }

    with grpc.insecure_channel(server.address) as channel:
        answers = {
            name: answer_of(
                channel,
                service.methods_by_name[name],
                [first.SerializeToString(), MALFORMED],
            )[:2]
            for name, first in firsts.items()
        }

    assert dict.fromkeys(firsts, ("INVALID_ARGUMENT", "INVALID_FIELD")) == answers


def answer_of(
    channel: grpc.Channel, method: MethodDescriptor, requests: list[bytes]
) -> tuple[str, str, str]:
    """Returns the code, the reason and the expected message of an error."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    # for the server a unary request is a stream of one
    call: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
    with pytest.raises(grpc.RpcError) as caught:
        list(call(iter(requests), timeout=30))
    info = error_info(caught.value)
    if info is None:
        return caught.value.code().name, "", ""
    return caught.value.code().name, info.reason, info.metadata.get("message_type", "")
