"""Places the names of marks in a lane, where no other mark or name is."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from storesvc_client._pictures.svg import fitted, text_width

_GAP: Final = 6.0
"""Space between a name and what is next to it."""

_WIDEST: Final = 150.0
"""Width beyond which a name is shortened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedName:
    """A name with its place."""

    text: str
    x: float
    anchor: Literal["start", "end"]
    is_above: bool
    """True for the row above the marks."""


def placed_names(
    marks: Sequence[tuple[float, str]], *, radius: float, width: float
) -> Iterator[PlacedName]:
    """Yields the names that have room: on the right of their mark, on its left, or
    above it.

    Args:
        marks: Place and name of each mark, ascending by place.
        radius: Half of the width of a mark.
        width: Right end of the lane.
    """
    beside, above = 0.0, 0.0  # ends of the last name in each row
    edges = [*(x - radius for x, _ in marks[1:]), width]
    before = [0.0, *(x + radius for x, _ in marks[:-1])]
    for (x, name), edge, last in zip(marks, edges, before, strict=True):
        text = fitted(name, _WIDEST)
        length = text_width(text)
        right, left = x + radius + _GAP - 1, x - radius - _GAP + 1
        if right + length + _GAP <= edge or (edge == width and right + length <= edge):
            yield PlacedName(text=text, x=right, anchor="start", is_above=False)
            beside = right + length
        elif left - length >= max(beside, last) + _GAP:
            yield PlacedName(text=text, x=left, anchor="end", is_above=False)
        elif x - radius >= above + _GAP and x - radius + length <= width:
            yield PlacedName(text=text, x=x - radius, anchor="start", is_above=True)
            above = x - radius + length
        elif x + radius - length >= above + _GAP:
            yield PlacedName(text=text, x=x + radius, anchor="end", is_above=True)
            above = x + radius


def needs_row_above(names: Iterable[PlacedName]) -> bool:
    """Returns whether a name is above its mark."""
    return any(name.is_above for name in names)
