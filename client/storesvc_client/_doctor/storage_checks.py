"""Checks a storage: the promises that a store relies on, and its speed.

The requests are made as in saves and restores. Each check writes objects of its own
below `Probe.folder`, which the caller deletes.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from storesvc.errors import InvalidFieldError, StorageDeniedError, StoreError
from storesvc.storage.bucket import check_conditions
from storesvc.storage.location import Storage
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.storage.requests import gather_each, shared_window
from storesvc_client._doctor.findings import (
    Effort,
    Finding,
    judge,
    passed,
    problem,
    skipped,
)

_OBJECTS: Final = 24
"""Objects of a list; few pages would hide no more."""

_OVERWRITES: Final = 5
_RANGES: Final = 32
_RANGED_BYTES: Final = 1 << 20


@dataclass(slots=True)
class Probe:
    """The storage that is checked, and the account of what the checks did to it."""

    bucket: TensorStoreBucket
    folder: str
    """Prefix of all objects of the checks; ends with a slash."""
    until: float
    """End of the checks, by ``time.monotonic``."""
    effort: Effort
    measured: dict[str, float]
    written_bytes: int = 0

    @property
    def storage(self) -> Storage:
        return self.bucket.opened.storage

    @property
    def left_seconds(self) -> float:
        """Time until the end; 0 after it."""
        return max(0.0, self.until - time.monotonic())

    async def write(self, name: str, data: bytes) -> str:
        """Writes an object of the checks; returns its path."""
        path = f"{self.folder}{name}"
        self.written_bytes += len(data)
        await self.bucket.write(path, data)
        return path


_PERMISSIONS: Final = {
    "create": ("storage.objects.create", "s3:PutObject"),
    "read": ("storage.objects.get", "s3:GetObject"),
    "list": ("storage.objects.list", "s3:ListBucket"),
    "overwrite": ("storage.objects.create and .delete", "s3:PutObject"),
    "delete": ("storage.objects.delete", "s3:DeleteObject"),
}
"""Permission for each operation, by Google's name and by Amazon's."""


async def check_permissions(probe: Probe) -> list[Finding]:
    """Makes each kind of request once; names each that is denied."""
    path, bucket, denied = f"{probe.folder}permissions", probe.bucket, []
    requests: dict[str, Callable[[], Awaitable[object]]] = {
        "create": lambda: bucket.write(path, b"1"),
        "read": lambda: bucket.read(path),
        "list": lambda: bucket.list(probe.folder),
        "overwrite": lambda: bucket.write(path, b"2"),
        "delete": lambda: bucket.delete(path),
    }
    for name, request in requests.items():
        needed = "write permission for the directory and all below it"
        if probe.storage.is_remote:
            needed = _PERMISSIONS[name][probe.storage.is_s3]
        try:
            await request()
        except StorageDeniedError:
            found = f"expected this identity to {name} objects, got a denial"
            denied.append(problem(f"permissions.{name}", f"{found}: it needs {needed}"))
    return denied or [passed("permissions", f"{', '.join(requests)}: all allowed")]


async def check_storage_conditions(probe: Probe) -> list[Finding]:
    """Makes changes whose condition does not hold; none may be accepted."""
    wrong = ""
    try:
        await check_conditions(probe.bucket, probe.folder)
    except InvalidFieldError as e:
        wrong = str(e)
    fine = "create, overwrite and delete are conditional"
    return judge("conditions.ignored", wrong, fine)


async def check_lists(probe: Probe) -> list[Finding]:
    """Lists before and right after writes, and right after deletions."""
    folder, bucket = f"{probe.folder}list/", probe.bucket
    await bucket.list(folder)
    names = [f"list/{number:03}" for number in range(_OBJECTS)]
    paths = await gather_each(lambda name: probe.write(name, b"x"), names)
    missing = set(paths) - {*await bucket.list(folder)}
    await gather_each(bucket.delete, paths[::2])
    ghosts = set(paths[::2]) & {*await bucket.list(folder)}
    if missing:
        found = (
            f"expected a list with the {_OBJECTS} objects that were just written, got "
            f"one without {len(missing)} of them"
        )
        return [problem("lists.incomplete", found)]
    shown = f"a list has {len(ghosts)} objects that were just deleted"
    fine = "a list shows each write and deletion at once"
    return judge("lists.stale", shown if ghosts else "", fine)


async def check_reads(probe: Probe) -> list[Finding]:
    """Reads right after each overwrite."""
    stale = 0
    for number in range(_OVERWRITES):
        path = await probe.write("overwritten", b"version %d" % number)
        stored = await probe.bucket.read(path)
        stale += stored is None or stored.data != b"version %d" % number
    shown = f"{_OVERWRITES - stale} of {_OVERWRITES} reads saw the last write"
    wrong = f"expected each read to return the last write, got {stale} older versions"
    return judge("reads.stale", wrong if stale else "", shown)


async def check_ranges(probe: Probe) -> list[Finding]:
    """Reads random ranges of an object, and compares each byte."""
    data = random.Random(1).randbytes(_RANGED_BYTES)  # noqa: S311 - no secret
    path = await probe.write("ranged", data)
    drawn = random.Random(2)  # noqa: S311 - no secret

    async def read(_: int) -> str:
        """Returns what is wrong with a range; empty: nothing."""
        start, stop = sorted(drawn.sample(range(len(data) + 1), 2))
        try:
            got = await probe.bucket.read_range(path, start, stop)
        except StoreError as e:
            return str(e)
        return "" if got == data[start:stop] else "other bytes"

    read_all = await gather_each(read, range(_RANGES))
    wrong = [one for one in read_all if one]
    fine = f"{_RANGES - len(wrong)} of {_RANGES} ranges equal what was written"
    shown = f"expected all ranges of an object as written, got {wrong[:1]}; {fine}"
    return judge("ranges.wrong", shown if wrong else "", fine)


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
    shown = f"expected each object under its own name, got others' for {wrong}"
    fine = "upper and lower case, signs and 200 characters"
    return judge("names.folded", shown if wrong else "", fine)


PROMISES: Final = (
    check_permissions,
    check_storage_conditions,
    check_lists,
    check_reads,
    check_ranges,
    check_names,
)
"""The checks in their order; the first one that fails need not be the last."""


# --- Speed ---------------------------------------------------------------------------

MIB: Final = 1 << 20

_AT_ONCE: Final = 8
_WRITES_AT_ONCE: Final = 16

LEVELS: Final = (1, 4, 16, 32, 64)
"""Concurrent requests that are compared."""

_LEVEL_SECONDS: Final = 15.0
"""Maximum time of a level; a slow storage is measured with fewer objects."""

_NEAR_BEST: Final = 0.9
"""Share of the best rate from which fewer concurrent requests are preferred."""

_TAIL_FACTOR: Final = 10
_TAIL_SECONDS: Final = 0.25
_TAIL_SHARE: Final = 0.01
_TICK_SECONDS: Final = 0.005


async def check_latency(probe: Probe) -> list[Finding]:
    """Measures small reads and writes; finds a slow tail."""
    count = probe.effort.sample_count
    path = await probe.write("small", b"x" * 1000)
    writes = await _sample(
        lambda number: probe.write(f"latency/{number}", b"x" * 1000), count // 3
    )
    async with asyncio.TaskGroup() as beside:
        lags: list[float] = []
        ticking = beside.create_task(_tick(lags))
        reads = await _sample(lambda _: probe.bucket.read(path), count)
        ticking.cancel()
    texts = []
    for name, seconds in (("write", writes), ("read", reads)):
        cuts = statistics.quantiles(seconds, n=100, method="inclusive")
        p50, p99 = 1000 * cuts[49], 1000 * cuts[98]
        probe.measured |= {f"small_{name}_p50_ms": p50, f"small_{name}_p99_ms": p99}
        texts.append(f"{name} {p50:.1f} ms (p99 {p99:.1f})")
    shown = ", ".join(texts)
    share = tail_share(reads, noise_seconds=max(lags, default=0.0))
    wrong = (
        f"{100 * share:.1f} % of small reads take over {_TAIL_FACTOR} times the "
        f"median: {shown}"
    )
    return judge("latency.tail", wrong if share else "", shown)


def tail_share(seconds: Sequence[float], *, noise_seconds: float) -> float:
    """Returns the share of slow requests; 0 if it is not worth a warning.

    Slow is over ten times the median, over 250 ms, and over three times the longest
    pause of this process: a busy machine in front of a fast storage is no finding.
    """
    median = statistics.median(seconds)
    bound = max(_TAIL_FACTOR * median, _TAIL_SECONDS, 3 * noise_seconds)
    share = sum(one > bound for one in seconds) / len(seconds)
    return share if share >= _TAIL_SHARE else 0.0


async def _tick(lags: list[float]) -> None:
    """Measures by how much this process wakes up late, until it is cancelled."""
    while True:
        begin = time.perf_counter()
        await asyncio.sleep(_TICK_SECONDS)
        lags.append(time.perf_counter() - begin - _TICK_SECONDS)


async def _sample(
    request: Callable[[int], Awaitable[object]], count: int
) -> list[float]:
    """Returns the seconds of each of so many requests, a few at a time."""

    async def make(number: int) -> float:
        begin = time.perf_counter()
        await request(number)
        return time.perf_counter() - begin

    return await gather_each(make, range(count), at_once=_AT_ONCE)


def best_concurrency(rates: Mapping[int, float]) -> int:
    """Returns the fewest concurrent requests whose rate is near the best."""
    near = _NEAR_BEST * max(rates.values())
    return min(at_once for at_once, rate in rates.items() if rate >= near)


async def check_rate(probe: Probe) -> list[Finding]:
    """Writes and reads large objects with more and more concurrent requests."""
    data = random.Random(3).randbytes(probe.effort.object_bytes)  # noqa: S311 - no secret
    left_bytes, paths = probe.effort.max_bytes - probe.written_bytes, list[str]()
    count = min(probe.effort.object_count, left_bytes // len(data))
    if count < 1 or not probe.left_seconds:
        return [skipped("rate", "no bytes or time are left for it")]

    async def write(number: int) -> int:
        paths.append(await probe.write(f"rate/{number}", data))
        return len(data)

    async def read(number: int) -> int:
        return len(await probe.bucket.read_range(paths[number], 0, len(data)))

    written = await _measure(probe, write, count, _WRITES_AT_ONCE)
    levels = [
        await _measure(probe, read, min(len(paths), max(4, 4 * at_once)), at_once)
        for at_once in LEVELS
    ]
    rates = {at_once: rate for at_once, rate, _ in levels}
    best = best_concurrency(rates)
    probe.measured |= {
        "write_mib_per_second": written[1],
        "read_mib_per_second_of_one": rates[1],
        "read_mib_per_second": rates[best],
        "recommended_concurrency": best,
    }
    shown = (
        f"write {written[1]:.0f} MiB/s, read {rates[1]:.0f} with "
        f"one request, {rates[best]:.0f} with {best}"
    )
    wrong = [
        f"the storage rejected {count} requests because of load with {at_once} at once "
        f"(429, 5xx): {shown}"
        for at_once, _, count in (written, *levels)
        if count
    ]
    return judge("rate.throttled", wrong[0] if wrong else "", shown)


async def _measure(
    probe: Probe, request: Callable[[int], Awaitable[int]], count: int, at_once: int
) -> tuple[int, float, int]:
    """Makes requests, each of which returns its bytes, so many at once; fewer if they
    are slow. Returns that number, MiB per second, and the number of rejected ones."""
    begin, moved = time.perf_counter(), list[int]()
    window = shared_window(probe.storage)
    rejections = window.rejection_count
    until = begin + min(_LEVEL_SECONDS, max(1.0, probe.left_seconds))

    async def make(number: int) -> None:
        if time.perf_counter() < until or not moved:
            moved.append(await request(number))

    await gather_each(make, range(count), at_once=at_once)
    rate = sum(moved) / MIB / (time.perf_counter() - begin)
    return at_once, rate, window.rejection_count - rejections


SPEED_CHECKS: Final = (check_latency, check_rate)
