"""Faults of a bucket whose client transfers directly: no call stalls forever, and no
restore returns data that were not saved."""

import logging
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import storesvc_client as store
from storesvc.rpc import streams
from storesvc.storage import hedging
from storesvc.storage.hedging import PAUSE_SECONDS, Limits
from storesvc.storage.location import storage_at
from storesvc_client._chunks.memory import MIN_BUDGET_BYTES
from storesvc_client._restore.open_tree import get_reader
from storesvc_client._save import direct
from storesvc_client._storage.bucket import BucketRoot
from tests.fake_gcs import (
    ALWAYS,
    Delay,
    FakeGcs,
    Late,
    Lost,
    Reset,
    Short,
    Stall,
    Status,
)
from tests.storage.freed_calls import assert_calls_freed
from tests.support.examples import sampled
from tests.support.gcs_calls import BUCKET, GcsCalls
from tests.support.sessions import send_through_server

MIB = 1 << 20

pytestmark = pytest.mark.emulated

LEAVES = 12

FAST = 1 << 40

HEDGED = Limits(floor_seconds=0.3, unknown_seconds=0.0, answer_seconds=600)
"""Only a second request ends a wait for a response that never comes."""


@pytest.fixture
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Limits:
    """Limits of reads: the test's parameter."""
    limits: Limits = request.param
    monkeypatch.setattr(hedging, "HEDGE_BURST", 1000.0)
    monkeypatch.setattr(hedging, "READS", limits)
    return limits


@pytest.fixture
def run(root: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[store.Run]:
    """A run of a direct client, with a checkpoint that has a data file per leaf."""
    monkeypatch.setattr(direct, "OBJECT_BYTES", MIB)
    with store.connect(root) as client:
        run = client.run("tests/faults")
        run.save(0, TREE).result()
        yield run


TREE: dict[str, Any] = {
    f"{n:02}": np.random.default_rng(n).random((1024, 1024), np.float32)
    for n in range(LEAVES)
}


def assert_equal(found: Any) -> None:
    assert TREE.keys() == found.keys()
    assert all(TREE[key].tobytes() == found[key].tobytes() for key in TREE)


def data_file(run: store.Run, leaf: str) -> str:
    """Returns the data file that holds a leaf of one chunk."""
    places = get_reader(run.open(0)).manifest.places
    return places.files[int(places.file[sorted(TREE).index(leaf)])]


def object_of(root: str, file: str) -> str:
    """Returns the name of the object of a data file."""
    return f"{root.removeprefix(f'gs://{BUCKET}/')}/data/tests/faults/pool/{file}"


@pytest.mark.slow
@pytest.mark.parametrize("limits", [HEDGED], indirect=True, ids=["hedged"])
def test_a_stalled_read_is_hedged_and_the_first_response_wins(
    limits: Limits, run: store.Run, gcs: FakeGcs, caplog: pytest.LogCaptureFixture
) -> None:
    gcs.fault(f"GET .*{data_file(run, '05')}", Stall())

    with caplog.at_level(logging.WARNING):
        assert_equal(run.restore(0))

    assert [] == caplog.messages


@pytest.mark.slow
@pytest.mark.parametrize("limits", [HEDGED], indirect=True, ids=["hedged"])
def test_a_server_hedges_stalled_reads(
    limits: Limits, run: store.Run, gcs: FakeGcs
) -> None:
    send_through_server(run)
    gcs.fault("GET .*pool", Stall())

    assert_equal(run.restore(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "limits",
    [
        Limits(
            floor_seconds=600, answer_seconds=0.5, least_bytes_per_second=FAST, tries=20
        )
    ],
    indirect=True,
    ids=["late"],
)
def test_stalled_reads_are_retried_and_logged(
    limits: Limits, run: store.Run, gcs: FakeGcs, caplog: pytest.LogCaptureFixture
) -> None:
    files = "|".join(data_file(run, leaf) for leaf in TREE)
    gcs.fault("GET .*pool", Stall(), times=len(TREE))

    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        assert_equal(run.restore(0))
    seconds = time.monotonic() - began

    reported = [message for message in caplog.messages if "retrying" in message]
    assert 1 <= len(reported) <= 1 + seconds / PAUSE_SECONDS
    late = f"restore of tests/faults@0: data file ({files}) has not answered for"
    assert all(re.match(late, message) for message in reported)


@pytest.mark.slow
@pytest.mark.parametrize(
    "limits",
    [Limits(answer_seconds=0.7, least_bytes_per_second=FAST, tries=2)],
    indirect=True,
    ids=["late"],
)
def test_a_data_file_that_never_answers_is_reported_within_its_deadline(
    limits: Limits, run: store.Run, gcs: FakeGcs
) -> None:
    file = data_file(run, "05")
    gcs.fault(f"GET .*{file}", Stall(), times=ALWAYS)
    began = time.monotonic()

    with pytest.raises(store.UnavailableError) as caught:
        run.restore(0)

    assert time.monotonic() - began < 30
    message = str(caught.value)
    assert message.startswith("restore of tests/faults@0: ")
    assert "did not answer in time" in message
    assert "data files are missing: " in message
    assert f"{file} (1)" in message
    assert not [t for t in threading.enumerate() if "storesvc-direct" in t.name]
    gcs.clear()
    assert_equal(run.restore(0))


@pytest.mark.slow
def test_a_restore_stops_waiting_for_a_stalled_read_at_its_deadline(
    run: store.Run, gcs: FakeGcs
) -> None:
    file = data_file(run, "05")
    gcs.fault(f"GET .*{file}", Stall(), times=ALWAYS)

    with pytest.raises(
        store.UnavailableError, match=rf"to end within 2 s, .*missing: .*{file}"
    ):
        run.restore(0, deadline=timedelta(seconds=2))


@pytest.mark.slow
def test_the_slowest_data_file_of_a_faulty_bucket_is_logged(
    run: store.Run, gcs: FakeGcs
) -> None:
    file = data_file(run, "03")
    gcs.fault(f"GET .*{file}", Delay(0.3))
    opened = run.open(0)

    opened.restore()

    assert opened.report is not None
    assert file == opened.report.slowest
    assert opened.report.slowest_seconds >= 0.3


def test_a_failed_restore_cancels_its_reads_in_flight(
    run: store.Run, gcs: FakeGcs, root: str
) -> None:
    lost = data_file(run, "00")
    with GcsCalls(gcs.url) as calls:
        calls.delete(object_of(root, lost))
    for file in set(get_reader(run.open(0)).manifest.places.files) - {lost}:
        gcs.fault(f"GET .*{file}", Stall(), times=ALWAYS)
    began = time.monotonic()

    with pytest.raises(store.DataLossError):
        run.restore(0)

    # not after the deadline of those that stall
    assert time.monotonic() - began < hedging.READS.answer_seconds
    assert not [t for t in threading.enumerate() if "storesvc-direct" in t.name]


def test_an_object_that_is_missing_is_data_loss_of_its_leaf(
    run: store.Run, gcs: FakeGcs, root: str
) -> None:
    with GcsCalls(gcs.url) as calls:
        calls.delete(object_of(root, data_file(run, "07")))

    with pytest.raises(
        store.DataLossError, match=r"tests/faults@0 leaf '0\d' chunk 0.* is missing"
    ):
        run.restore(0)
    with pytest.raises(store.DataLossError, match=r"leaf '07' chunk 0.* is missing"):
        run.restore(0, select="07")


def test_an_object_that_was_cut_off_is_data_loss_of_its_leaf(
    run: store.Run, gcs: FakeGcs, root: str
) -> None:
    place = object_of(root, data_file(run, "07"))
    with GcsCalls(gcs.url) as calls:
        calls.upload(place, calls.read(place).body[:-1])

    with pytest.raises(store.DataLossError, match=r"leaf '0\d' chunk 0.*truncated"):
        run.restore(0)


def test_a_flipped_bit_is_data_loss_of_its_leaf(
    run: store.Run, gcs: FakeGcs, root: str
) -> None:
    place = object_of(root, data_file(run, "07"))
    with GcsCalls(gcs.url) as calls:
        data = bytearray(calls.read(place).body)
        data[0] ^= 1  # of a chunk; there are unused bytes between two
        calls.upload(place, bytes(data))

    with pytest.raises(store.DataLossError, match=r"leaf '0\d' chunk 0: expected the"):
        run.restore(0)


@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "served"])
@pytest.mark.parametrize("place", ["pool", "manifests"])
def test_broken_streams_are_no_damage(
    run: store.Run, gcs: FakeGcs, place: str, is_direct: bool
) -> None:
    run.save(1, {"other": np.ones(1 << 18)}).result()
    if not is_direct:
        send_through_server(run)
    gcs.fault(f"GET .*{place}", Short(100), times=3)

    with suppress(store.UnavailableError):
        run.restore(on_damage="older")

    gcs.clear()
    assert ["other"] == list(run.restore(on_damage="older"))
    assert {} == run.checkpoint(1).labels


def test_a_denied_read_is_reported(run: store.Run, gcs: FakeGcs) -> None:
    gcs.fault("GET .*pool", Status(403), times=ALWAYS)

    with pytest.raises(
        store.PreconditionError, match=r"denies this to our credentials"
    ):
        run.restore(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "fault"),
    [
        ("GET .*pool", Status(403)),
        ("GET .*pool", Status(404)),
        ("PUT .*pool", Status(403)),
    ],
    ids=["denied read", "missing object", "denied write"],
)
def test_a_failed_call_frees_its_buffers_with_its_error(
    target: str, fault: Status, run: store.Run, gcs: FakeGcs
) -> None:
    gcs.clear()
    gcs.fault(target, fault, times=ALWAYS, after=3)
    # not pytest.raises, which would keep the error
    with assert_calls_freed(), suppress(store.StoreError):
        if target.startswith("GET"):
            run.restore(0)
        else:
            run.save(1, TREE, base=None).result()


@pytest.mark.slow
def test_a_denied_write_is_reported(run: store.Run, gcs: FakeGcs) -> None:
    gcs.fault("PUT .*pool", Status(403), times=ALWAYS)

    with pytest.raises(
        store.PreconditionError, match=r"denies this to our credentials"
    ):
        run.save(1, TREE, base=None).result()

    assert [0] == [checkpoint.step for checkpoint in run.checkpoints()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "action", sampled([Lost(), Reset(), Status(503), Late(0.5)], every=4)
)
def test_a_data_file_is_stored_once_though_its_response_is_lost(
    run: store.Run, gcs: FakeGcs, action: Any
) -> None:
    tree = {key: leaf + 1 for key, leaf in TREE.items()}
    gcs.clear()
    gcs.fault("PUT .*pool", action, times=3)

    run.save(1, tree, base=None).result()

    stored = [one.target for one in gcs.log if one.method == "PUT" and one.stored_bytes]
    assert len(set(stored)) == len(stored)
    back = run.restore(1)
    assert all(tree[key].tobytes() == back[key].tobytes() for key in tree)


@pytest.mark.parametrize("other", [b"other", b"longer"], ids=["same size", "longer"])
def test_an_object_with_other_bytes_is_never_taken_for_the_one_that_was_sent(
    root: str, gcs: FakeGcs, other: bytes
) -> None:
    bucket = BucketRoot.open(storage_at(root))
    with GcsCalls(gcs.url) as calls:
        calls.upload(f"{root.removeprefix(f'gs://{BUCKET}/')}/x", other)

    with pytest.raises(store.UnavailableError, match="already exists"):
        bucket.write("x", [b"by", b"tes"], what="a write", check=lambda: None)

    found = bucket.read("x", timeout=10)
    assert other == found


@pytest.mark.slow
def test_data_files_are_written_without_obstore(
    run: store.Run, gcs: FakeGcs, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    tree = {key: leaf + 1 for key, leaf in TREE.items()}
    with store.connect(root) as client:
        gcs.clear()

        client.run("tests/faults").save(1, tree, base=None).result()

        written = [one for one in gcs.log if "pool" in one.target and one.stored_bytes]
        assert {"POST"} == {one.method for one in written}
        back = client.run("tests/faults").restore(1)
    assert all(tree[key].tobytes() == back[key].tobytes() for key in tree)


@pytest.fixture
def write_limits(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Limits:
    """Limits of writes: the test's parameter."""
    limits: Limits = request.param
    monkeypatch.setattr(hedging, "HEDGE_BURST", 1000.0)
    monkeypatch.setattr(hedging, "WRITES", limits)
    return limits


@pytest.mark.slow
@pytest.mark.parametrize(
    "write_limits",
    [Limits(floor_seconds=600, answer_seconds=4.0, least_bytes_per_second=FAST)],
    indirect=True,
    ids=["late"],
)
def test_a_stalled_write_of_an_object_is_retried(
    write_limits: Limits, run: store.Run, gcs: FakeGcs, caplog: pytest.LogCaptureFixture
) -> None:
    gcs.fault("PUT .*pool", Stall())
    tree = {key: leaf + 1 for key, leaf in TREE.items()}

    with caplog.at_level(logging.WARNING):
        run.save(1, tree).result()

    (message,) = [m for m in caplog.messages if "retrying" in m]
    assert message.startswith("save: data file ")
    assert all(
        tree[k].tobytes() == leaf.tobytes() for k, leaf in run.restore(1).items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "served"])
@pytest.mark.parametrize("write_limits", [HEDGED], indirect=True, ids=["hedged"])
def test_a_stalled_write_of_an_object_is_hedged(
    write_limits: Limits,
    run: store.Run,
    gcs: FakeGcs,
    is_direct: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not is_direct:
        send_through_server(run)
    gcs.fault("(PUT|POST) .*pool", Stall())
    tree = {key: leaf + 1 for key, leaf in TREE.items()}

    with caplog.at_level(logging.WARNING):
        run.save(1, tree).result()

    assert [] == caplog.messages
    assert all(
        tree[k].tobytes() == leaf.tobytes() for k, leaf in run.restore(1).items()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "write_limits",
    [Limits(floor_seconds=600, answer_seconds=10.0, least_bytes_per_second=FAST)],
    indirect=True,
    ids=["late"],
)
def test_a_client_that_waits_for_acknowledgement_is_not_rejected_as_stalled(
    write_limits: Limits, root: str, gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client must not send chunks twice, as the server itself is slow."""
    # shorter than the wait of the server, longer than any of a busy machine
    monkeypatch.setattr(streams, "STALL_SECONDS", 6.0)
    tree = {f"{n:02}": np.full((16, MIB), n, np.uint8) for n in range(12)}
    size = sum(leaf.nbytes for leaf in tree.values())

    with store.connect(root, staging_bytes=MIN_BUDGET_BYTES) as client:
        send_through_server(client)
        gcs.fault("POST /upload.*pool", Stall())
        run = client.run("tests/late")
        run.save(1, tree).result()

        assert size <= gcs.stored_bytes < 1.02 * size
        assert run.verify(1).ok
