"""Storages: what the root of a store means to TensorStore.

Options of a bucket follow its root, as a query:
``gs://BUCKET/PREFIX?concurrency=256&driver=gcs_grpc``. Decides only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from storesvc.errors import InvalidFieldError

CONCURRENCY: Final = 128
"""Requests to a bucket at a time. TensorStore's own 32 leave most of a bucket idle: one
request moves some 50 MB/s, whatever the network."""

MAX_CONCURRENCY: Final = 4096

RETRIES: Final[dict[str, Any]] = {
    "max_retries": 6,
    "initial_delay": "100ms",
    "max_delay": "3s",
}
"""Of a request that fails in passing, each later than the one before, with jitter.
TensorStore's own 32 retries outlast every deadline."""

GCS_DRIVERS: Final = ("gcs", "gcs_grpc")
"""TensorStore's of Google Cloud Storage: over HTTP, and over gRPC."""

_LEAST_NAME: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A storage, as TensorStore opens it."""

    name: str
    """What messages call it: its root without the options."""
    spec: Mapping[str, Any]
    """Of the key-value store at the root."""
    context: Mapping[str, Any]
    """Resources that its driver takes from a context."""
    is_remote: bool
    """Whether it answers over a network."""

    def describe(self, place: str) -> str:
        """Returns what messages call a place in it."""
        return f"{self.name}/{place}" if self.is_remote else place


def storage_at(root: str) -> Storage:
    """Returns the storage at a root.

    Raises:
        InvalidFieldError: The root is not a URI of a storage we know, or has an option
            that this storage has not.
    """
    url = urlsplit(root)
    match url.scheme:
        case "file" if not url.netloc and url.path and not url.query:
            path = Path(unquote(url.path)).as_posix()
            return _local(root, {"driver": "file", "path": path.rstrip("/") + "/"})
        case "memory" if not (url.netloc or url.path or url.query):
            return _local(root, {"driver": "memory"})
        case "gs" if len(url.netloc) >= _LEAST_NAME:
            return _gcs(root, url)
    raise InvalidFieldError(
        f"root {root!r}: expected file:///PATH, memory:// or gs://BUCKET/PREFIX"
    )


def _local(root: str, spec: Mapping[str, Any]) -> Storage:
    return Storage(name=root, spec=spec, context={}, is_remote=False)


def _gcs(root: str, url: SplitResult) -> Storage:
    options = dict(parse_qsl(url.query, keep_blank_values=True))
    driver = options.pop("driver", GCS_DRIVERS[0])
    if driver not in GCS_DRIVERS:
        raise InvalidFieldError(
            f"root {root!r}: expected driver={' or driver='.join(GCS_DRIVERS)}, got "
            f"{driver!r}"
        )
    concurrency = options.pop("concurrency", str(CONCURRENCY))
    if not concurrency.isdecimal() or not 1 <= int(concurrency) <= MAX_CONCURRENCY:
        raise InvalidFieldError(
            f"root {root!r}: expected concurrency=1 to {MAX_CONCURRENCY}, got "
            f"{concurrency!r}"
        )
    if options:
        raise InvalidFieldError(
            f"root {root!r}: expected the options concurrency and driver, got "
            f"{', '.join(options)}"
        )
    path = unquote(url.path).strip("/")
    return Storage(
        name=f"gs://{url.netloc}/{path}".rstrip("/"),
        spec={
            "driver": driver,
            "bucket": url.netloc,
            "path": f"{path}/" if path else "",
        },
        context={
            "gcs_request_concurrency": {"limit": int(concurrency)},
            "gcs_request_retries": dict(RETRIES),
        },
        is_remote=True,
    )
