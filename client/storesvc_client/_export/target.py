"""Writes files at the target of an export: a local directory, or a URL by fsspec.

A file appears under its name when it is complete:

- in a local directory it is written as ``.NAME.part`` and renamed; a retry begins that
  file again, and a lock keeps two exports from writing it at once;
- an object of a bucket exists once its upload is complete, and a failed upload is
  discarded.

In a bucket, where there are no locks, an export claims a step: of two exports that
write it at once, the one that began last goes on, and the other one fails. A file in
the step names the export that writes it. An export that finds the file of another one
takes it for one that has failed: it deletes what is there, and begins again. So each
export compares the file before it writes another one, and before and after the one that
completes the step: otherwise it would complete a step whose files the other one has
deleted.
"""

import fcntl
import os
import posixpath
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias
from uuid import uuid4

from storesvc.storage.location import Storage
from storesvc.storage.rooted_files import sync_directory
from storesvc_client._storage.outside import (
    OutsideFiles,
    error_line,
    files_error,
    is_denied,
    local_folder,
    name_below,
    open_outside,
)
from storesvc_client.errors import (
    InvalidRequestError,
    LimitError,
    PreconditionError,
    StoreError,
    UnavailableError,
)

COPY_BYTES: Final = 8 << 20
"""Bytes of a file that are read at once."""

_NO_SPACE: Final = frozenset({28, 122})  # ENOSPC, EDQUOT


class NewFile(Protocol):
    """A file that is being written from its beginning to its end."""

    def write(self, data: Any, /) -> int:
        """Appends bytes."""


class NewFolder(Protocol):
    """A folder that receives files; paths are relative to it."""

    url: str
    local: Path | None
    """The folder as a local directory; None if it is not one."""

    def create(self, path: str) -> Any:
        """Returns a context of a ``NewFile``, which appears under its name, and
        replaces a file of that name, if the block succeeds."""

    def remove(self, path: str) -> None:
        """Removes a file, or a folder with all that it holds; nothing if there is
        none."""


class Target(NewFolder, Protocol):
    """A folder whose files can be read, too."""

    def size(self, path: str) -> int | None:
        """Returns the size of a file in bytes; None if there is none."""

    def names(self, folder: str = "") -> list[str]:
        """Returns the names in a folder, sorted; none if there is no such folder."""

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Returns a range of a file."""

    def below(self, folder: str) -> "Target":
        """Returns a folder of it."""


OpenTarget: TypeAlias = Callable[[str], Target]
"""Returns the target at a URL or a local path; see ``open_target``."""


def open_target(url: str, storage_options: Mapping[str, Any] | None = None) -> Target:
    """Returns the target at a URL or a local path.

    Args:
        url: The URL or path, with the options of a ``Location`` of an import.
        storage_options: Options of fsspec's file system, such as ``token``; they take
            precedence.

    Raises:
        InvalidRequestError: The URL names no such place, or a package is missing.
    """
    local = local_folder(url, noun="target")
    if local is not None:
        return LocalTarget(local.absolute())
    return RemoteTarget(open_outside(url, storage_options or {}, noun="target"))


def split_file(url: str) -> tuple[str, str]:
    """Returns the URL of the folder of a file, with its options, and the file's name.

    >>> split_file("gs://bucket/models/all.npz?endpoint=http://localhost:9000")
    ('gs://bucket/models?endpoint=http://localhost:9000', 'all.npz')
    """
    path, mark, options = url.partition("?") if "://" in url else (url, "", "")
    folder, name = posixpath.split(path)
    return f"{folder}{mark}{options}" or ".", name


@contextmanager
def translate_os_errors(place: str) -> Generator[None]:
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


class LocalTarget(Target):
    """A local directory; created when the first file is."""

    def __init__(self, root: Path) -> None:
        self.local = self._root = root
        self.url = str(root)

    def size(self, path: str) -> int | None:
        with translate_os_errors(f"{self._root / path}"):
            try:
                return (self._root / path).stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

    def names(self, folder: str = "") -> list[str]:
        with translate_os_errors(f"{self._root / folder}"):
            try:
                return sorted(each.name for each in (self._root / folder).iterdir())
            except FileNotFoundError:
                return []

    def read(self, path: str, start: int, stop: int) -> bytes:
        with (
            translate_os_errors(f"{self._root / path}"),
            (self._root / path).open("rb") as file,
        ):
            file.seek(start)
            return file.read(stop - start)

    @contextmanager
    def create(self, path: str) -> Generator[NewFile]:
        file = self._root / path
        part = file.with_name(f".{file.name}.part")
        with translate_os_errors(str(file)):
            make_directory(file.parent)
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
        place = self._root / path
        with translate_os_errors(str(place)):
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)

    def below(self, folder: str) -> "LocalTarget":
        return LocalTarget(self._root / folder)


class RefusedCopyError(Exception):
    """A bucket does not copy an object; it can still be read and written."""


class RemoteTarget(Target):
    """A prefix of a bucket, or whatever else fsspec writes to."""

    def __init__(self, place: OutsideFiles) -> None:
        self.place = place
        self.url = place.url
        self.local = None
        self._files = place.files

    def below(self, folder: str) -> "RemoteTarget":
        inside = self._path(folder)
        return RemoteTarget(
            replace(self.place, url=f"{self.url}/{folder}", folder=inside)
        )

    def size(self, path: str) -> int | None:
        with self._translate_errors(path, "read"):
            try:
                self._files.invalidate_cache()
                return int(self._files.size(self._path(path)))
            except FileNotFoundError:
                return None

    def names(self, folder: str = "") -> list[str]:
        place = self._path(folder)
        with self._translate_errors(folder, "read"):
            try:
                self._files.invalidate_cache()
                found = self._files.ls(place, detail=False)
            except FileNotFoundError:
                return []
        start = f"{place}/".lstrip("/")
        return sorted({each for name in found if (each := name_below(start, name))})

    def read(self, path: str, start: int, stop: int) -> bytes:
        with self._translate_errors(path, "read"):
            found: bytes = self._files.cat_file(self._path(path), start=start, end=stop)
        return found

    @contextmanager
    def create(self, path: str) -> Generator[NewFile]:
        with self._translate_errors(path, "write"):
            try:
                file = self._files.open(self._path(path), "wb")
            except NotImplementedError as e:
                raise InvalidRequestError(
                    f"target {self.url}: expected a URL that can be written, such as "
                    "gs:// or s3://, got one that can only be read"
                ) from e
        try:
            yield _RemoteFile(file, partial(self._translate_errors, path, "write"))
            with self._translate_errors(path, "write"):
                file.close()
        except BaseException:
            # closing it would complete the upload
            with suppress(Exception):
                file.discard()
            with suppress(AttributeError):
                file.closed = True
            if self.place.storage is None:  # memory has made it at once
                with suppress(OSError):
                    self._files.rm(self._path(path))
            raise

    def remove(self, path: str) -> None:
        with self._translate_errors(path, "write"), suppress(FileNotFoundError):
            self._files.invalidate_cache()
            # one by one: the bulk deletion of s3fs keeps its errors to itself
            for name in self._files.find(self._path(path)):
                self._files.rm_file(name)

    def copy_objects(
        self, storage: Storage, paths: Sequence[str], copies: Sequence[str]
    ) -> None:
        """Copies objects within the bucket; no byte passes through this process.

        Args:
            storage: A root in the same bucket.
            paths: The objects, relative to the root.
            copies: Where their copies are, relative to this folder.

        Raises:
            RefusedCopyError: An object is not there, or the storage denies the copy, or
                has no such operation.
            UnavailableError: The storage failed.
        """
        root = f"{storage.spec['bucket']}/{storage.spec['path']}"
        with self._translate_errors("", "write"):
            try:
                # lists are not searched for patterns
                self._files.copy(
                    [f"{root}{path}" for path in paths],
                    [self._path(path) for path in copies],
                )
            except Exception as e:
                if isinstance(e, FileNotFoundError):
                    raise RefusedCopyError(f"it has no {error_line(e)}") from e
                if isinstance(e, NotImplementedError) or is_denied(e):
                    raise RefusedCopyError(error_line(e)) from e
                raise

    def sizes(self, folder: str) -> dict[str, int]:
        """Returns the sizes in bytes of the files in a folder, by name."""
        place = self._path(folder)
        with self._translate_errors(folder, "read"):
            self._files.invalidate_cache()
            found = self._files.ls(place, detail=True)
        start = f"{place}/".lstrip("/")
        return {name_below(start, row["name"]): int(row["size"] or 0) for row in found}

    def _path(self, path: str) -> str:
        return f"{self.place.folder}/{path}" if path else self.place.folder

    @contextmanager
    def _translate_errors(self, path: str, verb: str) -> Generator[None]:
        """Raises errors of fsspec as errors of this library."""
        place = f"{self.url}/{path}" if path else self.url
        try:
            yield
        except (StoreError, RefusedCopyError):  # some are OSErrors too
            raise
        except Exception as e:
            remedy = "check the storage, and export again"
            raise files_error(e, place, verb=verb, remedy=remedy) from e


class _RemoteFile:
    """A file of fsspec that raises errors of this library."""

    def __init__(
        self, file: NewFile, translating: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._file = file
        self._translating = translating

    def write(self, data: Any) -> int:
        """See ``NewFile``."""
        with self._translating():
            return self._file.write(data)


def lock(descriptor: int, part: Path, place: Path) -> None:
    """Locks a temporary file or directory until its descriptor is closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), part.lstat()):
            return
    except (BlockingIOError, FileNotFoundError):
        pass
    raise PreconditionError(
        f"{place}: another export writes it; wait for it, or choose another target"
    )


def make_directory(directory: Path) -> None:
    """Makes a directory and those above it, durably."""
    new = [each for each in (directory, *directory.parents) if not each.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for each in reversed(new):
        sync_directory(each.parent)


MARK: Final = ".storesvc-export"
"""File in a step that is not finished."""


class ClaimedStep(NewFolder):
    """A step that this export writes."""

    local = None

    def __init__(self, target: Target) -> None:
        """Claims a step.

        Args:
            target: The step; what it holds is of an export that has failed.
        """
        self._target = target
        self.url = target.url
        self._text = f"An export of storesvc that is not finished: {uuid4()}\n".encode()
        with target.create(MARK) as file:
            file.write(self._text)

    def complete(self, name: str, data: bytes) -> None:
        """Writes the file that completes the step, and removes the claim."""
        with self.create(name) as file:
            file.write(data)
        found = self._found()
        if found == self._text:
            self._target.remove(MARK)
            return
        if found:  # it has deleted files of this export, and not completed its own
            self._target.remove(name)
        raise self._lost()

    def find_bucket_target(self) -> Target:
        """Returns the target itself, for copies within its bucket."""
        if self._found() != self._text:
            raise self._lost()
        return self._target

    def create(self, path: str) -> Any:
        return self.find_bucket_target().create(path)

    def remove(self, path: str) -> None:
        self._target.remove(path)

    def _found(self) -> bytes:
        """Returns the text of the claim; empty if there is none."""
        size = self._target.size(MARK)
        return self._target.read(MARK, 0, len(self._text)) if size else b""

    def _lost(self) -> PreconditionError:
        return PreconditionError(
            f"{self.url}: another export writes it; wait for it, or choose another "
            "target"
        )
