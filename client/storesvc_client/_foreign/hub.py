"""A location in a repository of a Hugging Face Hub, read at one commit.

The first call asks for the commit of the revision, and all later ones read at that
commit: a branch that moves changes nothing, and files of two commits never mix. To read
a newer commit, open the location again.

huggingface_hub reads names, sizes and ranges. It finds the token, and sends it to the
endpoint only: not to the storage of large files that the endpoint redirects to.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from storesvc.storage.location import Storage
from storesvc_client._foreign.locations import RemoteLocation
from storesvc_client._storage.roots import error_line, files_error, http_status
from storesvc_client.errors import (
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    StoreError,
)

_WAITS: Final = (1.0, 2.0, 4.0, 8.0, 8.0)
"""Seconds before each further attempt of a request that a busy server rejected."""

_RETRY_SECONDS: Final = 20.0
"""No attempt begins later: newer versions of the library retry for as long."""

_MAX_WAIT: Final = 60.0
"""Maximum seconds that the server's ``Retry-After`` may ask for."""

_TRANSIENT: Final = frozenset({408, 429, 500, 502, 503, 504})

_REMEDY: Final = "check HF_ENDPOINT and the network, and try again"


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
        """See ``Location``."""
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
                    self._found = _retry(self._resolve)
                except StoreError:
                    raise
                except Exception as e:
                    raise self._error(e, _cause(e)) from e
            return self._found

    def _resolve(self) -> _Commit:
        """Returns the commit; raises errors of the library."""
        from huggingface_hub import HfApi
        from huggingface_hub.constants import REPO_TYPES_URL_PREFIXES

        if self._root.startswith("buckets/"):
            raise InvalidRequestError(
                f"{self.url}: expected a repository, hf://ORG/NAME, got a bucket, "
                "which has no commits; copy the checkpoint to a disk, gs:// or s3://"
            )
        found = self._hub.resolve_path(self._root)
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
        return files_error(e, self.url, verb="read", remedy=_REMEDY)


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
            return _retry(read)

    def _describe(self, call: Callable[[], Any]) -> Any:
        """Returns the result of a call that may list a folder."""

        def attempt() -> Any:
            try:
                return call()
            except FileNotFoundError:
                raise  # an answer, which leaves the lists as they are
            except BaseException:
                self._files.invalidate_cache()
                raise

        with self._lock:
            return _retry(attempt)


_Result = TypeVar("_Result")


def _retry(call: Callable[[], _Result]) -> _Result:
    """Returns the result of a call, which is repeated while the server is busy."""
    ends = time.monotonic() + _RETRY_SECONDS
    for wait in _WAITS:
        try:
            return call()
        except Exception as e:
            cause = _cause(e)
            if http_status(cause) not in _TRANSIENT or time.monotonic() > ends:
                raise
            pause = _asked_wait(getattr(cause, "response", None), wait)
        time.sleep(pause)
    return call()


def _cause(e: Exception) -> BaseException | None:
    """Returns the error that has the status of the answer."""
    return e.__cause__ if isinstance(e, FileNotFoundError) and e.__cause__ else e


def _asked_wait(response: Any, wait: float) -> float:
    """Returns the seconds to wait, as the server asks for them."""
    asked = "" if response is None else response.headers.get("Retry-After", "")
    return min(float(asked), _MAX_WAIT) if asked.isdecimal() else wait
