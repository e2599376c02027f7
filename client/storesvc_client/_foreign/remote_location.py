"""A location that fsspec reads: a bucket, a repository, a web server, or memory."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final, Self
from urllib.parse import urlsplit

from storesvc.storage.gcs import endpoint_in_environment
from storesvc.storage.location import Storage
from storesvc_client._foreign.location import checked_path
from storesvc_client._storage.outside import (
    files_error,
    name_below,
    open_outside,
    text_of,
)
from storesvc_client.errors import (
    DataLossError,
    NotFoundError,
    PreconditionError,
    StoreError,
    UnavailableError,
)

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


class RemoteLocation:
    """A folder that fsspec reads. Thread-safe.

    fsspec's own caches are off: a list is new each time.
    """

    is_local: Final = False

    def __init__(
        self,
        url: str,
        files: Any,
        folder: str,
        storage: Storage | None,
        *,
        has_renames: bool = False,
    ) -> None:
        self.url = url
        self.has_renames = has_renames
        self._files = files
        """File system of fsspec."""
        self._root = folder
        """The folder in the form of that file system."""
        self._storage = storage
        """The bucket as TensorStore opens it; None for other locations."""

    @classmethod
    def at(cls, url: str, options: Mapping[str, Any]) -> Self:
        """Returns the location at a URL.

        Args:
            url: URL of a scheme of ``outside.PACKAGES``.
            options: Options of the file system.

        Raises:
            InvalidRequestError: The URL or an option is invalid, or a package is
                missing.
        """
        found = open_outside(url, options, noun="location")
        return cls(found.url, found.files, found.folder, found.storage)

    def __repr__(self) -> str:
        return f"<RemoteLocation {self.url}>"

    def names(self, folder: str = "") -> Sequence[str]:
        """See ``Location``."""
        return sorted(self._listed(folder))

    def stamps(self, folder: str = "") -> Mapping[str, str]:
        """See ``Location``."""
        listed = sorted(self._listed(folder).items())
        return {
            name: "" if name.endswith("/") else self._stamp(row) for name, row in listed
        }

    def size(self, path: str) -> int | None:
        """See ``Location``."""
        place = self._place(checked_path(self.url, path))
        with self._translated(path, is_absent_error=False):
            found = self._files.info(place)
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
        """See ``Location``."""
        size = self.size(path)
        if size is None:
            raise NotFoundError(f"{self.url}/{path}: expected a file, found none")
        if size > limit:
            raise DataLossError(
                f"{self.url}/{path}: expected at most {limit} bytes, got {size}; use "
                "another checkpoint"
            )
        with self._translated(path):
            data: bytes = self._files.cat_file(self._place(path))
            return self._checked(path, 0, size, data)
        raise AssertionError

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """See ``Location``."""
        place = self._place(checked_path(self.url, path))
        if not 0 <= start <= stop:
            raise DataLossError(
                f"{self.url}/{path}: expected a range, got {start} to {stop}; use "
                "another checkpoint"
            )
        if start == stop:
            return b""
        with self._translated(path):
            data: bytes = self._files.cat_file(place, start=start, end=stop)
            return self._checked(path, start, stop, data)
        raise AssertionError

    def read_into(self, path: str, start: int, into: memoryview) -> None:
        """See ``Location``."""
        flat = into.cast("B")
        flat[:] = self.read_range(path, start, start + len(flat))

    def kvstore(self, folder: str = "") -> dict[str, Any]:
        """See ``Location``."""
        inside = checked_path(self.url, folder, is_folder=True)
        below = f"{inside}/" if inside else ""
        if self._storage is not None:
            spec = dict(self._storage.spec)
            return {**spec, "path": spec["path"] + below}
        url = urlsplit(self.url)
        if url.scheme in ("http", "https"):
            path = f"{url.path.rstrip('/')}/{below}"
            base = f"{url.scheme}://{url.netloc}"
            return {"driver": "http", "base_url": base, "path": path}
        from storesvc_client._foreign import loopback

        return loopback.kvstore(self, inside)

    def below(self, folder: str) -> "RemoteLocation":
        """See ``Location``."""
        inside = checked_path(self.url, folder)
        storage = self._storage
        if storage is not None:
            storage = replace(storage, spec=self.kvstore(folder))
        return RemoteLocation(
            f"{self.url.rstrip('/')}/{inside}",
            self._files,
            self._place(inside),
            storage,
            has_renames=self.has_renames,
        )

    def labels(self) -> Mapping[str, str]:
        """See ``Location``."""
        return {}

    def opening(self) -> AbstractContextManager[None]:
        """See ``Location``."""
        if self._storage is None:
            return nullcontext()
        return endpoint_in_environment(self._storage)

    def _listed(self, folder: str) -> dict[str, Mapping[str, Any]]:
        """Returns the names in a folder, and what fsspec reports of each."""
        inside = checked_path(self.url, folder, is_folder=True)
        place = self._place(inside)
        with self._translated(inside, is_absent_error=False):
            self._files.invalidate_cache()
            rows = self._files.ls(place, detail=True)
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
            with self._translated(str(row["name"])):
                row = self._files.info(row["name"])
        version = next((row[field] for field in _VERSION_FIELDS if field in row), "")
        return f"{row.get('size')} {version}"

    def _place(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _checked(self, path: str, start: int, stop: int, data: bytes) -> bytes:
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
    def _translated(
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
            if _is_unreached(e):
                raise UnavailableError(
                    f"{place}: cannot be read ({text_of(e.__cause__)}); check the "
                    "storage, and try again"
                ) from e
            if not is_absent_error:
                return
            raise NotFoundError(f"{place}: expected a file, found none") from e
        except Exception as e:
            remedy = "check the storage, and try again"
            raise files_error(e, place, verb="read", remedy=remedy) from e


def _is_unreached(e: OSError) -> bool:
    """Returns whether an absent file is another error: fsspec's file system of web
    servers raises FileNotFoundError for a server that does not answer, too."""
    return isinstance(e.__cause__, OSError) and (
        not isinstance(e.__cause__, FileNotFoundError | NotADirectoryError)
    )
