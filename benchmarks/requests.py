"""Counts the requests of storesvc to a bucket, and how many of them wait for others.

    python -m benchmarks requests [--only small leaves large] [--mib 256]
        [--ways embedded direct streamed] [--refuse] [--trace WORK]

Every request of the emulator takes 30 ms. A request that begins after another has ended
may wait for it: the longest chain of these is the number of round trips of a call ("in
a row"), which does not depend on the machine's load while requests take most of the
time; "waits" is the time of the call by 30 ms. Requests that end after the last write
of a save, which makes it durable, or after another call, are "later", and counted too.
Google bills writes and lists as class A, reads as class B, and no deletions.

`--trace` prints the requests of a work, such as "save": each numbered one waits for the
one with the number before. With `--refuse` nothing takes 30 ms, and a second write of
an object within a second is rejected (429), as by the real storage.
"""

import argparse
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np

import storesvc_client as store
from benchmarks.speed.bars import Bar, Results, verdicts
from benchmarks.speed.tables import bars_table
from tests.fake_gcs import FakeGcs, Logged
from tests.support.gcs_calls import BUCKET, OBJECTS
from tests.support.server_process import ServerProcess

LATENCY_SECONDS: Final = 0.03
WAIT_SECONDS: Final = 5 * LATENCY_SECONDS
"""For what a call leaves to be done later."""
REFUSED_WAIT_SECONDS: Final = 3.0
MIB: Final = 1 << 20
LEAF_MIB: Final = 4
SMALL: Final = {"leaves": 3, "bytes": 100_000}
MANY: Final = {"leaves": 10_000, "bytes": 256}
LOOP: Final = 50
TREES: Final = ("small", "leaves", "large")
WAYS: Final = ("embedded", "direct", "streamed")
KINDS: Final = ("write", "list", "read", "delete", "other", "refused")
COLUMNS: Final = (*KINDS, "later", "in a row", "waits", "MiB up", "MiB down")
RUN: Final = "bench/requests"
TOO_SOON: Final = 429


def described(request: Logged) -> tuple[str, str]:
    """Returns the kind of a request, and its place without the root and the run."""
    parts = urlsplit(request.target)
    query = parse_qs(parts.query)
    name = unquote(parts.path.removeprefix(f"{OBJECTS}/"))
    match request.method:
        case "POST" if "name" in query:
            kind, name = "write", query["name"][0]
        case "PUT":  # of the XML API
            kind, name = "write", unquote(parts.path.removeprefix(f"/{BUCKET}/"))
        case "DELETE":
            kind = "delete"
        case "GET" if parts.path == OBJECTS:
            kind, name = "list", query["prefix"][0]
        case "GET":
            kind = "read"
        case _:
            kind = "other"
    name = name.partition("/")[2].replace(f"{RUN}/", "")
    return "refused" if request.status == TOO_SOON else kind, name


def longest_chain(requests: Sequence[Logged]) -> list[Logged]:
    """Returns as many requests as possible of which each begins after the one before
    it has ended."""
    chain: list[Logged] = []
    for request in sorted(requests, key=_end_seconds):
        if not chain or request.began_seconds >= _end_seconds(chain[-1]):
            chain.append(request)
    return chain


def trace(requests: Sequence[Logged]) -> str:
    """Returns a line for each request, in the order in which they began."""
    ordered = sorted(requests, key=lambda request: request.began_seconds)
    chain = longest_chain(ordered)
    lines = [f"{'':4}{'ms':>6}{'took':>6}  request"]
    for request in ordered:
        number = next((n for n, one in enumerate(chain, 1) if one is request), "")
        at = 1000 * (request.began_seconds - ordered[0].began_seconds)
        kind, name = described(request)
        took = 1000 * request.seconds
        lines.append(f"{number:>4}{at:6.0f}{took:6.0f}  {kind:8}{name}")
    return "\n".join(lines)


def tree(kind: str, mib: int) -> dict[str, Any]:
    """Returns the tree with this name."""
    leaves, size = {
        "small": (SMALL["leaves"], SMALL["bytes"]),
        "leaves": (MANY["leaves"], MANY["bytes"]),
        "large": (mib // LEAF_MIB, LEAF_MIB * MIB),
    }[kind]
    draw = np.random.default_rng(0)
    return {
        f"leaf-{i}": draw.integers(0, 1 << 30, size // 4, np.int32)
        for i in range(leaves)
    }


def works(
    client: store.Client, state: dict[str, Any], saves: int
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields the counted operations, in order."""
    run = client.run(RUN)

    def save(step: int) -> None:
        for leaf in state.values():
            np.add(leaf, 1, out=leaf)
        run.save(step, state).result()

    yield "first save", partial(save, 1)
    for step in range(2, 2 + saves):
        yield "save", partial(save, step)
    changed = {**state, "leaf-0": state["leaf-0"] + 1}
    yield "save, 1 leaf changed", lambda: run.save(1000, changed).result()
    yield "restore", lambda: run.restore(1000)
    yield "latest", run.latest
    yield "list", lambda: list(run.checkpoints())
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
        direct = root if way == "direct" else None
        try:
            with store.connect(server.address, direct=direct) as client:
                yield client
        finally:
            server.stop()


def count(
    gcs: FakeGcs, work: Callable[[], Any], later_seconds: float, *, is_save: bool
) -> tuple[list[Logged], list[float]]:
    """Returns the requests of a call, and its cells."""
    gcs.clear()
    began = time.monotonic()
    work()
    ended = time.monotonic()
    time.sleep(later_seconds)
    found = list(gcs.log)
    writes = [_end_seconds(each) for each in found if described(each)[0] == "write"]
    last = max(writes) if is_save else ended
    awaited = [request for request in found if _end_seconds(request) <= last]
    counted = Counter(described(request)[0] for request in found)
    return awaited, [
        *(counted[kind] for kind in KINDS),
        len(found) - len(awaited),
        len(longest_chain(awaited)),
        (ended - began) / LATENCY_SECONDS,
        sum(request.received_bytes for request in found) / MIB,
        sum(request.sent_bytes for request in found) / MIB,
    ]


def _measure(arguments: argparse.Namespace, kind: str, way: str) -> dict[str, Any]:
    """Prints the table of a tree and a way; returns the cells of each work."""
    rows: dict[str, list[list[float]]] = {}
    how: dict[str, Any]
    how, wait = {"latency_seconds": LATENCY_SECONDS}, WAIT_SECONDS
    if arguments.refuse:
        how, wait = {"seconds_between_writes": 1.0}, REFUSED_WAIT_SECONDS
    with FakeGcs(buckets=[BUCKET], **how) as gcs:
        os.environ["TENSORSTORE_GCS_HTTP_URL"] = gcs.url
        os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "any"
        with client_of(way, f"gs://{BUCKET}/{way}") as client:
            saves = LOOP if kind == "small" else 1
            for name, work in works(client, tree(kind, arguments.mib), saves):
                requests, cells = count(gcs, work, wait, is_save="save" in name)
                rows.setdefault(name, []).append(cells)
                if name == arguments.trace and len(rows[name]) == 1:
                    print(trace(requests))
    print(f"{f'{kind}, {way}':22}" + "".join(f"{c:>9}" for c in COLUMNS))
    for name, found in rows.items():
        middle = np.median(np.array(found), axis=0)
        print(f"{name:22}" + "".join(f"{cell:>9,.0f}" for cell in middle), flush=True)
        rows[name] = [list(middle)]
    return rows


def _in_a_row(results: Results) -> float:
    """Returns the round trips of a small save that an embedded store waits for."""
    return float(results["small"]["embedded"][0]["save"])


BAR: Final = Bar(
    what="small: save of 300 kB, requests in a row",
    value=_in_a_row,
    limit=5,
    sense="<=",
)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=TREES, default=TREES)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--refuse", action="store_true")
    parser.add_argument("--trace", default="")
    arguments = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    at = COLUMNS.index("in a row")
    for kind in arguments.only:
        for way in arguments.ways:
            rows = _measure(arguments, kind, way)
            row = {name: cells[0][at] for name, cells in rows.items()}
            results.setdefault(kind, {})[way] = [row]
    print(bars_table(each for each in verdicts(results, [BAR]) if each.value))


def _end_seconds(request: Logged) -> float:
    return request.began_seconds + request.seconds


if __name__ == "__main__":
    main()
