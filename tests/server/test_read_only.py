"""Stores on read-only storages: served calls, rejected calls and log lines."""

import os
import subprocess
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import storesvc_client as store
from storesvc.auth.call import Effect, rpcs_with
from tests.support.rpcs import NAMES
from tests.support.server_process import EndedError, ServerProcess

WRITING = {
    "LendCredentials",
    *("UpdateRun", "ApplyRetention", "UpdateCheckpoint", "DeleteCheckpoint"),
    *("UndeleteCheckpoint", "PurgeCheckpoint", "SetTag", "DeleteTag", "CreateHold"),
    *("RenewHold", "DeleteHold", "CollectGarbage", "BeginUpload", "JoinUpload"),
    *("KeepUploadAlive", "FindChunks", "WriteChunks", "FinishWriter", "CommitUpload"),
    *("AbortUpload", "CreateCheckpoint", "UpgradeStore"),
}


@contextmanager
def unwritable(root: Path) -> Generator[None]:
    """Yields a folder that this process cannot write to. Root, which ignores
    permissions, mounts it read-only."""
    if os.geteuid() != 0:
        folders = [path for path in (root, *root.rglob("*")) if path.is_dir()]
        for path in folders:
            path.chmod(0o500)
        try:
            yield
        finally:
            for path in folders:
                path.chmod(0o700)
        return
    bound = subprocess.run(["mount", "--bind", str(root), str(root)], check=False)
    if bound.returncode:
        pytest.skip("root may write whatever permissions say, and may not mount here")
    try:
        mount = ["mount", "-o", "remount,ro,bind", str(root)]
        subprocess.run(mount, check=True)
        yield
    finally:
        subprocess.run(["umount", root], check=True)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Root of a store with a checkpoint."""
    root = tmp_path / "store"
    with store.connect(root.as_uri()) as client:
        client.run("tests/old").save(1, {"x": np.arange(5)}).result()
    return root


def test_writes_to_a_read_only_storage_are_rejected_at_once(saved: Path) -> None:
    with unwritable(saved), store.connect(saved.as_uri()) as client:
        run, new = client.run("tests/old"), client.run("tests/new")
        calls: list[Callable[[], object]] = [
            lambda: run.save(2, {"x": 1}).result(),
            lambda: new.save(1, {"x": 1}).result(),
            lambda: run.tags.set("best", 1),
            lambda: run.holds.create(1),
            lambda: run.delete(1),
        ]
        for call in calls:
            with pytest.raises(store.PreconditionError) as caught:
                call()
            assert "STORAGE_DENIED" == caught.value.reason
            if os.geteuid() == 0:
                assert f"the storage {saved.as_uri()} is read-only" in str(caught.value)


def test_a_restore_from_a_read_only_storage_logs_one_short_line(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if os.geteuid() == 0:  # which the mount rejects, not a permission
        (saved / "reserve.bin").unlink()
    with unwritable(saved), store.connect(saved.as_uri()) as client:
        found = client.run("tests/old").restore(1)

    assert [0, 1, 2, 3, 4] == found["x"].tolist()
    lines = [found.message for found in caplog.records if found.levelname != "INFO"]
    begin = "tests/old@1 is read without a hold: "
    if os.geteuid() == 0:
        assert [f"{begin}its store is read-only"] == lines
    else:  # the client, and the server in its process, name the missing permission
        assert [False, True] == [line.startswith(begin) for line in lines]


@contextmanager
def served(root: Path, directory: Path, *arguments: str) -> Generator[ServerProcess]:
    """Serves a root while the context lasts."""
    server = ServerProcess(root, directory, *arguments)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.mark.slow
def test_a_server_of_a_read_only_root_logs_it_at_its_start(
    saved: Path, tmp_path: Path
) -> None:
    with unwritable(saved), served(saved, tmp_path) as server:
        pass

    (warning,) = [line for line in server.log.splitlines() if "WARNING" in line]
    assert f"root {saved.as_uri()} is read-only for this process" in warning
    assert "--read-only" in warning


@pytest.mark.slow
def test_a_store_that_is_served_read_only_is_read_and_never_written(
    saved: Path, tmp_path: Path
) -> None:
    (saved / "reserve.bin").unlink()
    before = {path: path.stat().st_mtime_ns for path in saved.rglob("*")}
    with (
        served(saved, tmp_path, "--read-only") as server,
        store.connect(server.address) as client,
    ):
        run = client.run("tests/old")
        assert [1] == [found.step for found in run.checkpoints()]
        assert [0, 1, 2, 3, 4] == run.restore(1)["x"].tolist()
        assert run.verify(1).ok
        calls: list[Callable[[], object]] = [
            lambda: run.save(2, {"x": 1}).result(),
            lambda: run.tags.set("best", 1),
            lambda: list(client.collect()),
        ]
        for call in calls:
            with pytest.raises(store.PreconditionError, match="is served read-only"):
                call()

    assert before == {path: path.stat().st_mtime_ns for path in saved.rglob("*")}
    assert f"serving {saved.as_uri()} read-only at" in server.log
    assert [] == [line for line in server.log.splitlines() if "WARNING" in line]


@pytest.mark.slow
def test_a_root_without_a_store_is_not_served_read_only(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "none", tmp_path, "--read-only")
    match = "expected a store, because it is served read-only"
    with pytest.raises(EndedError, match=match):
        server.start()
    server.stop()
    assert not (tmp_path / "none").exists()


def test_every_rpc_is_classified_as_reading_or_writing() -> None:
    assert NAMES - WRITING == rpcs_with(lambda rpc: rpc.effect is Effect.NONE)
    assert WRITING <= NAMES
