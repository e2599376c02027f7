"""Values of lent credentials. Their text never has the secret."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol, TypeAlias

from storesvc.lending.boundary import Boundary


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

        Args:
            boundary: What it permits.
            session: Name of the session in the provider's logs.

        Raises:
            StorageDeniedError: The provider rejects the server's own credentials.
            StorageUnavailableError: The provider does not answer.
        """
