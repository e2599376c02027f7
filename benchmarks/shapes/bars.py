"""The required speeds of any shape (bars): the worst and the median over the shapes.

Pure functions from results to values.
"""

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Final

from benchmarks.shapes import ratios
from benchmarks.shapes.drawing import SHAPES
from benchmarks.speed.bars import Bar, Found, Results

_GB: Final = 1e9


def by_size(results: Results) -> Mapping[str, Found]:
    """Returns the shapes that differ in the sizes and shardings of leaves."""
    return {n: found for n, found in results.items() if SHAPES[n].judged == "size"}


def over_shapes(
    results: Results, phase: str, figure: ratios.Figure, above: str, below: str
) -> list[float]:
    """Returns the ratio of two contenders at each shape that differs in sizes.

    Raises:
        LookupError: No shape has both.
    """
    found = []
    for each in by_size(results).values():
        try:
            found.append(ratios.ratio(each, phase, figure, above, below).middle)
        except LookupError:
            continue
    if not found:
        raise LookupError(above, below)
    return found


def cpu_per_gb(found: Found, name: str, phase: str) -> float:
    """Returns the median CPU seconds for each GB."""
    rounds = ratios.measured(found, name)
    size = float(rounds[0]["bytes"]) / _GB
    return median(ratios.cpu(each, phase) for each in rounds) / size


def _direct_cpu(results: Results) -> float:
    shapes = by_size(results).values()
    measured = [found for found in shapes if len(found.get("direct", ())) > 1]
    if not measured:
        raise LookupError("direct")
    return max(cpu_per_gb(found, "direct", "restore") for found in measured)


def _slowest(results: Results) -> float:
    rounds = ratios.measured(results["small"], "direct")
    shares = [each["save"]["slowest"] / each["save"]["seconds"] for each in rounds]
    return float(median(shares))


def _speed(phase: str, worst: float, middle: float) -> Iterator[Bar]:
    for says, over, limit in (("worst", min, worst), ("median", median, middle)):

        def value(results: Results, over: object = over) -> float:
            assert callable(over)
            found = over_shapes(results, phase, ratios.seconds, "orbax", "direct")
            return float(over(found))

        what = f"direct {phase}, speed / orbax, {says} shape"
        yield Bar(what=what, value=value, limit=limit, sense=">=")


def _streamed(phase: str, ending: str) -> Bar:
    def value(results: Results) -> float:
        names = f"streamed{ending}", f"grpc-files{ending}"
        return max(over_shapes(results, phase, ratios.cpu, *names))

    what = f"streamed{ending} {phase}, CPU / grpc-files{ending}, worst shape"
    return Bar(what=what, value=value, limit=1.2, sense="<=")


def _leaves(phase: str) -> Bar:
    def value(results: Results) -> float:
        found = results["leaves"]
        return ratios.ratio(found, phase, ratios.seconds, "orbax", "direct").middle

    what = f"leaves: direct {phase}, speed / orbax"
    return Bar(what=what, value=value, limit=4, sense=">=")


def _loop(results: Results) -> float:
    found = results["small"]
    return ratios.ratio(found, "save", ratios.seconds, "direct", "orbax").middle


def _bars() -> Iterator[Bar]:
    yield from _speed("restore", 3, 5)
    yield from _speed("save", 2.5, 3.5)
    yield Bar(
        what="direct restore, CPU-s/GB after the first, worst shape",
        value=_direct_cpu,
        limit=0.6,
        sense="<=",
    )
    for ending in ("", "-tls"):
        for phase in ("save", "restore"):
            yield _streamed(phase, ending)
    for phase in ("save", "restore"):
        yield _leaves(phase)
    what = "small: direct save in a loop, median / orbax's"
    yield Bar(what=what, value=_loop, limit=1, sense="<=")
    what = "small: direct save in a loop, slowest / median"
    yield Bar(what=what, value=_slowest, limit=3, sense="<=")


BARS: Final = tuple(_bars())
