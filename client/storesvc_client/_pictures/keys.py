"""Groups of leaf keys: natural order, and the layer of a key."""

import re
from typing import TypeAlias

Natural: TypeAlias = tuple[tuple[str, int, str], ...]

_NUMBER = re.compile(r"([0-9]{1,18})")


def natural(text: str) -> Natural:
    """Returns a sort key that orders numbers in a text by value.

    >>> sorted(["layer10", "layer9"], key=natural)
    ['layer9', 'layer10']
    """
    parts = _NUMBER.split(text)
    pairs = zip(parts[::2], [*parts[1::2], ""], strict=True)
    return tuple((words, int(digits or -1), digits) for words, digits in pairs)


def layer_of(key: str) -> str:
    """Returns the key up to its first part with a number; without one, up to its
    second part.

    >>> layer_of("params/layers/3/mlp/kernel"), layer_of("params/layer_3/kernel")
    ('params/layers/3', 'params/layer_3')
    >>> layer_of("params/embed/embedding")
    'params/embed'
    """
    parts = key.split("/")
    for at, part in enumerate(parts, 1):
        if part[-1:].isdecimal():
            return "/".join(parts[:at])
    return "/".join(parts[:2])
