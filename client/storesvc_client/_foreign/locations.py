"""A location outside a store: files by fsspec, arrays by TensorStore.

``gs://`` needs gcsfs, ``s3://`` s3fs, ``hf://`` huggingface_hub, ``http(s)://``
aiohttp; each error names the package to install.

>>> open_location("/ckpts/run").url
'file:///ckpts/run'

A folder of this machine is read without fsspec. Symbolic links are followed as long as
they stay below the folder. In a cache of Hugging Face,
``models--ORG--NAME/snapshots/REV/FILE`` is a link to ``models--ORG--NAME/blobs/HASH``:
below such a revision, links may lead anywhere in the folder of the repository.

A repository of a Hugging Face Hub is read at one commit. The first call asks for the
commit of the revision, and all later ones read at that commit: a branch that moves
changes nothing, and files of two commits never mix. To read a newer commit, open the
location again. huggingface_hub finds the token, and sends it to the endpoint only: not
to the storage of large files that the endpoint redirects to.
"""

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, Self, TypeVar
from urllib.parse import urlsplit

from storesvc.storage.location import Storage
from storesvc.storage.remote import endpoint_in_environment
from storesvc_client._storage.outside import (
    error_line,
    files_error,
    http_status,
    local_folder,
    name_below,
    open_outside,
)
from storesvc_client.errors import (
    DataLossError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    StoreError,
    UnavailableError,
)


class Location(Protocol):
    """A folder outside a store; what is read below it cannot lead out of it."""

    url: str
    """URL of the folder, without the scheme of a format and without options."""
    is_local: bool = False
    """True if the folder is one of this machine's file system."""
    has_renames: bool = False
    """True if a writer gives a folder its name when it is finished, as on a file
    system; in a bucket, it writes a mark last."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

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
        """Returns the location of a folder in this one."""

    def labels(self) -> Mapping[str, str]:
        """Returns labels of what is read there, such as the commit of a repository;
        empty where the storage has no such versions."""
        return {}

    def opening(self) -> AbstractContextManager[None]:
        """Returns a block in which TensorStore opens specs of ``kvstore``: it reads
        some endpoints from the environment."""
        return nullcontext()


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

    local = local_folder(url, noun="location")
    if local is not None:
        return LocalLocation(local)
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


_CACHED_KINDS: Final = ("models--", "datasets--", "spaces--")
"""Beginnings of the folders of repositories in a cache of Hugging Face."""

_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG})
_DENIED: Final = frozenset({errno.EACCES, errno.EPERM})

MAX_READ_BYTES: Final = 1 << 30
"""Maximum bytes of one system call; Linux reads at most 2 GiB."""


class LocalLocation(Location):
    """A folder of this machine; it need not exist. Thread-safe."""

    is_local = True
    has_renames = True

    def __init__(self, path: Path) -> None:
        self._root = Path(os.path.realpath(path))
        self.url = self._root.as_uri()
        self._bounds = _bounds(self._root)

    def names(self, folder: str = "") -> Sequence[str]:
        with self._translate_errors(folder):
            place = self._inside(checked_path(self.url, folder, is_folder=True))
            with os.scandir(place) as entries:
                return sorted(
                    f"{each.name}/" if each.is_dir() else each.name for each in entries
                )
        return []

    def stamps(self, folder: str = "") -> Mapping[str, str]:
        # the file that a symbolic link leads to counts
        with self._translate_errors(folder):
            place = self._inside(checked_path(self.url, folder, is_folder=True))
            with os.scandir(place) as entries:
                found = sorted((each.name, each) for each in entries)
                is_cache = self._bounds != self._root
                return dict(_stamp_entry(e, is_cache=is_cache) for _, e in found)
        return {}

    def size(self, path: str) -> int | None:
        with self._translate_errors(path):
            found = self._inside(checked_path(self.url, path)).lstat()
            return found.st_size if stat.S_ISREG(found.st_mode) else None
        return None

    def read(self, path: str, *, limit: int) -> bytes:
        with self._open_file(path) as (file, size):
            if size > limit:
                raise DataLossError(
                    f"{self.url}/{path}: expected at most {limit} bytes, got {size}; "
                    "use another checkpoint"
                )
            into = bytearray(size)
            self._fill(path, file, 0, memoryview(into))
        return bytes(into)

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        with self._open_file(path) as (file, size):
            self._check_end(path, start, stop, size)  # before memory is allocated
            into = bytearray(stop - start)
            self._fill(path, file, start, memoryview(into))
        return bytes(into)

    def read_into(self, path: str, start: int, into: memoryview) -> None:
        with self._open_file(path) as (file, size):
            flat = into.cast("B")
            self._check_end(path, start, start + len(flat), size)
            self._fill(path, file, start, flat)

    def kvstore(self, folder: str = "") -> dict[str, Any]:
        inside = checked_path(self.url, folder, is_folder=True)
        place = self._root / inside
        with self._translate_errors(folder):
            self._check_links(self._inside(inside))
        return {"driver": "file", "path": f"{place.as_posix().rstrip('/')}/"}

    def below(self, folder: str) -> "LocalLocation":
        return LocalLocation(self._inside(checked_path(self.url, folder)))

    def _inside(self, path: str) -> Path:
        """Returns the place of a path once all links are followed; rejects one that is
        outside the location."""
        place = Path(os.path.realpath(self._root / path))
        if not place.is_relative_to(self._bounds):
            raise DataLossError(
                f"{self.url}/{path}: expected files of this folder, got a symbolic "
                f"link to {place}; copy the checkpoint with its links replaced"
            )
        return place

    def _check_links(self, folder: Path) -> None:
        """Rejects a symbolic link that leads out of the location, and pipes and
        devices, which TensorStore would wait for: in a folder, below it, and where
        links in it lead."""
        left, seen = [str(folder)], {str(folder)}
        while left:
            with os.scandir(left.pop()) as entries:
                for each in entries:
                    # an entry knows its type without a call, unless it is a link
                    found = self._target(each) if each.is_symlink() else each
                    place = os.fspath(found)
                    if found.is_dir():
                        if place not in seen:
                            left.append(place)
                        seen.add(place)
                    elif not found.is_file() and Path(place).exists():
                        raise DataLossError(
                            f"{Path(place).as_uri()}: expected files and folders, got "
                            "a pipe, a socket or a device; use another checkpoint"
                        )

    def _target(self, link: "os.DirEntry[str]") -> Path:
        """Returns where a symbolic link leads; rejects one that leads out."""
        path = Path(link.path)
        is_below = path.is_relative_to(self._root)
        inside = path.relative_to(self._root).as_posix() if is_below else link.path
        return self._inside(inside)

    @contextmanager
    def _open_file(self, path: str) -> Generator[tuple[int, int]]:
        """Opens a regular file: its descriptor and its size."""
        with self._translate_errors(path):
            place = self._inside(checked_path(self.url, path))
            # NOFOLLOW: the links were followed; NONBLOCK: a pipe must not block us
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            file = os.open(place, flags)
            try:
                found = os.fstat(file)
                if stat.S_ISREG(found.st_mode):
                    yield file, found.st_size
                    return
            finally:
                os.close(file)
        raise NotFoundError(f"{self.url}/{path}: expected a file, found none")

    def _fill(self, path: str, file: int, start: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            some = into[done : done + MAX_READ_BYTES]
            count = os.preadv(file, [some], start + done)
            if not count:  # the file became shorter
                self._check_end(path, start, start + len(into), start + done)
            done += count

    def _check_end(self, path: str, start: int, stop: int, size: int) -> None:
        if not 0 <= start <= stop <= size:
            raise DataLossError(
                f"{self.url}/{path}: expected the bytes {start} to {stop}, got a file "
                f"of {size} bytes; use another checkpoint"
            )

    @contextmanager
    def _translate_errors(self, path: str) -> Generator[None]:
        """Translates errors of the system; absent files end the block."""
        try:
            yield
        except (DataLossError, UnavailableError):
            raise
        except OSError as e:
            if e.errno in _ABSENT:
                return
            if e.errno in _DENIED:
                raise PreconditionError(
                    f"{self.url}/{path}: access denied ({e.strerror}); use an account "
                    "that may read it"
                ) from e
            raise UnavailableError(
                f"{self.url}/{path}: cannot be read ({e.strerror}); check the storage"
            ) from e


def _stamp_entry(entry: "os.DirEntry[str]", *, is_cache: bool) -> tuple[str, str]:
    """Returns the name of a file or folder, and its stamp.

    In a cache of Hugging Face, a file is a link to one of which the name is a digest of
    the contents: it is the same on each machine, and so is the stamp.
    """
    if entry.is_dir():
        return f"{entry.name}/", ""
    try:
        found = entry.stat()
    except FileNotFoundError:  # a link to nothing, which no format reads
        return entry.name, "absent"
    if is_cache and entry.is_symlink():
        return entry.name, f"{found.st_size} {Path(entry.path).readlink().name}"
    return entry.name, f"{found.st_size} {found.st_mtime_ns}"


def _bounds(root: Path) -> Path:
    """Returns the folder that links of a location must not leave."""
    for above in root.parents:
        if above.name == "snapshots" and above.parent.name.startswith(_CACHED_KINDS):
            return above.parent
    return root


_VERSION_FIELDS: Final = (
    "generation",
    "ETag",
    "etag",
    "blob_id",
    "Last-Modified",
    "LastModified",
    "updated",
    "mtime",
    "created",
)
"""Fields in which file systems of fsspec report the version of a file, the most exact
ones first."""

_VERSIONS: Final = frozenset(_VERSION_FIELDS)


@dataclass(eq=False, repr=False)
class RemoteLocation(Location):
    """A folder that fsspec reads. Thread-safe.

    fsspec's own caches are off: a list is new each time.
    """

    url: str
    files: Any
    """File system of fsspec."""
    root: str
    """The folder in the form of that file system."""
    storage: Storage | None
    """The bucket as TensorStore opens it; None for other locations."""
    has_renames: bool = False

    @classmethod
    def at(cls, url: str, options: Mapping[str, Any]) -> Self:
        """Returns the location at a URL."""
        found = open_outside(url, options, noun="location")
        return cls(found.url, found.files, found.folder, found.storage)

    def names(self, folder: str = "") -> Sequence[str]:
        return sorted(self._list_folder(folder))

    def stamps(self, folder: str = "") -> Mapping[str, str]:
        listed = sorted(self._list_folder(folder).items())
        return {
            name: "" if name.endswith("/") else self._stamp(row) for name, row in listed
        }

    def size(self, path: str) -> int | None:
        place = self._place(checked_path(self.url, path))
        with self._translate_errors(path, is_absent_error=False):
            found = self.files.info(place)
            if found["type"] != "file":
                return None
            if found.get("size") is None:
                raise PreconditionError(
                    f"{self.url}/{path}: expected a server that announces the sizes of "
                    "files; copy the checkpoint to a disk or a bucket"
                )
            return int(found["size"])
        return None

    def read(self, path: str, *, limit: int) -> bytes:
        size = self.size(path)
        if size is None:
            raise NotFoundError(f"{self.url}/{path}: expected a file, found none")
        if size > limit:
            raise DataLossError(
                f"{self.url}/{path}: expected at most {limit} bytes, got {size}; use "
                "another checkpoint"
            )
        with self._translate_errors(path):
            data: bytes = self.files.cat_file(self._place(path))
            return self._check_length(path, 0, size, data)
        raise AssertionError

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        place = self._place(checked_path(self.url, path))
        if not 0 <= start <= stop:
            raise DataLossError(
                f"{self.url}/{path}: expected a range, got {start} to {stop}; use "
                "another checkpoint"
            )
        if start == stop:
            return b""
        with self._translate_errors(path):
            data: bytes = self.files.cat_file(place, start=start, end=stop)
            return self._check_length(path, start, stop, data)
        raise AssertionError

    def read_into(self, path: str, start: int, into: memoryview) -> None:
        flat = into.cast("B")
        flat[:] = self.read_range(path, start, start + len(flat))

    def kvstore(self, folder: str = "") -> dict[str, Any]:
        inside = checked_path(self.url, folder, is_folder=True)
        below = f"{inside}/" if inside else ""
        if self.storage is not None:
            spec = dict(self.storage.spec)
            return {**spec, "path": spec["path"] + below}
        url = urlsplit(self.url)
        if url.scheme in ("http", "https"):
            path = f"{url.path.rstrip('/')}/{below}"
            base = f"{url.scheme}://{url.netloc}"
            return {"driver": "http", "base_url": base, "path": path}
        from storesvc_client._foreign import loopback

        return loopback.kvstore(self, inside)

    def below(self, folder: str) -> "RemoteLocation":
        inside = checked_path(self.url, folder)
        storage = self.storage
        if storage is not None:
            storage = replace(storage, spec=self.kvstore(folder))
        return RemoteLocation(
            f"{self.url.rstrip('/')}/{inside}",
            self.files,
            self._place(inside),
            storage,
            has_renames=self.has_renames,
        )

    def opening(self) -> AbstractContextManager[None]:
        if self.storage is None:
            return nullcontext()
        return endpoint_in_environment(self.storage)

    def _list_folder(self, folder: str) -> dict[str, Mapping[str, Any]]:
        """Returns the names in a folder, and what fsspec reports of each."""
        inside = checked_path(self.url, folder, is_folder=True)
        place = self._place(inside)
        with self._translate_errors(inside, is_absent_error=False):
            self.files.invalidate_cache()
            rows = self.files.ls(place, detail=True)
            start = f"{place}/".lstrip("/")
            return {
                f"{name}/" if row["type"] == "directory" else name: row
                for row in rows
                if (name := name_below(start, str(row["name"])))
            }
        return {}

    def _stamp(self, row: Mapping[str, Any]) -> str:
        """Returns the stamp of a file; a web server is asked for each, as its lists
        have names only."""
        if _VERSIONS.isdisjoint(row):
            with self._translate_errors(str(row["name"])):
                row = self.files.info(row["name"])
        version = next((row[field] for field in _VERSION_FIELDS if field in row), "")
        return f"{row.get('size')} {version}"

    def _place(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    def _check_length(self, path: str, start: int, stop: int, data: bytes) -> bytes:
        """Returns bytes that were read, if they are all that were requested."""
        if len(data) > stop - start:
            raise PreconditionError(
                f"{self.url}/{path}: expected a server of ranges, got {len(data)} "
                f"bytes instead of {stop - start}; copy the checkpoint to a disk or a "
                "bucket"
            )
        if len(data) < stop - start:
            raise DataLossError(
                f"{self.url}/{path}: expected the bytes {start} to {stop}, got a file "
                f"that ends at {start + len(data)}; use another checkpoint"
            )
        return data

    @contextmanager
    def _translate_errors(
        self, path: str, *, is_absent_error: bool = True
    ) -> Generator[None]:
        """Translates errors of fsspec, whose file systems raise errors of the libraries
        below them; absent files end the block, or are an error."""
        place = f"{self.url}/{path}" if path else self.url
        try:
            yield
        except StoreError:
            raise
        except (FileNotFoundError, NotADirectoryError) as e:
            # fsspec's file system of web servers raises it for a server that does not
            # answer, too
            cause = e.__cause__
            if isinstance(cause, OSError) and not isinstance(
                cause, FileNotFoundError | NotADirectoryError
            ):
                raise UnavailableError(
                    f"{place}: cannot be read ({error_line(cause)}); check the "
                    "storage, and try again"
                ) from e
            if not is_absent_error:
                return
            raise NotFoundError(f"{place}: expected a file, found none") from e
        except Exception as e:
            remedy = "check the storage, and try again"
            raise files_error(e, place, verb="read", remedy=remedy) from e


_HUB_WAITS: Final = (1.0, 2.0, 4.0, 8.0, 8.0)
"""Seconds before each further attempt of a request that a busy server rejected."""

_HUB_RETRY_SECONDS: Final = 20.0
"""No attempt begins later: newer versions of the library retry for as long."""

_HUB_MAX_WAIT: Final = 60.0
"""Maximum seconds that the server's ``Retry-After`` may ask for."""

_HUB_TRANSIENT: Final = frozenset({408, 429, 500, 502, 503, 504})

_HUB_REMEDY: Final = "check HF_ENDPOINT and the network, and try again"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Commit:
    """The place of a location at one commit."""

    repository: str
    """Name of the repository, with ``datasets/`` or ``spaces/`` before it if it is one
    of these."""
    sha: str
    folder: str
    """Path of the location in the repository; "": all of it."""


class HubLocation(RemoteLocation):
    """A folder of a repository, ``hf://ORG/NAME[@REVISION][/FOLDER]``. Thread-safe."""

    def __init__(
        self, url: str, files: Any, folder: str, storage: Storage | None
    ) -> None:
        # no writer writes here itself: what is here was a folder of a file system
        super().__init__(url, _CommitFiles(files), folder, storage, has_renames=True)
        self._hub = files
        """File system of huggingface_hub."""
        self._lock = threading.Lock()
        self._found: _Commit | None = None

    def labels(self) -> Mapping[str, str]:
        found = self._commit()
        return {
            "huggingface.repository": found.repository,
            "huggingface.revision": found.sha,
        }

    def _place(self, path: str) -> str:
        found = self._commit()
        start = f"{found.repository}@{found.sha}"
        return "/".join(part for part in (start, found.folder, path) if part)

    def _commit(self) -> _Commit:
        """Returns the commit of the revision, which the first call asks for."""
        with self._lock:
            if self._found is None:
                try:
                    self._found = _retry_hub(self._resolve)
                except StoreError:
                    raise
                except Exception as e:
                    raise self._error(e, _hub_cause(e)) from e
            return self._found

    def _resolve(self) -> _Commit:
        """Returns the commit; raises errors of the library."""
        from huggingface_hub import HfApi
        from huggingface_hub.constants import REPO_TYPES_URL_PREFIXES

        if self.root.startswith("buckets/"):
            raise InvalidRequestError(
                f"{self.url}: expected a repository, hf://ORG/NAME, got a bucket, "
                "which has no commits; copy the checkpoint to a disk, gs:// or s3://"
            )
        found = self._hub.resolve_path(self.root)
        api = HfApi(endpoint=self._hub.endpoint, token=self._hub.token)
        sha = api.repo_info(
            found.repo_id, revision=found.revision, repo_type=found.repo_type
        ).sha
        if not sha:
            raise PreconditionError(
                f"{self.url}: expected the commit of the revision from "
                f"{self._hub.endpoint}, got none; use another endpoint"
            )
        prefix = REPO_TYPES_URL_PREFIXES.get(found.repo_type, "")
        repository = f"{prefix}{found.repo_id}"
        # the library asks once whether a revision exists: now, so that reads need not
        self._hub.resolve_path(f"{repository}@{sha}")
        return _Commit(
            repository=repository, sha=sha, folder=found.path_in_repo.rstrip("/")
        )

    def _error(self, e: Exception, cause: BaseException | None) -> StoreError:
        """Returns the error of a commit that was not found."""
        endpoint, status = self._hub.endpoint, http_status(cause)
        if type(cause).__name__ == "RevisionNotFoundError":
            return NotFoundError(
                f"{self.url}: expected a revision of the repository, found none of "
                "this name; check what follows '@'"
            )
        if status == 404:
            return NotFoundError(
                f"{self.url}: expected a repository at {endpoint} that the token may "
                "read, found none; check its name, and the token in HF_TOKEN"
            )
        if status in (401, 403):  # 401 also if there is none, without a token
            sent = getattr(cause, "response", None)
            has_token = "authorization" in sent.request.headers if sent else False
            given = "a token that may not" if has_token else "no token"
            return PreconditionError(
                f"{self.url}: expected a public repository at {endpoint}, or a token "
                f"that may read it, got {given} (status {status}); check its name, and "
                "set HF_TOKEN"
            )
        if isinstance(cause, ValueError):
            return InvalidRequestError(
                f"{self.url}: expected hf://ORG/NAME, got another name "
                f"({error_line(cause)}); check the URL"
            )
        return files_error(e, self.url, verb="read", remedy=_HUB_REMEDY)


class _CommitFiles:
    """The reads of huggingface_hub's file system, of one commit.

    Some versions of it do not retry lists, others not status 429. Older ones fill
    their cache of lists while pages arrive, so one thread at a time lists, and the
    cache is cleared after a list that failed.
    """

    def __init__(self, files: Any) -> None:
        self._files = files
        self._lock = threading.RLock()

    def invalidate_cache(self) -> None:
        """Keeps the lists, because a commit does not change."""

    def ls(self, path: str, *, detail: bool) -> Any:
        """Returns what is known of each name in a folder."""
        return self._describe(partial(self._files.ls, path, detail=detail))

    def info(self, path: str) -> Any:
        """Returns what is known of a file or folder."""
        return self._describe(partial(self._files.info, path))

    def cat_file(
        self, path: str, *, start: int | None = None, end: int | None = None
    ) -> bytes:
        """Returns bytes of a file, and reads no others: by default, the library reads
        5 MB ahead."""
        opening = partial(self._files.open, path, "rb", cache_type="none")
        file = self._describe(opening)

        def read() -> bytes:
            file.seek(start or 0)
            data: bytes = file.read(-1 if end is None else end - (start or 0))
            return data

        with file:
            return _retry_hub(read)

    def _describe(self, call: Callable[[], Any]) -> Any:
        """Returns the result of a call that may list a folder."""

        def attempt() -> Any:
            try:
                return call()
            except FileNotFoundError:
                raise  # an answer, which leaves the lists as they are
            except BaseException as e:
                if type(e).__name__ == "RemoteEntryNotFoundError":  # up to 1.19
                    raise FileNotFoundError(str(e)) from None
                self._files.invalidate_cache()
                raise

        with self._lock:
            return _retry_hub(attempt)


_Result = TypeVar("_Result")


def _retry_hub(call: Callable[[], _Result]) -> _Result:
    """Returns the result of a call, which is repeated while the server is busy, or has
    closed the connection."""
    ends = time.monotonic() + _HUB_RETRY_SECONDS
    for wait in _HUB_WAITS:
        try:
            return call()
        except Exception as e:
            cause = _hub_cause(e)
            is_transient = (
                http_status(cause) in _HUB_TRANSIENT
                # The server has closed an idle connection; up to 1.20, no retry.
                or type(cause).__name__ == "RemoteProtocolError"
            )
            if not is_transient or time.monotonic() > ends:
                raise
            response = getattr(cause, "response", None)
            asked = "" if response is None else response.headers.get("Retry-After", "")
            pause = min(float(asked), _HUB_MAX_WAIT) if asked.isdecimal() else wait
        time.sleep(pause)
    return call()


def _hub_cause(e: Exception) -> BaseException | None:
    """Returns the error that has the status of the answer."""
    return e.__cause__ if isinstance(e, FileNotFoundError) and e.__cause__ else e
