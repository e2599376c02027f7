"""Configuration of lending."""

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Lending:
    """Limits of the credentials that a server lends for its storage."""

    lifetime: timedelta = timedelta(hours=1)
    """Maximum lifetime of a credential."""
    gcs: bool = False
    """True to lend tokens for Google Cloud Storage."""
    s3_role_arn: str = ""
    """Role that is assumed for S3; empty: no credentials for S3 are lent."""
    s3_sts_endpoint: str = ""
    """URL of the security token service; empty: the one of AWS."""
