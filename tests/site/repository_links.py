"""Links of documents between places of the repository, as links between pages.

Documents link each other, and files of the repository, by relative paths, so that the
links work in a checkout. The site has pages for some of these places; a link to any
other place becomes its text.
"""

import posixpath
import re
from collections.abc import Mapping
from typing import Final

_LINK: Final = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCED: Final = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def rewritten(
    markdown: str, *, source: str, page: str, pages: Mapping[str, str]
) -> str:
    """Returns a document with links to pages of the site.

    Args:
        markdown: The text of the document.
        source: Path of the document in the repository.
        page: Path of its page in the site.
        pages: Path of the page, or file, of each place of the repository that has one.
    """

    def target_of(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            return found[0]
        path, hash_sign, heading = target.partition("#")
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        at = pages.get(place)
        if at is None:
            return text
        anchor = hash_sign + heading
        return f"{mark}[{text}]({_relative(at, page)}{anchor})"

    pieces = _FENCED.split(markdown)
    pieces[::2] = [_LINK.sub(target_of, piece) for piece in pieces[::2]]
    return "".join(pieces)


def _relative(target: str, page: str) -> str:
    return posixpath.relpath(target, posixpath.dirname(page) or ".")
