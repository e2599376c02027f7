"""A location outside a store: files by fsspec, arrays by TensorStore.

``gs://`` needs gcsfs, ``s3://`` s3fs, ``hf://`` huggingface_hub, ``http(s)://``
aiohttp; each error names the package to install.
"""

from collections.abc import Sequence
from typing import Any, Protocol


class Location(Protocol):
    """A folder outside a store; what is read below it cannot lead out of it."""

    @property
    def url(self) -> str:
        """URL of the folder, without the scheme of a format and without options."""

    def names(self, folder: str = "") -> Sequence[str]:
        """Returns the names in a folder, sorted; folders end in "/"; none if there is
        no such folder."""

    def size(self, path: str) -> int | None:
        """Returns the size of a file in bytes; None if there is no such file."""

    def read(self, path: str, *, limit: int) -> bytes:
        """Returns the contents of a file.

        Args:
            path: Relative path; a part "..", an absolute path, and a symbolic link that
                leads out of the location are rejected.
            limit: Maximum size in bytes; a larger file is rejected unread.

        Raises:
            NotFoundError: There is no such file.
            DataLossError: It is larger.
            UnavailableError: The storage does not answer.
        """

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Returns bytes of a file.

        Raises:
            DataLossError: The file ends before `stop`.
            NotFoundError: There is no such file.
            UnavailableError: The storage does not answer.
        """

    def read_into(self, path: str, start: int, into: memoryview) -> None:
        """Reads as many bytes of a file as `into` holds, from `start`; see
        ``read_range``."""

    def kvstore(self, folder: str = "") -> dict[str, Any]:
        """Returns the spec of TensorStore's key-value store at a folder.

        Raises:
            PreconditionError: TensorStore has no driver for such URLs.
        """
