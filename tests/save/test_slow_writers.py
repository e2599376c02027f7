"""Clients that send chunks slowly, or begin to and stop, keep no other save waiting."""

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

import storesvc_client as store
from storesvc.save.batches import AdmissionLimits
from storesvc.save.receiver import MAX_BATCHES
from storesvc_client._rpc import retry as _retrying
from storesvc_proto.v1 import upload_service_pb2 as api
from tests.support.contract import Writer, frame, stored
from tests.support.thread_server import ThreadServer

SECONDS = 60.0


def within_a_chunk(chunk: int = 0, size: int = 1) -> api.ChunkFrame:
    """Returns a frame that holds the beginning of a chunk."""
    data = stored(chunk)[:size]
    return api.ChunkFrame(chunk=[chunk], offset=[0], length=[size], data=data)


class Stalled:
    """A WriteChunks stream that sends frames, and then nothing."""

    def __init__(self, server: ThreadServer, namespace: str, sent: api.ChunkFrame):
        self._writer = Writer(server.address, f"{namespace}/{uuid.uuid4().hex}", 1)
        self._writer.begin()
        self._ended = threading.Event()
        self.acknowledged: list[int] = []
        self.error: grpc.RpcError | None = None
        before = server.store.receiver.admission.free
        self._thread = threading.Thread(target=self._write, args=(sent,))
        self._thread.start()
        deadline = time.monotonic() + SECONDS
        while server.store.receiver.admission.free == before:  # until it has a place
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def _write(self, sent: api.ChunkFrame) -> None:
        def requests() -> Iterator[api.WriteChunksRequest]:
            yield api.WriteChunksRequest(open=self._writer.ref())
            yield api.WriteChunksRequest(frame=sent)
            self._ended.wait(SECONDS)

        try:
            for answer in self._writer.stub.WriteChunks(requests()):
                self.acknowledged.append(answer.durable_count)
        except grpc.RpcError as e:
            self.error = e

    @property
    def is_open(self) -> bool:
        """Returns whether the stream is still open."""
        return self._thread.is_alive()

    def end(self) -> None:
        """Ends the stream, as the client."""
        self._ended.set()
        self._thread.join(SECONDS)


@contextmanager
def stalled_streams(
    server: ThreadServer, count: int, sent: api.ChunkFrame
) -> Iterator[list[Stalled]]:
    """Opens streams that sent a frame each, and then nothing."""
    with ExitStack() as stack:
        streams = []
        for _ in range(count):
            streams.append(Stalled(server, "slow", sent))
            stack.callback(streams[-1].end)
        yield streams


def details_of(error: grpc.RpcError) -> tuple[str, float]:
    """Returns the reason of an error, and its retry delay in seconds."""
    assert isinstance(error, grpc.Call)
    status = rpc_status.from_call(error)
    assert status is not None
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in status.details:
        _ = detail.Unpack(info) or detail.Unpack(retry)
    return info.reason, retry.retry_delay.ToTimedelta().total_seconds()


def test_streams_that_stop_within_a_chunk_keep_no_save_waiting_on_files(
    tmp_path: Path,
) -> None:
    with (
        ThreadServer(tmp_path.as_uri()) as server,
        stalled_streams(server, 2 * MAX_BATCHES, within_a_chunk()) as streams,
    ):
        Writer(server.address, "good/run", 1).save()

        assert all(stream.is_open for stream in streams)


@pytest.mark.slow
def test_streams_that_stop_within_a_chunk_lose_their_permits_to_a_save() -> None:
    with (
        ThreadServer("memory://") as server,
        stalled_streams(server, MAX_BATCHES, within_a_chunk()) as streams,
    ):
        Writer(server.address, "good/run", 1).save()

        ended = [stream.error for stream in streams if stream.error is not None]
        assert [("LIMIT_EXCEEDED", 1.0)] == [details_of(error) for error in ended]


@pytest.mark.slow
def test_streams_that_stop_after_a_chunk_are_acknowledged_for_a_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("storesvc.save.batches.BATCH_SECONDS", 3600.0)
    with (
        ThreadServer("memory://") as server,
        stalled_streams(server, MAX_BATCHES, frame(0)) as streams,
    ):
        Writer(server.address, "good/run", 1).save()

        deadline = time.monotonic() + SECONDS
        while not any(stream.acknowledged for stream in streams):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert all(stream.is_open for stream in streams)
        assert [[1]] == [s.acknowledged for s in streams if s.acknowledged]


@pytest.mark.slow
def test_a_slow_client_keeps_its_permit_while_no_stream_waits() -> None:
    with ThreadServer("memory://") as server:
        server.store.receiver.admission.limits = AdmissionLimits(
            first_seconds=0.1, credit_seconds=0.1, client_seconds=0.1
        )
        writer = Writer(server.address, "slow/run", 1)
        writer.begin()

        def requests() -> Iterator[api.WriteChunksRequest]:
            yield api.WriteChunksRequest(open=writer.ref())
            for at in range(0, 1004, 251):
                data = stored(0)[at : at + 251]
                piece = api.ChunkFrame(
                    chunk=[0], offset=[at], length=[len(data)], data=data
                )
                yield api.WriteChunksRequest(frame=piece)
                time.sleep(0.4)

        answers = writer.stub.WriteChunks(requests(), timeout=SECONDS)

        assert [1] == [answer.durable_count for answer in answers]


@contextmanager
def keep_places() -> Iterator[ThreadServer]:
    """Yields a server at which no stream loses its place to another, which soon gives
    up."""
    with ThreadServer("memory://") as server:
        server.store.receiver.admission.limits = AdmissionLimits(
            wait_seconds=0.3,
            first_seconds=3600,
            credit_seconds=3600,
            client_seconds=3600,
        )
        yield server


@pytest.mark.slow
def test_a_stream_that_finds_no_place_is_rejected_and_may_retry() -> None:
    with (
        keep_places() as server,
        stalled_streams(server, MAX_BATCHES, within_a_chunk()),
    ):
        writer = Writer(server.address, "good/run", 1)
        writer.begin()
        with pytest.raises(grpc.RpcError) as caught:
            writer.write(frame(0, 1, 2))

        assert ("LIMIT_EXCEEDED", 1.0) == details_of(caught.value)
        assert "storage" not in str(caught.value.details())


@pytest.mark.slow
def test_a_save_that_finds_no_place_is_repeated_until_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_retrying, "PATIENCE_SECONDS", 0.1)
    with keep_places() as server, store.connect(server.address) as client:
        state = {"x": np.arange(1 << 18)}
        with stalled_streams(server, MAX_BATCHES, within_a_chunk()):
            saving = client.run("good/run").save(1, state)
            time.sleep(2)  # it is rejected in the meantime, more than once
            assert not saving.done()

        saving.result()

        assert (state["x"] == client.run("good/run").restore(1)["x"]).all()
