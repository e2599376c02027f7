"""Checks what a directory needs besides the promises of any storage: its file system,
locks, syncs, renames, free space and clock."""

import fcntl
import os
import shutil
import statistics
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from storesvc_client._doctor.findings import Finding, passed, problem
from storesvc_client._views.texts import size_text

_SYNCS: Final = 20
_SLOW_SYNC_SECONDS: Final = 0.1

_SKEW_SECONDS: Final = 2.0
"""Difference of clocks from which it is a finding; collection allows an hour."""

_LITTLE_SHARE: Final = 0.1

_VOLATILE: Final = ("tmpfs", "ramfs")
_REMOTE: Final = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "9p",
    "lustre",
    "ceph",
    "beegfs",
    "gpfs",
)
_MOUNTED_BUCKETS: Final = ("fuse.gcsfuse", "fuse.s3fs", "fuse.rclone", "fuse.goofys")


def check_directory(folder: Path) -> list[Finding]:
    """Checks an existing, empty directory that the caller deletes.

    Raises:
        OSError: The directory cannot be read or written.
    """
    return [
        *_check_file_system(folder),
        *_check_locks(folder / "locked"),
        *_check_renames(folder),
        *_check_syncs(folder / "synced"),
        *_check_space(folder),
        *_check_clock(folder / "dated"),
    ]


def file_system(folder: Path, mounts: str) -> str:
    """Returns the type of the file system of a path.

    Args:
        folder: An absolute path.
        mounts: Contents of ``/proc/mounts``: device, mount point, type and options.
    """
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
    if kind in _MOUNTED_BUCKETS:
        return [
            problem(
                "file-system.bucket", f"the directory is a bucket that {kind} mounts"
            )
        ]
    if kind in _VOLATILE:
        return [problem("file-system.volatile", f"the directory is in memory ({kind})")]
    if kind in _REMOTE:
        return [
            problem("file-system.network", f"the directory is on a network ({kind})")
        ]
    return [passed("file-system", kind or "unknown")]


_LOCK: Final = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def _check_locks(path: Path) -> list[Finding]:
    """Takes a lock through one descriptor, and tries to take it through another."""
    one = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    other = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(one, fcntl.F_OFD_SETLK, _LOCK)
        try:
            fcntl.fcntl(other, fcntl.F_OFD_SETLK, _LOCK)
        except BlockingIOError:
            return [passed("locks", "a locked file cannot be locked again")]
        found = "expected a locked file to reject a second lock, got both"
    except OSError as e:
        found = f"expected a lock of a file, got {e.strerror}"
    finally:
        os.close(one)
        os.close(other)
    return [problem("locks.missing", found)]


def _check_renames(folder: Path) -> list[Finding]:
    """Replaces a file while a descriptor of the old one is open."""
    old, new = folder / "renamed", folder / "renamed.new"
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    with old.open("rb") as opened:
        new.replace(old)
        is_kept = opened.read() == b"old"
    if old.read_bytes() != b"new" or new.exists() or not is_kept:
        return [
            problem(
                "renames.not-atomic",
                "expected a rename to replace a file at once, got another result",
            )
        ]
    return [passed("renames", "a rename replaces a file at once")]


def _check_syncs(path: Path) -> list[Finding]:
    seconds = list[float]()
    with path.open("wb") as file:
        for _ in range(_SYNCS):
            file.write(b"x" * 4096)
            file.flush()
            begin = time.perf_counter()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - begin)
    shown = f"fsync takes {1000 * statistics.median(seconds):.2g} ms"
    if statistics.median(seconds) > _SLOW_SYNC_SECONDS:
        return [problem("syncs.slow", shown)]
    return [passed("syncs", shown)]


def _check_space(folder: Path) -> list[Finding]:
    usage = shutil.disk_usage(folder)
    shown = f"{size_text(usage.free)} of {size_text(usage.total)} are free"
    if usage.free < _LITTLE_SHARE * usage.total:
        return [problem("space.low", shown)]
    return [passed("space", shown)]


def _check_clock(path: Path) -> list[Finding]:
    path.write_bytes(b"x")
    skew = path.stat().st_mtime - time.time()
    with suppress(OSError):
        path.unlink()
    return judge_clock(skew, "the file server")


def judge_clock(skew_seconds: float, whose: str) -> list[Finding]:
    """Returns what a difference of clocks means.

    Args:
        skew_seconds: That clock minus the clock of this machine.
        whose: Owner of the other clock.
    """
    shown = f"the clock of {whose} is {abs(skew_seconds):.1f} s "
    shown += "ahead" if skew_seconds > 0 else "behind"
    if abs(skew_seconds) > _SKEW_SECONDS:
        return [problem("clock.differs", shown)]
    return [passed("clock", shown)]
