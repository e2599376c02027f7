"""A location outside a store: files by fsspec, arrays by TensorStore.

``gs://`` needs gcsfs, ``s3://`` s3fs, ``hf://`` huggingface_hub, ``http(s)://``
aiohttp; each error names the package to install. Files of this machine need none.

>>> open_location("/ckpts/run").url
'file:///ckpts/run'
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from storesvc_client._storage.outside import local_folder
from storesvc_client.errors import DataLossError


class Location(Protocol):
    """A folder outside a store; what is read below it cannot lead out of it."""

    @property
    def url(self) -> str:
        """URL of the folder, without the scheme of a format and without options."""

    @property
    def is_local(self) -> bool:
        """True if the folder is one of this machine's file system."""

    @property
    def has_renames(self) -> bool:
        """True if a writer gives a folder its name when it is finished, as on a file
        system; in a bucket, it writes a mark last."""

    def names(self, folder: str = "") -> Sequence[str]:
        """Returns the names in a folder, sorted; folders end in "/"; none if there is
        no such folder."""

    def size(self, path: str) -> int | None:
        """Returns the size of a file in bytes; None if there is no such file."""

    def stamps(self, folder: str = "") -> Mapping[str, str]:
        """Returns the names in a folder as ``names`` does, each with its stamp: what
        the storage knows of a file without reading it.

        A stamp is the size, and the generation, ETag or time of the last change. It
        changes when the file is written again, and it may change when the file is
        copied. That of a folder is empty.
        """

    def read(self, path: str, *, limit: int) -> bytes:
        """Returns the contents of a file.

        Args:
            path: Relative path; a part "..", an absolute path, and a symbolic link that
                leads out of the location are rejected.
            limit: Maximum size in bytes; a larger file is rejected unread.

        Raises:
            NotFoundError: There is no such file.
            DataLossError: It is larger, or its path leads out of the location.
            PreconditionError: The storage denies access.
            UnavailableError: The storage does not answer.
        """

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Returns bytes of a file.

        Raises:
            DataLossError: The file ends before `stop`.
            NotFoundError: There is no such file.
            PreconditionError: The storage denies access, or serves no ranges.
            UnavailableError: The storage does not answer.
        """

    def read_into(self, path: str, start: int, into: memoryview) -> None:
        """Reads as many bytes of a file as `into` holds, from `start`; see
        ``read_range``."""

    def kvstore(self, folder: str = "") -> dict[str, Any]:
        """Returns the spec of TensorStore's key-value store at a folder.

        On this machine, all symbolic links below the folder, and those where they lead,
        are checked first, because TensorStore follows them and waits for pipes.

        Raises:
            DataLossError: A symbolic link leads out of the location, or a file is a
                pipe or a device.
            PreconditionError: TensorStore would use a proxy for what ``loopback``
                serves.
        """

    def below(self, folder: str) -> "Location":
        """Returns the location of a folder in this one.

        Raises:
            DataLossError: It is a symbolic link that leads out of the location.
        """

    def labels(self) -> Mapping[str, str]:
        """Returns labels of what is read there, such as the commit of a repository;
        empty where the storage has no such versions."""

    def opening(self) -> AbstractContextManager[None]:
        """Returns a block in which TensorStore opens specs of ``kvstore``: it reads
        some endpoints from the environment."""


def open_location(
    url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> Location:
    """Returns the location at a URL or a path; reads nothing.

    Args:
        url: A path, ``file:///PATH``, or a URL of one of ``outside.PACKAGES``. Options
            of a bucket may follow as for the root of a store:
            ``s3://B/P?endpoint=https://minio:9000&region=us-east-1``.
        storage_options: Options of fsspec's file system, such as ``token`` or
            ``anon``; they take precedence.

    Raises:
        InvalidRequestError: The URL names no such location, or a package is missing.
    """
    from storesvc_client._foreign.local_location import LocalLocation

    local = local_folder(url, noun="location")
    if local is not None:
        return LocalLocation(local)
    from storesvc_client._foreign.hub_location import HubLocation
    from storesvc_client._foreign.remote_location import RemoteLocation

    kind = HubLocation if os.fspath(url).startswith("hf://") else RemoteLocation
    return kind.at(os.fspath(url), storage_options or {})


def checked_path(url: str, path: str, *, is_folder: bool = False) -> str:
    """Returns a relative path that cannot lead out of a location by its parts.

    Args:
        url: The location, for the message.
        path: The path; of a folder, it may be "" and may end in "/".
        is_folder: Whether it is that of a folder.

    Raises:
        DataLossError: It is absolute, empty, or has a part that is empty, "." or "..",
            or a NUL, a backslash or a scheme.
    """
    if is_folder and not path:
        return ""
    wanted = path.removesuffix("/") if is_folder else path
    parts = wanted.split("/")
    if not {"", ".", ".."}.isdisjoint(parts) or "\0" in path or "\\" in path:
        raise DataLossError(
            f"{url}: expected a relative path without '.', '..' and empty parts, got "
            f"{path[:200]!r}; use a checkpoint whose files name no others"
        )
    return wanted
