"""Directories are made durable once, and remembered in a bounded cache."""

import asyncio
import os
from pathlib import Path

import pytest

from storesvc.storage import directories
from storesvc.storage.directories import Directories
from storesvc.storage.tensorstore_bucket import TensorStoreBucket


def test_the_cache_of_known_directories_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directories, "KEPT", 10)
    kept = Directories(tmp_path)
    for number in range(25):
        kept.make(f"{number}/file")

    assert 10 == len(kept._synced)
    assert (tmp_path / "0").is_dir()


def test_a_directory_that_was_removed_is_made_again(tmp_path: Path) -> None:
    kept = Directories(tmp_path)
    kept.make("a/b/file")
    kept.remove_below("a/")
    assert not (tmp_path / "a").exists()

    kept.make("a/b/file")

    assert (tmp_path / "a/b").is_dir()


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Directories that this process syncs."""
    found: list[Path] = []
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        found.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def test_every_new_directory_is_synced_into_the_one_above(
    tmp_path: Path, synced: list[Path]
) -> None:
    root = tmp_path / "store"
    Directories(root).make("a/b/c")

    assert [tmp_path, root, root / "a"] == synced


def test_settling_a_file_syncs_its_directory(
    tmp_path: Path, synced: list[Path]
) -> None:
    async def main() -> None:
        bucket = await TensorStoreBucket.open(tmp_path.as_uri())
        await bucket.write("a/b", b"1")
        synced.clear()
        await bucket.settle("a/b")

    asyncio.run(main())
    assert [tmp_path / "a"] == synced
