"""Checks and corrects the HTML of pages."""

import re
from typing import Final

LONG: Final = 20
"""Characters of a name in a table above which it may be broken at a separator."""

_CELL: Final = re.compile(r"(<td[^>]*>)(.*?)(</td>)", re.DOTALL)
_CODE: Final = re.compile(r"<code>([^<]+)</code>")
_BREAK: Final = re.compile(r"(?<=[_/.:])(?=[\w{])")


def loaded_from_elsewhere(html: str) -> list[str]:
    """Returns what a page loads from other hosts; links to follow do not count."""
    tags = re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", html)
    return [tag for tag in tags if re.search(r"""["'](?:https?:)?//""", tag)]


def with_breaks(html: str) -> str:
    """Returns a page whose tables break long names behind ``_``, ``/``, ``.`` or ``:``
    rather than within a word."""

    def broken(found: re.Match[str]) -> str:
        if len(found[1]) <= LONG:
            return found[0]
        return f"<code>{_BREAK.sub('<wbr>', found[1])}</code>"

    return _CELL.sub(lambda cell: cell[1] + _CODE.sub(broken, cell[2]) + cell[3], html)
