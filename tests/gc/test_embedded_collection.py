"""Which embedded stores collect garbage, and the warning of those that do not."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storesvc_client as store
from storesvc.server import embedded
from tests.conftest import gcs_root
from tests.fake_gcs import FakeGcs


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "DEFAULT_INTERVAL", timedelta(milliseconds=50))


def takes_lease(gcs: FakeGcs, *, collect: bool | None) -> bool:
    """Returns whether a process that opens a store in a bucket collects it."""
    root = gcs_root()
    gcs.clear()
    with store.connect(root, collect=collect):
        time.sleep(1)
    return any("collector.binpb" in one.target for one in gcs.log)


@pytest.mark.emulated
def test_a_store_in_a_bucket_is_collected_only_if_asked(gcs: FakeGcs) -> None:
    assert not takes_lease(gcs, collect=None)
    assert not takes_lease(gcs, collect=False)
    assert takes_lease(gcs, collect=True)


def test_deleted_checkpoints_free_the_disk_of_a_process_without_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storesvc.server.gc_scheduler.DEFAULT_GRACE", timedelta(0))
    with store.connect(tmp_path) as client:
        run = client.run("tests/kept")
        run.retention.set(store.KeepLatest(1), purge_delay=0)
        for step in range(3):
            run.save(step, {"x": np.full(1 << 20, step, np.uint8)}).result()
        end = time.monotonic() + 60
        while len({file.parent for file in tmp_path.rglob("pool/*/*")}) > 1:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert [2] == run.steps()


def test_a_store_in_a_directory_is_not_collected_if_not_wanted(tmp_path: Path) -> None:
    with store.connect(tmp_path, collect=False):
        time.sleep(0.3)
        assert not (tmp_path / "collector.binpb").exists()


@pytest.mark.emulated
def test_a_policy_without_a_collector_is_warned_about_once(
    gcs: FakeGcs, caplog: pytest.LogCaptureFixture
) -> None:
    root = gcs_root()
    with store.connect(root) as client:
        run = client.run("tests/kept")
        run.retention.set(store.KeepLatest(1))
        for step in range(3):
            run.save(step, {"x": np.arange(step + 2)}).result()
    with store.connect(root) as client:
        client.run("tests/kept").save(9, {"x": np.arange(9)}).result()

    warned = [text for text in caplog.messages if "no server collects" in text]
    assert 1 == len(warned)
    assert "tests/kept: its policy deleted 2 checkpoints" in warned[0]
    assert "storectl gc" in warned[0]


def test_a_server_is_not_told_whether_to_collect() -> None:
    with pytest.raises(store.InvalidRequestError, match="collect= with the root"):
        store.connect("localhost:1", collect=True)


def test_a_value_of_collect_that_is_no_bool_is_rejected(tmp_path: Path) -> None:
    wrong: Any = "yes"
    with pytest.raises(store.InvalidRequestError, match="True, False or None, got 'ye"):
        store.connect(tmp_path.as_uri(), collect=wrong)
    assert [] == list(tmp_path.iterdir())
