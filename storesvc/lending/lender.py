"""Lends credentials for the storage of a store.

A lender checks nothing about its caller: `storesvc.rpc` has checked permissions, and
that the upload is open or the hold live. The text of a lent credential never has its
secret.

- Google Cloud Storage: the server's own token is exchanged for one that has fewer
  rights, by Credential Access Boundaries. Its life is what is left of the life of the
  server's token: Google has no shorter one.
- S3: a role is assumed with a session policy. The role must permit to read and create
  objects below the root of the store; the session has what both the role and the policy
  permit.
"""

import asyncio
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from storesvc.auth.call import principal_name
from storesvc.auth.policy_file import Lending
from storesvc.clock import Clock, SystemClock
from storesvc.errors import (
    InvalidFieldError,
    LendingUnsupportedError,
    StorageDeniedError,
    StorageUnavailableError,
    StoreError,
)
from storesvc.format.names import HoldName, UploadName
from storesvc.lending import boundary
from storesvc.lending.boundary import Boundary, gcs_options, s3_policy
from storesvc.storage.location import Storage, shows_plaintext
from storesvc.storage.remote import source_credentials
from storesvc.storage.requests import run_in_daemon_thread

if TYPE_CHECKING:
    from google.auth.credentials import Credentials


@dataclass(frozen=True, slots=True, kw_only=True)
class GcsToken:
    """An OAuth 2.0 access token for Google Cloud Storage."""

    token: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Keys:
    """Temporary keys for S3."""

    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str = field(repr=False)


Secret: TypeAlias = GcsToken | S3Keys


@dataclass(frozen=True, slots=True, kw_only=True)
class LentCredential:
    """A credential that is limited to a prefix."""

    prefix: str
    """URI of the only prefix that it permits."""
    expire_time: datetime
    secret: Secret


class Issuer(Protocol):
    """Obtains limited credentials from a provider."""

    def issue(self, boundary: Boundary, *, session: str) -> tuple[Secret, datetime]:
        """Returns a credential, and when the provider ends it; blocks.

        Raises:
            StorageDeniedError: The provider rejects the server's own credentials.
            StorageUnavailableError: The provider does not answer.
        """


STS_URL: Final = "https://sts.googleapis.com/v1/token"
"""The token service of Google."""

SCOPE: Final = "https://www.googleapis.com/auth/cloud-platform"
"""Scope of the server's token; the token service accepts no narrower one."""

GCS_TIMEOUT_SECONDS: Final = 10.0
"""Timeout of one request."""

_LEAST_LIFE: Final = timedelta(minutes=10)
"""Life of the server's token below which it is refreshed before it is exchanged."""

_TOKEN_TYPE: Final = "urn:ietf:params:oauth:token-type:access_token"  # noqa: S105 - a name
_MAX_REASON: Final = 200
_GOOGLE: Final = "Google's token service failed"
_AMAZON: Final = "the token service of S3 failed"


@dataclass(eq=False, repr=False)
class GcsIssuer:
    """Exchanges the server's token for limited ones. Thread-safe."""

    storage: Storage
    source: "Credentials"
    clock: Clock
    sts_url: str = STS_URL
    _refreshing: threading.Lock = field(default_factory=threading.Lock)

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
        from google.oauth2 import sts

        try:
            with self._refreshing:
                until = _aware(self.source.expiry)
                is_short = until is not None and until - self.clock.now() < _LEAST_LIFE
                if not self.source.token or is_short:
                    self.source.refresh(_bounded_request())
                token, until = str(self.source.token), _aware(self.source.expiry)
            asked = self.clock.now()
            answer = sts.Client(self.sts_url).exchange_token(
                _bounded_request(),
                grant_type="urn:ietf:params:oauth:grant-type:token-exchange",
                subject_token=token,
                subject_token_type=_TOKEN_TYPE,
                requested_token_type=_TOKEN_TYPE,
                additional_options=gcs_options(boundary),
            )
            lent = GcsToken(token=str(answer["access_token"]))
        except GoogleAuthError as e:
            raise self._error(e) from e
        except (KeyError, TypeError, ValueError) as e:
            raise _failure_error(
                self.storage, f"{_GOOGLE}: it returned no token"
            ) from e
        # User accounts get no expiry of their own: theirs is that of the source.
        life = answer.get("expires_in")
        ends = [asked + timedelta(seconds=float(life))] if life is not None else []
        ends += [until] if until is not None else []
        return lent, min(ends, default=asked + timedelta(hours=1))

    def _error(self, cause: Any) -> StoreError:
        from google.auth.exceptions import TransportError

        reason = str(cause.args[0] if cause.args else cause).partition("\n")[0]
        if isinstance(cause, TransportError) or cause.retryable:
            return _failure_error(self.storage, f"{_GOOGLE}: {reason[:_MAX_REASON]}")
        return StorageDeniedError(
            f"{self.storage.name}: Google lends no token to the server "
            f"({reason[:_MAX_REASON]}); give the server's account access to the "
            "bucket, and check that the bucket has uniform bucket-level access",
            storage=self.storage.name,
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


LEAST_LIFE: Final = timedelta(minutes=15)
MOST_LIFE: Final = timedelta(hours=12)
"""Limits of STS."""

DEFAULT_REGION: Final = "us-east-1"

_NOT_IN_NAMES: Final = re.compile(r"[^\w+=,.@-]", re.ASCII)


class S3Issuer:
    """Assumes a role for each credential. Thread-safe."""

    def __init__(self, storage: Storage, client: Any, lending: Lending) -> None:
        self._storage = storage
        self._client = client
        self._role_arn = lending.s3_role_arn
        self._life = min(lending.lifetime, MOST_LIFE)

    @classmethod
    def open(cls, storage: Storage, lending: Lending) -> "S3Issuer":
        """Returns an issuer with the server's own credentials; sends no request."""
        if lending.lifetime < LEAST_LIFE:
            raise LendingUnsupportedError(
                f"lending: lifetime: expected at least 15m for a bucket on S3, got "
                f"{lending.lifetime.total_seconds():g}s; correct the policy file"
            )
        if lending.s3_sts_endpoint and shows_plaintext(lending.s3_sts_endpoint):
            raise LendingUnsupportedError(
                f"lending: s3_sts_endpoint: expected https://..., got "
                f"{lending.s3_sts_endpoint!r}, which sends keys over plaintext; use "
                "https"
            )
        try:
            from botocore.config import Config
            from botocore.session import get_session
        except ModuleNotFoundError as e:
            raise InvalidFieldError(
                f"lending: credentials of S3 need {e.name}; pip install "
                "'storesvc[server,s3]'"
            ) from e
        session = get_session()
        region = session.get_config_variable("region")
        client = session.create_client(
            "sts",
            region_name=storage.spec.get("aws_region") or region or DEFAULT_REGION,
            endpoint_url=lending.s3_sts_endpoint or None,
            config=Config(
                connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 2}
            ),
        )
        return cls(storage, client, lending)

    def issue(self, boundary: Boundary, *, session: str) -> tuple[S3Keys, datetime]:
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        try:
            answer = self._client.assume_role(
                RoleArn=self._role_arn,
                RoleSessionName=session_name(session),
                Policy=s3_policy(boundary, role_arn=self._role_arn),
                DurationSeconds=int(self._life.total_seconds()),
            )
        except (ClientError, NoCredentialsError) as e:
            if _is_transient(e):
                raise _failure_error(self._storage, f"{_AMAZON}: {_text(e)}") from e
            raise StorageDeniedError(
                f"{self._storage.name}: the token service does not let the server "
                f"assume {self._role_arn} ({_text(e)}); let the role trust the "
                "server's account",
                storage=self._storage.name,
            ) from e
        except BotoCoreError as e:
            raise _failure_error(self._storage, f"{_AMAZON}: {_text(e)}") from e
        found = answer["Credentials"]
        keys = S3Keys(
            access_key_id=found["AccessKeyId"],
            secret_access_key=found["SecretAccessKey"],
            session_token=found["SessionToken"],
        )
        return keys, found["Expiration"].astimezone(UTC)


def session_name(principal: str) -> str:
    """Returns the name of a session for a principal, as CloudTrail shows it."""
    name = _NOT_IN_NAMES.sub("-", f"storesvc-{principal or 'anonymous'}")
    return name[:64]


def _is_transient(cause: Any) -> bool:
    """Returns whether the service failed, rather than reject the request."""
    answer = getattr(cause, "response", {})
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = answer.get("Error", {}).get("Code", "")
    return bool(status >= 500) or "Throttl" in code


def _text(cause: Exception) -> str:
    return str(cause).partition("\n")[0][:_MAX_REASON]


def _failure_error(storage: Storage, what: str) -> StorageUnavailableError:
    return StorageUnavailableError(
        f"{storage.name}: {what}; try again", storage=storage.name
    )


TIMEOUT_SECONDS: Final = 30.0
"""Maximum wait for a credential."""


class Lender:
    """Lends credentials for one storage, as the configuration in force permits."""

    def __init__(
        self,
        storage: Storage,
        config: Callable[[], Lending | None],
        *,
        clock: Clock | None = None,
        gcs_sts_url: str = STS_URL,
    ) -> None:
        """Makes a lender; sends no request.

        Args:
            config: Returns the configuration in force; None: lends nothing.
            gcs_sts_url: The token service of Google, or an emulator of it.
        """
        self._storage = storage
        self._config = config
        self._clock = clock or SystemClock()
        self._gcs_sts_url = gcs_sts_url
        self._opened: tuple[Lending, Issuer] | None = None
        """The issuer, with the configuration that it was opened with."""

    async def lend(self, name: UploadName | HoldName) -> LentCredential:
        """Lends a credential that permits to create data files of an upload, or to read
        the data files of a hold's run.

        Raises:
            LendingUnsupportedError: The server is not configured to lend, or the
                storage has no credentials that are limited to a prefix.
            StorageDeniedError: The provider lends the server none.
            StorageUnavailableError: The provider does not answer.
        """
        if isinstance(name, UploadName):
            limits = boundary.bound_upload(self._storage, name)
        else:
            limits = boundary.bound_pool(self._storage, name.run)
        config, is_gcs = self._config(), limits.is_gcs
        if config is None or not (config.gcs if is_gcs else config.s3_role_arn):
            raise LendingUnsupportedError(
                f"lending: expected {'gcs = true' if is_gcs else 's3_role_arn'} in "
                "[lending] of the server's policy file, found none; ask its "
                "administrator for it, or connect without lend_credentials="
            )
        session = principal_name()

        def issue() -> LentCredential:
            issuer = self._issuer(config, limits)
            asked = self._clock.now()
            secret, until = issuer.issue(limits, session=session)
            until = min(until, asked + max(config.lifetime, timedelta(0)))
            return LentCredential(prefix=limits.uri, expire_time=until, secret=secret)

        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                return await run_in_daemon_thread(issue)
        except TimeoutError as e:
            late = f"the token service did not answer within {TIMEOUT_SECONDS:g} s"
            raise _failure_error(self._storage, late) from e

    def _issuer(self, config: Lending, limits: Boundary) -> Issuer:
        """Returns the issuer; opens another one after a change of the configuration."""
        if self._opened is None or self._opened[0] != config:
            issuer: Issuer
            if limits.is_gcs:
                issuer = GcsIssuer.open(
                    self._storage, clock=self._clock, sts_url=self._gcs_sts_url
                )
            else:
                issuer = S3Issuer.open(self._storage, config)
            self._opened = config, issuer
        return self._opened[1]
