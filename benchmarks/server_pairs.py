"""Compares servers that differ in one thing: calls and saves of each, in turns.

Rounds alternate, and the ratios are of the best rounds and of the medians. A second
server like the first shows how far a ratio of equal servers is from one.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median

import grpc
import numpy as np
from numpy.typing import NDArray

import storesvc_client as store
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from tests.support.server_process import ServerProcess


def started(folder: Path, name: str, *arguments: str) -> ServerProcess:
    """Returns a server in a directory of its own, started."""
    where = folder / name
    where.mkdir()
    server = ServerProcess(where / "store", where, *arguments)
    server.start()
    return server


def save(client: store.Client, step: Iterator[int], array: NDArray[np.uint8]) -> None:
    """Saves another array."""
    number = next(step)
    client.run("bench/saves").save(number, {"w": np.roll(array, number)}).result()


def caller(address: str, token: str | None) -> Callable[[int], None]:
    """Returns a function that lists the runs again and again."""
    stub = CheckpointServiceStub(grpc.insecure_channel(address))
    request = api.ListRunsRequest(parent="namespaces/bench")
    metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def call(count: int) -> None:
        for _ in range(count):
            stub.ListRuns(request, metadata=metadata, timeout=60)

    return call


def table(
    title: str, works: Mapping[str, Callable[[], object]], *, rounds: int
) -> None:
    """Times works in turns, and prints a table.

    Args:
        title: Title of the table.
        works: The works by name; the ratios are to the first one.
        rounds: Number of rounds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds):
        names = sorted(works, reverse=bool(number % 2))
        for name in names:
            began = time.perf_counter()
            works[name]()
            seconds[name].append(time.perf_counter() - began)
    best = {name: min(found) for name, found in seconds.items()}
    middle = {name: median(found) for name, found in seconds.items()}
    print(f"{title}: seconds a round of {rounds}, best and median")
    for name in works:
        print(f"  {name:10}  {best[name]:.3f}  {middle[name]:.3f}")
    first, *others = works
    for name in others:
        print(
            f"  {name} / {first}: best {best[name] / best[first]:.3f}, median "
            f"{middle[name] / middle[first]:.3f}"
        )
