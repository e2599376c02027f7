"""A picture for notebooks: SVG with a name."""

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Final

from storesvc_client._views.plots import write_svg
from storesvc_client._views.texts import printable

_GREY: Final = "#767676"
"""Colour of texts that can be read on a white and on a black page. Notebooks show a
picture apart from their page, so it does not get the colour of the page's texts."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Picture:
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

    @property
    def svg(self) -> str:
        """Text of the picture as an SVG file, with grey texts and lines."""
        return self.drawing.replace("<svg ", f'<svg color="{_GREY}" ', 1)

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
        return write_svg(self.name, self.svg, path)
