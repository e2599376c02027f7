"""Lists of buckets on Google Cloud Storage.

TensorStore's own lists are not for us: a page that is refused (400, 401, 403, 404) ends
one as if nothing followed. Who collects garbage by such a list deletes what is needed.
"""

from typing import TYPE_CHECKING, Any, Final, Self

from storesvc.errors import StorageUnavailableError, StoreError
from storesvc.storage import deadlines
from storesvc.storage.daemon_threads import aside
from storesvc.storage.errors import (
    denied,
    failed,
    no_bucket,
    translated,
    unaccepted,
)
from storesvc.storage.gcs_client import bucket_of
from storesvc.storage.location import Storage

if TYPE_CHECKING:
    from google.auth.exceptions import GoogleAuthError
    from google.cloud.storage import Bucket

RETRY_SECONDS: Final = 30.0
"""How long a page is asked for again that fails in passing."""

TIMEOUT_SECONDS: Final = (10.0, 20.0)
"""Of one try: to connect, and between bytes of the answer."""

MAX_EMPTY_PAGES: Final = 1000
"""Pages without a name, one after another, before a list is taken for endless."""

_REPEATED: Final = "a page of its list repeats names of the page before"
_ENDLESS: Final = f"its list has {MAX_EMPTY_PAGES} empty pages, one after another"


class GcsLists:
    """The names in a bucket, below a root. Threads may share it."""

    def __init__(self, storage: Storage, bucket: "Bucket", path: str) -> None:
        self._storage = storage
        self._bucket = bucket
        self._path = path
        """What the names of the root begin with."""

    @classmethod
    async def of(cls, storage: Storage) -> Self:
        """Returns those of a bucket there.

        Raises:
            InvalidFieldError: The packages that speak to it are not installed, or
                there are no credentials.
        """
        bucket = await aside(bucket_of, storage)
        return cls(storage, bucket, storage.spec["path"])

    async def names(self, prefix: str, *, after: str = "") -> list[str]:
        """Returns all places that begin with a prefix, ascending.

        Args:
            prefix: What they begin with.
            after: Only those after this place.

        Raises:
            StorageDeniedError: The storage lets us not in, or not do this.
            StorageUnavailableError: A page cannot be had.
        """
        found: list[str] = []
        pages = self._pages(prefix, after)
        with translated(self._storage, prefix):
            # their order is that of UTF-8, as that of texts is
            while page := await self._page(pages, prefix):
                if found and page[0] <= found[-1]:
                    raise failed(self._storage, prefix, _REPEATED)
                found += page
        return found

    async def first_names(self, limit: int) -> list[str]:
        """Returns the names of up to so many objects, by one request.

        Raises:
            StorageDeniedError: The storage lets us not in.
            StorageUnavailableError: It does not answer.
        """
        with translated(self._storage, ""):
            return await self._page(self._pages("", "", at_most=limit), "")

    async def check_bucket(self) -> None:
        """Refuses a bucket that is not there: to read from it finds nothing.

        Raises:
            InvalidFieldError: It is not.
            StorageDeniedError: It lets us not in.
            StorageUnavailableError: It does not answer.
        """
        from google.api_core.exceptions import NotFound

        try:
            with translated(self._storage, ""):
                await self._page(self._pages("", "", at_most=1), "")
        except StorageUnavailableError as e:
            if not isinstance(e.__cause__, NotFound):
                raise
            raise no_bucket(self._storage) from e

    async def _page(self, pages: Any, prefix: str) -> list[str]:
        """The names of the next page; none: that was the last."""
        asked = aside(self._next, pages, prefix)
        return await deadlines.answer(self._storage, asked)

    def _pages(self, prefix: str, after: str, at_most: int | None = None) -> Any:
        """The pages of a list, each asked for when it is wanted."""
        from google.cloud.storage.retry import DEFAULT_RETRY

        return self._bucket.list_blobs(
            prefix=f"{self._path}{prefix}",
            start_offset=f"{self._path}{after}\0" if after else None,
            max_results=at_most,
            fields="items(name),nextPageToken",
            timeout=TIMEOUT_SECONDS,
            retry=DEFAULT_RETRY.with_timeout(RETRY_SECONDS),
        ).pages

    def _next(self, pages: Any, prefix: str) -> list[str]:
        from google.api_core.exceptions import GoogleAPIError
        from google.auth.exceptions import GoogleAuthError
        from requests.exceptions import RequestException

        try:
            # a page may be empty and not the last
            for number, page in enumerate(pages):
                if names := [blob.name.removeprefix(self._path) for blob in page]:
                    return names
                if number >= MAX_EMPTY_PAGES:
                    raise failed(self._storage, prefix, _ENDLESS)
        except (GoogleAPIError, GoogleAuthError, RequestException) as e:
            raise _error(self._storage, prefix, e) from e
        return []


def _error(storage: Storage, prefix: str, cause: Exception) -> StoreError:
    from google.api_core.exceptions import Forbidden, RetryError, Unauthorized
    from google.auth.exceptions import GoogleAuthError

    if isinstance(cause, RetryError) and cause.cause is not None:
        cause = cause.cause  # it says itself no more than how long it has tried
    told = _told(cause)
    is_about_tokens = isinstance(cause, GoogleAuthError) and not _is_passing(cause)
    if is_about_tokens or isinstance(cause, Unauthorized):
        return unaccepted(storage, prefix, told)
    if isinstance(cause, Forbidden):
        return denied(storage, prefix, told)
    return failed(storage, prefix, told)


def _is_passing(cause: "GoogleAuthError") -> bool:
    """Whether who hands out tokens has not answered, rather than refused."""
    from google.auth.exceptions import GoogleAuthError, TransportError

    while cause.args and isinstance(cause.args[0], GoogleAuthError):
        cause = cause.args[0]
    # beside its message it has what was answered
    is_unanswered = isinstance(cause, TransportError) and len(cause.args) == 1
    return cause.retryable or is_unanswered


def _told(cause: object) -> str:
    """What an error says, of what it holds beside that."""
    from google.api_core.exceptions import GoogleAPICallError

    if isinstance(cause, GoogleAPICallError) and cause.errors:
        return str(cause.errors[0].get("message", cause))
    while isinstance(cause, Exception) and cause.args:
        cause = cause.args[0]
    return str(cause).partition("\n")[0]
