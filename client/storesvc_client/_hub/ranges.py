"""The headers of a request that choose bytes: Range, If-Range, If-None-Match.

>>> parse_range("bytes=-2", 10)
(8, 10)
>>> parse_range("bytes=4-", 10)
(4, 10)
>>> parse_range("lines=1-2", 10)
(0, 10)
"""

import re
from typing import Final

_RANGE: Final = re.compile(r"bytes=([0-9]{0,19})-([0-9]{0,19})")


def parse_range(text: str, size: int) -> tuple[int, int] | None:
    """Returns the first byte of a range, and the one after its last; None if the file
    has none of these bytes.

    A header that this module does not know, such as one of several ranges, asks for the
    whole file, as RFC 9110 permits.
    """
    found = _RANGE.fullmatch(text.strip())
    if found is None or found[1] == found[2] == "":
        return 0, size
    first, last = found[1], found[2]
    if not first:
        start, stop = max(size - int(last), 0), size
    else:
        start, stop = int(first), min(int(last) + 1, size) if last else size
        if last and int(last) < start:
            return 0, size  # no valid range
    return (start, stop) if start < min(stop, size) else None


def has_tag(header: str, tag: str) -> bool:
    """Returns whether If-None-Match names an entity tag."""
    tags = [each.strip().removeprefix("W/") for each in header.split(",")]
    return "*" in tags or f'"{tag}"' in tags
