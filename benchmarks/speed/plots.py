"""The plots of a run: GB/s of each contender, the floors as lines."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.speed.bars import Found, Results
from benchmarks.speed.tables import PHASES, speed
from benchmarks.speed.works import FLOORS, OURS


def plot(results: Results, file: Path) -> None:
    """Writes the plots of all works that are a save and a restore, if there are any."""
    works = {title: _phased(found) for title, found in results.items()}
    works = {title: found for title, found in works.items() if found}
    if not works:
        return
    # a slow import that only plots need
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.5 * len(works)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(works), len(PHASES), squeeze=False)
    for row, (title, found) in zip(grid, works.items(), strict=True):
        for axes, phase in zip(row, PHASES, strict=True):
            _draw(axes, f"{title}: {phase}", found, phase)
    figure.savefig(file, dpi=100)


def _phased(found: Found) -> Found:
    return {name: rounds for name, rounds in found.items() if "restore" in rounds[0]}


def _draw(axes: Any, title: str, found: Found, phase: str) -> None:
    speeds: Mapping[str, float] = {
        name: speed(rounds, phase) for name, rounds in found.items()
    }
    bars = {name: value for name, value in speeds.items() if name not in FLOORS}
    colours = ["tab:blue" if name in OURS else "tab:gray" for name in bars]
    axes.bar(list(bars), list(bars.values()), color=colours)
    for style, name in zip(("-", "--", ":"), FLOORS, strict=True):
        if name in speeds:
            axes.axhline(speeds[name], linestyle=style, color="black", label=name)
    axes.set(title=title, ylabel="GB/s")
    axes.tick_params(axis="x", rotation=30)
    if speeds.keys() & set(FLOORS):
        axes.legend(title="floors")
