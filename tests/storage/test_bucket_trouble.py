"""Faults of a bucket on Google Cloud Storage: transient errors are retried, others are
raised soon and name the bucket."""

import asyncio
import time
from collections.abc import Awaitable

import pytest

from storesvc.catalog.records import write_record
from storesvc.errors import StorageDeniedError, StorageUnavailableError, StoreError
from storesvc.storage import hedging, requests
from storesvc.storage.bucket import IF_ABSENT, Condition, Stored
from storesvc.storage.hedging import Limits
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.fake_gcs import (
    ALWAYS,
    Delay,
    FakeGcs,
    Late,
    Lost,
    Mute,
    Reset,
    Stall,
    Status,
)
from tests.support.examples import sampled
from tests.support.gcs_calls import BUCKET

pytestmark = pytest.mark.emulated


@pytest.fixture
def bucket(root: str) -> Awaitable[TensorStoreBucket]:
    """A fresh bucket."""
    return TensorStoreBucket.open(root)


async def test_a_retried_delete_after_a_lost_response_succeeds(
    bucket: TensorStoreBucket, gcs: FakeGcs
) -> None:
    generation = await bucket.write("a", b"1")
    gcs.fault("DELETE .*/a", Lost())
    await bucket.delete("a", generation=generation)
    assert await bucket.read("a") is None


@pytest.mark.slow
async def test_transient_errors_are_retried(
    bucket: TensorStoreBucket, gcs: FakeGcs
) -> None:
    for action in (Status(429), Status(503), Reset()):
        gcs.fault("POST /upload", action, times=2)
        await bucket.write("a", b"1")
        gcs.fault("GET .*/a", action, times=2)
        stored = await bucket.read("a")
        assert stored is not None


@pytest.mark.slow
async def test_permanent_errors_are_raised_at_once_and_name_the_bucket(
    bucket: TensorStoreBucket, gcs: FakeGcs, root: str
) -> None:
    began = time.monotonic()
    gcs.fault("POST /upload", Status(503), times=ALWAYS)
    with pytest.raises(StorageUnavailableError, match=f"{root}/a: "):
        await bucket.write("a", b"1")
    assert time.monotonic() - began < 30


async def test_a_call_fails_at_its_deadline(
    root: str, gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hedging, "READS", Limits(answer_seconds=0.1, tries=2))
    bucket = await TensorStoreBucket.open(root)
    gcs.fault("GET .*/a", Stall(), times=ALWAYS)
    with pytest.raises(StorageUnavailableError, match="did not answer in time"):
        await bucket.read("a")
    assert 2 == gcs.pending


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes changes be hedged after a short time."""
    limits = Limits(floor_seconds=0.05, unknown_seconds=0.05, answer_seconds=60)
    monkeypatch.setattr(hedging, "CHANGES", limits)


async def test_a_stalled_change_is_hedged(
    bucket: TensorStoreBucket, hasty: None, gcs: FakeGcs
) -> None:
    generation = await bucket.write("a", b"1")
    gcs.fault("POST /upload", Stall())
    generation = await bucket.write("a", b"2", condition=generation)
    assert Stored(b"2", generation) == await bucket.read("a")
    gcs.fault("DELETE ", Stall())
    await bucket.delete("a", generation=generation)
    assert await bucket.read("a") is None


@pytest.mark.slow
async def test_a_late_duplicate_of_a_write_changes_nothing(
    bucket: TensorStoreBucket, hasty: None, gcs: FakeGcs
) -> None:
    generation = await bucket.write("a", b"1")
    gcs.fault("POST /upload", Delay(0.5))
    await bucket.write("a", b"2", condition=generation)
    await bucket.delete("a")
    await asyncio.sleep(0.7)
    assert await bucket.read("a") is None


@pytest.mark.slow
async def test_a_write_whose_response_was_lost_is_no_conflict(
    root: str, gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(floor_seconds=0.05, unknown_seconds=0.05, answer_seconds=0.5)
    monkeypatch.setattr(hedging, "CHANGES", limits)
    bucket = await TensorStoreBucket.open(root)
    record = pb.StoreRecord(uid="1")
    generation = await bucket.write("a", b"")
    gcs.fault("POST /upload", Mute())
    written = await write_record(bucket, "a", record, condition=generation)
    found = await bucket.read("a")
    assert found is not None
    assert written == found.generation
    gcs.fault("DELETE ", Mute())
    await bucket.delete("a", generation=written)
    assert await bucket.read("a") is None


@pytest.mark.slow
async def test_a_later_write_of_another_does_not_fail_a_hedged_write(
    bucket: TensorStoreBucket, hasty: None, gcs: FakeGcs
) -> None:
    """The hedged second request finds the later write of another process."""
    generation = await bucket.write("a", b"1")
    gcs.fault("POST /upload", Late(1.0))
    ours = asyncio.ensure_future(bucket.write("a", b"2", condition=generation))
    found = await bucket.read("a")
    while found is None or found.data != b"2":
        found = await bucket.read("a")
    theirs = await bucket.write("a", b"3", condition=found.generation)

    assert found.generation == await ours
    assert Stored(b"3", theirs) == await bucket.read("a")


@pytest.mark.slow
async def test_a_creation_is_never_hedged(
    bucket: TensorStoreBucket,
    hasty: None,
    gcs: FakeGcs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A late duplicate of a creation would restore an object that was deleted since."""
    monkeypatch.setattr(requests, "ANSWER_SECONDS", 0.5)
    for condition in (IF_ABSENT, Condition.ALWAYS):
        gcs.clear()
        gcs.fault("POST /upload", Stall())
        with pytest.raises(StorageUnavailableError, match="did not answer in time"):
            await bucket.write("a", b"1", condition=condition)
        assert 1 == gcs.pending


REFUSALS = [
    (
        Status(403, message="no storage.objects.get access"),
        StorageDeniedError,
        "denies this to our credentials",
    ),
    (
        Status(401, message="Invalid Credentials"),
        StorageDeniedError,
        "does not accept our credentials",
    ),
    (
        Status(401, message="RequestTimeTooSkewed"),
        StorageDeniedError,
        "the clock is right",
    ),
    (
        Status(400, message="Bucket is a requester pays bucket"),
        StorageUnavailableError,
        "the storage failed: ",
    ),
]


@pytest.mark.parametrize(("refusal", "error", "said"), REFUSALS)
async def test_a_denial_is_raised_at_once_with_the_bucket_and_the_reason(
    bucket: TensorStoreBucket,
    gcs: FakeGcs,
    root: str,
    refusal: Status,
    error: type[StoreError],
    said: str,
) -> None:
    for ask in (
        lambda: bucket.read("a/b"),
        lambda: bucket.read_range("a/b", 0, 1),
        lambda: bucket.write("a/b", b""),
        lambda: bucket.delete("a/b"),
        lambda: bucket.list("a/b"),
        lambda: TensorStoreBucket.open(root),
    ):
        gcs.clear()
        gcs.fault(".", refusal, times=ALWAYS)
        with pytest.raises(error) as reported:
            await ask()
        sentence = str(reported.value)
        assert sentence.startswith(f"{root}/")
        assert said in sentence
        # a list reports instead that a token from the environment cannot be renewed
        assert refusal.message in sentence or "refresh the access tok" in sentence
        # Google's client asks, aside, about the bucket
        assert len([asked for asked in gcs.log if "/o" in asked.target]) <= 2


def test_a_bucket_that_denies_access_cannot_be_opened(gcs: FakeGcs, root: str) -> None:
    gcs.deny(BUCKET)
    try:
        with pytest.raises(StorageDeniedError, match=f"delete objects below {root}"):
            asyncio.run(TensorStoreBucket.open(root))
    finally:
        gcs.allow(BUCKET)


@pytest.mark.slow
@pytest.mark.parametrize("code", sampled([400, 401, 403, 404], every=4))
@pytest.mark.parametrize("after", [0, 1])
async def test_a_list_with_a_failed_page_is_an_error(
    bucket: TensorStoreBucket, gcs: FakeGcs, code: int, after: int
) -> None:
    """TensorStore's own list would return the pages before the failed one."""
    names = [f"a/{n:04}" for n in range(1100)]
    await asyncio.gather(*(bucket.write(name, b"") for name in names))
    gcs.fault(r"GET /storage/v1/b/[^/]*/o\?", Status(code), after=after)
    with pytest.raises(StoreError):
        await bucket.list("a/")
    assert names == await bucket.list("a/")
    gcs.fault(r"GET /storage/v1/b/[^/]*/o\?", Status(code), after=after)
    with pytest.raises(StoreError):
        await bucket.delete_below("a/")
    assert names == await bucket.list("a/")


@pytest.mark.slow
def test_the_limit_of_concurrent_requests_is_used_in_full(
    root: str, gcs: FakeGcs
) -> None:
    async def test(root: str, reads: int) -> float:
        bucket = await TensorStoreBucket.open(root)
        gcs.fault("GET .*/slow", Delay(0.3), times=ALWAYS)
        began = time.monotonic()
        await asyncio.gather(*(bucket.read(f"slow/{n}") for n in range(reads)))
        return time.monotonic() - began

    assert asyncio.run(test(root, 64)) < 4 * 0.3
    assert asyncio.run(test(f"{root}?concurrency=2", 8)) >= 4 * 0.3


@pytest.mark.slow
async def test_throttled_requests_slow_down_and_all_succeed(
    bucket: TensorStoreBucket, gcs: FakeGcs
) -> None:
    """Retries back off exponentially, so that a bucket can scale to its load."""
    reads, busy_seconds = 32, 1.0
    await bucket.write("a/b", b"1")
    gcs.fault("GET .*/a/b", Status(429), times=ALWAYS)
    began = time.monotonic()
    asked = [asyncio.ensure_future(bucket.read("a/b")) for _ in range(reads)]
    await asyncio.sleep(busy_seconds)
    refused = [entry for entry in gcs.log if entry.status == 429]
    gcs.clear()

    found = await asyncio.gather(*asked)

    assert [b"1"] * reads == [stored and stored.data for stored in found]
    # at 0, 0.1, 0.3 and 0.7 s, each a little later
    assert reads <= len(refused) <= 5 * reads
    assert time.monotonic() - began < 30


@pytest.mark.slow
@pytest.mark.parametrize("target", ["manifest.ocdbt", "pool/"])
async def test_a_read_of_a_key_space_is_retried_and_then_fails(
    root: str, gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    limits = Limits(unknown_seconds=0.1, answer_seconds=0.5, tries=2)
    monkeypatch.setattr(hedging, "READS", limits)
    bucket = await TensorStoreBucket.open(root)
    space = bucket.key_space(path="trees/a/", pool="pool/")
    assert await space.places() is None
    await asyncio.to_thread(lambda: space.opened().write("k", b"v" * 2000).result())
    found = await space.places()
    gcs.fault(f"GET .*/{target}", Stall())
    assert found == await space.places()
    assert found is not None
    assert ["k"] == list(found)
    gcs.fault(f"GET .*/{target}", Stall(), times=ALWAYS)
    with pytest.raises(StorageUnavailableError, match="did not answer in time"):
        await space.places()


async def test_a_list_fails_at_its_deadline(
    bucket: TensorStoreBucket, gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "ANSWER_SECONDS", 0.2)
    gcs.fault("GET .*/o[?]", Delay(1), times=ALWAYS)
    with pytest.raises(StorageUnavailableError, match="did not answer in time"):
        await bucket.list("a/")
