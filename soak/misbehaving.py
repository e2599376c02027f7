"""Clients that stall in calls of every kind, while honest clients save and restore.

Saves and restores of honest clients must not take twice as long as alone.
"""

import multiprocessing
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from typing import Any, Final

import numpy as np

from soak import promises
from soak.outcomes import Outcome
from storesvc_proto.v1 import checkpoint_service_pb2 as checkpoint_api
from storesvc_proto.v1 import chunk_service_pb2 as chunk_api
from storesvc_proto.v1 import upload_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from storesvc_proto.v1.chunk_service_pb2_grpc import ChunkServiceStub
from tests.rpc.test_stalled_clients import save_chunks
from tests.support.contract import Writer, frame
from tests.support.restrictions import channel, connect

EACH: Final = 16
"""Stalled streams of each kind."""

ROUNDS: Final = 8
"""Saves and restores of the honest client."""

MOST: Final = 2.0
"""Largest allowed ratio of the times with stalled streams and alone."""

_spawn: Final = multiprocessing.get_context("spawn")


def misbehaving() -> Outcome:
    """Saves and restores alone, and then with stalled streams."""
    outcome = Outcome()
    with promises.served() as server:
        name = save_chunks(server.address, 200_000)
        _honest(server.address, "soak/warm")
        alone = _honest(server.address, "soak/alone")
        stop, count = _spawn.Event(), _spawn.Value("i", 0)
        evil = _spawn.Process(target=_stall, args=(server.address, name, stop, count))
        evil.start()
        while not count.value:
            assert evil.is_alive()
            time.sleep(0.1)
        time.sleep(3)  # until all of them have stalled
        disturbed = _honest(server.address, "soak/disturbed")
        stop.set()
        evil.join()
    for what, a, b in zip(("save", "restore"), alone, disturbed, strict=True):
        lost = [f"a {what} took {b:.2f} s, alone {a:.2f} s"] if b > MOST * a else []
        outcome.add(what, lost)
    outcome.note = (
        f"with {count.value} stalled streams a save took "
        f"{disturbed[0] / alone[0]:.2f} times as long as alone, a restore "
        f"{disturbed[1] / alone[1]:.2f}"
    )
    return outcome


def _honest(address: str, run: str) -> tuple[float, float]:
    """Returns the median seconds of a save, and of a restore."""
    with connect(address) as client:
        saved = [
            _seconds(partial(client.run(run).save, step, _state(step)))
            for step in range(ROUNDS)
        ]
        restored = [_seconds(lambda: client.run(run).restore()) for _ in range(ROUNDS)]
    return statistics.median(saved), statistics.median(restored)


def _state(step: int) -> dict[str, np.ndarray[Any, Any]]:
    """Returns a state of 16 MiB that differs by step, so that all of it is sent."""
    return {"x": np.full(4 << 20, step, np.float32) + np.arange(4 << 20)}


def _seconds(act: Callable[[], object]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


def _stall(address: str, name: str, stop: Event, count: "Synchronized[int]") -> None:
    """Begins calls that stall, and cancels them at the end."""
    ended = threading.Event()
    calls = list(_stalled(address, name, ended))
    count.value = len(calls)
    stop.wait()
    ended.set()
    for call in calls:
        call.cancel()


def _stalled(address: str, name: str, stop: threading.Event) -> Iterator[Any]:
    """Yields calls whose request streams stall."""

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
    """Yields calls of which at most the first response is read."""
    own = channel(address, [("grpc.use_local_subchannel_pool", 1)])
    checkpoints, chunks = CheckpointServiceStub(own), ChunkServiceStub(own)
    manifest = checkpoints.ReadManifest(checkpoint_api.ReadManifestRequest(name=name))
    uid = next(manifest).checkpoint.uid
    yield manifest
    request = chunk_api.ReadChunksRequest(name=name, uid=uid, chunk=range(60_000))
    read = chunks.ReadChunks(request)
    next(read)
    yield read
    yield checkpoints.WatchCheckpoints(
        checkpoint_api.WatchCheckpointsRequest(parent=parent)
    )
    yield checkpoints.DiffCheckpoints(
        checkpoint_api.DiffCheckpointsRequest(base=name, name=name)
    )
