"""Reads the settings of a bucket that matter for a store, with the provider's own
client, and judges them: what each does to a store, and what it costs.

Sources of the names of settings: ``storage.buckets.get`` of Google Cloud Storage (JSON
API), and ``GetBucketVersioning``, ``GetBucketLifecycleConfiguration``,
``GetObjectLockConfiguration`` and ``GetBucketRequestPayment`` of S3.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from storesvc.errors import InvalidFieldError, StoreError
from storesvc.storage.location import Storage
from storesvc.storage.remote import make_bucket
from storesvc.storage.requests import run_in_daemon_thread

_log = logging.getLogger(__name__)


async def warn_about_settings(storage: Storage) -> None:
    """Logs a warning for each setting of a bucket that harms a store, or costs; nothing
    if the settings cannot be read, or the storage is no bucket."""
    if not storage.is_remote:
        return
    try:
        settings = await run_in_daemon_thread(read_settings, storage)
    except StoreError as e:
        _log.info("%s: settings of the bucket: %s", storage.name, e)
        return
    for code, text in judge_settings(settings, storage).items():
        _log.warning("%s: %s (%s of storectl doctor)", storage.name, text, code)


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
    is_hierarchical: bool = False
    soft_delete_seconds: int = 0
    retention_seconds: int = 0
    """Time for which an object cannot be deleted."""
    requester_pays: bool = False
    rules: Sequence[LifecycleRule] = ()
    storage_class: str = "STANDARD"


def read_settings(storage: Storage) -> BucketSettings:
    """Returns the settings of a bucket; blocks on the storage.

    Raises:
        InvalidFieldError: They cannot be read.
    """
    return _read_s3(storage) if storage.is_s3 else _read_gcs(storage)


def judge_settings(settings: BucketSettings, storage: Storage) -> dict[str, str]:
    """Returns what the settings of a bucket mean for a store, by the code of the
    problem."""
    path = storage.spec["path"]
    rules = [
        rule
        for rule in settings.rules
        if rule.prefix.startswith(path) or path.startswith(rule.prefix)
    ]
    found = {
        code: f"a lifecycle rule {code.partition('.')[2]} objects below "
        f"{rule.prefix or '/'!r}"
        for rule in rules
        if (code := _CHANGES.get(rule.action)) and not rule.is_of_old_versions
    }
    cleans = any(rule.is_of_old_versions for rule in rules)
    end = "until a lifecycle rule deletes it" if cleans else "for ever"
    locked, kept = (
        f"{seconds / _DAY:g} day{'s' * (seconds != _DAY)}" if seconds else ""
        for seconds in (settings.retention_seconds, settings.soft_delete_seconds)
    )
    storage_class = settings.storage_class
    others: dict[str, str | bool] = {
        "retention-lock.on": locked
        and f"objects cannot be deleted or overwritten for {locked}",
        "requester-pays.on": settings.requester_pays
        and not storage.user_project
        and "each request must name a project that pays",
        "versioning.on": settings.keeps_versions
        and f"the bucket keeps each overwritten and deleted object {end}, and bills it",
        "soft-delete.on": kept and f"deleted objects stay for {kept}, and are paid for",
        "storage-class.cold": storage_class not in _HOT
        and f"new objects have the class {storage_class}",
        "namespace.hierarchical": settings.is_hierarchical
        and "folders stay when their objects are deleted: some for each checkpoint",
    }
    return found | {code: str(text) for code, text in others.items() if text}


_CHANGES: Final = {
    **dict.fromkeys(("Delete", "Expiration"), "lifecycle.deletes"),
    **dict.fromkeys(("SetStorageClass", "Transition"), "lifecycle.moves"),
}
"""Problems by the action of a lifecycle rule."""

_HOT: Final = ("STANDARD", "EXPRESS_ONEZONE", "RAPID")


def _read_gcs(storage: Storage) -> BucketSettings:
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError
    from requests.exceptions import RequestException

    bucket = make_bucket(storage)
    try:
        bucket.reload(timeout=10, retry=None)
    except (GoogleAPIError, GoogleAuthError, RequestException) as e:
        needed = "storage.buckets.get (such as in roles/storage.legacyBucketReader)"
        why = str(e).partition("\n")[0]
        raise InvalidFieldError(f"not readable; it needs {needed}: {why}") from e
    # Releases of the client before 2.17 have no attribute for it.
    folders = bucket._properties.get("hierarchicalNamespace", {})  # noqa: SLF001 - above
    return BucketSettings(
        keeps_versions=bool(bucket.versioning_enabled),
        is_hierarchical=bool(folders.get("enabled")),
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
