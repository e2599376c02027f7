"""Lists of a bucket read many records concurrently, as each small read takes a round
trip."""

import asyncio
from collections.abc import Iterator
from itertools import islice

import pytest

import storesvc_client as store
from benchmarks.catalogue import LARGE, records
from storesvc.storage.object_bucket import TensorStoreBucket
from tests.conftest import gcs_root, s3_root
from tests.fake_gcs import ALWAYS, Delay, FakeGcs
from tests.fake_s3 import FakeS3
from tests.support.gcs_calls import BUCKET, GcsCalls

CHECKPOINTS = 300

pytestmark = pytest.mark.emulated


@pytest.fixture(scope="module")
def run(gcs: FakeGcs) -> Iterator[store.Run]:
    """A run of many checkpoints in a bucket."""
    root = gcs_root()
    with store.connect(root) as client, GcsCalls(gcs.url) as calls:
        for place, data in records(CHECKPOINTS, 0):
            calls.upload(f"{root.removeprefix(f'gs://{BUCKET}/')}/{place}", data)
        yield client.run(str(LARGE))


@pytest.fixture
def far(gcs: FakeGcs, run: store.Run) -> Iterator[FakeGcs]:
    """The storage, with a delay of each record."""
    run.latest()  # after a rejection in another test, one request is probed
    gcs.clear()
    gcs.fault("GET .*/checkpoints/.*alt=media", Delay(0.2), times=ALWAYS)
    yield gcs
    gcs.clear()


def reads(gcs: FakeGcs) -> int:
    """Number of records of checkpoints that were read."""
    targets = [one.target for one in gcs.log if "alt=media" in one.target]
    return sum("%2Fcheckpoints%2F" in target for target in targets)


def lists(gcs: FakeGcs) -> int:
    """Number of requests for pages of names."""
    return sum(one.target.split("?")[0].endswith("/o") for one in gcs.log)


@pytest.mark.slow
def test_records_are_read_in_batches_and_rarely_twice(
    run: store.Run, far: FakeGcs
) -> None:
    steps = [checkpoint.step for checkpoint in run.checkpoints()]

    assert list(reversed(range(CHECKPOINTS))) == steps
    # One read per page shows whether there is more; some are hedged if the machine is
    # slow.
    assert CHECKPOINTS <= reads(far) < 1.1 * CHECKPOINTS
    assert lists(far) <= 2
    assert far.most_pending > 64


def test_a_short_list_reads_one_page(run: store.Run, far: FakeGcs) -> None:
    newest = [checkpoint.step for checkpoint in islice(run.checkpoints(), 3)]

    assert [CHECKPOINTS - 1, CHECKPOINTS - 2, CHECKPOINTS - 3] == newest
    assert reads(far) < 110
    assert 1 == lists(far)


@pytest.mark.parametrize("storage", ["gcs", "s3"])
async def test_a_list_from_a_path_on_sends_one_request_for_the_names_that_it_needs(
    gcs: FakeGcs, s3: FakeS3, storage: str
) -> None:
    emulator, root = {"gcs": (gcs, gcs_root()), "s3": (s3, s3_root(s3))}[storage]
    bucket = await TensorStoreBucket.open(root)
    places = [f"n/{number:04d}" for number in range(1200)]
    await asyncio.gather(*(bucket.write(place, b"") for place in places))
    emulator.clear()

    assert places[100:110] == await bucket.list("n/", after=places[99], limit=10)
    assert places[:10] == await bucket.list("n/", limit=10)
    assert places[1100:] == await bucket.list("n/", after=places[1099])
    assert 3 == len(emulator.log)
