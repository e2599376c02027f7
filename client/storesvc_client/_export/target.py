"""Writes files at the target of an export: a local directory, or a URL by fsspec.

A file appears under its name when it is complete:

- in a local directory it is written as ``.NAME.part`` and renamed; a retry begins that
  file again, and a lock keeps two exports from writing it at once;
- an object of a bucket exists once its upload is complete, and a failed upload is
  discarded.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias
from urllib.parse import unquote, urlsplit

from storesvc_client.errors import (
    InvalidRequestError,
    LimitError,
    PreconditionError,
    StoreError,
    UnavailableError,
)

COPY_BYTES: Final = 8 << 20
"""Bytes of a file that are read at once."""

_PACKAGES: Final = {
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "s3": "s3fs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
}
_NO_SPACE: Final = frozenset({28, 122})  # ENOSPC, EDQUOT


class NewFile(Protocol):
    """A file that is being written from its beginning to its end."""

    def write(self, data: Any, /) -> int:
        """Appends bytes."""


class Target(Protocol):
    """A folder that receives files; paths are relative to it."""

    url: str

    @property
    def local(self) -> Path | None:
        """The folder as a local directory; None if it is not one."""

    def size(self, path: str) -> int | None:
        """Returns the size of a file in bytes; None if there is none."""

    def names(self, folder: str = "") -> list[str]:
        """Returns the names in a folder, sorted; none if there is no such folder."""

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Returns a range of a file."""

    def create(self, path: str) -> Any:
        """Returns a context of a ``NewFile``, which appears under its name, and
        replaces a file of that name, if the block succeeds."""

    def remove(self, path: str) -> None:
        """Removes a file, or a folder with all that it holds; nothing if there is
        none."""


OpenTarget: TypeAlias = Callable[[str], Target]
"""Returns the target at a URL or a local path; see ``open_target``."""


def open_target(url: str, storage_options: Mapping[str, Any] | None = None) -> Target:
    """Returns the target at a URL or a local path.

    Args:
        url: The URL or path.
        storage_options: Options of fsspec's file system, such as ``endpoint_url``.

    Raises:
        InvalidRequestError: The URL has an unknown scheme, or a package is missing.
        PreconditionError: The storage denies access, or its host is unknown.
        UnavailableError: The storage does not answer.
    """
    scheme, colon, _ = url.partition("://")
    if not colon:
        if not url:
            raise InvalidRequestError("target: expected a path or a URL, got ''")
        return LocalTarget(Path(url).absolute())
    if scheme == "file":
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise InvalidRequestError(
                f"target {url!r}: expected file:///PATH, got a host"
            )
        return LocalTarget(Path(unquote(parts.path)))
    try:
        import fsspec
    except ImportError as e:
        raise InvalidRequestError(
            f"target {url!r}: expected the package fsspec, which writes to such URLs; "
            "pip install fsspec"
        ) from e
    try:
        with translated(f"target {url!r}"):  # some file systems connect at once
            files, root = fsspec.core.url_to_fs(url, **(storage_options or {}))
    except (ImportError, ValueError) as e:
        package = _PACKAGES.get(scheme)
        hint = f"pip install {package}" if package else "use a path, gs:// or s3://"
        raise InvalidRequestError(f"target {url!r}: {e}; {hint}") from e
    return RemoteTarget(files, root.rstrip("/"), url.rstrip("/"))


@contextmanager
def translated(place: str) -> Generator[None]:
    """Raises errors of the operating system as errors of this library."""
    try:
        yield
    except StoreError:  # some are OSErrors too
        raise
    except OSError as e:
        message = f"{place}: {e.strerror or e}"
        if e.errno in _NO_SPACE:
            raise LimitError(f"{message}; free space, and export again") from e
        if isinstance(e, ConnectionError | TimeoutError):
            raise UnavailableError(f"{message}; export again") from e
        raise PreconditionError(f"{message}; check the target") from e


class LocalTarget:
    """A local directory; created when the first file is."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.url = str(root)

    @property
    def local(self) -> Path | None:
        """See ``Target``."""
        return self._root

    def size(self, path: str) -> int | None:
        """See ``Target``."""
        with translated(f"{self._root / path}"):
            try:
                return (self._root / path).stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

    def names(self, folder: str = "") -> list[str]:
        """See ``Target``."""
        with translated(f"{self._root / folder}"):
            try:
                return sorted(each.name for each in (self._root / folder).iterdir())
            except FileNotFoundError:
                return []

    def read(self, path: str, start: int, stop: int) -> bytes:
        """See ``Target``."""
        with translated(f"{self._root / path}"), (self._root / path).open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    @contextmanager
    def create(self, path: str) -> Generator[NewFile]:
        """See ``Target``."""
        file = self._root / path
        part = file.with_name(f".{file.name}.part")
        with translated(str(file)):
            file.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(part, flags, 0o644)
            with open(descriptor, "wb") as opened:  # noqa: PTH123 - a descriptor
                lock(descriptor, part, file)
                opened.truncate(0)
                yield opened
                opened.flush()
                os.fsync(descriptor)
                part.replace(file)
            sync_directory(file.parent)

    def remove(self, path: str) -> None:
        """See ``Target``."""
        place = self._root / path
        with translated(str(place)):
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)


class RemoteTarget:
    """A prefix of a bucket, or whatever else fsspec writes to."""

    def __init__(self, files: Any, root: str, url: str) -> None:
        self._files = files
        self._root = root
        self.url = url

    @property
    def local(self) -> Path | None:
        """See ``Target``."""
        return None

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def size(self, path: str) -> int | None:
        """See ``Target``."""
        with translated(f"{self.url}/{path}"):
            try:
                self._files.invalidate_cache()
                return int(self._files.size(self._path(path)))
            except FileNotFoundError:
                return None

    def names(self, folder: str = "") -> list[str]:
        """See ``Target``."""
        with translated(f"{self.url}/{folder}"):
            try:
                self._files.invalidate_cache()
                found = self._files.ls(self._path(folder), detail=False)
            except FileNotFoundError:
                return []
        return sorted(each.rstrip("/").rpartition("/")[2] for each in found)

    def read(self, path: str, start: int, stop: int) -> bytes:
        """See ``Target``."""
        with translated(f"{self.url}/{path}"):
            found: bytes = self._files.cat_file(self._path(path), start=start, end=stop)
        return found

    @contextmanager
    def create(self, path: str) -> Generator[NewFile]:
        """See ``Target``."""
        with translated(f"{self.url}/{path}"):
            try:
                file = self._files.open(self._path(path), "wb")
            except NotImplementedError as e:
                raise InvalidRequestError(
                    f"target {self.url}: expected a URL that can be written, such as "
                    "gs:// or s3://, got one that can only be read"
                ) from e
            try:
                yield file
            except BaseException:
                # closing it would complete the upload
                with suppress(AttributeError, NotImplementedError, OSError):
                    file.discard()
                with suppress(AttributeError):
                    file.closed = True
                with suppress(OSError):  # of a storage that had made it at once
                    self._files.rm(self._path(path))
                raise
            file.close()

    def remove(self, path: str) -> None:
        """See ``Target``."""
        with (
            translated(f"{self.url}/{path}"),
            suppress(FileNotFoundError),
        ):
            self._files.rm(self._path(path), recursive=True)


def lock(descriptor: int, part: Path, place: Path) -> None:
    """Locks a temporary file or directory until its descriptor is closed.

    Args:
        descriptor: An open descriptor of it.
        part: Its path.
        place: The path that it will have, for the message.

    Raises:
        PreconditionError: Another export holds the lock, or has just completed it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), part.lstat()):
            return
    except (BlockingIOError, FileNotFoundError):
        pass
    raise PreconditionError(
        f"{place}: another export writes it; wait for it, or choose another target"
    )


def sync_directory(directory: Path) -> None:
    """Makes the entries of a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
