"""A server warns once of the settings of its bucket that harm a store or cost."""

import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import storesvc_client as store
from storesvc.errors import InvalidFieldError
from storesvc.storage.location import storage_at
from tests.doctor.planted import PlantedGcs, Settings
from tests.fake_gcs import ALWAYS, FakeGcs, Status
from tests.support.gcs_calls import BUCKET
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.emulated

HARMFUL = {
    "versioning": {"enabled": True},
    "softDeletePolicy": {"retentionDurationSeconds": "604800"},
    "retentionPolicy": {"retentionPeriod": "86400"},
    "hierarchicalNamespace": {"enabled": True},
    "lifecycle": {"rule": [{"action": {"type": "Delete"}, "condition": {"age": 30}}]},
}


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORSTORE_GCS_HTTP_URL", raising=False)
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "any")


def test_a_server_warns_once_of_each_setting_that_harms_or_costs(
    tmp_path: Path,
) -> None:
    with PlantedGcs(wrap=partial(Settings, properties=HARMFUL)) as gcs:
        server = ServerProcess(tmp_path, tmp_path, uri=gcs.root)
        server.start()
        until = time.monotonic() + 30
        while "namespace.hierarchical" not in server.log and time.monotonic() < until:
            time.sleep(0.1)
        with store.connect(server.address) as client:
            client.run("tests/a").save(1, {"x": 1}).result()
        server.stop()

    for text in (
        "keeps each overwritten and deleted object for ever, and bills it",
        "deleted objects stay for 7 days, and are paid for",
        "objects cannot be deleted or overwritten for 1 day",
        "folders stay when their objects are deleted",
        "a lifecycle rule deletes objects below '/'",
    ):
        assert 1 == server.log.count(text)


def test_a_server_that_may_not_read_the_settings_starts(tmp_path: Path) -> None:
    with PlantedGcs() as gcs:
        gcs.fault(f"GET /storage/v1/b/{BUCKET}[?]", Status(403), times=ALWAYS)
        server = ServerProcess(tmp_path, tmp_path, uri=gcs.root)
        server.start()
        with store.connect(server.address) as client:
            client.run("tests/a").save(1, {"x": 1}).result()
        server.stop()

    assert "WARNING" not in server.log


def test_each_request_names_the_project_that_pays() -> None:
    with FakeGcs(buckets=[BUCKET]) as gcs:
        root = f"gs://{BUCKET}/paid?endpoint={gcs.url}&userProject=team-a"
        with store.connect(root) as client:
            run = client.run("tests/a")
            run.save(1, {"x": np.zeros(1 << 18)}).result()
            run.restore(1)
        unpaid = [
            one.method
            for one in gcs.log
            if "userProject=team-a" not in one.target
            # Google's client reads it by itself, for traces.
            and "/b/bucket?projection=noAcl" not in one.target
        ]

    # The XML API takes a header instead.
    assert {"PUT"} == {*unpaid}


def test_a_directory_bucket_of_s3_is_rejected_by_name() -> None:
    with pytest.raises(InvalidFieldError, match="S3 Express"):
        storage_at("s3://ckpts--usw2-az1--x-s3/prod")
