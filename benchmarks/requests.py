"""Counts the requests of storesvc to a bucket, by the classes that Google bills.

    python -m benchmarks requests [--mib 256]

The emulator counts the requests, and rejects (429) a second write of an object within a
second, as the real storage does. `embedded` is a client with an embedded server,
`served` is a client of a separate server.
"""

import argparse
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

import storesvc_client as store
from tests.fake_gcs import FakeGcs, Logged
from tests.support.gcs_calls import BUCKET, OBJECTS, UPLOADS
from tests.support.server_process import ServerProcess

MIB: Final = 1 << 20
LEAF_MIB: Final = 4
COLUMNS: Final = (
    "class A",
    "class B",
    "free",
    "other",
    "refused",
    "MiB up",
    "MiB down",
)
TOO_SOON: Final = 429


def class_of(request: Logged) -> str:
    """Returns the billing class of a request; "other" if it is not about objects."""
    place = urlsplit(request.target).path
    match request.method:
        case _ if request.status == TOO_SOON:
            return "refused"
        case "POST" if place == UPLOADS:
            return "class A"
        case "GET" if place == OBJECTS:  # a page of a list
            return "class A"
        case "GET" if place.startswith(f"{OBJECTS}/"):
            return "class B"
        case "DELETE" if place.startswith(f"{OBJECTS}/"):
            return "free"
    return "other"


def row(requests: Iterable[Logged]) -> list[int]:
    """Returns the cells of some requests."""
    known = list(requests)
    counted = Counter(map(class_of, known))
    up = sum(request.received_bytes for request in known) // MIB
    down = sum(request.sent_bytes for request in known) // MIB
    return [*(counted[column] for column in COLUMNS[:5]), up, down]


def tree(mib: int, *, changed: int = 0) -> dict[str, Any]:
    """Returns a tree of a size in MiB; one leaf depends on the number."""
    draw = np.random.default_rng(0)
    leaves = {
        f"leaf-{i}": draw.integers(0, 1 << 30, LEAF_MIB * MIB // 4, np.int32)
        for i in range(mib // LEAF_MIB)
    }
    return {**leaves, "leaf-0": leaves["leaf-0"] + np.int32(changed)}


def works(client: store.Client, mib: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields the counted operations, in order."""
    run = client.run("bench/requests")
    first, second = tree(mib), tree(mib, changed=1)
    yield "first save", lambda: run.save(1, first).result()
    yield "save, 1 leaf changed", lambda: run.save(2, second).result()
    yield "restore", lambda: run.restore(2)
    yield "latest", run.latest
    yield "list of 2", lambda: list(run.checkpoints())
    yield "collection", lambda: list(client.collect())


@contextmanager
def client_of(way: str, root: str) -> Iterator[store.Client]:
    """Yields a client of the store at a root."""
    if way == "embedded":
        with store.connect(root) as client:
            yield client
        return
    with tempfile.TemporaryDirectory(prefix="storesvc-bench-") as directory:
        place = Path(directory)
        server = ServerProcess(place, place, "--gc-interval", "0s", uri=root)
        server.start()
        try:
            with store.connect(server.address) as client:
                yield client
        finally:
            server.stop()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    mib = parser.parse_args().mib
    with FakeGcs(buckets=[BUCKET], seconds_between_writes=1.0) as gcs:
        os.environ["TENSORSTORE_GCS_HTTP_URL"] = gcs.url
        os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "any"
        for way in ("embedded", "served"):
            print(f"{way}, {mib} MiB".ljust(24), *(f"{c:>9}" for c in COLUMNS))
            with client_of(way, f"gs://{BUCKET}/{way}") as client:
                for name, work in works(client, mib):
                    gcs.clear()
                    work()
                    print(f"{name:24}", *(f"{cell:>9,}" for cell in row(gcs.log)))


if __name__ == "__main__":
    main()
