"""Requests that would take a multiple of their size in memory."""

import re
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc
import pytest

import storesvc_client as store
from storesvc.format.checksums import crc32c
from storesvc.rpc.requests import COUNTS
from storesvc_client.errors import StoreError, translate_rpc_errors
from storesvc_proto.v1 import checkpoint_service_pb2, tree_pb2
from storesvc_proto.v1 import upload_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from storesvc_proto.v1.upload_service_pb2_grpc import UploadServiceStub
from tests.support.amplified_requests import all_amplified
from tests.support.contract import Writer
from tests.support.rpcs import METHODS
from tests.support.server_process import ServerProcess

AMPLIFIED = list(all_amplified())
BOUND_BYTES = 512 << 20


def test_each_repeated_field_of_each_request_has_a_limit() -> None:
    found = {amplified.path[-1].full_name for amplified in AMPLIFIED}

    assert found == set(COUNTS)


@pytest.mark.slow
def test_a_request_that_is_too_large_is_rejected_before_it_is_parsed(
    start_server: Callable[..., ServerProcess],
) -> None:
    """Parsing would occupy the event loop, and with it all other clients."""
    server = start_server()
    unary = [method for method in METHODS if not method.client_streaming]

    with grpc.insecure_channel(server.address) as channel:
        for method in unary:
            kind = "unary_stream" if method.server_streaming else "unary_unary"
            name = f"/{method.containing_service.full_name}/{method.name}"
            call = getattr(channel, kind)(name)
            send = partial(call, b"\xff" * (2 << 20), timeout=20)  # no message at all
            with pytest.raises(grpc.RpcError) as caught:
                list(send()) if method.server_streaming else send()
            assert grpc.StatusCode.RESOURCE_EXHAUSTED == caught.value.code(), name
            assert "expected at most" in (caught.value.details() or "")


@pytest.mark.parametrize(
    ("request_", "metadata", "says"),
    [
        (
            checkpoint_service_pb2.GetRunRequest(name="x" * (5 << 20)),
            (),
            "message larger than max",
        ),
        (
            checkpoint_service_pb2.GetRunRequest(),
            (("x", "y" * 20_000),),
            "metadata size exceeds",
        ),
    ],
    ids=["message", "metadata"],
)
def test_the_limits_of_grpc_have_a_reason(
    server_address: str,
    request_: checkpoint_service_pb2.GetRunRequest,
    metadata: tuple[tuple[str, str], ...],
    says: str,
) -> None:
    with (
        grpc.insecure_channel(server_address) as channel,
        pytest.raises(store.LimitError, match=says) as caught,
        translate_rpc_errors(server_address),
    ):
        CheckpointServiceStub(channel).GetRun(request_, metadata=metadata, timeout=20)

    assert "LIMIT_EXCEEDED" == caught.value.reason


@pytest.mark.slow
def test_no_request_takes_much_more_memory_than_it_weighs(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    writer = Writer(server.address, "tests/amplified", 1, writers=2)
    writer.begin()
    at_rest = memory_bytes(server.pid, "VmRSS")

    statuses = {str(a): a.send(server.address, writer, parts=3) for a in AMPLIFIED}

    assert {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"} == set(statuses.values())
    assert memory_bytes(server.pid, "VmHWM") - at_rest < BOUND_BYTES
    writer.keep_alive()  # it serves as before


@pytest.mark.slow
def test_a_tree_of_millions_of_chunks_takes_no_memory_for_each_of_them(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    stub = UploadServiceStub(grpc.insecure_channel(server.address))
    begun = [begin_chunks(stub, step, 4_000_000) for step in range(8)]
    at_rest = memory_bytes(server.pid, "VmRSS")

    for writer in begun:
        for version in range(4):
            frames = [
                api.WriteChunksRequest(open=writer),
                api.WriteChunksRequest(frame=frame_of(version)),
            ]
            list(stub.WriteChunks(iter(frames), timeout=30))
        table = tree_pb2.ChunkTable(ordinal=[7], crc32c=[0], digests=[b"\0" * 16])
        asked = [
            api.FindChunksRequest(open=writer),
            api.FindChunksRequest(chunks=table),
        ]
        (answer,) = stub.FindChunks(iter(asked), timeout=30)
        assert [] == list(answer.found)

    assert memory_bytes(server.pid, "VmHWM") - at_rest < 64 << 20


@pytest.mark.slow
def test_more_rows_than_a_stream_announced_are_rejected_as_they_come(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    writer = Writer(server.address, "tests/announced", 1)
    writer.begin()
    two = tree_pb2.LeafTable(
        key=["a", "b"],
        path_kinds=["k", "k"],
        kind=[tree_pb2.LEAF_KIND_ARRAY] * 2,
        dtype=[0, 0],
        rank=[0, 0],
        sharding=[0, 0],
        prng_impl=[0, 0],
    )
    opening = api.BeginUploadRequest(
        parent="namespaces/tests/runs/announced",
        request_id=str(uuid.uuid4()),
        upload=api.Upload(step=2, writer_count=1),
        leaf_count=3,
    )
    parts = [api.BeginUploadRequest(leaves=two)] * 2
    receipt = api.FinishWriterRequest(open=writer.ref(), chunk_count=4)

    expected = "3 leaves as leaf_count says, got 4"
    with pytest.raises(StoreError, match=expected), translate_rpc_errors("here"):
        writer.stub.BeginUpload(iter([opening, *parts]), timeout=30)
    expected = "the tree has 3 chunks, got 4"
    with pytest.raises(StoreError, match=expected), translate_rpc_errors("here"):
        writer.stub.FinishWriter(iter([receipt]), timeout=30)


def memory_bytes(pid: int, kind: str) -> int:
    """Returns what a process takes, or took at most."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"{kind}:\s+(\d+) kB", status)
    assert found
    return int(found[1]) << 10


def begin_chunks(stub: UploadServiceStub, step: int, chunks: int) -> api.WriterRef:
    """Begins an upload of a leaf with chunks of one byte."""
    leaves = tree_pb2.LeafTable(
        key=["x"],
        path_kinds=["k"],
        kind=[tree_pb2.LEAF_KIND_HOST_ARRAY],
        dtype=[0],
        dtypes=["uint8"],
        rank=[1],
        shape=[chunks - step],
        chunk_shape=[1],
        sharding=[0],
        prng_impl=[0],
    )
    requests = [
        api.BeginUploadRequest(
            parent="namespaces/tests/runs/chunks",
            request_id=str(uuid.uuid4()),
            upload=api.Upload(step=step, writer_count=1),
            leaf_count=1,
        ),
        api.BeginUploadRequest(leaves=leaves),
    ]
    upload = stub.BeginUpload(iter(requests), timeout=30).upload
    return api.WriterRef(upload=upload.name, epoch=upload.epoch, writer=0)


def frame_of(version: int) -> api.ChunkFrame:
    """Returns the frame of one chunk of one byte."""
    data = bytes([version])
    data += crc32c(data).to_bytes(4, "little")
    return api.ChunkFrame(chunk=[7], offset=[0], length=[5], data=data)
