"""Each defect of a directory is named: of real file systems, and of a library that
breaks what some of them break."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from storesvc_client._doctor.findings import Diagnosis
from tests.doctor.examined import examine
from tests.support.examples import sampled
from tests.support.small_disk import small_disk

SOURCE: Final = Path(__file__).with_name("bad_files.c")
NEEDS_ROOT: Final = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("it takes a C compiler")
    made = tmp_path_factory.mktemp("library") / "bad_files.so"
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", made, SOURCE, "-ldl"], check=True
    )
    return made


BROKEN: Final = {
    "no locks": ("locks.missing", "No locks available"),
    "free locks": ("locks.missing", "got both"),
    "failed syncs": ("syncs.failed", "Input/output error"),
    "slow syncs": ("syncs.slow", "fsync takes 1.5e+02 ms"),
    "failed renames": ("renames.not-atomic", "Invalid cross-device link"),
    "copied renames": ("renames.not-atomic", "got another result"),
    "followed links": ("links.followed", "got its target"),
    "folded names": ("names.folded", "names/Case"),
    "a clock": ("clock.differs", "400.0 s behind"),
}


@pytest.mark.parametrize("what", sampled(list(BROKEN), every=5, checked_every=2))
def test_a_broken_file_system_is_named(
    tmp_path: Path, library: Path, what: str
) -> None:
    root = tmp_path / "store"
    code, words = BROKEN[what]

    done = subprocess.run(
        [sys.executable, "-m", "tests.doctor.examined", root.as_uri()],
        env={
            **os.environ,
            "LD_PRELOAD": str(library),
            "BAD_FILES": what,
            "BAD_FILES_ROOT": str(root),
        },
        stdout=subprocess.PIPE,
        check=True,
    )

    found = json.loads(done.stdout)
    (named,) = (each for each in found["findings"] if each["code"] == code)
    assert words in named["found"]
    assert found["exit_code"] == (2 if named["severity"] == "failure" else 1)
    assert not root.exists()


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


@contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    mount("--bind", folder, folder)
    try:
        mount("-o", "remount,bind,ro", folder)
        yield folder / "store"
    finally:
        subprocess.run(["umount", folder], check=True)


@contextmanager
def whole_seconds(folder: Path) -> Iterator[Path]:
    """An ext4 whose inodes have no room for nanoseconds."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("it takes mkfs.ext4")
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-I", "128", image], check=True)
    folder.mkdir()
    mount("-o", "loop", image, folder)
    try:
        yield folder / "store"
    finally:
        subprocess.run(["umount", folder], check=True)


@contextmanager
def nearly_full(folder: Path) -> Iterator[Path]:
    with small_disk(folder, size_bytes=512 << 20) as disk:
        (disk / "other").write_bytes(bytes(464 << 20))
        yield disk


@contextmanager
def few_files(folder: Path) -> Iterator[Path]:
    with small_disk(folder, size_bytes=128 << 20) as disk:
        mount("-o", "remount,nr_inodes=64", disk)
        yield disk


@contextmanager
def occupied(folder: Path) -> Iterator[Path]:
    folder.write_text("a file")
    yield folder / "store"


PLACES: Final[
    dict[str, tuple[Callable[[Path], AbstractContextManager[Path]], str, str]]
] = {
    "is in memory": (
        partial(small_disk, size_bytes=128 << 20),
        "file-system.volatile",
        "tmpfs",
    ),
    "has no space": (
        partial(small_disk, size_bytes=4 << 20),
        "space.full",
        "4.0 MiB of 4.0 MiB are free",
    ),
    "has little space": (nearly_full, "space.low", "48.0 MiB of 512.0 MiB are free"),
    "has no room for files": (few_files, "space.full", "and 6"),
    "is read-only": (read_only, "directory.unusable", "Read-only file system"),
    "keeps whole seconds": (whole_seconds, "times.coarse", "is 0.99 s off"),
    "is below a file": (occupied, "directory.unusable", "Not a directory"),
}


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*")) if folder.is_dir() else []


@NEEDS_ROOT
@pytest.mark.parametrize("name", sampled(list(PLACES), every=3))
def test_a_bad_place_is_named_and_left_as_it_was(tmp_path: Path, name: str) -> None:
    make, code, words = PLACES[name]

    with make(tmp_path / "place") as root:
        before = files(root.parent)
        found: Diagnosis = examine(root.as_uri())
        assert before == files(root.parent)

    (named,) = (each for each in found.findings if each.code == code)
    assert words in named.found
    assert found.exit_code == (2 if named.severity.value == "failure" else 1)


@NEEDS_ROOT
def test_a_directory_of_another_user_is_a_failure(tmp_path: Path) -> None:
    program = (  # imports what only root may read, and then examines
        "import json, os, sys; from tests.doctor.examined import examine; "
        "os.setuid(65534); print(json.dumps(examine(sys.argv[1]).document()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, (tmp_path / "store").as_uri()],
        stdout=subprocess.PIPE,
        check=True,
    )

    (named,) = json.loads(done.stdout)["findings"]
    assert "directory.unusable" == named["code"]
    assert "got Permission denied" in named["found"]
