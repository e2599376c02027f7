"""``python -m benchmarks tenants``: how much longer the saves of a namespace take
while another tenant floods the server, in each of several ways.

The tenants have tokens and namespaces of their own, and the flooding one has quotas. A
flood is a process of its own; saves of the other tenant are timed alone, before and
after, and during the flood. The flood's own work would be another machine's, so it has
the lowest priority here; the row "processor" has what even a flood of such priority
takes that sends nothing.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final

import grpc
import numpy as np

import storesvc_client as store
from storesvc.format.trees import pack_leaves
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1 import tree_pb2
from storesvc_proto.v1 import upload_service_pb2 as upload_api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from storesvc_proto.v1.upload_service_pb2_grpc import UploadServiceStub
from tests.support.amplified_requests import all_amplified
from tests.support.contract import tree_of
from tests.support.server_process import ServerProcess
from tests.support.tokens import keys_document, signed

SAVES: Final = 15
SAVED_BYTES: Final = 8 << 20
THREADS: Final = 16
WARM_SECONDS: Final = 2.0

POLICY: Final = """
[[issuers]]
name = "bench"
issuer = "https://issuer.example"
audiences = ["storesvc"]
jwks_file = "{keys}"
principal = "user:{{sub}}"

[[bindings]]
role = "writer"
runs = ["quiet/*"]
who = ["user:quiet"]

[[bindings]]
role = "writer"
runs = ["flood/*"]
who = ["user:flood"]

[[quotas]]
namespaces = ["flood"]
requests_per_second = 50
streams = 2
watches = 32
uploads = 1

[quotas_per_principal]
requests_per_second = 100
"""


def main() -> None:
    """Times saves in each flood, or floods."""
    match sys.argv[1:]:
        case [kind, address, token]:
            flood(kind, address, token)
        case _:
            compare()


def compare() -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        folder = Path(place)
        keys, policy = folder / "keys.json", folder / "policy.toml"
        keys.write_text(keys_document())
        policy.write_text(POLICY.format(keys=keys))
        server = ServerProcess(folder / "store", folder, "--policy", str(policy))
        server.start()
        print(f"saves of {SAVED_BYTES >> 20} MiB, median of {SAVES}, in ms")
        print(f"{'flood':10} {'alone':>7} {'flooded':>8} {'ratio':>6}")
        try:
            with store.connect(server.address, token=signed("quiet")) as client:
                timed = _saver(client)
                timed()
                for kind in FLOODS:
                    _row(kind, server, timed)
        finally:
            server.stop()


def _row(kind: str, server: ServerProcess, timed: Callable[[], float]) -> None:
    before = timed()
    command = [sys.executable, "-m", "benchmarks", "tenants", kind, server.address]
    with subprocess.Popen([*command, signed("flood")]) as flooding:
        time.sleep(WARM_SECONDS)
        flooded = timed()
        is_running = flooding.poll() is None
        flooding.kill()
    assert is_running, f"the flood {kind} has ended"
    alone = min(before, timed())
    ratio = flooded / alone
    print(f"{kind:10} {alone * 1e3:7.0f} {flooded * 1e3:8.0f} {ratio:6.2f}", flush=True)


def _saver(client: store.Client) -> Callable[[], float]:
    """Returns a function that saves some steps, and returns the median time."""
    run = client.run("quiet/run")
    data = np.random.default_rng(0).integers(0, 255, SAVED_BYTES, np.uint8)
    steps = iter(range(10**6))

    def timed() -> float:
        seconds = []
        for _ in range(SAVES):
            step = next(steps)
            tree = {"w": np.roll(data, step)}
            began = time.perf_counter()
            run.save(step, tree).result()
            seconds.append(time.perf_counter() - began)
        return median(seconds)

    return timed


def flood(kind: str, address: str, token: str) -> None:
    """Floods a server until the process is killed."""
    os.nice(19)
    parent = os.getppid()
    for number in range(THREADS):
        work = FLOODS[kind](address, (("authorization", f"Bearer {token}"),), number)
        threading.Thread(target=_forever, args=(work,), daemon=True).start()
    while os.getppid() == parent:
        time.sleep(0.1)


def _forever(work: Callable[[], object]) -> None:
    while True:
        try:
            work()
        except (grpc.RpcError, store.StoreError):
            continue


def _channel(address: str, number: int) -> grpc.Channel:
    return grpc.insecure_channel(address, [("storesvc.channel", number)])


def _calls(address: str, metadata: Any, number: int) -> Callable[[], object]:
    """Lists without a pause."""
    stub = CheckpointServiceStub(_channel(address, number))
    request = api.ListRunsRequest(parent="namespaces/flood")
    return lambda: stub.ListRuns(request, metadata=metadata)


def _watches(address: str, metadata: Any, number: int) -> Callable[[], object]:
    """Opens watches and leaves them."""
    stub = CheckpointServiceStub(_channel(address, number))
    request = api.WatchCheckpointsRequest(parent="namespaces/flood")
    kept: list[Any] = []

    def work() -> None:
        stream = stub.WatchCheckpoints(request, metadata=metadata, timeout=600)
        next(stream)
        kept.append(stream)

    return work


def _malformed(address: str, metadata: Any, number: int) -> Callable[[], object]:
    """Sends bytes that are no requests."""
    channel = _channel(address, number)
    call: Any = channel.unary_unary("/storesvc.v1.CheckpointService/GetCheckpoint")
    return lambda: call(os.urandom(100_000), metadata=metadata)


def _stalled(address: str, metadata: Any, number: int) -> Callable[[], object]:
    """Opens uploads whose tables never arrive."""
    stub = UploadServiceStub(_channel(address, number))

    def opening() -> Iterator[upload_api.BeginUploadRequest]:
        yield upload_api.BeginUploadRequest(
            parent=f"namespaces/flood/runs/run-{number}",
            request_id="00000000-0000-0000-0000-000000000000",
            upload=upload_api.Upload(step=1, writer_count=1),
            leaf_count=1,
        )
        time.sleep(30)

    return lambda: stub.BeginUpload(opening(), metadata=metadata, timeout=60)


def _saves(address: str, metadata: Any, number: int) -> Callable[[], object]:
    """Saves without a pause."""
    token = metadata[0][1].removeprefix("Bearer ")
    client = store.connect(address, token=token)
    run = client.run(f"flood/saves-{number}")
    steps = iter(range(10**6))

    def work() -> None:
        tree = {"w": np.random.default_rng().integers(0, 255, 8 << 20, np.uint8)}
        run.save(next(steps), tree).result()

    return work


def _unread(address: str, metadata: Any, number: int) -> Callable[[], object]:
    """Begins to read a manifest of many chunks, and reads no more of it."""
    token = metadata[0][1].removeprefix("Bearer ")
    with store.connect(address, token=token) as client:
        run = client.run("flood/unread")
        if number == 0 and run.latest_step() is None:
            many = {str(leaf): np.zeros(1, np.uint8) for leaf in range(20_000)}
            run.save(1, many).result()
    stub = CheckpointServiceStub(_channel(address, number))
    request = api.ReadManifestRequest(
        name="namespaces/flood/runs/unread/checkpoints/latest"
    )
    kept: list[Any] = []

    def work() -> None:
        stream = stub.ReadManifest(request, metadata=metadata)
        next(stream)
        kept.append(stream)

    return work


def _amplified(address: str, metadata: Any, number: int) -> Callable[[], object]:
    """Sends messages whose entries take a hundred times their bytes as objects."""
    channel = _channel(address, number)
    unary = [each for each in all_amplified() if not each.method.client_streaming]
    chosen = unary[number % len(unary)]
    method = chosen.method
    kind = "unary_stream" if method.server_streaming else "unary_unary"
    call: Any = getattr(channel, kind)(
        f"/{method.containing_service.full_name}/{method.name}"
    )
    message = chosen.message()

    def work() -> None:
        answer = call(message, metadata=metadata, timeout=60)
        if method.server_streaming:
            list(answer)

    return work


def _writers(address: str, metadata: Any, number: int) -> Callable[[], object]:
    """Begins uploads of the maximum number of writers, and asks for their state."""
    stub = UploadServiceStub(_channel(address, number))
    tree = tree_of(3)

    def requests() -> Iterator[upload_api.BeginUploadRequest]:
        yield upload_api.BeginUploadRequest(
            parent=f"namespaces/flood/runs/writers-{number}",
            request_id=str(uuid.uuid4()),
            upload=upload_api.Upload(step=1, writer_count=65536),
            leaf_count=len(tree.leaves),
        )
        for part in pack_leaves(tree):
            leaves = tree_pb2.LeafTable.FromString(part)
            yield upload_api.BeginUploadRequest(leaves=leaves)

    def work() -> None:
        begun = stub.BeginUpload(requests(), metadata=metadata, timeout=60).upload
        request = upload_api.GetUploadRequest(name=begun.name)
        stub.GetUpload(request, metadata=metadata, timeout=60)

    return work


def _processor(_address: str, _metadata: Any, _number: int) -> Callable[[], object]:
    """Sends nothing."""
    return lambda: sum(range(10_000))


FLOODS: Final[dict[str, Callable[[str, Any, int], Callable[[], object]]]] = {
    "processor": _processor,
    "calls": _calls,
    "watches": _watches,
    "malformed": _malformed,
    "stalled": _stalled,
    "saves": _saves,
    "unread": _unread,
    "amplified": _amplified,
    "writers": _writers,
}
"""The kinds of floods."""


if __name__ == "__main__":
    main()
