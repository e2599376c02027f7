"""The sums of the chunks of a save, as they become known."""

import numpy as np

from storesvc.format.chunks import I64, Sums


class SumsInProgress:
    """The sums of all chunks of a tree; of each, they are set once."""

    def __init__(self, count: int) -> None:
        self._crc32c = np.zeros(count, np.uint32)
        self._digests = np.zeros((count, 16), np.uint8)
        self._known = np.zeros(count, np.bool_)

    def knows(self, ordinal: int) -> bool:
        """Returns whether the sums of a chunk are set."""
        return bool(self._known[ordinal])

    def crc32c(self, ordinal: int) -> int:
        """Returns the CRC-32C of a chunk whose sums are set."""
        return int(self._crc32c[ordinal])

    def set(self, ordinal: int, crc32c: int, digest: bytes) -> None:
        """Sets the sums of a chunk."""
        self._crc32c[ordinal] = crc32c
        self._digests[ordinal] = np.frombuffer(digest, np.uint8)
        self._known[ordinal] = True

    def copy(self, sums: Sums, rows: I64) -> None:
        """Takes the sums of chunks over from other ones of all chunks."""
        self._crc32c[rows] = sums.crc32c[rows]
        self._digests[rows] = sums.digests[rows]
        self._known[rows] = True

    def result(self, ordinals: I64 | None = None) -> Sums:
        """Returns the sums of some chunks, ascending; None: of all."""
        at = np.arange(len(self._crc32c)) if ordinals is None else ordinals
        return Sums(ordinal=at, crc32c=self._crc32c[at], digests=self._digests[at])
