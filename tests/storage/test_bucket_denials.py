"""A denial by a bucket is raised at once, in streamed and in direct mode."""

import logging
import re
import time
from collections.abc import Iterator

import numpy as np
import pytest

import storesvc_client as store
from tests.fake_gcs import ALWAYS, FakeGcs, Status
from tests.support.refusals import rejected
from tests.support.server_process import ServerProcess

PATIENCE_SECONDS = 30
"""Time for which calls with transient errors are retried."""

TREE = {"x": np.arange(1 << 20, dtype=np.float32)}

pytestmark = pytest.mark.emulated


@pytest.fixture(
    params=["embedded", pytest.param("served", marks=pytest.mark.slow), "direct"]
)
def client(request: pytest.FixtureRequest, root: str) -> Iterator[store.Client]:
    """A client of the server."""
    if request.param == "embedded":
        with store.connect(root) as connected:
            yield connected
        return
    server = request.getfixturevalue("bucket_server")
    direct = root if request.param == "direct" else None
    with store.connect(server.address, direct=direct) as connected:
        yield connected


REFUSALS = [
    (
        Status(403, message="trainer does not have storage.objects access"),
        "the storage denies this to our credentials (",
        "); let them read, write, list and delete objects below ",
    ),
    (
        Status(401, message="Invalid Credentials"),
        "the storage does not accept our credentials (",
        "); renew them, and check that their account exists and the clock is right",
    ),
]


@pytest.mark.parametrize(
    ("refusal", "said", "advice"), REFUSALS, ids=["denied", "unaccepted"]
)
def test_a_denial_is_raised_at_once_and_names_the_bucket(
    client: store.Client,
    gcs: FakeGcs,
    root: str,
    refusal: Status,
    said: str,
    advice: str,
) -> None:
    run = client.run("tests/denied")
    run.save(1, TREE).result()
    opened = run.open(1)
    gcs.fault(".", refusal, times=ALWAYS)

    began = time.monotonic()
    for ask in (
        lambda: run.checkpoint(1),
        lambda: list(run.checkpoints()),
        lambda: list(client.runs()),
        lambda: run.tags.set("best", 1),
        lambda: run.delete(1),
        opened.restore,
        lambda: run.save(2, TREE).result(),
    ):
        with rejected("STORAGE_DENIED", store.PreconditionError) as reported:
            ask()
        assert {"storage", "request_id"} >= set(reported.value.metadata)
        assert reported.value.metadata["storage"] == root
        reported.match(f"^{root}/[^ ]*: {re.escape(said)}[^\n]*{re.escape(advice)}")
        assert "\n" not in str(reported.value)
    assert time.monotonic() - began < PATIENCE_SECONDS

    gcs.clear()
    run.save(2, TREE).result()
    assert [2, 1] == [found.step for found in run.checkpoints()]


def test_a_store_that_is_denied_cannot_be_opened(gcs: FakeGcs, root: str) -> None:
    gcs.fault(".", Status(403), times=ALWAYS)

    with rejected(
        "STORAGE_DENIED", store.PreconditionError, match="denies this to our"
    ):
        store.connect(root)


@pytest.mark.slow
def test_a_denied_direct_client_is_pointed_to_the_server(
    gcs: FakeGcs, root: str, bucket_server: ServerProcess
) -> None:
    gcs.fault(".", Status(403), times=ALWAYS)

    with rejected(
        "STORAGE_DENIED", store.PreconditionError, match="or connect without direct="
    ):
        store.connect(bucket_server.address, direct=root)


@pytest.mark.slow
@pytest.mark.parametrize("after", range(1, 10, 2))
def test_a_denial_during_a_save_leaves_no_partial_checkpoint(
    client: store.Client, gcs: FakeGcs, after: int
) -> None:
    run = client.run("tests/denied")
    run.save(1, {"x": 1}).result()
    gcs.fault("^(POST|PUT|DELETE) ", Status(403), times=ALWAYS, after=after)

    began = time.monotonic()
    try:
        run.save(2, TREE).result()
        steps = [2, 1]
    except store.PreconditionError as e:
        assert "STORAGE_DENIED" == e.reason
        steps = [1]
    assert time.monotonic() - began < PATIENCE_SECONDS

    assert steps == [found.step for found in run.checkpoints()]
    gcs.clear()
    if steps == [1]:
        run.save(2, TREE).result()
    np.testing.assert_array_equal(TREE["x"], run.restore(2)["x"])


def test_a_read_only_client_restores_without_a_hold(
    client: store.Client, gcs: FakeGcs, caplog: pytest.LogCaptureFixture
) -> None:
    run = client.run("tests/denied")
    run.save(1, TREE).result()
    gcs.fault("^(POST|PUT|DELETE) ", Status(403), times=ALWAYS)

    with caplog.at_level(logging.WARNING, logger="storesvc_client"):
        back = run.restore(1)
        leaves = dict(run.open(1).read(["x"]))

    np.testing.assert_array_equal(TREE["x"], back["x"])
    assert ["x"] == [leaf.key for leaf in leaves]
    reported = [one for one in caplog.messages if "is read without a hold" in one]
    assert 2 == len(reported)
    assert all("denies this to our credentials" in one for one in reported)
