"""Limited credentials for S3: an assumed role with a session policy.

The role must permit to read and create objects below the root of the store; the session
has what both the role and the policy permit.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from storesvc.errors import (
    InvalidFieldError,
    LendingUnsupportedError,
    StorageDeniedError,
    StorageUnavailableError,
)
from storesvc.lending.boundary import Boundary, s3_policy
from storesvc.lending.config import Lending
from storesvc.lending.credentials import S3Keys
from storesvc.storage.location import Storage, shows_plaintext

LEAST_LIFE: Final = timedelta(minutes=15)
MOST_LIFE: Final = timedelta(hours=12)
"""Limits of STS."""

DEFAULT_REGION: Final = "us-east-1"

_CONNECT_SECONDS: Final = 5
_READ_SECONDS: Final = 10
_NOT_IN_NAMES: Final = re.compile(r"[^\w+=,.@-]", re.ASCII)
_MAX_NAME: Final = 64
_MAX_REASON: Final = 200


class S3Issuer:
    """Assumes a role for each credential. Thread-safe."""

    def __init__(self, storage: Storage, client: Any, lending: Lending) -> None:
        self._storage = storage
        self._client = client
        self._role_arn = lending.s3_role_arn
        self._life = min(lending.lifetime, MOST_LIFE)

    @classmethod
    def open(cls, storage: Storage, lending: Lending) -> "S3Issuer":
        """Returns an issuer with the server's own credentials; sends no request.

        Raises:
            InvalidFieldError: Packages are missing.
            LendingUnsupportedError: S3 has no credentials of so short a life.
        """
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
                connect_timeout=_CONNECT_SECONDS,
                read_timeout=_READ_SECONDS,
                retries={"total_max_attempts": 2},
            ),
        )
        return cls(storage, client, lending)

    def issue(self, boundary: Boundary, *, session: str) -> tuple[S3Keys, datetime]:
        """See ``Issuer.issue``."""
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
                raise self._failed(e) from e
            raise StorageDeniedError(
                f"{self._storage.name}: the token service does not let the server "
                f"assume {self._role_arn} ({_text(e)}); let the role trust the "
                "server's account",
                storage=self._storage.name,
            ) from e
        except BotoCoreError as e:
            raise self._failed(e) from e
        found = answer["Credentials"]
        keys = S3Keys(
            access_key_id=found["AccessKeyId"],
            secret_access_key=found["SecretAccessKey"],
            session_token=found["SessionToken"],
        )
        return keys, found["Expiration"].astimezone(UTC)

    def _failed(self, cause: Exception) -> StorageUnavailableError:
        return StorageUnavailableError(
            f"{self._storage.name}: the token service of S3 failed: {_text(cause)}; "
            "try again",
            storage=self._storage.name,
        )


def session_name(principal: str) -> str:
    """Returns the name of a session for a principal, as CloudTrail shows it."""
    name = _NOT_IN_NAMES.sub("-", f"storesvc-{principal or 'anonymous'}")
    return name[:_MAX_NAME]


def _is_transient(cause: Any) -> bool:
    """Returns whether the service failed, rather than reject the request."""
    answer = getattr(cause, "response", {})
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = answer.get("Error", {}).get("Code", "")
    return bool(status >= 500) or "Throttl" in code


def _text(cause: Exception) -> str:
    return str(cause).partition("\n")[0][:_MAX_REASON]
