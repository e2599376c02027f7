"""The laws of the costs, and what follows from them for a fleet.

Pure functions of the counted figures; all raise ``LookupError`` for what was not
counted, or at too few sizes.
"""

import math
from collections.abc import Mapping
from statistics import linear_regression
from typing import Final

from benchmarks.scale import prices
from benchmarks.speed.bars import Results
from storesvc_client._save.direct import object_bytes
from storesvc_client._session import DEFAULT_STAGING_BYTES

LEAST_SIZE: Final = 8
"""Sizes below show what one process does first, and no law."""

_LEAST_COST: Final = 0.01
"""The least cost: zero has no logarithm."""

NAMES_PER_LIST: Final = 1000


def points(results: Results, series: str, figure: str) -> dict[int, float]:
    """Returns a figure by size."""
    found = {int(n): float(rows[0][figure]) for n, rows in results[series].items()}
    if not found:
        raise LookupError(series)
    return found


def last(found: Mapping[int, float]) -> float:
    """Returns the figure at the largest size."""
    return found[max(found)]


def exponent(found: Mapping[int, float]) -> float:
    """Returns the slope of log cost over log size; needs two sizes or more."""
    sizes = [n for n in found if n >= LEAST_SIZE]
    if len(sizes) < 2:
        raise LookupError("fewer than two sizes")
    logs = [math.log(max(found[n], _LEAST_COST)) for n in sizes]
    return float(linear_regression([math.log(n) for n in sizes], logs).slope)


def at_size(found: Mapping[int, float], size: int, *, least: float = 0.0) -> float:
    """Returns a figure at a size: as counted, or by its law from the largest one on.

    `least` is the smallest exponent to assume: 1 for a cost of which each has a part.
    """
    if size in found:
        return found[size]
    largest = max(found)
    law = max(exponent(found), least)
    return float(found[largest] * (size / largest) ** law)


def slope(found: Mapping[int, float]) -> float:
    """Returns what each further one costs, between the two largest sizes."""
    if len(found) < 2:
        raise LookupError("fewer than two sizes")
    small, large = sorted(found)[-2:]
    return (found[large] - found[small]) / (large - small)


def dollars(a: float, b: float) -> float:
    """Returns the price of operations."""
    return a * prices.DOLLARS_A + b * prices.DOLLARS_B


def fleet(results: Results, hosts: int) -> dict[str, float]:
    """Returns the costs of a job that saves 1 TB every ten minutes, by name.

    A process counts by the law of joint saves, but with the data files of its part of
    1 TB. A collection counts by the law of steps, for those that are kept or deleted,
    and by the law of data files; it lists the data files of the one that it purges.
    """

    def joint(figure: str) -> float:
        return at_size(points(results, "save", figure), hosts, least=1.0)

    def collect(name: str) -> float:
        steps = at_size(points(results, "steps", f"collection: {name}"), held)
        return steps + max(0.0, slope(points(results, "files", name))) * held * files

    own_bytes = math.ceil(prices.SAVE_BYTES / hosts)
    size = object_bytes(math.ceil(prices.SAVE_BYTES), own_bytes, DEFAULT_STAGING_BYTES)
    files = hosts * math.ceil(own_bytes / size)
    held = prices.HELD
    save_a, save_b = joint("A") + files - hosts, joint("B")  # a file of each is in A
    pass_a, pass_b = collect("A") + files / NAMES_PER_LIST, collect("B")
    stored = held * prices.SAVE_BYTES / 1e9
    return {
        "data files of a save": files,
        "class A of a save": save_a,
        "class B of a save": save_b,
        "GB of records that a save reads": joint("KiB down") * 1024 / 1e9,
        "class A of a collection": pass_a,
        "class B of a collection": pass_b,
        "dollars a month, saves": prices.SAVES * dollars(save_a, save_b),
        "dollars a month, collections": prices.SAVES * dollars(pass_a, pass_b),
        "dollars a month, storage": stored * prices.DOLLARS_GB_MONTH,
    }
