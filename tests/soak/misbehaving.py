"""Clients that stop in the midst of calls of every kind, beside honest ones.

Saves and restores of these must not take twice the time that they take alone.
"""

import multiprocessing
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np

import storesvc_client as store
from storesvc_proto.v1 import checkpoint_service_pb2 as catalogue_api
from storesvc_proto.v1 import chunk_service_pb2 as chunk_api
from storesvc_proto.v1 import upload_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from storesvc_proto.v1.chunk_service_pb2_grpc import ChunkServiceStub
from tests.rpc.test_stalled_clients import save_chunks
from tests.soak.outcomes import Outcome
from tests.support.contract import Writer, frame
from tests.support.server_process import ServerProcess

EACH: Final = 16
"""Stalled streams of each kind."""

ROUNDS: Final = 8
"""Saves and restores of the honest client."""

MOST: Final = 2.0
"""How many times as long as alone they may take."""

_spawn: Final = multiprocessing.get_context("spawn")


def misbehaving() -> Outcome:
    """Saves and restores alone, and then beside the stalled streams."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="storesvc-soak-") as scratch:
        server = ServerProcess(Path(scratch) / "store", Path(scratch))
        server.start()
        name = save_chunks(server.address, 200_000)
        _honest(server.address, "soak/warm")
        alone = _honest(server.address, "soak/alone")
        stop, count = _spawn.Event(), _spawn.Value("i", 0)
        evil = _spawn.Process(target=_stall, args=(server.address, name, stop, count))
        evil.start()
        while not count.value:
            assert evil.is_alive()
            time.sleep(0.1)
        time.sleep(3)  # all of them have got as far as they get
        beside = _honest(server.address, "soak/beside")
        stop.set()
        evil.join()
        server.stop()
    for what, a, b in zip(("save", "restore"), alone, beside, strict=True):
        lost = [f"a {what} took {b:.2f} s, alone {a:.2f} s"] if b > MOST * a else []
        outcome.add(what, lost)
    outcome.note = (
        f"beside {count.value} stalled streams a save took "
        f"{beside[0] / alone[0]:.2f} times as long as alone, a restore "
        f"{beside[1] / alone[1]:.2f}"
    )
    return outcome


def _honest(address: str, run: str) -> tuple[float, float]:
    """Returns the median seconds of a save, and of a restore."""
    with store.connect(address) as client:
        saved = [
            _seconds(partial(client.run(run).save, step, _state(step)))
            for step in range(ROUNDS)
        ]
        restored = [_seconds(lambda: client.run(run).restore()) for _ in range(ROUNDS)]
    return statistics.median(saved), statistics.median(restored)


def _state(step: int) -> dict[str, np.ndarray[Any, Any]]:
    """Returns a state of 16 MiB; of each step another one, so that all is sent."""
    return {"x": np.full(4 << 20, step, np.float32) + np.arange(4 << 20)}


def _seconds(act: Callable[[], object]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


def _stall(address: str, name: str, stop: Event, count: "Synchronized[int]") -> None:
    """Begins calls that go no further, and keeps them until the end."""
    ended = threading.Event()
    calls = list(_stalled(address, name, ended))
    count.value = len(calls)
    stop.wait()
    ended.set()
    for call in calls:
        call.cancel()


def _stalled(address: str, name: str, stop: threading.Event) -> Iterator[Any]:
    """Yields calls that go no further."""

    def requests(*first: Any) -> Iterator[Any]:
        yield from first
        stop.wait()

    parent = "namespaces/soak/runs/evil"
    for number in range(EACH):
        writer = Writer(address, "soak/evil", number, writers=2)
        writer.begin()
        stub, ref = writer.stub, writer.ref()
        upload = api.Upload(step=1000 + number, writer_count=1)
        begin = api.BeginUploadRequest(
            parent=parent, request_id=str(uuid.uuid4()), upload=upload, leaf_count=1
        )
        yield stub.BeginUpload.future(requests(begin))
        join = api.JoinOpening(upload=writer.name, writer=1, writer_count=2)
        yield stub.JoinUpload.future(
            requests(api.JoinUploadRequest(open=join, leaf_count=1))
        )
        receipt = api.FinishWriterRequest(open=ref, chunk_count=3)
        yield stub.FinishWriter.future(requests(receipt))
        yield stub.FindChunks(requests(api.FindChunksRequest(open=ref)))
        cut = frame(0)
        cut.data, cut.length[0] = cut.data[:1], 1
        yield stub.WriteChunks(
            requests(
                api.WriteChunksRequest(open=ref), api.WriteChunksRequest(frame=cut)
            )
        )
        yield from _stalled_readers(address, name, parent)


def _stalled_readers(address: str, name: str, parent: str) -> Iterator[Any]:
    """Yields calls whose responses are not taken, but for the first one."""
    channel = grpc.insecure_channel(
        address, options=[("grpc.use_local_subchannel_pool", 1)]
    )
    catalogue, chunks = CheckpointServiceStub(channel), ChunkServiceStub(channel)
    manifest = catalogue.ReadManifest(catalogue_api.ReadManifestRequest(name=name))
    uid = next(manifest).checkpoint.uid
    yield manifest
    request = chunk_api.ReadChunksRequest(name=name, uid=uid, chunk=range(60_000))
    read = chunks.ReadChunks(request)
    next(read)
    yield read
    yield catalogue.WatchCheckpoints(
        catalogue_api.WatchCheckpointsRequest(parent=parent)
    )
    yield catalogue.DiffCheckpoints(
        catalogue_api.DiffCheckpointsRequest(base=name, name=name)
    )
