"""Checks what is special about a bucket: its settings, its clock, and its price.

`judge_settings` and `estimate_cost` decide; the rest reads the settings with the
provider's own client. Sources of the names: ``storage.buckets.get`` of Google Cloud
Storage (JSON API), and ``GetBucketVersioning``, ``GetBucketLifecycleConfiguration``,
``GetObjectLockConfiguration`` and ``GetBucketRequestPayment`` of S3.
"""

import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, NamedTuple

from storesvc.errors import InvalidFieldError, StoreError
from storesvc.storage.location import Storage
from storesvc.storage.remote import find_endpoint, make_bucket
from storesvc_client._doctor.findings import (
    Finding,
    judge_clock,
    passed,
    problem,
    skipped,
)
from storesvc_client._views.texts import size_text

_DAY: Final = 86_400


class LifecycleRule(NamedTuple):
    """A rule by which the provider itself changes objects."""

    action: str
    """Name of the action, such as "Delete"."""
    prefix: str
    """Beginning of the names that it is for; empty: all."""
    is_of_old_versions: bool
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
    rules = [
        rule
        for rule in settings.rules
        if rule.prefix.startswith(path) or path.startswith(rule.prefix)
    ]
    found = [
        problem(
            code,
            f"a lifecycle rule {code.partition('.')[2]} objects below "
            f"{rule.prefix or '/'!r}",
        )
        for rule in rules
        if (code := _CHANGES.get(rule.action)) and not rule.is_of_old_versions
    ]
    cleans = any(rule.is_of_old_versions for rule in rules)
    end = "until a lifecycle rule deletes it" if cleans else "for ever"
    locked, kept = settings.retention_seconds, settings.soft_delete_seconds
    storage_class = settings.storage_class
    others: dict[str, str | int] = {
        "retention-lock.on": locked
        and f"objects cannot be deleted or overwritten for {_days(locked)}",
        "requester-pays.on": settings.requester_pays
        and "each request must name a project that pays",
        "versioning.on": settings.keeps_versions
        and f"the bucket keeps each overwritten and deleted object {end}",
        "soft-delete.on": kept
        and f"deleted objects stay for {_days(kept)}, and are paid for",
        "storage-class.cold": storage_class not in _HOT
        and f"new objects have the class {storage_class}",
    }
    found += [problem(code, str(text)) for code, text in others.items() if text]
    return found or [passed("settings", "nothing in the way of a store")]


_CHANGES: Final = {
    **dict.fromkeys(("Delete", "Expiration"), "lifecycle.deletes"),
    **dict.fromkeys(("SetStorageClass", "Transition"), "lifecycle.moves"),
}
"""Problems by the action of a lifecycle rule."""

_HOT: Final = ("STANDARD", "EXPRESS_ONEZONE", "RAPID")


def _days(seconds: int) -> str:
    return f"{seconds / _DAY:g} days" if seconds != _DAY else "1 day"


def check_settings(storage: Storage) -> list[Finding]:
    """Reads the settings of a bucket, and judges them; blocks on the storage."""
    read = _read_s3 if storage.is_s3 else _read_gcs
    try:
        settings = read(storage)
    except StoreError as e:
        return [skipped("settings", str(e))]
    return judge_settings(settings, path=storage.spec["path"])


def check_clock(storage: Storage) -> list[Finding]:
    """Compares the clock of a bucket's API with this machine's; blocks on it."""
    provider = "s3" if storage.is_s3 else "gcs"
    endpoint = find_endpoint(storage) or _ENDPOINTS[provider]
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


_ENDPOINTS: Final = {
    "gcs": "https://storage.googleapis.com",
    "s3": "https://s3.amazonaws.com",
}
_CLOCK_SECONDS: Final = 10.0


def _read_gcs(storage: Storage) -> BucketSettings:
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError
    from requests.exceptions import RequestException

    bucket = make_bucket(storage)
    try:
        bucket.reload(timeout=10)
    except (GoogleAPIError, GoogleAuthError, RequestException) as e:
        raise InvalidFieldError(
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
    is_of_old = condition.get("isLive") is False or not condition.keys().isdisjoint(
        ("numNewerVersions", "daysSinceNoncurrentTime")
    )
    return [
        LifecycleRule(rule["action"]["type"], prefix, is_of_old)
        for prefix in condition.get("matchesPrefix", [""])
    ]


def _read_s3(storage: Storage) -> BucketSettings:
    try:
        from botocore.config import Config
        from botocore.session import get_session
    except ModuleNotFoundError as e:
        raise InvalidFieldError(
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
    lock, lifecycle, versioning, payment = (
        _ask(getattr(client, f"get_{what}"), storage.spec["bucket"])
        for what in (
            "object_lock_configuration",
            "bucket_lifecycle_configuration",
            "bucket_versioning",
            "bucket_request_payment",
        )
    )
    locked = lock.get("ObjectLockConfiguration", {}).get("Rule", {})
    default = locked.get("DefaultRetention", {})
    days = default.get("Days", 0) + 365 * default.get("Years", 0)
    return BucketSettings(
        keeps_versions=versioning.get("Status") == "Enabled",
        retention_seconds=_DAY * days,
        requester_pays=payment.get("Payer") == "Requester",
        rules=[rule for each in lifecycle.get("Rules", ()) for rule in _s3_rules(each)],
    )


_ABSENT: Final = (
    "NoSuchLifecycleConfiguration",
    "ObjectLockConfigurationNotFoundError",
    "NotImplemented",
    "MethodNotAllowed",
)
"""Codes of S3 for a setting that a bucket does not have."""


def _ask(call: Callable[..., dict[str, Any]], bucket: str) -> dict[str, Any]:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return call(Bucket=bucket)
    except (BotoCoreError, ClientError) as e:
        answer = e.response if isinstance(e, ClientError) else {}
        if answer.get("Error", {}).get("Code") in _ABSENT:
            return {}
        raise InvalidFieldError(f"not readable with these credentials: {e}") from e


def _s3_rules(rule: dict[str, Any]) -> list[LifecycleRule]:
    if rule.get("Status") != "Enabled":
        return []
    filtered = rule.get("Filter", {})
    prefix = (
        rule.get("Prefix")
        or filtered.get("Prefix")
        or filtered.get("And", {}).get("Prefix", "")
    )
    return [
        LifecycleRule(action, prefix, is_of_old)
        for key, action, is_of_old in (
            ("Expiration", "Expiration", False),
            ("Transitions", "Transition", False),
            ("NoncurrentVersionExpiration", "Delete", True),
        )
        if rule.get(key)
    ]


# --- Price ---------------------------------------------------------------------------

_MONTH_SECONDS: Final = 30 * _DAY
_GIB: Final = 1 << 30


class Prices(NamedTuple):
    """List prices of a provider in one region, in dollars."""

    gib_month: float
    write: float
    """Price of one request that writes or lists."""
    source: str


PRICES: Final = {
    "gcs": Prices(
        0.020, 5e-6, "us-central1, STANDARD, https://cloud.google.com/storage/pricing"
    ),
    "s3": Prices(0.023, 5e-6, "us-east-1, Standard, https://aws.amazon.com/s3/pricing"),
}
PRICES_DATE: Final = "November 2026"
"""Month in which the prices were looked up."""


class Workload(NamedTuple):
    """The saves of one job."""

    stored_bytes: int
    """Bytes of one checkpoint as stored."""
    added_bytes: int
    """Bytes that each save adds; it shares the others with earlier checkpoints."""
    interval_seconds: float = 600.0
    """Time between two saves."""
    kept_count: int = 5
    """Checkpoints that are kept."""
    purge_seconds: float = 3.0 * _DAY
    """Time for which a deleted checkpoint keeps its bytes."""


FIXED_WRITES: Final = 33
BYTES_A_WRITE: Final = 48 << 20
"""Writing requests of a save: so many, and one more for so many bytes; measured by
``python -m benchmarks requests``."""


def estimate_cost(work: Workload, storage: Storage | None) -> list[Finding]:
    """Returns the requests and dollars of a month."""
    if storage is None or not storage.is_remote:
        return [skipped("cost", "only a bucket has prices; give its root")]
    prices = PRICES["s3" if storage.is_s3 else "gcs"]
    saves = _MONTH_SECONDS / work.interval_seconds
    writes = saves * (FIXED_WRITES + -(-work.added_bytes // BYTES_A_WRITE))
    kept = min(saves, work.kept_count + work.purge_seconds / work.interval_seconds)
    stored = work.stored_bytes + max(0.0, kept - 1) * work.added_bytes
    storing, requests = stored / _GIB * prices.gib_month, writes * prices.write
    return [
        passed(
            "cost",
            f"a save of {size_text(work.stored_bytes)}, {size_text(work.added_bytes)} "
            f"of it new, every {work.interval_seconds / 60:g} min: {writes:,.0f} "
            f"writing requests (${requests:,.2f}) and up to {size_text(round(stored))} "
            f"stored (${storing:,.2f}) a month, if {work.kept_count} checkpoints are "
            f"kept and deleted ones stay for {_days(int(work.purge_seconds))}; list "
            f"prices of {PRICES_DATE}, {prices.source}",
        )
    ]
