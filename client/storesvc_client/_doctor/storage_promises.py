"""Checks whether a storage keeps what a store relies on: conditions, complete lists,
reads that see the last write, ranges, and names.

Each check writes objects of its own below `Probe.folder`, which the caller deletes.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from storesvc.errors import (
    CorruptDataError,
    InvalidFieldError,
    StorageDeniedError,
    StoreError,
)
from storesvc.storage.bucket import check_conditions
from storesvc.storage.location import Storage
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc_client._doctor.findings import Effort, Finding, passed, problem

_OBJECTS: Final = 24
"""Objects of a list; few pages would hide no more."""

_OVERWRITES: Final = 5
_RANGES: Final = 32
_RANGED_BYTES: Final = 1 << 20


@dataclass(slots=True, kw_only=True)
class Probe:
    """The storage that is checked, and the account of what the checks did to it."""

    bucket: TensorStoreBucket
    storage: Storage
    folder: str
    """Prefix of all objects of the checks; ends with a slash."""
    until: float
    """End of the checks, by ``time.monotonic``."""
    effort: Effort
    measured: dict[str, float] = field(default_factory=dict)
    written_bytes: int = 0

    @property
    def left_seconds(self) -> float:
        """Time until the end; 0 after it."""
        return max(0.0, self.until - time.monotonic())

    def may_write(self, size_bytes: int) -> bool:
        """Returns whether so many bytes more stay within the limits."""
        is_within = self.written_bytes + size_bytes <= self.effort.max_bytes
        return is_within and self.left_seconds > 0

    async def write(self, name: str, data: bytes) -> str:
        """Writes an object of the checks; returns its path."""
        path = f"{self.folder}{name}"
        self.written_bytes += len(data)
        await self.bucket.write(path, data)
        return path


_PERMISSIONS: Final = {
    "gcs": {
        "create": "storage.objects.create",
        "read": "storage.objects.get",
        "list": "storage.objects.list",
        "overwrite": "storage.objects.create and storage.objects.delete",
        "delete": "storage.objects.delete",
    },
    "s3": {
        "create": "s3:PutObject",
        "read": "s3:GetObject",
        "list": "s3:ListBucket",
        "overwrite": "s3:PutObject",
        "delete": "s3:DeleteObject",
    },
}
"""Permission for each operation, by its provider's name."""


async def check_permissions(probe: Probe) -> list[Finding]:
    """Makes each kind of request once; names each that is denied."""
    path = f"{probe.folder}permissions"
    bucket = probe.bucket
    requests: dict[str, Callable[[], Awaitable[object]]] = {
        "create": lambda: bucket.write(path, b"1"),
        "read": lambda: bucket.read(path),
        "list": lambda: bucket.list(probe.folder),
        "overwrite": lambda: bucket.write(path, b"2"),
        "delete": lambda: bucket.delete(path),
    }
    denied = [name for name in requests if await _is_denied(requests[name])]
    if not denied:
        return [passed("permissions", f"{', '.join(requests)}: all allowed")]
    return [
        problem(
            f"permissions.{name}",
            f"expected this identity to {name} objects, got a denial: it needs "
            f"{_permission(probe.storage, name)}",
        )
        for name in denied
    ]


async def _is_denied(request: Callable[[], Awaitable[object]]) -> bool:
    try:
        await request()
    except StorageDeniedError:
        return True
    return False


def _permission(storage: Storage, operation: str) -> str:
    if storage.is_files or storage.is_memory:
        return "write permission for the directory and all below it"
    return _PERMISSIONS["s3" if storage.is_s3 else "gcs"][operation]


async def check_storage_conditions(probe: Probe) -> list[Finding]:
    """Makes changes whose condition does not hold; none may be accepted."""
    try:
        await check_conditions(probe.bucket)
    except InvalidFieldError as e:
        return [problem("conditions.ignored", str(e))]
    return [passed("conditions", "create, overwrite and delete are conditional")]


async def check_lists(probe: Probe) -> list[Finding]:
    """Lists before and right after writes, and right after deletions."""
    await probe.bucket.list(f"{probe.folder}list/")
    names = [f"list/{number:03}" for number in range(_OBJECTS)]
    paths = await asyncio.gather(*(probe.write(name, b"x") for name in names))
    listed = set(await probe.bucket.list(f"{probe.folder}list/"))
    missing = [path for path in paths if path not in listed]
    await asyncio.gather(*(probe.bucket.delete(path) for path in paths[::2]))
    listed = set(await probe.bucket.list(f"{probe.folder}list/"))
    ghosts = [path for path in paths[::2] if path in listed]
    found = []
    if missing:
        found.append(
            problem(
                "lists.incomplete",
                f"expected a list with the {_OBJECTS} objects that were just written, "
                f"got one without {len(missing)} of them",
            )
        )
    if ghosts:
        found.append(
            problem(
                "lists.stale",
                f"a list has {len(ghosts)} objects that were just deleted",
            )
        )
    return found or [passed("lists", "a list shows each write and deletion at once")]


async def check_reads(probe: Probe) -> list[Finding]:
    """Reads right after each overwrite."""
    stale = 0
    for number in range(_OVERWRITES):
        data = b"version %d" % number
        path = await probe.write("overwritten", data)
        stored = await probe.bucket.read(path)
        stale += stored is None or stored.data != data
    if stale:
        return [
            problem(
                "reads.stale",
                f"expected each read to return the last write, got an older version "
                f"{stale} times of {_OVERWRITES}",
            )
        ]
    return [passed("reads", f"{_OVERWRITES} of {_OVERWRITES} reads saw the last write")]


async def check_ranges(probe: Probe) -> list[Finding]:
    """Reads random ranges of an object, and compares each byte."""
    data = random.Random(1).randbytes(_RANGED_BYTES)  # noqa: S311 - no secret
    path = await probe.write("ranged", data)
    drawn = random.Random(2)  # noqa: S311 - no secret
    spans = [sorted(drawn.sample(range(len(data) + 1), 2)) for _ in range(_RANGES)]
    read = (_read_range(probe, path, start, stop) for start, stop in spans)
    got = await asyncio.gather(*read)
    wrong = [
        one if isinstance(one, StoreError) else "other bytes"
        for (start, stop), one in zip(spans, got, strict=True)
        if one != data[start:stop]
    ]
    if wrong:
        return [
            problem(
                "ranges.wrong",
                f"expected {_RANGES} ranges of an object as written, got {wrong[0]} "
                f"({len(wrong)} of {_RANGES})",
            )
        ]
    return [passed("ranges", f"{_RANGES} of {_RANGES} ranges equal what was written")]


async def _read_range(
    probe: Probe, path: str, start: int, stop: int
) -> bytes | StoreError:
    try:
        return await probe.bucket.read_range(path, start, stop)
    except (CorruptDataError, StoreError) as e:
        return e


_NAMES: Final[Sequence[str]] = ("names/Case", "names/case", "names/é#%23 +", "n" * 200)


async def check_names(probe: Probe) -> list[Finding]:
    """Writes objects whose names differ in case only, and unusual names."""
    for name in _NAMES:
        await probe.write(name, name.encode())
    wrong = []
    for name in _NAMES:
        stored = await probe.bucket.read(f"{probe.folder}{name}")
        if stored is None or stored.data != name.encode():
            wrong.append(name)
    if wrong:
        return [
            problem(
                "names.folded",
                f"expected each object under its own name, got another one's for "
                f"{wrong[0]!r}",
            )
        ]
    return [passed("names", "upper and lower case, signs and 200 characters")]


STORAGE_CHECKS: Final = (
    check_permissions,
    check_storage_conditions,
    check_lists,
    check_reads,
    check_ranges,
    check_names,
)
"""The checks in their order; the first one that fails need not be the last."""
