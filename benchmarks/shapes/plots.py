"""The plot of a run: speed to Orbax at each shape, with its interval."""

from pathlib import Path

from benchmarks.shapes import ratios
from benchmarks.shapes.tables import PHASES
from benchmarks.speed.bars import Results
from benchmarks.speed.works import LOCAL


def plot(results: Results, file: Path) -> None:
    """Writes the plot, if anything was compared with Orbax."""
    drawn = {
        (phase, name): {
            shape: each
            for shape, found in results.items()
            if (each := ratios.to_orbax(found, name, phase))
        }
        for phase in PHASES
        for name in LOCAL
    }
    if not any(drawn.values()):
        return
    # a slow import that only plots need
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, phase in zip(figure.subplots(1, len(PHASES)), PHASES, strict=True):
        for name in LOCAL:
            found = drawn[phase, name]
            if not found:
                continue
            low = [each.middle - each.low for each in found.values()]
            high = [each.high - each.middle for each in found.values()]
            middles = [each.middle for each in found.values()]
            axes.errorbar(
                list(found), middles, [low, high], fmt="o", capsize=4, label=name
            )
        axes.axhline(1, linestyle=":", color="black", label="orbax")
        axes.set(title=phase, ylabel="speed / orbax", ylim=(0, None))
        axes.tick_params(axis="x", rotation=30)
        axes.legend()
    figure.savefig(file, dpi=100)
