"""Prints the requests of one save to a bucket with their times, and how many of them
wait for one another.

    python -m benchmarks chain [--mib 64] [--reuse]

Every request waits 30 ms. A request that begins after another has ended may wait for
it: the longest chain of such requests is the number of round trips of a save, which
does not depend on the machine's load while requests take most of the time. The client
writes data files directly, next to a server.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit

import storesvc_client as store
from benchmarks.requests import MIB, tree
from tests.fake_gcs import FakeGcs, Logged
from tests.support.gcs_calls import BUCKET, OBJECTS
from tests.support.server_process import ServerProcess

LATENCY_SECONDS: Final = 0.03
ROOT: Final = f"gs://{BUCKET}/chain"
RUN: Final = "bench/chain"


def longest_chain(requests: Sequence[Logged]) -> list[Logged]:
    """Returns as many requests as possible of which each begins after the one before
    it has ended."""
    chain: list[Logged] = []
    for request in sorted(requests, key=_ended):
        if not chain or request.began_seconds >= _ended(chain[-1]):
            chain.append(request)
    return chain


def before_and_after_data(requests: Sequence[Logged]) -> tuple[int, int]:
    """Returns the lengths of the longest chains before the first data file was sent and
    after the last one was stored; between them other requests wait for none of these.
    """
    data = [request for request in requests if request.stored_bytes >= MIB]
    first = min(request.began_seconds for request in data)
    last = max(map(_ended, data))
    before = longest_chain([r for r in requests if _ended(r) <= first])
    after = longest_chain([r for r in requests if r.began_seconds >= last])
    return len(before), len(after)


def described(request: Logged) -> str:
    """Returns the method and the place of a request, without the root and the run."""
    parts = urlsplit(request.target)
    query = parse_qs(parts.query)
    name = unquote(parts.path.removeprefix(f"{OBJECTS}/"))
    match request.method:
        case "POST":
            what, name = "write", query["name"][0]
        case "PUT":  # of the XML API
            what, name = "write", unquote(parts.path.removeprefix(f"/{BUCKET}/"))
        case "DELETE":
            what = "delete"
        case _ if parts.path == OBJECTS:
            what, name = "list", query["prefix"][0]
        case _:
            what = "read"
    for start in (f"{urlsplit(ROOT).path[1:]}/", f"runs/{RUN}/"):
        name = name.removeprefix(start)
    return f"{what:7}{name}"


def trace(requests: Sequence[Logged]) -> str:
    """Returns a line for each request, in the order in which they began; the longest
    chain is numbered: each of its requests waits for the one with the number before."""
    ordered = sorted(requests, key=lambda request: request.began_seconds)
    chain = longest_chain(ordered)
    lines = [f"{'':4}{'ms':>6}{'took':>6}  request"]
    for request in ordered:
        number = next((n for n, one in enumerate(chain, 1) if one is request), "")
        at = 1000 * (request.began_seconds - ordered[0].began_seconds)
        took = 1000 * request.seconds
        lines.append(f"{number:>4}{at:6.0f}{took:6.0f}  {described(request)}")
    return "\n".join(lines)


def main() -> None:
    """Prints the trace of the second save of a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument(
        "--reuse", action="store_true", help="chunks of the save before"
    )
    arguments = parser.parse_args()
    first, state = tree(arguments.mib), tree(arguments.mib, changed=1)
    with (
        FakeGcs(buckets=[BUCKET], latency_seconds=LATENCY_SECONDS) as gcs,
        tempfile.TemporaryDirectory(prefix="storesvc-bench-") as directory,
    ):
        os.environ["TENSORSTORE_GCS_HTTP_URL"] = gcs.url
        os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = ""
        place = Path(directory)
        server = ServerProcess(place, place, "--gc-interval", "0s", uri=ROOT)
        server.start()
        try:
            with store.connect(server.address, direct=ROOT) as client:
                run = client.run(RUN)
                run.save(1, first).result()
                gcs.clear()
                began = time.monotonic()
                run.save(2, state, base="latest" if arguments.reuse else None).result()
                ended = time.monotonic()
            found = gcs.log
        finally:
            server.stop()
    print(trace(found))
    awaited = [request for request in found if _ended(request) <= ended]
    before, after = before_and_after_data(awaited)
    print(
        f"\nThe save took {1000 * (ended - began):.0f} ms and waited for "
        f"{len(awaited)} requests, {len(longest_chain(awaited))} of them one after "
        f"another: {before} before the data, {after} after them; "
        f"{len(found) - len(awaited)} requests followed"
    )


def _ended(request: Logged) -> float:
    return request.began_seconds + request.seconds


if __name__ == "__main__":
    main()
