"""Clients that stall within a call: no other client waits for them."""

import asyncio
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from storesvc import concurrency
from storesvc.concurrency import FairSemaphore
from storesvc.errors import LimitExceededError
from storesvc.format.checksums import crc32c, digest
from storesvc.format.chunks import Sums, pack_sums
from storesvc.rpc import streams, upload_service
from storesvc.rpc.streams import MessageBudget
from storesvc_proto.v1 import checkpoint_service_pb2 as checkpoint_api
from storesvc_proto.v1 import tree_pb2
from storesvc_proto.v1 import upload_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from tests.rpc.test_request_limits import begin_chunks
from tests.support.contract import Writer
from tests.support.faulty_server import serving
from tests.support.server_process import ServerProcess

PARENT = "namespaces/stalled/runs/r"
STALLED = 12
"""Clients, more than any kind of call had places."""


class Stalled:
    """Requests of a client that stops after the first ones."""

    def __init__(self) -> None:
        self._goes_on = threading.Event()

    def __call__(self, *requests: Any) -> Iterator[Any]:
        """Yields the requests, and then waits for the end."""
        yield from requests
        self._goes_on.wait()

    def end(self) -> None:
        """Lets all of them end."""
        self._goes_on.set()


@pytest.fixture
def stalled() -> Iterator[Stalled]:
    requests = Stalled()
    yield requests
    requests.end()


def begin_opening(leaf_count: int = 3) -> api.BeginUploadRequest:
    return api.BeginUploadRequest(
        parent=PARENT,
        request_id=str(uuid.uuid4()),
        upload=api.Upload(step=1, writer_count=1),
        leaf_count=leaf_count,
    )


@pytest.mark.slow
def test_streams_that_send_only_an_opening_delay_no_save(
    server: ServerProcess, stalled: Stalled
) -> None:
    own = Writer(server.address, "stalled/own", 1, writers=2)
    own.begin()
    join = api.JoinOpening(upload=own.name, writer=1, writer_count=2)
    calls: list[Any] = []
    for _ in range(STALLED):
        stub = own.stub
        opening = api.JoinUploadRequest(open=join, leaf_count=1)
        calls.append(stub.JoinUpload.future(stalled(opening)))
        calls.append(stub.BeginUpload.future(stalled(begin_opening())))
        receipt = api.FinishWriterRequest(open=own.ref(), chunk_count=1)
        calls.append(stub.FinishWriter.future(stalled(receipt)))

    for step in range(3):
        Writer(server.address, "stalled/victim", step).save()

    assert [False] * len(calls) == [call.done() for call in calls]
    for call in calls:
        call.cancel()


@pytest.mark.slow
def test_readers_of_manifests_that_stop_delay_no_other_reader(
    server: ServerProcess,
) -> None:
    channel = grpc.insecure_channel(server.address)
    name = save_chunks(server.address, 200_000)
    stub = CheckpointServiceStub(channel)
    request = checkpoint_api.ReadManifestRequest(name=name)
    calls: list[Any] = [stub.ReadManifest(request) for _ in range(STALLED)]
    for call in calls:
        next(call)

    parts = list(stub.ReadManifest(request, timeout=60))

    assert parts[0].checkpoint.manifest_bytes == sum(len(p.part) for p in parts)
    assert [False] * STALLED == [call.done() for call in calls]
    for call in calls:
        call.cancel()


def test_the_slowest_client_is_cut_where_others_need_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stalled: Stalled
) -> None:
    monkeypatch.setattr(upload_service, "TABLES_BYTES", 1 << 20)
    monkeypatch.setattr(upload_service, "PEER_BYTES", 1 << 20)
    monkeypatch.setattr(streams, "CREDIT_SECONDS", -30.0)
    document = tree_pb2.LeafTable(structure=[b"x" * (700 << 10)])
    part = api.BeginUploadRequest(leaves=document)
    with serving(tmp_path) as address:
        slow = Writer(address, "stalled/slow", 1).stub
        held = slow.BeginUpload.future(stalled(begin_opening(), part))
        while not held.done():
            other = Writer(address, "stalled/other", 1)
            with pytest.raises(grpc.RpcError):
                other.stub.BeginUpload(iter([begin_opening(), part]), timeout=30)
        error = held.exception()
        stalled.end()

    assert isinstance(error, grpc.RpcError)
    assert isinstance(error, grpc.Call)
    assert grpc.StatusCode.RESOURCE_EXHAUSTED == error.code()
    assert "bytes per second" in error.details()
    status = rpc_status.from_call(error)
    retry = error_details_pb2.RetryInfo()
    assert status is not None
    assert any(detail.Unpack(retry) for detail in status.details)
    assert 1 == retry.retry_delay.seconds


async def test_streams_that_wait_for_each_other_do_not_wait_for_long() -> None:
    async def gather(budget: MessageBudget, size: int) -> str:
        with budget.share("peer") as share:
            try:
                for _ in range(4):
                    await share.take(size)
                    share.count(1 << 30)  # fast
            except LimitExceededError:
                return "rejected"
        return "gathered"

    budget = MessageBudget(1 << 20, 1 << 20, purpose="tables")

    found = await asyncio.gather(*(gather(budget, 200 << 10) for _ in range(3)))
    assert "gathered" in found


async def test_peers_are_served_in_turn() -> None:
    served: list[str] = []

    async def work(semaphore: FairSemaphore, peer: str) -> None:
        async with semaphore.held(peer):
            served.append(peer)
            await asyncio.sleep(0)

    semaphore = FairSemaphore(1, purpose="works")
    peers = ["many"] * 4 + ["one"]
    await asyncio.gather(*(work(semaphore, peer) for peer in peers))

    assert ["many", "one", "many", "many", "many"] == served


async def test_a_call_that_finds_no_place_is_rejected_with_a_delay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(concurrency, "WAIT_SECONDS", 0.01)

    semaphore = FairSemaphore(1, purpose="works")
    async with semaphore.held("one"):
        with pytest.raises(LimitExceededError) as caught:
            async with semaphore.held("other"):
                pass
    assert 1 == caught.value.retry_seconds
    async with semaphore.held("other"):
        pass


def save_chunks(address: str, count: int) -> str:
    """Saves a leaf of so many chunks of one byte; returns the checkpoint's name."""
    stub = Writer(address, "stalled/chunks", 0).stub
    writer = begin_chunks(stub, 0, count)
    data = b"a" + crc32c(b"a").to_bytes(4, "little")

    def frames() -> Iterator[api.WriteChunksRequest]:
        yield api.WriteChunksRequest(open=writer)
        size = 20_000
        for at in range(0, count, size):
            frame = api.ChunkFrame(
                chunk=range(at, at + size),
                offset=[0] * size,
                length=[len(data)] * size,
                data=data * size,
            )
            yield api.WriteChunksRequest(frame=frame)

    list(stub.WriteChunks(frames(), timeout=60))
    receipt = Sums(
        ordinal=np.arange(count),
        crc32c=np.full(count, crc32c(b"a"), np.uint32),
        digests=np.tile(np.frombuffer(digest(b"a"), np.uint8), (count, 1)),
    )
    parts = (api.FinishWriterRequest(chunks=part) for part in pack_sums(receipt))
    opening = api.FinishWriterRequest(open=writer, chunk_count=count)
    stub.FinishWriter(iter([opening, *parts]), timeout=60)
    commit = api.CommitUploadRequest(name=writer.upload, epoch=writer.epoch)
    name: str = stub.CommitUpload(commit, timeout=60).checkpoint.name
    return name
