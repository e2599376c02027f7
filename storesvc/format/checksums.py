"""Checksums and digests, which bind stored bytes to the saved ones."""

from typing import Final, TypeAlias

import crc32c as _crc32c
import xxhash

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Contiguous bytes in any kind of memory."""

DIGEST_BYTES: Final = 16
"""Bytes of a digest: XXH3-128, canonical (big-endian)."""


def crc32c(data: Buffer, start: int = 0) -> int:
    """Returns the CRC-32C (RFC 3720) of data; continued from ``start``, the checksum of
    preceding data."""
    return _crc32c.crc32c(data, start)


def digest(data: Buffer) -> bytes:
    """Returns the XXH3-128 digest of data, 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def hash_name(name: str) -> int:
    """Returns the XXH3-64 of a name, by which sets of names are compared."""
    return xxhash.xxh3_64_intdigest(name.encode())


class Hasher:
    """Computes the digest of data that arrives in pieces."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def add(self, piece: Buffer) -> None:
        self._digest.update(piece)

    @property
    def digest(self) -> bytes:
        """Digest of the pieces so far, as ``digest`` returns it."""
        return self._digest.digest()


class ChunkHasher(Hasher):
    """Computes the checksum and the digest of data that arrives in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.crc32c = 0
        """Checksum of the pieces so far."""

    def add(self, piece: Buffer) -> None:
        super().add(piece)
        self.crc32c = crc32c(piece, self.crc32c)
