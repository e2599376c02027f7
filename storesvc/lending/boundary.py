"""Boundaries of lent credentials, in the languages of the providers.

A boundary is one prefix with one kind of access. The names of runs and uploads cannot
leave it: their rules admit letters, digits and hyphens only. The rest of the prefix is
the root of the store, which must not have characters that a provider's language
interprets.

* READ permits to read objects below the prefix. No list: a list is a right on the
  bucket.
* WRITE permits to create objects, and to read them: a writer whose response was lost
  looks at what it has created. It permits neither to replace nor to delete one. On
  Google Cloud Storage this follows from the roles, as an overwrite needs the permission
  to delete; on S3 the policy requires the header If-None-Match.
"""

import json
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from storesvc.errors import LendingUnsupportedError
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName, UploadName
from storesvc.storage.location import Storage

MAX_POLICY_CHARACTERS: Final = 2048
"""Maximum length of a session policy of S3."""

_PLAIN: Final = re.compile(r"[A-Za-z0-9._~@+=,:/ -]+")


class Access(Enum):
    """Kind of access of a lent credential."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Limits of a lent credential."""

    is_gcs: bool
    """True for Google Cloud Storage, False for S3."""
    bucket: str
    prefix: str
    """Beginning of the names of the objects; ends with "/"."""
    access: Access

    @property
    def uri(self) -> str:
        return f"{'gs' if self.is_gcs else 's3'}://{self.bucket}/{self.prefix}"


def bound_upload(storage: Storage, upload: UploadName) -> Boundary:
    """Returns the boundary of the writers of an upload: its own data files.

    Raises:
        LendingUnsupportedError: The storage has no credentials to lend.
    """
    paths = RunPaths(upload.run)
    below = f"{paths.pool}{paths.data_prefix(upload.upload)}"
    return _boundary(storage, below, Access.WRITE)


def bound_pool(storage: Storage, run: RunName) -> Boundary:
    """Returns the boundary of the readers of a run: all its data files.

    Raises:
        LendingUnsupportedError: The storage has no credentials to lend.
    """
    return _boundary(storage, RunPaths(run).pool, Access.READ)


def _boundary(storage: Storage, below: str, access: Access) -> Boundary:
    if not (storage.is_gcs or storage.is_s3):
        raise LendingUnsupportedError(
            f"lending: expected a bucket, got the store {storage.name}, for which "
            "there are no credentials to lend; connect without lend_credentials="
        )
    prefix = f"{storage.spec['path']}{below}"
    if not _PLAIN.fullmatch(prefix) or not prefix.endswith("/"):
        raise LendingUnsupportedError(
            f"lending: expected a root of letters, digits and ._~@+=,:/ - only, got "
            f"{storage.name!r}, which a boundary cannot express exactly; connect "
            "without lend_credentials="
        )
    return Boundary(
        is_gcs=storage.is_gcs,
        bucket=storage.spec["bucket"],
        prefix=prefix,
        access=access,
    )


def gcs_options(boundary: Boundary) -> dict[str, Any]:
    """Returns the options of a token exchange: a Credential Access Boundary."""
    roles = ["inRole:roles/storage.objectViewer"]
    if boundary.access is Access.WRITE:
        roles.insert(0, "inRole:roles/storage.objectCreator")
    objects = f"projects/_/buckets/{boundary.bucket}/objects/{boundary.prefix}"
    rule = {
        "availableResource": (
            f"//storage.googleapis.com/projects/_/buckets/{boundary.bucket}"
        ),
        "availablePermissions": roles,
        # A list has the bucket for its resource, so this condition excludes it.
        "availabilityCondition": {
            "expression": f"resource.name.startsWith('{objects}')"
        },
    }
    return {"accessBoundary": {"accessBoundaryRules": [rule]}}


def s3_policy(boundary: Boundary, *, role_arn: str) -> str:
    """Returns the session policy of an assumed role.

    Args:
        role_arn: ARN of the role; the resource is in the same partition of AWS.
    """
    partition = role_arn.split(":")[1] if role_arn.startswith("arn:aws") else "aws"
    resource = f"arn:{partition}:s3:::{boundary.bucket}/{boundary.prefix}*"
    statements: list[dict[str, Any]] = [
        {"Effect": "Allow", "Action": "s3:GetObject", "Resource": resource}
    ]
    if boundary.access is Access.WRITE:
        statements.append(
            {
                "Effect": "Allow",
                "Action": "s3:PutObject",
                "Resource": resource,
                "Condition": {"Null": {"s3:if-none-match": "false"}},
            }
        )
    policy = {"Version": "2012-10-17", "Statement": statements}
    text = json.dumps(policy, separators=(",", ":"))
    if len(text) > MAX_POLICY_CHARACTERS:
        raise LendingUnsupportedError(
            f"lending: expected a session policy of at most {MAX_POLICY_CHARACTERS} "
            f"characters, got {len(text)} for {boundary.uri}; use a shorter root"
        )
    return text
