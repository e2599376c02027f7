"""Encodes columns of OCDBT nodes: numbers as varints, names without shared prefixes.

A node may have 100,000 entries, so NumPy processes them, not a Python loop.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from storesvc.format.chunks import I64

U64: TypeAlias = NDArray[np.uint64]


def varints(values: "Sequence[int] | I64") -> bytes:
    """Encodes a column of unsigned numbers as varints (LEB128): seven bits per byte,
    lowest first; the top bit is set on all bytes but the last."""
    column: U64 = np.asarray(values, np.uint64)
    if not len(column):
        return b""
    width = max(1, -(-int(column.max()).bit_length() // 7))
    rest = column[:, None] >> np.arange(0, 7 * width, 7, dtype=np.uint64)
    more = rest > 0x7F
    written = (rest & 0x7F).astype(np.uint8) | (more.astype(np.uint8) << 7)
    here = rest > 0
    here[:, 0] = True
    return written[here].tobytes()


def shared_lengths(names: list[bytes]) -> I64:
    """Returns the number of bytes that each name shares with the previous one.

    Raises:
        ValueError: The names are not strictly ascending.
    """
    shared = np.zeros(len(names), np.int64)
    if len(names) < 2:
        return shared
    sizes = lengths(names)
    start = np.cumsum(sizes) - sizes
    text = b"".join((*names, bytes(8)))
    # Eight bytes at any offset are one word, so most pairs take a few steps.
    words = np.ndarray((len(text) - 7,), "<u8", text, strides=(1,))
    least = np.minimum(sizes[:-1], sizes[1:])
    pairs = np.flatnonzero(least)
    while len(pairs):
        at = shared[pairs + 1]
        differ = words[start[pairs] + at] ^ words[start[pairs + 1] + at]
        lowest = (differ & -differ).astype(np.float64)
        same = np.where(differ == 0, 8, (np.frexp(lowest)[1] - 1) >> 3)
        shared[pairs + 1] = np.minimum(at + same, least[pairs])
        pairs = pairs[(same == 8) & (at + 8 < least[pairs])]
    octets = np.frombuffer(text, np.uint8)
    before, after = octets[start[:-1] + shared[1:]], octets[start[1:] + shared[1:]]
    inside = shared[1:] < least
    ascending = np.where(inside, before < after, sizes[:-1] < sizes[1:])
    if not ascending.all():
        row = int(np.argmin(ascending))
        raise ValueError(
            f"expected strictly ascending names, got {names[row + 1][:40]!r} "
            f"after {names[row][:40]!r}"
        )
    return shared


def lengths(names: list[bytes]) -> I64:
    """Returns the number of bytes of each name."""
    return np.fromiter(map(len, names), np.int64, len(names))
