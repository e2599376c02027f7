"""A response that is corrupted in transit is read again, and causes no damage."""

import logging
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import storesvc_client as store
from tests.conftest import gcs_root
from tests.fake_gcs import ALWAYS, Corrupt, FakeGcs, Status
from tests.support.examples import sampled
from tests.support.server_process import ServerProcess

TREE = {"large": np.arange(1 << 18), "small": np.arange(7), "other": np.arange(9.0)}


@pytest.fixture
def root(gcs: FakeGcs) -> Iterator[str]:
    """A store with one checkpoint in a bucket."""
    gcs.clear()
    root = gcs_root()
    with store.connect(root) as client:
        run = client.run("prod/tiny")
        run.save(1, TREE).result()
        run.tags.set("best", 1)
    yield root
    gcs.clear()


RECORDS: dict[str, Callable[[store.Run], object]] = {
    "checkpoints/": lambda run: run.checkpoint(1).step,
    "tags/best": lambda run: run.checkpoint("best").step,
    "runs/prod/tiny": lambda run: run.info().latest_step,
}


@pytest.mark.parametrize("place", RECORDS)
@pytest.mark.parametrize("wrong", [Corrupt(), Status(404)], ids=["corrupt", "absent"])
def test_a_record_is_read_again_after_one_corrupt_response(
    root: str,
    gcs: FakeGcs,
    caplog: pytest.LogCaptureFixture,
    place: str,
    wrong: Corrupt | Status,
) -> None:
    with store.connect(root) as client:
        run = client.run("prod/tiny")
        caplog.clear()
        gcs.fault(rf"GET .*{place}.*alt=media", wrong)

        assert 1 == RECORDS[place](run)

    assert 1 == sum(place in message for message in caplog.messages) or isinstance(
        wrong, Status
    )


def test_a_missing_step_is_not_suggested_as_the_nearest(root: str) -> None:
    with (
        store.connect(root) as client,
        pytest.raises(store.NotFoundError, match=r"@2 does not exist; .* are 1$"),
    ):
        client.run("prod/tiny").checkpoint(2)


@pytest.mark.parametrize("way", ["direct", "streamed"])
@pytest.mark.parametrize("place", sampled(["pool/", "manifests/"], every=2))
def test_a_restore_rereads_bytes_corrupted_in_transit(
    root: str,
    gcs: FakeGcs,
    start_server: Callable[..., ServerProcess],
    caplog: pytest.LogCaptureFixture,
    way: str,
    place: str,
) -> None:
    caplog.set_level(logging.WARNING)
    target = root if way == "direct" else start_server("--root", root).address
    with store.connect(target) as client:
        gcs.fault(rf"GET .*{place}.*alt=media", Corrupt())

        found = client.run("prod/tiny").restore(1)

    assert all(np.array_equal(TREE[key], found[key]) for key in TREE)
    assert any("corrupted in transit" in message for message in caplog.messages)


@pytest.mark.parametrize("way", ["direct", "streamed"])
@pytest.mark.parametrize(
    "place", sampled(["pool/", "manifests/", "checkpoints/"], every=3)
)
def test_bytes_that_are_corrupt_twice_are_data_loss(
    root: str,
    gcs: FakeGcs,
    start_server: Callable[..., ServerProcess],
    way: str,
    place: str,
) -> None:
    target = root if way == "direct" else start_server("--root", root).address
    with store.connect(target) as client:
        gcs.fault(rf"GET .*{place}.*alt=media", Corrupt(), times=ALWAYS)

        with pytest.raises(store.DataLossError) as caught:
            client.run("prod/tiny").restore(1)

    assert "CORRUPT_DATA" == caught.value.reason


@pytest.mark.parametrize("place", ["manifests/", "pool/"])
def test_a_verification_ignores_corruption_in_transit(
    root: str, gcs: FakeGcs, place: str
) -> None:
    with store.connect(root) as client:
        gcs.fault(rf"GET .*{place}.*alt=media", Corrupt())

        assert client.run("prod/tiny").verify(1).ok
