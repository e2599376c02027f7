"""Pictures of the pages, as SVG that needs no script and no inline style.

The functions return None where there is nothing to draw; a page then leaves the panel
out.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import Final, Literal

from markupsafe import Markup

from storesvc_client import (
    Checkpoint,
    Diff,
    HoldInfo,
    LeafInfo,
    OpenCheckpoint,
    Tag,
    WriterReport,
)
from storesvc_client._pictures.chunk_map import chunk_map as chunk_map_picture
from storesvc_client._pictures.layer_bars import changed_shares
from storesvc_client._pictures.layer_bars import layer_bars as layer_bars_picture
from storesvc_client._pictures.sharding_grid import (
    sharding_grid as sharding_grid_picture,
)
from storesvc_client._pictures.timeline import timeline as timeline_picture
from storesvc_client._pictures.treemap import treemap as treemap_picture
from storesvc_client._values.plots import plot_of
from storesvc_client._values.texts import printable
from storesvc_client.console.leaf_values import LeafValues
from storesvc_client.console.save_chart import save_chart

_WIDTH: Final = 96
_HEIGHT: Final = 22


def metric_plot(
    run: str, metric: str, checkpoints: Sequence[Checkpoint]
) -> Markup | None:
    """Returns the plot of a metric over steps."""
    drawn = [c for c in checkpoints if math.isfinite(c.metrics.get(metric, math.nan))]
    if len(drawn) < 2:
        return None
    return _drawn(plot_of(run, metric, checkpoints).svg)


def sparkline(values: Sequence[float], title: str) -> Markup | None:
    """Returns a small line through values, the oldest first."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return None
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    points = " ".join(
        f"{2 + at * (_WIDTH - 4) / (len(finite) - 1):.1f},"
        f"{_HEIGHT - 3 - (value - low) / span * (_HEIGHT - 6):.1f}"
        for at, value in enumerate(finite)
    )
    return Markup(  # noqa: S704 - numbers, and an escaped title
        f'<svg class="spark" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" role="img"><title>{escape(printable(title))}</title>'
        f'<polyline points="{points}" fill="none" stroke="currentColor" '
        'stroke-width="1.5" stroke-linejoin="round"/></svg>'
    )


def timeline(
    checkpoints: Sequence[Checkpoint], tags: Sequence[Tag], holds: Sequence[HoldInfo]
) -> Markup | None:
    """Returns the checkpoints of a run over steps, deleted ones included."""
    if not checkpoints:
        return None
    damaged = {found.step for found in checkpoints if "damage" in found.labels}
    return _drawn(
        timeline_picture(
            checkpoints, tags=tags, holds=holds, damaged=damaged, width=1180
        )
    )


def treemap(opened: OpenCheckpoint, found: Diff | None) -> Markup | None:
    """Returns the leaves of a checkpoint as areas, coloured by dtype or by change."""
    leaves = opened.leaves.values()
    if not any(leaf.size_bytes for leaf in leaves):
        return None
    shares = None if found is None else changed_shares(found)
    return _drawn(treemap_picture(leaves, width=780, height=360, changed=shares))


def chunk_map(leaf: LeafInfo) -> Markup | None:
    """Returns the grid of the chunks of a leaf of several."""
    if leaf.chunk_count < 2:
        return None
    return _drawn(chunk_map_picture(leaf.shape, leaf.chunk_shape, width=760))


def sharding_grid(leaf: LeafInfo) -> Markup | None:
    """Returns the devices that held the blocks of a leaf."""
    if leaf.sharding is None or not leaf.shape:
        return None
    return _drawn(sharding_grid_picture(leaf.shape, leaf.sharding, width=760))


def histogram(values: LeafValues, scale: Literal["linear", "symlog"]) -> Markup | None:
    """Returns the histogram of a leaf."""
    found = values.statistics
    if found is None or found.minimum is None:
        return None
    return _drawn(found.histogram(scale=scale).drawing)


def heatmap(values: LeafValues) -> Markup | None:
    """Returns the means of the blocks of a leaf of two dimensions or more."""
    found = values.statistics
    if found is None or found.means is None or found.minimum is None:
        return None
    return _drawn(found.heatmap().drawing)


def save_phases(writer: WriterReport, seconds: float) -> Markup | None:
    """Returns the phases of a process of a save."""
    if not writer.timeline:
        return None
    label = f"phases of process {writer.writer}"
    return _drawn(save_chart(writer.timeline, seconds=seconds, label=label))


def layer_bars(opened: OpenCheckpoint, found: Diff) -> Markup | None:
    """Returns the share of the changed bytes of each layer."""
    shares = changed_shares(found)
    if not shares:
        return None
    return _drawn(layer_bars_picture(opened.leaves.values(), shares, width=1180))


def _drawn(svg: str) -> Markup:
    """Marks a picture as HTML: the functions that draw escape every text."""
    return Markup(svg)  # noqa: S704
