"""The configuration of lending, as the policy file has it."""

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Lending:
    """Limits of the credentials that a server lends for its storage."""

    lifetime: timedelta = timedelta(hours=1)
    """Maximum time until clients renew a credential. The provider may end it sooner."""
    gcs: bool = False
    """True to lend for a bucket on Google Cloud Storage."""
    s3_role_arn: str = ""
    """Role to assume for a bucket on S3; empty: lends none there."""
    s3_sts_endpoint: str = ""
    """URL of the token service of S3; empty: the default of AWS."""
