"""``fanout``: many clients that restore from one server at the same time."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.speed.meters import measured
from benchmarks.speed.ours import Streamed
from benchmarks.speed.states import States

CLIENTS: Final = 32
PROCESSES: Final = 4
"""Processes that the clients are threads of."""

PROBE_SECONDS: Final = 0.05
"""Time between two health checks."""


def fanout(contender: Streamed, states: States, directory: Path) -> dict[str, Any]:
    """Returns the bytes that the server read from its storage per stored byte, its
    additional memory, and the slowest health check during the restores."""
    del directory
    contender.save(1, states.whole().state)
    info = contender.run.latest()
    clients = [_client(contender.address, str(info.step)) for _ in range(PROCESSES)]
    try:
        for client in clients:
            assert client.stdout is not None
            assert client.stdout.readline() == "ready\n"
        with _probed(contender.address) as probe:
            time.sleep(20 * PROBE_SECONDS)
            idle = max(probe.answers)
            probe.clear()
            with measured(contender.pids) as cost:
                # start all clients before waiting for the first
                ended = [client.communicate for client in _begun(clients)]
                received = sum(json.loads(end()[0]) for end in ended)
    finally:
        for client in clients:
            client.kill()
    assert CLIENTS * info.stored_bytes == received
    return {
        "bytes": received,
        "seconds": cost.seconds,
        "server_cpu_seconds": cost.others_cpu_seconds,
        "read_per_stored": cost.read_bytes / info.stored_bytes,
        "server_extra_mib": cost.others_extra_mib,
        "health_idle_ms": 1000 * idle,
        "health_slowest_ms": 1000 * max(probe.answers),
        "probe_late_ms": 1000 * max(probe.late),
    }


def _client(address: str, step: str) -> "subprocess.Popen[str]":
    """Starts a process with its share of the clients."""
    command = [sys.executable, "-m", "benchmarks.speed.reading", address, step]
    return subprocess.Popen(
        [*command, str(CLIENTS // PROCESSES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _begun(clients: "list[subprocess.Popen[str]]") -> "list[subprocess.Popen[str]]":
    for client in clients:
        assert client.stdin is not None
        client.stdin.write("go\n")
        client.stdin.flush()
    return clients


@dataclass(slots=True)
class _Probe:
    """Timings of health checks."""

    answers: list[float] = field(default_factory=list)
    """Duration of each check, in seconds."""
    late: list[float] = field(default_factory=list)
    """Delay of the start of each check, in seconds. A busy machine delays this process,
    so up to as much of a slow check may not be caused by the server."""

    def clear(self) -> None:
        """Removes all timings."""
        self.answers.clear()
        self.late.clear()


@contextmanager
def _probed(address: str) -> Iterator[_Probe]:
    """Repeats health checks of a server, on a separate connection.

    Yields:
        The timings, which grow until the context ends.
    """
    found = _Probe()
    ended = threading.Event()
    options = [("grpc.use_local_subchannel_pool", 1)]

    def probe() -> None:
        with grpc.insecure_channel(address, options=options) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            due = time.perf_counter() + PROBE_SECONDS
            while not ended.wait(max(0, due - time.perf_counter())):
                began = time.perf_counter()
                stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
                found.answers.append(time.perf_counter() - began)
                found.late.append(began - due)
                due = time.perf_counter() + PROBE_SECONDS

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
