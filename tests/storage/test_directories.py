"""Directories are made durable once, and remembered in a bounded cache; the leftovers
of a killed write do not affect later writes."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

import pytest
import tensorstore as ts

from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.storage.rooted_files import Directories, clear_interrupted_write


def test_the_cache_of_known_directories_is_bounded(tmp_path: Path) -> None:
    kept = Directories(tmp_path, kept=10)
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


async def test_settling_a_file_syncs_its_directory(
    tmp_path: Path, synced: list[Path]
) -> None:
    bucket = await TensorStoreBucket.open(tmp_path.as_uri())
    await bucket.write("a/b", b"1")
    synced.clear()
    await bucket.settle("a/b")
    assert [tmp_path / "a"] == synced


async def test_a_write_ignores_the_leftovers_of_a_killed_write(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b.__lock").write_bytes(b"long" * 100)
    bucket = await TensorStoreBucket.open(tmp_path.as_uri())

    await bucket.write("a/b", b"short")

    assert b"short" == (tmp_path / "a/b").read_bytes()
    assert ["b"] == [path.name for path in (tmp_path / "a").iterdir()]


@pytest.mark.slow
def test_temporary_files_of_running_writes_are_kept(tmp_path: Path) -> None:
    store = ts.KvStore.open({"driver": "file", "path": f"{tmp_path}/"}).result()
    stop = threading.Event()

    def clear() -> None:
        while not stop.is_set():
            clear_interrupted_write(tmp_path / "a")

    clearing = threading.Thread(target=clear)
    clearing.start()
    try:
        for number in range(300):
            data = str(number).encode() * (1 + number % 50) * 100
            store.write("a", data).result()
            assert data == store.read("a").result().value
    finally:
        stop.set()
        clearing.join()


LOCKLESS: Final = """
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <unistd.h>
#include <sys/syscall.h>
int flock(int fd, int operation) { errno = ENOSYS; return -1; }
int fcntl(int fd, int command, ...) {
    va_list rest;
    va_start(rest, command);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    switch (command) {
    case F_SETLK: case F_SETLKW: case F_OFD_SETLK: case F_OFD_SETLKW:
        errno = ENOSYS;
        return -1;
    }
    return syscall(SYS_fcntl, fd, command, argument);
}
int fcntl64(int fd, int command, ...) __attribute__((alias("fcntl")));
"""
"""Has no locks, as some file systems of networks and of FUSE."""


@pytest.mark.slow
def test_a_file_system_without_locks_is_an_invalid_place(tmp_path: Path) -> None:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("it takes a C compiler")
    source, library = tmp_path / "lockless.c", tmp_path / "lockless.so"
    source.write_text(LOCKLESS)
    command = [compiler, "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True)

    created = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import sys, storesvc_client as store; store.connect(sys.argv[1])",
            str(tmp_path / "x"),
        ],
        env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )

    last = created.stderr.splitlines()[-1]
    assert "InvalidRequestError: root file:///" in last
    assert "expected a file system with locks" in last
    assert "run 'storectl serve' on a machine where it is a local disk" in last
