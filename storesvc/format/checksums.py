"""Checksums and digests: what binds stored bytes to what was saved."""

from typing import Final, TypeAlias

import crc32c as _crc32c
import xxhash

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Bytes, wherever they lie; contiguous."""

DIGEST_BYTES: Final = 16
"""Bytes of a digest: XXH3-128, canonical (big-endian)."""


def crc32c(data: Buffer, start: int = 0) -> int:
    """Returns the CRC-32C (RFC 3720) of data, or of what ``start`` is the
    checksum of, followed by data."""
    return _crc32c.crc32c(data, start)


def digest(data: Buffer) -> bytes:
    """Returns the XXH3-128 of data, 16 bytes."""
    return xxhash.xxh3_128_digest(data)


class Digesting:
    """The digest of data that comes in pieces."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def add(self, piece: Buffer) -> None:
        """Adds the next piece."""
        self._digest.update(piece)

    @property
    def digest(self) -> bytes:
        """The digest of what was added, as ``digest`` returns it."""
        return self._digest.digest()


class Summing(Digesting):
    """The checksum and the digest of data that comes in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.crc32c = 0
        """Of what was added."""

    def add(self, piece: Buffer) -> None:
        """Adds the next piece."""
        super().add(piece)
        self.crc32c = crc32c(piece, self.crc32c)
