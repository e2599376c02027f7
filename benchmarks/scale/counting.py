"""Requests, bytes and CPU of a piece of work on the emulator."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final, TypeAlias

from benchmarks.requests import described
from tests.fake_gcs import FakeGcs, Logged
from tests.support.gcs_calls import BUCKET

Cost: TypeAlias = dict[str, float]
"""Figures of one size of a series, by name."""

BILLED: Final = {"PUT": "A", "POST": "A", "LIST": "A", "GET": "B"}
"""Class of each kind of request at Google; deletions cost nothing."""

QUIET_SECONDS: Final = 0.3
"""Time without a request after which a work has left nothing to be done later."""


@contextmanager
def emulated_bucket() -> Iterator[FakeGcs]:
    """Yields an emulator with a bucket, to which new clients connect."""
    with FakeGcs(buckets=[BUCKET]) as gcs:
        os.environ["TENSORSTORE_GCS_HTTP_URL"] = gcs.url
        os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "any"
        yield gcs


def count(
    gcs: FakeGcs, work: Callable[[], Any], *, later_seconds: float = QUIET_SECONDS
) -> Cost:
    """Returns the cost of a work, with what it leaves to be done in the time after."""
    gcs.clear()
    began = time.process_time() - gcs.cpu_seconds
    work()
    time.sleep(later_seconds)
    while gcs.pending:  # of background work
        time.sleep(QUIET_SECONDS)
    return add_up(gcs.log) | {"CPU-s": time.process_time() - gcs.cpu_seconds - began}


def add_up(requests: Sequence[Logged]) -> Cost:
    """Returns the figures of requests; those that fail are not billed."""
    kinds, classes = Counter[str](), Counter[str]()
    writes = Counter[str]()
    for request in requests:
        kind, name = described(request)
        method = "LIST" if kind == "list" else request.method
        kinds[method] += 1
        if request.status and request.status < HTTPStatus.BAD_REQUEST:
            classes[BILLED.get(method, "free")] += 1
        if method in ("PUT", "POST"):
            writes[name] += 1
    return {
        "requests": len(requests),
        **{each: classes[each] for each in ("A", "B")},
        **{each: kinds[each] for each in ("PUT", "POST", "GET", "LIST", "DELETE")},
        "refused": sum(described(each)[0] == "refused" for each in requests),
        "KiB up": sum(each.received_bytes for each in requests) / 1024,
        "KiB down": sum(each.sent_bytes for each in requests) / 1024,
        "commits": sum(n for name, n in writes.items() if "manifests/" in name),
        "writes of one object": max(writes.values(), default=0),
    }
