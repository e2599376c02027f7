"""``python -m benchmarks telemetry``: calls, saves and restores of a server with
metrics and traces, and of two without; and scrapes while streams are open.

The traces go to a collector on this machine, whose time counts, too.
"""

import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

import grpc
import numpy as np

import storesvc_client as store
from benchmarks.server_pairs import caller, save, started, table
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from tests.support.otlp_collector import collecting_spans
from tests.support.scraped import SERVED, url_of
from tests.support.server_process import ServerProcess

CALLS: Final = 10_000
ROUNDS: Final = 20
SAVES: Final = 12
SAVED_BYTES: Final = 128 << 20
SCRAPES: Final = 100
STREAMS: Final = 64


def main() -> None:
    """Measures the servers in turns, and prints tables."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as place,
        collecting_spans() as collector,
    ):
        folder = Path(place)
        options = (*SERVED, "--otlp-endpoint", collector.url, "--log-format", "json")
        servers = {
            "off": started(folder, "off"),
            "off again": started(folder, "off again"),
            "on": started(folder, "on", *options),
        }
        try:
            _compare(servers)
            _scrape(servers["on"])
        finally:
            for server in servers.values():
                server.stop()


def _compare(servers: dict[str, ServerProcess]) -> None:
    tree = {"w": np.random.default_rng(0).integers(0, 255, SAVED_BYTES, np.uint8)}
    with ExitStack() as stack:
        clients = {
            name: stack.enter_context(store.connect(server.address))
            for name, server in servers.items()
        }
        for client in clients.values():
            client.run("bench/warm").save(0, tree).result()
        calls = {name: caller(servers[name].address, None) for name in servers}
        table(
            f"ListRuns, {CALLS:,} calls",
            {name: partial(calls[name], CALLS // ROUNDS) for name in servers},
            rounds=ROUNDS,
        )
        step = iter(range(1, 10**6))
        table(
            f"save of {SAVED_BYTES >> 20} MiB",
            {name: partial(save, clients[name], step, tree["w"]) for name in servers},
            rounds=SAVES,
        )
        table(
            f"restore of {SAVED_BYTES >> 20} MiB",
            {
                name: partial(clients[name].run("bench/warm").restore, 0)
                for name in servers
            },
            rounds=SAVES,
        )


def _scrape(server: ServerProcess) -> None:
    """Times scrapes while watches and restores keep streams open."""
    url = url_of(server)
    for title, busy in (("idle", False), (f"{STREAMS} streams", True)):
        seconds = []
        with _streams(server.address) if busy else ExitStack():
            for _ in range(SCRAPES):
                began = time.perf_counter()
                with urllib.request.urlopen(url, timeout=60) as response:
                    size = len(response.read())
                seconds.append(time.perf_counter() - began)
                time.sleep(0.02)
        print(
            f"scrape, {title}: {size >> 10} KiB, median {median(seconds) * 1e3:.1f} "
            f"ms, slowest of {SCRAPES} {max(seconds) * 1e3:.1f} ms"
        )


@contextmanager
def _streams(address: str) -> Iterator[None]:
    """Keeps watches open, and four restores running, while the context lasts."""
    stop = threading.Event()

    def restore() -> None:
        with store.connect(address) as client:
            while not stop.is_set():
                client.run("bench/warm").restore(0)

    restores = [threading.Thread(target=restore) for _ in range(4)]
    with grpc.insecure_channel(address) as channel:
        stub = CheckpointServiceStub(channel)
        request = api.WatchCheckpointsRequest(parent="namespaces/bench/runs/warm")
        watches = [
            stub.WatchCheckpoints(request) for _ in range(STREAMS - len(restores))
        ]
        for thread in restores:
            thread.start()
        time.sleep(2)
        try:
            yield
        finally:
            stop.set()
            for thread in restores:
                thread.join()
            for watch in watches:
                watch.cancel()


if __name__ == "__main__":
    main()
