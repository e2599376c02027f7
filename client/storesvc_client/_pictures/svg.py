"""Pictures as SVG: escaped texts, texts that fit, colours for light and dark pages.

Pictures work under a strict Content-Security-Policy: no script, no style attribute, no
reference to anything outside. Texts and lines have ``currentColor``, that of the page;
colours of shapes are neither very light nor very dark, so that they can be seen on
white and on black. Texts are escaped, and unprintable characters are shown as
escapes.

Example:
    >>> element("rect", title="a < b", x=1.25, fill_opacity=0.5)
    '<rect x="1.25" fill-opacity="0.5"><title>a &lt; b</title></rect>'
"""

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypeAlias
from unicodedata import east_asian_width

from storesvc_client._views.texts import printable, printable_lines
from storesvc_client.errors import InvalidRequestError

Style: TypeAlias = dict[str, Any]
"""Attributes of an element: texts and numbers."""

FONT: Final = 11.0
"""Height of texts, in pixels."""

GREY: Final = "#9aa1a9"
BLUE: Final = "#2b83ea"
GREEN: Final = "#2f9e5b"
ORANGE: Final = "#c77700"
RED: Final = "#d64545"
PURPLE: Final = "#a35ac4"

DTYPE_COLOURS: Final = (
    "#4477aa",
    "#66ccee",
    "#228833",
    "#ccbb44",
    "#ee6677",
    "#aa3377",
)
"""Colours that also people with colour blindness can distinguish (Paul Tol)."""

_NARROW: Final = frozenset("iljtfrI.,:;|'!()[]{}/\\-` ")
_WIDE: Final = frozenset("mwMW@%…")


def element(
    tag: str, content: str = "", *, title: str = "", **attributes: str | float
) -> str:
    """Returns an element.

    Args:
        title: Lines that are shown while a pointer is on it; "" for none.
        **attributes: Attributes; "_" stands for "-", also at the end of a keyword.
    """
    parts = [f"<{tag}"]
    for name, value in attributes.items():
        shown = value if isinstance(value, str) else number(value)
        parts.append(f' {name.rstrip("_").replace("_", "-")}="{escape_text(shown)}"')
    if title:
        content = f"<title>{escape(printable_lines(title))}</title>{content}"
    parts.append(f">{content}</{tag}>" if content else "/>")
    return "".join(parts)


def document(body: Iterable[str], *, label: str, width: float, height: float) -> str:
    return element(
        "svg",
        "".join(body),
        xmlns="http://www.w3.org/2000/svg",
        class_="picture",
        role="img",
        aria_label=label,
        width=width,
        height=height,
        viewBox=f"0 0 {number(width)} {number(height)}",
        font_family="system-ui, sans-serif",
        font_size=FONT,
        fill="currentColor",
    )


def words(text: str, x: float, y: float, **attributes: Any) -> str:
    """Returns a line of text that starts at a place, or ends there or is centred."""
    return element("text", escape_text(text), x=x, y=y, **attributes)


def note(text: str, *, width: float, height: float = 60) -> str:
    """Returns a picture that only says why there is nothing to draw."""
    shown = fit_text(text, width - 16)
    return document(
        [words(shown, 8, height / 2 + 4)], label=text, width=width, height=height
    )


def line(x1: float, y1: float, x2: float, y2: float, *, opacity: float = 1.0) -> str:
    """Returns a line in the colour of texts."""
    return element(
        "line",
        x1=x1,
        y1=y1,
        x2=x2,
        y2=y2,
        stroke="currentColor",
        stroke_opacity=opacity,
    )


def draw_rect(
    x: float, y: float, width: float, height: float, **attributes: Any
) -> str:
    """Returns a rectangle by its upper left corner and its size."""
    return element("rect", x=x, y=y, width=width, height=height, **attributes)


def number(value: float) -> str:
    """Returns a coordinate, with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"


def escape_text(text: str) -> str:
    """Returns a text for an element or an attribute."""
    return escape(printable(text))


def text_width(text: str, size: float = FONT) -> float:
    """Returns an upper estimate of the width of a text in a sans-serif font."""
    return size * sum(map(_em, printable(text)))


def fit_text(text: str, width: float, size: float = FONT) -> str:
    """Returns as much of a text as fits, with "…" for the rest; "" if too little
    does."""
    shown = printable(text)
    if text_width(shown, size) <= width:
        return shown
    left, kept = width - size * _em("…"), 0
    for char in shown:
        left -= size * _em(char)
        if left < 0:
            break
        kept += 1
    return f"{shown[:kept]}…" if kept >= 2 else ""


def ink_on(colour: str) -> str:
    """Returns black or white, whichever contrasts more with a colour."""
    return (
        "#ffffff"
        if contrast("#ffffff", colour) > contrast("#000000", colour)
        else "#000000"
    )


def contrast(one: str, other: str) -> float:
    """Returns the contrast of two colours, from 1 to 21, as WCAG defines it."""
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _em(char: str) -> float:
    """Returns the width of a character, in heights of the font."""
    if char in _NARROW:
        return 0.42
    if char in _WIDE:
        return 1.0
    if not char.isascii():
        return 1.05 if east_asian_width(char) in "WFA" else 0.8
    return 0.76 if char.isupper() else 0.64


_ALONE: Final = "#767676"
"""Colour of texts that can be read on a white and on a black page. Notebooks show a
picture apart from their page, so it does not get the colour of the page's texts."""


class Drawing:
    """A drawing that a notebook shows, and that can be saved."""

    __slots__ = ()

    def _draw(self) -> tuple[str, str]:
        """Returns the name of the picture, and its drawing."""
        raise NotImplementedError

    @property
    def svg(self) -> str:
        """Text of the picture as an SVG file, with grey texts and lines."""
        return self._draw()[1].replace("<svg ", f'<svg color="{_ALONE}" ', 1)

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: "str | PathLike[str]") -> Path:
        """Writes the picture to a file, and returns its path.

        Args:
            path: A path that ends in ``.svg``.

        Raises:
            InvalidRequestError: The path has another suffix.
            OSError: The file cannot be written.
        """
        file = Path(path)
        if file.suffix.lower() != ".svg":
            raise InvalidRequestError(
                f"{self._draw()[0]}: expected a file that ends in .svg, got "
                f"{str(file)!r}"
            )
        file.write_text(self.svg, encoding="utf-8")
        return file


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Picture(Drawing):
    """A picture of a run, a checkpoint or a leaf, as SVG.

    A notebook shows it; ``svg`` is its text, and ``save`` writes that to a file.

    >>> run.open("best").pictures.treemap().save("tree.svg")
    """

    name: str
    """Name, such as "treemap of prod/llama-8b@100"."""
    drawing: str
    """SVG whose texts and lines have the colour of the text around them, for a page
    that includes it."""

    def __repr__(self) -> str:
        return f"<Picture: {printable(self.name)}>"

    def _draw(self) -> tuple[str, str]:
        return self.name, self.drawing
