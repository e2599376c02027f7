"""The required speeds of any shape (bars): the worst and the median over the shapes.

Pure functions from results to values.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any, Final, TypeAlias

from benchmarks.shapes import ratios
from benchmarks.shapes.drawing import SHAPES
from benchmarks.speed.bars import Bar, Found, Results, Sense

_GB: Final = 1e9


def by_size(results: Results) -> Mapping[str, Found]:
    """Returns the shapes that differ in the sizes and shardings of leaves."""
    return {n: found for n, found in results.items() if SHAPES[n].judged == "size"}


Reading: TypeAlias = Callable[[Found], float]
"""Reads a figure of a shape; raises ``LookupError`` if it was not measured."""


def paired(phase: str, figure: ratios.Figure, above: str, below: str) -> Reading:
    """Returns the reading of the ratio of two contenders."""
    return lambda found: ratios.ratio(found, phase, figure, above, below).middle


def over_shapes(results: Results, reading: Reading) -> list[float]:
    """Returns a figure at each shape that differs in sizes.

    Raises:
        LookupError: No shape has it.
    """
    figures = []
    for each in by_size(results).values():
        try:
            figures.append(reading(each))
        except LookupError:
            continue
    if not figures:
        raise LookupError(reading)
    return figures


def cpu_per_gb(found: Found, name: str, phase: str) -> float:
    """Returns the median CPU seconds for each GB."""
    rounds = ratios.measured(found, name)
    size = float(rounds[0]["bytes"]) / _GB
    return median(ratios.cpu(each, phase) for each in rounds) / size


def _speed(what: str, reading: Reading, worst: float, middle: float) -> Iterator[Bar]:
    """Yields the bars of the worst and the median shape."""
    for says, over, limit in (("worst", min, worst), ("median", median, middle)):

        def value(results: Results, over: Any = over) -> float:
            return float(over(over_shapes(results, reading)))

        yield Bar(what=f"{what}, {says} shape", value=value, limit=limit, sense=">=")


def _worst(what: str, reading: Reading, sense: Sense, limit: float) -> Bar:
    over = min if sense == ">=" else max

    def value(results: Results) -> float:
        return over(over_shapes(results, reading))

    return Bar(what=f"{what}, worst shape", value=value, limit=limit, sense=sense)


def _streamed(ending: str) -> Iterator[Bar]:
    for phase in ("save", "restore"):
        names = f"streamed-none{ending}", f"grpc-files{ending}"
        yield _worst(
            f"{names[0]} {phase}, CPU / {names[1]}",
            paired(phase, ratios.cpu, *names),
            "<=",
            1.2,
        )


def _shape(shape: str, what: str, reading: Reading, sense: Sense, limit: float) -> Bar:
    def value(results: Results) -> float:
        return reading(results[shape])

    return Bar(what=f"{shape}: {what}", value=value, limit=limit, sense=sense)


def _slowest(found: Found) -> float:
    rounds = ratios.measured(found, "embedded")
    shares = [each["save"]["slowest"] / each["save"]["seconds"] for each in rounds]
    return float(median(shares))


def _bars() -> Iterator[Bar]:
    yield _worst(
        "embedded-none save on a base, speed / without one",
        paired("save", ratios.seconds, "embedded-none-new", "embedded-none"),
        ">=",
        0.97,
    )
    to_orbax = paired("save", ratios.seconds, "orbax", "embedded")
    yield from _speed("embedded save, speed / orbax", to_orbax, 2.8, 3.5)
    for memory in ("memcpy-new", "memcpy"):
        back = paired("save", ratios.returned, "embedded", memory)
        yield _worst(f"embedded save returns, time / {memory}", back, "<=", 0.7)
    floor = paired("save", ratios.cpu, "direct-none", "sums")
    yield _worst("direct-none save, CPU / sums", floor, "<=", 1.3)
    later = paired("restore", ratios.seconds, "orbax", "direct-none")
    yield from _speed("direct-none restore, speed / orbax", later, 3.5, 5)
    yield from _speed(
        "direct-none first restore, speed / orbax",
        lambda found: ratios.first(found, "restore", "orbax", "direct-none"),
        3.5,
        5,
    )
    cpu = partial(cpu_per_gb, name="direct-none", phase="restore")
    yield _worst("direct-none restore, CPU-s/GB", cpu, "<=", 0.6)
    yield from _streamed("")
    yield from _streamed("-tls")
    through = paired("restore", ratios.seconds, "orbax", "streamed-none")
    yield _worst("streamed-none restore, speed / orbax", through, ">=", 1.2)
    for phase in ("save", "restore"):
        speed = paired(phase, ratios.seconds, "orbax", "direct-none")
        yield _shape("leaves", f"direct-none {phase}, speed / orbax", speed, ">=", 4)
    in_loop = paired("save", ratios.seconds, "embedded", "orbax")
    for shape in ("small", "three"):
        yield _shape(shape, "embedded save, median / orbax's", in_loop, "<=", 0.5)
        yield _shape(shape, "embedded save, slowest / median", _slowest, "<=", 3)


BARS: Final = tuple(_bars())
