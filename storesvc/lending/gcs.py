"""Limited tokens for Google Cloud Storage, by Credential Access Boundaries.

The server's own token is exchanged for one that has fewer rights. Its life is what is
left of the life of the server's token: Google has no shorter one.
"""

import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from storesvc.clock import Clock
from storesvc.errors import StorageDeniedError, StorageUnavailableError, StoreError
from storesvc.lending.boundary import Boundary, gcs_options
from storesvc.lending.credentials import GcsToken
from storesvc.storage.gcs import source_credentials
from storesvc.storage.location import Storage

if TYPE_CHECKING:
    from google.auth.credentials import Credentials

STS_URL: Final = "https://sts.googleapis.com/v1/token"
"""The token service of Google."""

SCOPE: Final = "https://www.googleapis.com/auth/cloud-platform"
"""Scope of the server's token; the token service accepts no narrower one."""

GCS_TIMEOUT_SECONDS: Final = 10.0
"""Timeout of one request."""

_LEAST_LIFE: Final = timedelta(minutes=10)
"""Life of the server's token below which it is refreshed before it is exchanged."""

_EXCHANGE: Final = "urn:ietf:params:oauth:grant-type:token-exchange"
_TOKEN_TYPE: Final = "urn:ietf:params:oauth:token-type:access_token"  # noqa: S105 - a name
_MAX_REASON: Final = 200


class GcsIssuer:
    """Exchanges the server's token for limited ones. Thread-safe."""

    def __init__(
        self,
        storage: Storage,
        source: "Credentials",
        *,
        clock: Clock,
        sts_url: str = STS_URL,
    ) -> None:
        self._storage = storage
        self._source = source
        self._clock = clock
        self._sts_url = sts_url
        self._refreshing = threading.Lock()

    @classmethod
    def open(
        cls, storage: Storage, *, clock: Clock, sts_url: str = STS_URL
    ) -> "GcsIssuer":
        """Returns an issuer with the server's own credentials; blocks.

        Raises:
            InvalidFieldError: There are no credentials, or packages are missing.
        """
        source = source_credentials(storage, (SCOPE,))
        return cls(storage, source, clock=clock, sts_url=sts_url)

    def issue(self, boundary: Boundary, *, session: str) -> tuple[GcsToken, datetime]:
        """See ``Issuer.issue``; Google's logs have no name for a session."""
        del session
        from google.auth.exceptions import GoogleAuthError

        try:
            token, until = self._own_token()
            asked = self._clock.now()
            answer = self._exchange(token, boundary)
            lent = GcsToken(token=str(answer["access_token"]))
        except GoogleAuthError as e:
            raise self._error(e) from e
        except (KeyError, TypeError, ValueError) as e:
            raise self._failed("it returned no token") from e
        # User accounts get no expiry of their own: theirs is that of the source.
        life = answer.get("expires_in")
        ends = [asked + timedelta(seconds=float(life))] if life is not None else []
        ends += [until] if until is not None else []
        return lent, min(ends, default=asked + timedelta(hours=1))

    def _exchange(self, token: str, boundary: Boundary) -> Any:
        from google.oauth2 import sts

        client = sts.Client(self._sts_url)
        return client.exchange_token(
            _bounded_request(),
            grant_type=_EXCHANGE,
            subject_token=token,
            subject_token_type=_TOKEN_TYPE,
            requested_token_type=_TOKEN_TYPE,
            additional_options=gcs_options(boundary),
        )

    def _own_token(self) -> tuple[str, datetime | None]:
        """Returns the server's own token, and when it expires."""
        with self._refreshing:
            until = _aware(self._source.expiry)
            is_short = until is not None and until - self._clock.now() < _LEAST_LIFE
            if not self._source.token or is_short:
                self._source.refresh(_bounded_request())
            return str(self._source.token), _aware(self._source.expiry)

    def _error(self, cause: Any) -> StoreError:
        from google.auth.exceptions import TransportError

        reason = str(cause.args[0] if cause.args else cause).partition("\n")[0]
        if isinstance(cause, TransportError) or cause.retryable:
            return self._failed(reason[:_MAX_REASON])
        return StorageDeniedError(
            f"{self._storage.name}: Google lends no token to the server "
            f"({reason[:_MAX_REASON]}); give the server's account access to the "
            "bucket, and check that the bucket has uniform bucket-level access",
            storage=self._storage.name,
        )

    def _failed(self, reason: str) -> StorageUnavailableError:
        return StorageUnavailableError(
            f"{self._storage.name}: Google's token service failed: {reason}; try again",
            storage=self._storage.name,
        )


def _bounded_request() -> Any:
    """Returns a transport with a timeout for each request."""
    from google.auth.transport.requests import Request

    class BoundedRequest(Request):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            given = kwargs.get("timeout") or GCS_TIMEOUT_SECONDS
            kwargs["timeout"] = min(given, GCS_TIMEOUT_SECONDS)
            return super().__call__(*args, **kwargs)  # type: ignore[no-untyped-call]

    return BoundedRequest()


def _aware(expiry: datetime | None) -> datetime | None:
    """Returns an expiry of Google's library, which is in UTC, with its zone."""
    return None if expiry is None else expiry.replace(tzinfo=UTC)
