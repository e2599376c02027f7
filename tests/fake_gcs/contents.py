"""Data of an object, and its checksums in base64."""

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, TypeAlias

import crc32c as crc32c_of

from tests.fake_gcs.refusals import RefusedError

Data: TypeAlias = bytes | bytearray | memoryview

MD5_MOST_BYTES: Final = 1 << 20
"""Largest object that gets an MD5 which no client sent: an MD5 takes ten times as long
as a CRC-32C. Clients work without one, as composed objects never have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Immutable data of an object, and its checksums."""

    data: Data
    crc32c: str
    md5: str | None

    @classmethod
    def of(cls, data: Data, claims: Mapping[str, str]) -> "Content":
        """Returns data with its checksums.

        Args:
            data: The data; it is referenced, not copied.
            claims: Checksums that the client announced, by name: "crc32c", "md5".

        Raises:
            RefusedError: A checksum differs from the data's.
        """
        has_md5 = len(data) <= MD5_MOST_BYTES or "md5" in claims
        content = cls(
            data=data, crc32c=_crc32c(data), md5=_md5(data) if has_md5 else None
        )
        for name, computed in (("crc32c", content.crc32c), ("md5", content.md5)):
            claimed = claims.get(name, computed)
            if claimed != computed:
                raise RefusedError(
                    HTTPStatus.BAD_REQUEST,
                    f"{name} of the upload: expected {claimed}, got {computed}",
                )
        return content

    @classmethod
    def composed(cls, contents: list["Content"]) -> "Content":
        """Returns the concatenation of contents, without an MD5."""
        data = b"".join(content.data for content in contents)
        return cls(data=data, crc32c=_crc32c(data), md5=None)

    @property
    def hashes(self) -> dict[str, str]:
        """Checksums by name."""
        known = {"crc32c": self.crc32c}
        return known if self.md5 is None else known | {"md5": self.md5}


def _crc32c(data: Data) -> str:
    return base64.b64encode(crc32c_of.crc32c(data).to_bytes(4, "big")).decode()


def _md5(data: Data) -> str:
    return base64.b64encode(hashlib.md5(data).digest()).decode()
