"""A heatmap of the means of blocks: hue by sign, strength by magnitude.

Values near 0 have the colour of the page, light or dark.

Example:
    >>> svg = heatmap(statistics.means, leaf.shape, remark=statistics.sample)
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from storesvc_client._pictures.svg import (
    Style,
    document,
    element,
    fit_text,
    note,
    number,
    text_width,
    words,
)
from storesvc_client._views.texts import number_text, sizes_text

if TYPE_CHECKING:
    from storesvc_client._pictures.statistics import Means

_NEGATIVE: Final = "#2b83ea"
_POSITIVE: Final = "#d9653b"
_LEVELS: Final = 12
"""Strengths of each hue; all blocks of one are one element."""

_LARGEST: Final = 24.0
_CAPTION: Final = 44.0
_SCALE: Final = 160.0
"""Width of the scale of colours."""


def heatmap(
    means: "Means | None",
    shape: Sequence[int],
    *,
    remark: str = "",
    width: float = 480,
) -> str:
    """Returns the heatmap of a leaf as SVG.

    Args:
        means: Rows of means; None for a leaf of rank 0 or 1.
        shape: Shape of the leaf.
        remark: Text below, about what was read.
        width: Width in pixels.
    """
    known = [mean for row in means or () for mean in row if mean is not None]
    if means is None or not known:
        text = "a heatmap needs two dimensions" if means is None else "no finite values"
        return note(text, width=width)
    columns, rows = len(means[0]), len(means)
    size = min(width / columns, _LARGEST)
    strongest = max(abs(min(known)), abs(max(known)))
    body = [*_cells(means, size, strongest)]
    top = rows * size + 16
    body += _scale(strongest, top)
    lead = f", mean over {sizes_text(shape[:-2])}" if len(shape) > 2 else ""
    blocks = f"{rows} x {columns} blocks of {sizes_text(shape[-2:])}{lead}"
    caption = f"{blocks}, {remark}" if remark else blocks
    body.append(words(fit_text(caption, width), 0, top + 22, fill_opacity=0.7))
    body.append(
        element(
            "rect",
            x=0,
            y=0,
            width=columns * size,
            height=rows * size,
            fill="none",
            stroke="currentColor",
            stroke_opacity=0.25,
        )
    )
    low, high = number_text(min(known)), number_text(max(known))
    label = f"means from {low} to {high} of {caption}"
    return document(body, label=label, width=width, height=rows * size + _CAPTION)


def _cells(means: "Means", size: float, strongest: float) -> Iterator[str]:
    """Yields one path for each strength, and one for blocks without a mean."""
    squares: dict[int | None, list[str]] = {}
    for row, line in enumerate(means):
        for column, mean in enumerate(line):
            share = (mean or 0) / strongest if strongest else 0
            level = None if mean is None else round(_LEVELS * share)
            x, y, side = (number(n) for n in (column * size, row * size, size))
            square = f"M{x} {y}h{side}v{side}h-{side}z"
            if level is None:  # a cross, so that it differs from 0
                square = f"M{x} {y}l{side} {side}m0 -{side}l-{side} {side}"
            squares.setdefault(level, []).append(square)
    for level, found in squares.items():
        places = "".join(found)
        if level is None:
            yield element(
                "path",
                d=places,
                fill="none",
                stroke="currentColor",
                stroke_opacity=0.3,
            )
        elif level:
            yield element("path", d=places, **_style(level))


def _style(level: int) -> Style:
    colour = _POSITIVE if level > 0 else _NEGATIVE
    # without smoothing, which would draw lines between neighbours of other strengths
    crisp: Style = {"shape_rendering": "crispEdges"}
    return crisp | {"fill": colour, "fill_opacity": abs(level) / _LEVELS}


def _scale(strongest: float, top: float) -> Iterator[str]:
    """Yields the scale of colours, with its ends and 0."""
    wide, text = _SCALE / (2 * _LEVELS + 1), number_text(strongest)
    yield words(f"-{text}", 0, top + 4)
    start = text_width(f"-{text}") + 8
    for level in range(-_LEVELS, _LEVELS + 1):
        if level:
            place: Style = {"x": start + (level + _LEVELS) * wide, "y": top - 5}
            yield element("rect", **place, width=wide, height=10, **_style(level))
    yield words("0", start + _SCALE / 2, top + 4, text_anchor="middle")
    yield words(text, start + _SCALE + 8, top + 4)
