"""Checks what is special about a kind of place.

A directory: its file system, space, locks, renames, links, syncs, times and clock. A
bucket: its settings, which the provider's own client reads, its clock, and its price.
Sources of the names of settings: ``storage.buckets.get`` of Google Cloud Storage (JSON
API), and ``GetBucketVersioning``, ``GetBucketLifecycleConfiguration``,
``GetObjectLockConfiguration`` and ``GetBucketRequestPayment`` of S3.
"""

import fcntl
import os
import shutil
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from os.path import lexists
from pathlib import Path
from typing import Final, NamedTuple

from storesvc.errors import StoreError
from storesvc.storage.bucket_settings import judge_settings, read_settings
from storesvc.storage.file_bucket import TICK_SECONDS
from storesvc.storage.location import Storage
from storesvc.storage.remote import find_endpoint
from storesvc.storage.rooted_files import (
    WHOLE_FILE,
    IrregularFileError,
    open_file,
    sync_directory,
)
from storesvc_client._doctor.findings import (
    Finding,
    Severity,
    judge,
    judge_clock,
    passed,
    problem,
    skipped,
)
from storesvc_client._save.direct import object_bytes
from storesvc_client._session import DEFAULT_STAGING_BYTES
from storesvc_client._views.texts import duration_text, size_text

_SYNCS: Final = 20
_SLOW_SYNC_SECONDS: Final = 0.1
_LITTLE_SHARE: Final = 0.1
_NEEDED_FILES: Final = 1000

_KINDS: Final = {
    **dict.fromkeys(
        ("fuse.gcsfuse", "fuse.goofys", "fuse.rclone", "fuse.s3fs"),
        ("file-system.bucket", "the directory is a bucket that {} mounts"),
    ),
    **dict.fromkeys(
        ("ramfs", "tmpfs"),
        ("file-system.volatile", "the directory is in memory ({})"),
    ),
    **dict.fromkeys(
        ("9p", "beegfs", "ceph", "cifs", "gpfs", "lustre", "nfs", "nfs4", "smb3"),
        ("file-system.network", "the directory is on a network ({})"),
    ),
}
"""Problems by the type of a file system."""


def absent_directories(path: Path) -> list[Path]:
    """Returns the directories down to a path that do not exist, the deepest first."""
    return [each for each in (path, *path.parents) if not lexists(each)]


def delete_directories(path: Path, absent: Sequence[Path]) -> list[Finding]:
    """Deletes a directory, and those above it that did not exist before it."""
    for _ in range(_TRIES):
        shutil.rmtree(path, ignore_errors=True)
        time.sleep(_PAUSE_SECONDS)  # an interrupted check may still write a file
        if not lexists(path):
            break
    else:
        return [problem("clean-up.left", f"{path}: expected to delete it, got files")]
    for each in absent:
        with suppress(OSError):  # of other probes, or never made
            each.rmdir()
    return []


_TRIES: Final = 50
_PAUSE_SECONDS: Final = 0.1


def check_directory(folder: Path, *, needed_bytes: int) -> list[Finding]:
    """Makes a directory, which the caller deletes, and checks it and the space for the
    other checks."""
    try:
        folder.mkdir(parents=True)
    except OSError as e:
        text = f"expected to create {folder}, got {e.strerror}"
        return [problem("directory.unusable", text)]
    found = [*_check_file_system(folder), *_check_space(folder, needed_bytes)]
    if found[-1].severity is not Severity.FAILURE:
        for check, code, expected in _CHECKS:
            try:
                found += check(folder)
            except OSError as e:
                found.append(problem(code, f"expected {expected}, got {e.strerror}"))
    return found


def file_system(folder: Path, mounts: str) -> str:
    """Returns the type of the file system of an absolute path by ``/proc/mounts``."""
    found, depth = "", -1
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split(" ")
        place = Path(point.replace(r"\040", " "))
        if folder.is_relative_to(place) and len(place.parts) >= depth:
            found, depth = kind, len(place.parts)
    return found


def _check_file_system(folder: Path) -> list[Finding]:
    mounts = Path("/proc/mounts")
    if not mounts.exists():  # not Linux
        return []
    kind = file_system(folder.resolve(), mounts.read_text())
    code, found = _KINDS.get(kind, ("file-system", ""))
    return judge(code, found.format(kind), kind or "unknown")


def _check_space(folder: Path, needed_bytes: int) -> list[Finding]:
    disk = os.statvfs(folder)
    free, total = (disk.f_frsize * count for count in (disk.f_bavail, disk.f_blocks))
    shown = f"{size_text(free)} of {size_text(total)} are free"
    lacks_files = disk.f_files > 0 and disk.f_favail < _NEEDED_FILES
    if free < needed_bytes or lacks_files:
        needed = f"{size_text(needed_bytes)} and {_NEEDED_FILES} files"
        found = f"expected space for {needed}, got {shown}, and {disk.f_favail} files"
        return [problem("space.full", found)]
    return judge("space.low", shown if free < _LITTLE_SHARE * total else "", shown)


def _check_locks(folder: Path) -> list[Finding]:
    """Locks a file through one descriptor, and tries to lock it through another."""
    path = folder / "locked"
    with path.open("w+b") as one, path.open("r+b") as other:
        fcntl.fcntl(one, fcntl.F_OFD_SETLK, WHOLE_FILE)
        try:
            fcntl.fcntl(other, fcntl.F_OFD_SETLK, WHOLE_FILE)
        except BlockingIOError:
            return [passed("locks", "a locked file cannot be locked again")]
    found = "expected a locked file to reject a second lock, got both"
    return [problem("locks.missing", found)]


def _check_renames(folder: Path) -> list[Finding]:
    """Replaces a file while a descriptor of the old one is open."""
    old, new = folder / "renamed", folder / "renamed.new"
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    with old.open("rb") as opened:
        new.replace(old)
        is_kept = opened.read() == b"old"
    is_right = is_kept and old.read_bytes() == b"new" and not new.exists()
    wrong = "expected a rename to replace a file at once, got another result"
    fine = "a rename replaces a file at once"
    return judge("renames.not-atomic", "" if is_right else wrong, fine)


def _check_links(folder: Path) -> list[Finding]:
    (folder / "target").touch()
    try:
        (folder / "link").symlink_to("target")
    except OSError:
        return [passed("links", "the file system has no symbolic links")]
    try:
        os.close(open_file(folder, "link"))
    except IrregularFileError:
        return [passed("links", "a symbolic link is seen, and rejected")]
    return [problem("links.followed", "expected a link to be seen, got its target")]


def _check_syncs(folder: Path) -> list[Finding]:
    seconds = list[float]()
    with (folder / "synced").open("wb") as file:
        for _ in range(_SYNCS):
            file.write(b"x" * 4096)
            file.flush()
            begin = time.perf_counter()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - begin)
    sync_directory(folder)
    median = statistics.median(seconds)
    shown = f"fsync takes {1000 * median:.2g} ms"
    return judge("syncs.slow", shown if median > _SLOW_SYNC_SECONDS else "", shown)


_A_TIME: Final = 1_700_000_001_987_654_321
"""Nanoseconds since 1970, of an odd second: FAT keeps even ones only."""


def _check_times(folder: Path) -> list[Finding]:
    """Sets the time of a file: with its inode, it is the version of an object."""
    path = folder / "timed"
    path.touch()
    os.utime(path, ns=(_A_TIME, _A_TIME))
    off_seconds = abs(path.stat().st_mtime_ns - _A_TIME) / 1e9
    wrong = f"expected a file to keep its time, got one that is {off_seconds:.2g} s off"
    is_wrong = off_seconds > TICK_SECONDS
    return judge("times.coarse", wrong if is_wrong else "", "a file keeps its time")


def _check_clock(folder: Path) -> list[Finding]:
    path = folder / "dated"
    path.write_bytes(b"x")
    return judge_clock(path.stat().st_mtime - time.time(), "the file server")


_CHECKS: Final[tuple[tuple[Callable[[Path], list[Finding]], str, str], ...]] = (
    (_check_locks, "locks.missing", "to lock a file"),
    (_check_renames, "renames.not-atomic", "to rename a file"),
    (_check_links, "links.followed", "to open a file"),
    (_check_syncs, "syncs.failed", "to sync a file and its directory"),
    (_check_times, "times.coarse", "to set the time of a file"),
    (_check_clock, "check.failed", "to read the time of a file"),
)
"""Each check, and the problem where a call of it fails: code, and what was expected."""


# --- Buckets -------------------------------------------------------------------------


def check_settings(storage: Storage) -> list[Finding]:
    """Reads the settings of a bucket, and judges them; blocks on the storage."""
    try:
        found = judge_settings(read_settings(storage), storage)
    except StoreError as e:
        return [skipped("settings", str(e))]
    problems = [problem(code, text) for code, text in found.items()]
    return problems or [passed("settings", "nothing in the way of a store")]


def check_clock(storage: Storage) -> list[Finding]:
    """Compares the clock of a bucket's API with this machine's; blocks on it."""
    provider = "s3" if storage.is_s3 else "gcs"
    endpoint = find_endpoint(storage) or _ENDPOINTS[provider]
    request = urllib.request.Request(endpoint, method="HEAD")  # noqa: S310 - of a root
    try:
        with urllib.request.urlopen(request, timeout=_CLOCK_SECONDS) as answer:  # noqa: S310
            date = answer.headers["date"]
    except urllib.error.HTTPError as e:
        date = e.headers["date"]
    except OSError as e:
        return [skipped("clock", f"{endpoint} does not answer: {e}")]
    if date is None:
        return [skipped("clock", f"{endpoint} says no time")]
    skew = (parsedate_to_datetime(date) - datetime.now(UTC)).total_seconds()
    # The header has whole seconds.
    return judge_clock(min(0.0, skew + 1) if skew < 0 else skew, "the bucket")


_ENDPOINTS: Final = {
    "gcs": "https://storage.googleapis.com",
    "s3": "https://s3.amazonaws.com",
}
_CLOCK_SECONDS: Final = 10.0


# --- Price ---------------------------------------------------------------------------

_MONTH_SECONDS: Final = 30 * 86_400
_GIB: Final = 1 << 30


class Prices(NamedTuple):
    """List prices of a provider in one region, in dollars."""

    gib_month: float
    write: float
    """Price of one request that writes or lists."""
    source: str


PRICES: Final = {
    "gcs": Prices(
        0.020, 5e-6, "us-central1, STANDARD, https://cloud.google.com/storage/pricing"
    ),
    "s3": Prices(0.023, 5e-6, "us-east-1, Standard, https://aws.amazon.com/s3/pricing"),
}
PRICES_DATE: Final = "November 2026"
"""Month in which the prices were looked up."""


class Workload(NamedTuple):
    """The saves of one job."""

    stored_bytes: int
    """Bytes of one checkpoint as stored."""
    added_bytes: int
    """Bytes that each save adds; it shares the others with earlier checkpoints."""
    interval_seconds: float = 600.0
    """Time between two saves."""


KEPT: Final = 5
"""Checkpoints that are kept."""

PURGE_DELAY: Final = timedelta(days=3)
"""Time for which a deleted checkpoint keeps its bytes."""

FIXED_WRITES: Final = 15
"""Writing requests and lists of a direct save of one process, in addition to one for
each data file; measured by ``python -m benchmarks requests``."""


def estimate_cost(work: Workload, storage: Storage | None) -> list[Finding]:
    """Returns the requests and dollars of a month."""
    if storage is None or not storage.is_remote:
        return [skipped("cost", "only a bucket has prices; give its root")]
    prices = PRICES["s3" if storage.is_s3 else "gcs"]
    saves = _MONTH_SECONDS / work.interval_seconds
    size = object_bytes(work.stored_bytes, work.added_bytes, DEFAULT_STAGING_BYTES)
    writes = saves * (FIXED_WRITES + -(-work.added_bytes // size))
    kept = min(saves, KEPT + PURGE_DELAY.total_seconds() / work.interval_seconds)
    stored = work.stored_bytes + max(0.0, kept - 1) * work.added_bytes
    storing, requests = stored / _GIB * prices.gib_month, writes * prices.write
    return [
        passed(
            "cost",
            f"a save of {size_text(work.stored_bytes)}, {size_text(work.added_bytes)} "
            f"of it new, every {work.interval_seconds / 60:g} min: {writes:,.0f} "
            f"writing requests (${requests:,.2f}) and up to {size_text(round(stored))} "
            f"stored (${storing:,.2f}) a month, if {KEPT} checkpoints are "
            f"kept and deleted ones stay for {duration_text(PURGE_DELAY)}; list "
            f"prices of {PRICES_DATE}, {prices.source}",
        )
    ]
