"""The required speeds and sizes (bars), and their comparison with the measurements.

Pure functions from results to verdicts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, Literal, TypeAlias

from benchmarks.speed.links import save_bound_seconds

Rounds: TypeAlias = Sequence[Mapping[str, Any]]
Found: TypeAlias = Mapping[str, Rounds]
"""Results of the rounds, by contender."""
Results: TypeAlias = Mapping[str, Found]
"""By work and place: "lm on tmpfs"."""

SPARE_MIB: Final = 64
"""Memory that a save or a restore may take beyond its budget."""

BUDGET_STATES: Final = {
    ("embedded", "save"): 1,
    ("direct-none", "save"): 0,
    ("streamed-none", "save"): 0,
    ("direct-none", "restore"): 0,
    ("streamed-none", "restore"): 0,
}
"""Copies of the state that each may hold in addition to the one that it saves or
returns."""

GROWTH_MIB: Final = 32
"""Change of memory over 40 cycles that the allocator alone may cause; less than 1 % of
the state per cycle counts as no growth."""

_MIB: Final = 1 << 20
_GB: Final = 1e9

_SIDES: Final = ("embedded", "streamed")


Sense: TypeAlias = Literal[">=", "<="]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A limit for one measured value."""

    what: str
    """Description for people; begins with the work."""
    value: Callable[[Results], float]
    """Reads the value; raises ``LookupError`` if it was not measured."""
    limit: float
    sense: Sense


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of the comparison with a bar."""

    bar: Bar
    value: float | None
    """The measured value; None: it was not measured."""

    def __str__(self) -> str:
        limit, value = self.bar.limit, self.value
        if value is None:
            return "not measured"
        short = limit - value if self.bar.sense == ">=" else value - limit
        if short <= 0:
            return "met"
        return f"missed by {short / limit:.0%}" if limit else f"missed by {short:g}"


def verdicts(results: Results, bars: Sequence[Bar] | None = None) -> list[Verdict]:
    """Returns the verdict on each bar, by default of all works, in their order."""
    judged = BARS if bars is None else bars
    return [Verdict(bar=bar, value=_measured(bar, results)) for bar in judged]


def _measured(bar: Bar, results: Results) -> float | None:
    try:
        return bar.value(results)
    except LookupError:
        return None


def middle(results: Results, work: str, name: str, *path: str) -> float:
    """Returns the median over the rounds of a figure, such as "save", "seconds".

    Raises:
        LookupError: It was not measured.
    """
    figures = []
    for found in results[f"{work} on tmpfs"][name]:
        at: Any = found
        for key in path:
            at = at[key]
        figures.append(at)
    if not figures:
        raise LookupError(name)
    return float(median(figures))


def _speed(work: str, phase: str, ours: str, other: str, limit: float) -> Bar:
    def value(results: Results) -> float:
        theirs = middle(results, work, other, phase, "seconds")
        return theirs / middle(results, work, ours, phase, "seconds")

    what = f"{work}: {ours} {phase}, speed / {other}"
    return Bar(what=what, value=value, limit=limit, sense=">=")


def _figure(what: str, work: str, name: str, field: str, limit: float) -> Bar:
    def value(results: Results) -> float:
        return middle(results, work, name, field)

    return Bar(what=f"{work}: {what}", value=value, limit=limit, sense="<=")


def _extra_memory(ours: str, phase: str) -> Bar:
    """Returns the bar for the memory above the budget."""

    def value(results: Results) -> float:
        state = middle(results, "lm", ours, "bytes") / _MIB
        budget = BUDGET_STATES[ours, phase] * state
        return middle(results, "lm", ours, phase, "extra_mib") - budget

    what = f"lm: {ours} {phase}, MiB above the budget"
    return Bar(what=what, value=value, limit=SPARE_MIB, sense="<=")


def _read_per_needed(ours: str) -> Bar:
    def value(results: Results) -> float:
        read = middle(results, "reshard", ours, "restore", "read_bytes")
        return read / middle(results, "reshard", ours, "bytes")

    what = f"reshard: {ours} restore, bytes read / needed"
    return Bar(what=what, value=value, limit=1.2, sense="<=")


def _server_cpu(results: Results) -> float:
    seconds = middle(results, "lm", "streamed-none", "restore", "others_cpu_seconds")
    return seconds / (middle(results, "lm", "streamed-none", "bytes") / _GB)


def _save_per_link(results: Results) -> float:
    seconds = middle(results, "gcs", "bucket", "save", "seconds")
    return save_bound_seconds(middle(results, "gcs", "bucket", "bytes")) / seconds


def _bars() -> Iterator[Bar]:
    for phase, ours, limits in (
        ("restore", "direct-none", {"orbax": 5, "orbax-raw": 3, "files": 0.6}),
        ("save", "direct-none", {"orbax": 3, "orbax-raw": 1.5, "files": 0.8}),
        ("save", "embedded", {"orbax": 2.8}),
        ("restore", "streamed-none", {"orbax": 1.2, "grpc": 0.7}),
        ("save", "streamed-none", {"grpc": 0.6}),
    ):
        for other, limit in limits.items():
            yield _speed("lm", phase, ours, other, limit)
    yield Bar(
        what="lm: streamed-none restore, CPU-s/GB of the server",
        value=_server_cpu,
        limit=0.6,
        sense="<=",
    )
    for ours, phase in BUDGET_STATES:
        yield _extra_memory(ours, phase)
    for ours in ("direct-none", "streamed-none"):
        yield _read_per_needed(ours)
    for phase in ("save", "restore"):
        yield _speed("many", phase, "direct-none", "orbax", 3)
    for other in ("orbax-bucket", "orbax-raw-bucket"):
        yield _speed("gcs", "restore", "bucket", other, 2)
    yield Bar(
        what="gcs: bucket save, speed / bound of the link",
        value=_save_per_link,
        limit=0.9,
        sense=">=",
    )
    yield Bar(
        what="gcs: bucket save, MiB above the state",
        value=lambda results: middle(results, "gcs", "bucket", "save", "extra_mib"),
        limit=256,
        sense="<=",
    )
    yield _figure("seconds", "lists", "bucket", "seconds", 1)
    for ours in _SIDES:
        yield _figure(
            f"{ours}, bytes read / returned", "params", ours, "read_per_returned", 1.05
        )
        yield from _of_training(ours)
    for what, field, limit in (
        ("bytes read from storage / stored", "read_per_stored", 1.05),
        ("MiB of the server above its rest", "server_extra_mib", 512),
        ("ms of the slowest health check", "health_slowest_ms", 100),
    ):
        yield _figure(what, "fanout", "streamed", field, limit)


def _of_training(ours: str) -> Iterator[Bar]:
    """Yields the bars for the works of a train loop."""
    for work, what, field, limit in (
        ("lora", "bytes / first save", "stored_share", 0.03),
        ("lora", "time / first save", "time_share", 0.2),
        ("growth", "MiB of the client", "client_growth_mib", GROWTH_MIB),
        ("growth", "MiB of the server", "server_growth_mib", GROWTH_MIB),
    ):
        yield _figure(f"{ours}, {what}", work, ours, field, limit)


BARS: Final = tuple(_bars())
