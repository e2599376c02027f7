"""A bucket that rejects everything for some time: processes that save send it few
requests, and their saves end after it."""

import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import pytest

import storesvc_client as store
from storesvc.errors import StorageUnavailableError
from storesvc.storage import hedging
from storesvc.storage.bucket import Generation
from storesvc.storage.location import storage_at
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc_client._storage.bucket import BucketRoot
from tests.conftest import gcs_root
from tests.fake_gcs import ALWAYS, FakeGcs, Lost, Status
from tests.support.gcs_calls import BUCKET, GcsCalls

pytestmark = pytest.mark.emulated

MIB = 1 << 20

STORM_SECONDS = 20.0

SAVE = """
import sys, numpy as np, storesvc_client as store
root, run = sys.argv[1:]
tree = {f"{n}": np.random.default_rng(n).bytes(8 << 20) for n in range(3)}
tree = {name: np.frombuffer(data, np.uint8) for name, data in tree.items()}
with store.connect(root) as client:
    client.run(run).save(0, {"x": np.zeros(1 << 18)}).result()
    print("ready", flush=True)
    sys.stdin.readline()
    print(client.run(run).save(1, tree, base=None).report().sent_bytes)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("code", "wait"), [(503, 0.0), (429, 1.0)])
def test_processes_send_less_than_a_request_a_second_in_a_storm_and_save_after_it(
    code: int, wait: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeGcs(buckets=[BUCKET], bytes_per_second=15e6) as gcs:
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", gcs.url)
        monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "any")
        savers = [
            subprocess.Popen(
                [sys.executable, "-c", SAVE, f"gs://{BUCKET}/storm", f"tests/{n}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for n in range(2)
        ]
        for saver in savers:
            assert saver.stdout is not None
            assert saver.stdin is not None
            assert "ready\n" == saver.stdout.readline()
            saver.stdin.write("\n")
            saver.stdin.flush()
        time.sleep(wait)
        gcs.clear()
        gcs.fault(".*", Status(code), times=ALWAYS)
        time.sleep(STORM_SECONDS)
        rejected = [one for one in gcs.log if one.status == code]
        gcs.clear()
        said = [saver.communicate(timeout=120)[0] for saver in savers]

    assert ["25165836\n"] * len(savers) == said
    assert 1 <= len(rejected) <= len(savers) * STORM_SECONDS


@pytest.mark.slow
def test_a_slow_write_that_makes_progress_is_not_cut(
    gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        hedging,
        "WRITES",
        replace(hedging.WRITES, answer_seconds=1.0, least_bytes_per_second=1 << 40),
    )
    tree = {"x": np.random.default_rng(1).random(MIB // 2, np.float64)}
    with (
        FakeGcs(buckets=[BUCKET], stream_bytes_per_second=MIB) as slow,
        store.connect(f"gs://{BUCKET}/slow?endpoint={slow.url}") as client,
    ):
        client.run("tests/slow").save(1, tree).result()
        sent = [one for one in slow.log if one.method == "PUT"]

    assert 1 == sum(one.status == 200 for one in sent)


def test_saves_need_no_etag(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of googleapis/storage-testbench."""
    tree = {"x": np.arange(1 << 18)}
    with FakeGcs(buckets=[BUCKET], left_out=("etag", "last-modified")) as gcs:
        root = f"gs://{BUCKET}/sparse?endpoint={gcs.url}"
        monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "any")
        with store.connect(root) as client:
            run = client.run("tests/sparse")
            gcs.fault("PUT .*pool", Lost())
            run.save(1, tree).result()
            puts = [one for one in gcs.log if one.method == "PUT"]

            assert [None, 412] == [one.status for one in puts]
            assert np.array_equal(tree["x"], run.restore(1)["x"])


async def test_a_storage_that_says_when_to_retry_is_asked_then(gcs: FakeGcs) -> None:
    bucket = await TensorStoreBucket.open(gcs_root())
    gcs.clear()
    gcs.fault("GET .*/o[?]", Status(503, retry_after_seconds=3))
    began = time.monotonic()

    await bucket.list("")

    assert time.monotonic() - began >= 3
    assert 2 == sum("/o?" in each.target for each in gcs.log)


CALLS: Mapping[str, Callable[[TensorStoreBucket, Generation], Awaitable[Any]]] = {
    "GET": lambda bucket, _: bucket.read("a"),
    "POST": lambda bucket, held: bucket.write("a", b"2", condition=held),
    "DELETE": lambda bucket, held: bucket.delete("a", generation=held),
}


@pytest.mark.parametrize("method", CALLS)
async def test_a_request_is_sent_again_when_a_probe_shows_that_the_storage_wants_it(
    method: str, gcs: FakeGcs
) -> None:
    """TensorStore does not show ``Retry-After``."""
    bucket = await TensorStoreBucket.open(gcs_root())
    held = await bucket.write("a", b"1")
    gcs.clear()
    gcs.fault(".", Status(503, retry_after_seconds=3), times=2)
    began = time.monotonic()

    await CALLS[method](bucket, held)

    assert time.monotonic() - began >= 3
    # a request of a slow machine may be dropped for its hedge
    sent = [(one.method, one.status) for one in gcs.log if one.status][:4]
    probes = [("GET", 503), ("GET", 200)]
    done = (method, 204 if method == "DELETE" else 200)
    assert [(method, 503), *probes, done] == sent


def test_a_data_file_is_sent_again_when_a_probe_shows_that_the_storage_wants_it(
    gcs: FakeGcs,
) -> None:
    root = BucketRoot.open(storage_at(gcs_root()))
    gcs.clear()
    gcs.fault("PUT|/o[?]", Status(503, retry_after_seconds=3), times=2)
    began = time.monotonic()

    root.write("a", [b"1"], what="a", check=lambda: None)

    assert time.monotonic() - began >= 3
    # a request of a slow machine may be dropped for its hedge, and both answered
    answered = (
        (one.method, one.status)
        for one in gcs.log
        if one.status and "noAcl&pretty" not in one.target
    )
    sent = [each for each, _ in groupby(answered)]
    assert [("PUT", 503), ("GET", 503), ("GET", 200), ("PUT", 200)] == sent


@pytest.mark.slow
async def test_a_bucket_that_lists_and_rejects_writes_gets_few_of_both(
    gcs: FakeGcs,
) -> None:
    bucket = await TensorStoreBucket.open(gcs_root())
    gcs.clear()
    gcs.fault("POST /upload", Status(429), times=ALWAYS)

    for _ in range(2):
        with pytest.raises(StorageUnavailableError):
            await bucket.write("a", b"1")

    sent = len(gcs.log)
    gcs.clear()
    assert sent <= 20


async def test_a_list_is_complete_though_each_page_fails_once(gcs: FakeGcs) -> None:
    """The iterator of Google's client would end, as if nothing followed."""
    bucket = await TensorStoreBucket.open(gcs_root())
    names = [f"many/{n:04}" for n in range(1500)]
    with GcsCalls(gcs.url) as calls:
        place = bucket.name.removeprefix(f"gs://{BUCKET}/")
        for name in names:
            calls.upload(f"{place}/{name}", b"x")
    gcs.fault("GET .*pageToken", Status(503), times=2)

    assert names == await bucket.list("many/")
