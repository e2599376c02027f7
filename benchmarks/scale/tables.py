"""Tables and the plot of the laws."""

from contextlib import suppress
from pathlib import Path
from typing import Final

from benchmarks.scale import prices
from benchmarks.scale.laws import exponent, fleet, points
from benchmarks.speed.bars import Results

ROWS: Final = {
    "save": (
        "requests",
        *("A", "B", "PUT", "POST", "GET", "LIST", "DELETE", "commits"),
        *("KiB up", "KiB down", "CPU-s"),
    ),
    "late": ("requests", "LIST", "GET", "writes of one object"),
    "steps": (
        *("latest: requests", "latest: LIST", "latest: KiB down"),
        *("save: requests", "save: LIST", "save: KiB down"),
        *("ls: requests", "ls: LIST", "ls, 10: requests"),
        *("collection: A", "collection: B", "collection: CPU-s"),
    ),
    "retention": ("requests", "LIST", "GET"),
    "runs": ("requests", "A", "B", "CPU-s"),
    "files": ("requests", "A", "B", "MiB", "CPU-s"),
    "names": ("MiB", "CPU-s"),
    "leaves": ("KiB of joins a process", "CPU-s"),
    "outage": (
        *("seconds", "requests", "a second", "most in a second"),
        *("last save ends after", "failed"),
    ),
}
"""Figures of each series that the tables show."""


def table(series: str, says: str, results: Results) -> str:
    """Returns the figures of a series at each size, and their exponents."""
    sizes = [int(size) for size in results[series]]
    head = f"{series}: {says}\n{'':26}" + "".join(f"{n:>11,}" for n in sizes)
    lines = [f"{head}{'exponent':>10}"]
    for figure in ROWS[series]:
        found = points(results, series, figure)
        cells = "".join(f"{_short(found[size]):>11}" for size in sizes)
        law = ""
        with suppress(LookupError):
            law = f"{exponent(found):.2f}"
        lines.append(f"{figure:26}{cells}{law:>10}".rstrip())
    return "\n".join(lines)


def fleet_table(results: Results) -> str:
    """Returns the table of the fleets; "" if a law was not counted."""
    try:
        fleets = [fleet(results, hosts) for hosts in prices.FLEETS]
    except LookupError:
        return ""
    lines = ["a job that saves 1 TB every 10 minutes and keeps 3, computed"]
    lines.append(f"{'hosts':32}" + "".join(f"{n:>13,}" for n in prices.FLEETS))
    for name in fleets[0]:
        cells = "".join(f"{_short(each[name]):>13}" for each in fleets)
        lines.append(f"{name:32}{cells}")
    return "\n".join(lines)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"


def plot(results: Results, file: Path) -> None:
    """Writes the plot of the requests of all series."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = (
        ("save", "processes of a joint save", "requests", "commits"),
        ("steps", "steps of a run", "latest: requests", "ls: LIST", "collection: B"),
        ("files", "data files of a run", "requests", "MiB"),
    )
    for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        series, title, *names = panel
        for name in names if series in results else ():
            found = points(results, series, name)
            axes.plot([*found], [*found.values()], marker="o", label=name)
            axes.legend()
        axes.set(title=title, xscale="log", yscale="log")
    figure.savefig(file, dpi=100)
