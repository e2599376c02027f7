"""Orders texts as people do: numbers in them by value.

>>> sorted(["layer_10", "layer_2"], key=natural_key)
['layer_2', 'layer_10']
"""

import re
from typing import Final, TypeAlias

NaturalKey: TypeAlias = tuple[object, ...]
"""A sort key; comparable with others of ``natural_key``."""

_DIGITS: Final = re.compile("([0-9]+)")


def natural_key(text: str) -> NaturalKey:
    """Returns the sort key of a text.

    Numbers are compared by length and digits: no text is converted to an integer, which
    Python rejects for very long ones. A number sorts before a letter.
    """
    pieces = _DIGITS.split(text)
    return (*map(_piece_key, range(len(pieces)), pieces),), text


def _piece_key(index: int, piece: str) -> tuple[int, str]:
    """Returns the key of a piece; digits are at the odd positions of a split."""
    if index % 2 == 0:
        return len(piece) > 0, piece
    digits = piece.lstrip("0")
    return len(digits), digits
