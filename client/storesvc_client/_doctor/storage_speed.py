"""Measures a storage: latency, rate of a connection, and the number of concurrent
requests from which it gets no faster.

TensorStore makes the requests, as in saves and restores, and counts its retries: the
storage has answered 429 or 5xx, or not at all.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import tensorstore as ts

from storesvc_client._doctor.findings import Finding, passed, problem, skipped
from storesvc_client._doctor.storage_promises import Probe

MIB: Final = 1 << 20

_AT_ONCE: Final = 8

LEVELS: Final = (1, 4, 16, 32, 64)
"""Concurrent requests that are compared."""

_LEVEL_SECONDS: Final = 15.0
"""Maximum time of a level; a slow storage is measured with fewer objects."""

_NEAR_BEST: Final = 0.9
"""Share of the best rate from which fewer concurrent requests are preferred."""

_TAIL_FACTOR: Final = 10
_TAIL_SECONDS: Final = 0.05
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
    for name, seconds in (("write", writes), ("read", reads)):
        for percent in (50, 99):
            key = f"small_{name}_p{percent}_ms"
            probe.measured[key] = 1000 * percentile(seconds, percent)
    shown = ", ".join(
        f"{name} {1000 * percentile(each, 50):.1f} ms (p99 "
        f"{1000 * percentile(each, 99):.1f})"
        for name, each in (("write", writes), ("read", reads))
    )
    if share := tail_share(reads, noise_seconds=max(lags, default=0.0)):
        return [
            problem(
                "latency.tail",
                f"{100 * share:.1f} % of small reads take over {_TAIL_FACTOR} times "
                f"the median: {shown}",
            )
        ]
    return [passed("latency", shown)]


def percentile(seconds: Sequence[float], percent: int) -> float:
    """Returns a percentile of at least two values."""
    return statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1]


def tail_share(seconds: Sequence[float], *, noise_seconds: float) -> float:
    """Returns the share of slow requests; 0 if it is not worth a warning.

    Slow is over ten times the median, over 50 ms, and over three times the longest
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
    slots, seconds = asyncio.Semaphore(_AT_ONCE), list[float]()

    async def make(number: int) -> None:
        async with slots:
            begin = time.perf_counter()
            await request(number)
            seconds.append(time.perf_counter() - begin)

    await asyncio.gather(*map(make, range(count)))
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The rate at a number of concurrent requests."""

    concurrency: int
    bytes_per_second: float
    retry_count: int
    """Requests that TensorStore repeated."""


def best_concurrency(levels: Sequence[Level]) -> int:
    """Returns the fewest concurrent requests whose rate is near the best."""
    best = max(level.bytes_per_second for level in levels)
    return next(
        level.concurrency
        for level in levels
        if level.bytes_per_second >= _NEAR_BEST * best
    )


async def check_rate(probe: Probe) -> list[Finding]:
    """Writes and reads large objects with more and more concurrent requests."""
    data = random.Random(3).randbytes(probe.effort.object_bytes)  # noqa: S311 - no secret
    begin, paths = time.perf_counter(), list[str]()
    retries = _retry_count(probe)
    while len(paths) < probe.effort.object_count and probe.may_write(16 * len(data)):
        if paths and time.perf_counter() - begin > _LEVEL_SECONDS:
            break
        names = [f"rate/{len(paths) + number}" for number in range(16)]
        paths += await asyncio.gather(*(probe.write(name, data) for name in names))
    if not paths:
        return [skipped("rate", "no bytes or time are left for it")]
    rate = len(paths) * len(data) / (time.perf_counter() - begin)
    written = Level(
        concurrency=16,
        bytes_per_second=rate,
        retry_count=_retry_count(probe) - retries,
    )
    levels = [await _measure_level(probe, paths, n) for n in LEVELS]
    best = best_concurrency(levels)
    rates = {level.concurrency: level.bytes_per_second / MIB for level in levels}
    probe.measured |= {
        "write_mib_per_second": written.bytes_per_second / MIB,
        "read_mib_per_second_of_one": rates[1],
        "read_mib_per_second": rates[best],
        "recommended_concurrency": best,
    }
    shown = (
        f"write {written.bytes_per_second / MIB:.0f} MiB/s, read {rates[1]:.0f} with "
        f"one request, {rates[best]:.0f} with {best}"
    )
    repeated = [level for level in (written, *levels) if level.retry_count]
    if repeated:
        first = repeated[0]
        return [
            problem(
                "rate.throttled",
                f"the storage made TensorStore repeat {first.retry_count} requests "
                f"with {first.concurrency} at once (429, 5xx or no answer): {shown}",
            )
        ]
    return [passed("rate", shown)]


async def _measure_level(probe: Probe, paths: Sequence[str], concurrency: int) -> Level:
    slots, begin = asyncio.Semaphore(concurrency), time.perf_counter()
    retries, read_bytes = _retry_count(probe), 0
    size_bytes = probe.effort.object_bytes
    until = begin + min(_LEVEL_SECONDS, max(1.0, probe.left_seconds))

    async def read(path: str) -> None:
        nonlocal read_bytes
        async with slots:
            if time.perf_counter() < until or not read_bytes:
                data = await probe.bucket.read_range(path, 0, size_bytes)
                read_bytes += len(data)

    await asyncio.gather(*map(read, paths[: max(4, 4 * concurrency)]))
    return Level(
        concurrency=concurrency,
        bytes_per_second=read_bytes / (time.perf_counter() - begin),
        retry_count=_retry_count(probe) - retries,
    )


def _retry_count(probe: Probe) -> int:
    """Returns TensorStore's count of repeated requests since this process began."""
    name = f"/tensorstore/kvstore/{probe.storage.spec['driver']}/retries"
    metrics = ts.experimental_collect_matching_metrics(name, include_zero_metrics=True)
    values = [
        v for metric in metrics if metric["name"] == name for v in metric["values"]
    ]
    return sum(int(value.get("value", 0)) for value in values)


SPEED_CHECKS: Final = (check_latency, check_rate)
