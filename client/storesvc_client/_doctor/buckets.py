"""Checks what is special about a bucket: its settings, its clock, and its price.

`judge_settings` and `estimate_cost` decide; the rest reads the settings with the
provider's own client. Sources of the names: ``storage.buckets.get`` of Google Cloud
Storage (JSON API), and ``GetBucketVersioning``, ``GetBucketLifecycleConfiguration``,
``GetObjectLockConfiguration`` and ``GetBucketRequestPayment`` of S3. Prices are list
prices of one region, for an order of magnitude: Google Cloud Storage
(https://cloud.google.com/storage/pricing, us-central1, STANDARD) and S3
(https://aws.amazon.com/s3/pricing, us-east-1), read in November 2026.
"""

import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final

from storesvc.errors import StoreError
from storesvc.storage.location import Storage
from storesvc.storage.remote import find_endpoint, make_bucket
from storesvc_client._doctor.directory import judge_clock
from storesvc_client._doctor.findings import (
    Finding,
    passed,
    problem,
    skipped,
)

if TYPE_CHECKING:
    pass


from storesvc_client._views.texts import size_text

_DAY: Final = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleRule:
    """A rule by which the provider itself changes objects."""

    action: str
    """Name of the action, such as "Delete"."""
    prefix: str = ""
    """Beginning of the names that it is for; empty: all."""
    is_of_old_versions: bool = False
    """True if it leaves live versions alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSettings:
    """The settings that matter for a store."""

    keeps_versions: bool = False
    soft_delete_seconds: int = 0
    retention_seconds: int = 0
    """Time for which an object cannot be deleted."""
    requester_pays: bool = False
    rules: Sequence[LifecycleRule] = ()
    storage_class: str = "STANDARD"


def judge_settings(settings: BucketSettings, *, path: str) -> list[Finding]:
    """Returns what the settings of a bucket mean for a store below a prefix.

    Args:
        settings: The settings.
        path: Prefix of the store; ends with a slash, or is empty.
    """
    found = list[Finding]()
    rules = [
        rule
        for rule in settings.rules
        if rule.prefix.startswith(path) or path.startswith(rule.prefix)
    ]
    for rule in rules:
        if not rule.is_of_old_versions and rule.action in ("Delete", "Expiration"):
            found.append(
                problem(
                    "lifecycle.deletes",
                    f"a lifecycle rule deletes objects below {rule.prefix or '/'!r}",
                )
            )
        elif not rule.is_of_old_versions and rule.action != "AbortIncompleteMultipart":
            found.append(
                problem(
                    "lifecycle.moves",
                    f"a lifecycle rule moves objects below {rule.prefix or '/'!r} to "
                    f"another class ({rule.action})",
                )
            )
    if settings.retention_seconds:
        found.append(
            problem(
                "retention-lock.on",
                "objects cannot be deleted or overwritten for "
                f"{_days(settings.retention_seconds)}",
            )
        )
    if settings.requester_pays:
        found.append(
            problem("requester-pays.on", "each request must name a project that pays")
        )
    if settings.keeps_versions:
        cleans = any(rule.is_of_old_versions for rule in rules)
        found.append(
            problem(
                "versioning.on",
                "the bucket keeps each overwritten and deleted object"
                + (", until a lifecycle rule deletes it" if cleans else " for ever"),
            )
        )
    if settings.soft_delete_seconds:
        found.append(
            problem(
                "soft-delete.on",
                f"deleted objects stay for {_days(settings.soft_delete_seconds)}, and "
                "are paid for",
            )
        )
    if settings.storage_class not in ("STANDARD", "EXPRESS_ONEZONE", "RAPID"):
        found.append(
            problem(
                "storage-class.cold",
                f"new objects have the class {settings.storage_class}",
            )
        )
    return found or [passed("settings", "nothing in the way of a store")]


def _days(seconds: int) -> str:
    return f"{seconds / _DAY:g} days" if seconds != _DAY else "1 day"


def check_settings(storage: Storage) -> list[Finding]:
    """Reads the settings of a bucket, and judges them; blocks on the storage."""
    read = _read_s3 if storage.is_s3 else _read_gcs
    try:
        settings = read(storage)
    except (_UnreadableError, StoreError) as e:
        return [skipped("settings", str(e))]
    return judge_settings(settings, path=storage.spec["path"])


def check_clock(storage: Storage) -> list[Finding]:
    """Compares the clock of a bucket's API with this machine's; blocks on it."""
    endpoint = find_endpoint(storage) or (
        _S3_ENDPOINT if storage.is_s3 else _GCS_ENDPOINT
    )
    request = urllib.request.Request(endpoint, method="HEAD")  # noqa: S310 - of a root
    try:
        with urllib.request.urlopen(request, timeout=_CLOCK_SECONDS) as answer:  # noqa: S310
            date = answer.headers["date"]
    except urllib.error.HTTPError as e:
        date = e.headers["date"]
    except OSError as e:
        return [skipped("clock", f"{endpoint} does not answer: {e}")]
    if date is None:
        return [skipped("clock", f"{endpoint} says no time")]
    skew = (parsedate_to_datetime(date) - datetime.now(UTC)).total_seconds()
    # The header has whole seconds.
    return judge_clock(min(0.0, skew + 1) if skew < 0 else skew, "the bucket")


_GCS_ENDPOINT: Final = "https://storage.googleapis.com"
_S3_ENDPOINT: Final = "https://s3.amazonaws.com"
_CLOCK_SECONDS: Final = 10.0


class _UnreadableError(Exception):
    """The settings cannot be read; the message says what would help."""


def _read_gcs(storage: Storage) -> BucketSettings:
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError
    from requests.exceptions import RequestException

    bucket = make_bucket(storage)
    try:
        bucket.reload(timeout=10)
    except (GoogleAPIError, GoogleAuthError, RequestException) as e:
        raise _UnreadableError(
            "not readable without storage.buckets.get (such as in "
            f"roles/storage.legacyBucketReader): {str(e).partition(chr(10))[0]}"
        ) from e
    return BucketSettings(
        keeps_versions=bool(bucket.versioning_enabled),
        soft_delete_seconds=bucket.soft_delete_policy.retention_duration_seconds or 0,
        retention_seconds=bucket.retention_period or 0,
        requester_pays=bool(bucket.requester_pays),
        rules=[rule for each in bucket.lifecycle_rules for rule in _gcs_rules(each)],
        storage_class=bucket.storage_class or "STANDARD",
    )


def _gcs_rules(rule: dict[str, Any]) -> list[LifecycleRule]:
    condition = rule.get("condition", {})
    action = rule["action"]["type"].removesuffix("Upload")
    is_of_old = (
        condition.get("isLive") is False
        or "numNewerVersions" in condition
        or "daysSinceNoncurrentTime" in condition
    )
    return [
        LifecycleRule(action=action, prefix=prefix, is_of_old_versions=is_of_old)
        for prefix in condition.get("matchesPrefix", [""])
    ]


def _read_s3(storage: Storage) -> BucketSettings:
    try:
        from botocore.config import Config
        from botocore.session import get_session
    except ModuleNotFoundError as e:
        raise _UnreadableError(
            f"not readable without {e.name}; pip install 'storesvc[server,s3]'"
        ) from e
    client = get_session().create_client(
        "s3",
        region_name=storage.spec.get("aws_region", "us-east-1"),
        endpoint_url=storage.endpoint,
        config=Config(
            connect_timeout=5,
            read_timeout=10,
            retries={"max_attempts": 2},
            s3={"addressing_style": "path" if storage.endpoint else "auto"},
        ),
    )
    bucket = storage.spec["bucket"]
    lock = _ask(client.get_object_lock_configuration, bucket)
    lifecycle = _ask(client.get_bucket_lifecycle_configuration, bucket)
    locked = lock.get("ObjectLockConfiguration", {}).get("Rule", {})
    default = locked.get("DefaultRetention", {})
    days = default.get("Days", 0) + 365 * default.get("Years", 0)
    return BucketSettings(
        keeps_versions=_ask(client.get_bucket_versioning, bucket).get("Status")
        == "Enabled",
        retention_seconds=_DAY * days,
        requester_pays=_ask(client.get_bucket_request_payment, bucket).get("Payer")
        == "Requester",
        rules=[rule for each in lifecycle.get("Rules", ()) for rule in _s3_rules(each)],
    )


_ABSENT: Final = (
    "NoSuchLifecycleConfiguration",
    "ObjectLockConfigurationNotFoundError",
    "NotImplemented",
    "MethodNotAllowed",
)
"""Codes of S3 for a setting that a bucket does not have."""


def _ask(call: "Callable[..., dict[str, Any]]", bucket: str) -> dict[str, Any]:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return call(Bucket=bucket)
    except ClientError as e:
        code = e.response.get("Error", {}).get("Code", "")
        if code in _ABSENT:
            return {}
        raise _UnreadableError(f"not readable with these credentials: {e}") from e
    except BotoCoreError as e:
        raise _UnreadableError(f"not readable: {e}") from e


def _s3_rules(rule: dict[str, Any]) -> list[LifecycleRule]:
    if rule.get("Status") != "Enabled":
        return []
    filtered = rule.get("Filter", {})
    prefix = (
        rule.get("Prefix")
        or filtered.get("Prefix")
        or filtered.get("And", {}).get("Prefix", "")
    )
    actions = [
        LifecycleRule(action=action, prefix=prefix)
        for action, key in (("Expiration", "Expiration"), ("Transition", "Transitions"))
        if rule.get(key)
    ]
    if rule.get("NoncurrentVersionExpiration"):
        actions.append(
            LifecycleRule(action="Delete", prefix=prefix, is_of_old_versions=True)
        )
    return actions


# --- Price ---------------------------------------------------------------------------

_MONTH_SECONDS: Final = 30 * 86_400
_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Dollars of a provider."""

    gib_month: float
    write: float
    """Price of one request that writes or lists."""


GCS: Final = Prices(gib_month=0.020, write=5e-6)
S3: Final = Prices(gib_month=0.023, write=5e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The saves of one job."""

    state_bytes: int
    """Bytes of one checkpoint."""
    interval_seconds: float = 600.0
    """Time between two saves."""
    kept_count: int = 5
    """Checkpoints that are kept."""
    purge_seconds: float = 3 * 86_400.0
    """Time for which a deleted checkpoint keeps its bytes."""


FIXED_WRITES: Final = 33
BYTES_A_WRITE: Final = 48 << 20
"""Writing requests of a save: so many, and one more for so many bytes; measured by
``python -m benchmarks requests``."""


def estimate_cost(work: Workload, prices: Prices) -> list[Finding]:
    """Returns the requests and dollars of a month."""
    saves = _MONTH_SECONDS / work.interval_seconds
    writes = saves * (FIXED_WRITES + -(-work.state_bytes // BYTES_A_WRITE))
    kept = work.kept_count + work.purge_seconds / work.interval_seconds
    stored = min(kept, saves) * work.state_bytes
    storing = stored / _GIB * prices.gib_month
    requests = writes * prices.write
    return [
        passed(
            "cost",
            f"{size_text(work.state_bytes)} every {work.interval_seconds / 60:g} min: "
            f"{writes:,.0f} writing requests (${requests:,.2f}) and up to "
            f"{size_text(round(stored))} stored (${storing:,.0f}) a month, if each "
            "save changes every byte and deleted checkpoints stay for "
            f"{work.purge_seconds / 86_400:g} days",
        )
    ]
