"""Groups leaf keys by the layers of a model."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

_DIGITS: Final = "0123456789"


def layers_of(keys: Iterable[str]) -> dict[str, str]:
    """Returns the layer of each key: the key up to its numbered part with the most
    siblings, at least two, such as "layers/3". Without such a part, it is the key
    without its last part, and at most four parts of it.

    >>> keys = [*(f"mu/0/layers/{at}/w" for at in range(3)), "mu/0/embed/w"]
    >>> [*layers_of(keys).values()]
    ['mu/0/layers/0', 'mu/0/layers/1', 'mu/0/layers/2', 'mu/0/embed']
    """
    parts_of = {key: tuple(key.split("/")) for key in keys}
    siblings = defaultdict[tuple[str, ...], set[str]](set)
    for parts in parts_of.values():
        for at, part in enumerate(parts):
            if part[-1:] in _DIGITS and part:
                siblings[*parts[:at], part.rstrip(_DIGITS)].add(part)
    return {key: "/".join(_layer(parts, siblings)) for key, parts in parts_of.items()}


def _layer(
    parts: tuple[str, ...], siblings: Mapping[tuple[str, ...], set[str]]
) -> tuple[str, ...]:
    most, length = 2, 0
    for at, part in enumerate(parts):
        if part[-1:] in _DIGITS and part:
            count = len(siblings[*parts[:at], part.rstrip(_DIGITS)])
            if count > most:
                most, length = count, at + 1
    return parts[:length] if length else parts[: min(max(len(parts) - 1, 1), 4)]
