"""The bars: what a fleet of 1,000 hosts needs of each law."""

from collections.abc import Callable
from typing import Final

from benchmarks.scale import laws, works
from benchmarks.scale.laws import at_size, fleet, last, points
from benchmarks.speed.bars import Bar, Results

_MILLION: Final = 10**6


def _bar(what: str, limit: float, value: Callable[[Results], float]) -> Bar:
    return Bar(what=what, value=value, limit=limit, sense="<=")


def _last(series: str, figure: str) -> Callable[[Results], float]:
    return lambda results: last(points(results, series, figure))


def _per_process(results: Results) -> float:
    found = points(results, "save", "requests")
    return last(found) / max(found)


def _in_outage(results: Results) -> float:
    found = points(results, "outage", "a second")
    return last(found) / max(found)


def _writes_a_second(results: Results) -> float:
    """Returns the writes of the one most written object, with the default lease.

    One process was late by a part of a short lease, in which the others renewed it.
    """
    leases = works.LATE_SECONDS / works.SHORT_LEASE_SECONDS
    writes = last(points(results, "late", "writes of one object"))
    return writes / leases / works.LEASE_SECONDS


def _memory(files: int) -> Callable[[Results], float]:
    """Returns the memory of a collection, the more of the emulator and of simulated
    names."""

    def value(results: Results) -> float:
        counted = (
            points(results, s, "MiB") for s in ("files", "names") if s in results
        )
        found = [each[files] for each in counted if files in each]
        if not found:
            raise LookupError(files)
        return max(found)

    return value


def _added(figure: str) -> Callable[[Results], float]:
    """Returns what many steps add to a figure of a few."""

    def value(results: Results) -> float:
        found = points(results, "steps", figure)
        return last(found) - found[min(found)]

    return value


BARS: Final = (
    _bar(
        "joint save: full commits, the most of any P",
        1,
        lambda results: max(points(results, "save", "commits").values()),
    ),
    _bar(
        "joint save: exponent of requests over P",
        1.05,
        lambda results: laws.exponent(points(results, "save", "requests")),
    ),
    _bar("joint save: requests a process, largest P", 8, _per_process),
    _bar("joint save: writes of one object a second", 1, _writes_a_second),
    _bar("collection: MiB of 1 million data files", 64, _memory(_MILLION)),
    _bar("collection: MiB of 50 million data files", 128, _memory(50 * _MILLION)),
    _bar(
        "collection: requests for a run that did not change",
        1,
        lambda results: laws.slope(points(results, "runs", "requests")),
    ),
    _bar("latest: requests, largest N", 2, _last("steps", "latest: requests")),
    _bar("latest: KiB, largest N", 64, _last("steps", "latest: KiB down")),
    _bar("begin and save: requests that N adds", 2, _added("save: requests")),
    _bar("begin and save: KiB down that N adds", 64, _added("save: KiB down")),
    _bar(
        "ls: lists for 3,000 steps",
        4,
        lambda results: at_size(points(results, "steps", "ls: LIST"), 3000),
    ),
    _bar(
        "retention after a commit: requests of 4 processes, largest N",
        4,
        _last("retention", "requests"),
    ),
    _bar(
        "join: KiB of a process, 100,000 leaves",
        64,
        lambda results: at_size(
            points(results, "leaves", "KiB of joins a process"), 100_000
        ),
    ),
    _bar("outage: requests of a process a second", 1, _in_outage),
    _bar("outage: saves that fail", 0, _last("outage", "failed")),
    _bar(
        "1,000 hosts, 1 TB: dollars a month of saves",
        700,
        lambda results: fleet(results, 1000)["dollars a month, saves"],
    ),
    _bar(
        "1,000 hosts, 1 TB: dollars a month of collections",
        150,
        lambda results: fleet(results, 1000)["dollars a month, collections"],
    ),
)
