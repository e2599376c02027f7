"""Measures the health of a server from another process."""

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from typing import Final

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from tests.support.restrictions import channel

PAUSE_SECONDS: Final = 0.02

_spawn: Final = multiprocessing.get_context("spawn")


class Health:
    """Durations of health checks."""

    def __init__(self, worst: "Synchronized[float]") -> None:
        self._worst = worst

    def worst_seconds(self) -> float:
        """Returns the longest duration since the last call."""
        with self._worst:
            seconds = self._worst.value
            self._worst.value = 0.0
        return seconds


@contextmanager
def measured(address: str) -> Iterator[Health]:
    """Repeats health checks of a server while the context lasts."""
    worst, stop, ready = _spawn.Value("d", 0.0), _spawn.Event(), _spawn.Event()
    process = _spawn.Process(target=_check, args=(address, worst, stop, ready))
    process.start()
    ready.wait()
    try:
        yield Health(worst)
    finally:
        stop.set()
        process.join()


def _check(
    address: str, worst: "Synchronized[float]", stop: Event, ready: Event
) -> None:
    check = channel(address).unary_unary(
        "/grpc.health.v1.Health/Check",
        HealthCheckRequest.SerializeToString,
        HealthCheckResponse.FromString,
    )
    check(HealthCheckRequest(), timeout=60)
    ready.set()
    while not stop.is_set():
        began = time.monotonic()
        check(HealthCheckRequest(), timeout=60)
        seconds = time.monotonic() - began
        with worst:
            worst.value = max(worst.value, seconds)
        time.sleep(PAUSE_SECONDS)
