"""Parses the root of a store into the storage that TensorStore opens.

Options of a bucket follow its root as a query:
``gs://BUCKET/PREFIX?concurrency=256&driver=gcs_grpc``,
``s3://BUCKET/PREFIX?endpoint=https://minio:9000&region=us-east-1``.
This module decides only.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from storesvc.errors import InvalidFieldError

CONCURRENCY: Final = 128
"""Default of the maximum of concurrent requests to a bucket. TensorStore's own 32 leave
most of a bucket idle: one request transfers some 50 MB/s on any network."""

MAX_CONCURRENCY: Final = 4096

NO_RETRIES: Final[Mapping[str, Any]] = {"max_retries": 0}
"""Retries of a transient error by TensorStore: they would multiply the requests that
`throttle` admits."""

JSON_DRIVER: Final = "gcs"
GRPC_DRIVER: Final = "gcs_grpc"
GCS_DRIVERS: Final = (JSON_DRIVER, GRPC_DRIVER)
"""TensorStore's drivers for Google Cloud Storage: over HTTP, and over gRPC."""

S3_DRIVER: Final = "s3"
FILE_DRIVER: Final = "file"
MEMORY_DRIVER: Final = "memory"

LOCK_SUFFIX: Final = ".__lock"
"""Suffix of the lock files that TensorStore puts next to the files that it writes."""

_LEAST_NAME: Final = 3

_EXPRESS_SUFFIX: Final = "--x-s3"

_BROKEN_URI: Final = re.compile(r"(file|gs|s3|memory):/")
"""Beginning of a URI that became a path, which has no empty part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A storage, as TensorStore opens it."""

    name: str
    """Root of the storage without its options; messages show it."""
    spec: Mapping[str, Any]
    """Spec of TensorStore's key-value store at the root."""
    context: Mapping[str, Any]
    """Resources of the driver, for ``tensorstore.Context``."""
    is_remote: bool
    """True if the storage is reached over a network."""
    endpoint: str | None = None
    """URL of the API of a bucket; None for the provider's default."""
    user_project: str | None = None
    """Project of Google Cloud that pays for requests; None: that of the bucket."""

    @property
    def is_files(self) -> bool:
        """True for a directory."""
        return bool(self.spec["driver"] == FILE_DRIVER)

    @property
    def is_memory(self) -> bool:
        """True for a bucket in memory, which tests use."""
        return bool(self.spec["driver"] == MEMORY_DRIVER)

    @property
    def is_s3(self) -> bool:
        """True for a bucket of S3, or of a storage with its API."""
        return bool(self.spec["driver"] == S3_DRIVER)

    @property
    def is_gcs(self) -> bool:
        """True for a bucket of Google Cloud Storage, over HTTP or gRPC."""
        return self.spec["driver"] in GCS_DRIVERS

    @property
    def uses_grpc(self) -> bool:
        """True for a bucket of Google Cloud Storage that is reached over gRPC."""
        return bool(self.spec["driver"] == GRPC_DRIVER)

    @property
    def concurrency(self) -> int:
        """Maximum concurrent requests; each driver has its own resource for them."""
        suffix = "_request_concurrency"
        limits = [self.context[name] for name in self.context if name.endswith(suffix)]
        return int(limits[0]["limit"]) if limits else 1

    def describe(self, path: str) -> str:
        return f"{self.name}/{path}" if self.is_remote else path

    def check(self, path: str) -> None:
        """Rejects a path that the storage cannot hold.

        On S3, names are URL paths, in which "." and ".." are resolved, and XML lists
        cannot hold control characters. On files, a name ending with "/" is a directory,
        and one ending with the lock suffix belongs to TensorStore.
        """
        if self.is_files and path.endswith(("/", LOCK_SUFFIX)):
            raise InvalidFieldError(
                f"{self.name}: expected a path that does not end with '/' or "
                f"{LOCK_SUFFIX!r}, got {path!r}"
            )
        if not self.is_s3:
            return
        if not {".", ".."}.isdisjoint(path.split("/")) or min(path, default=" ") < " ":
            raise InvalidFieldError(
                f"{self.name}: expected a path without '.' and '..' and control "
                f"characters, got {path!r}"
            )


def parse_root(place: "str | os.PathLike[str]") -> str:
    """Returns a root as a URI if it is a path, and any other target unchanged.

    >>> parse_root("/ckpts/../old"), parse_root(Path("/ckpts")), parse_root("host:7070")
    ('file:///old', 'file:///ckpts', 'host:7070')
    """
    if not isinstance(place, str | os.PathLike):
        raise InvalidFieldError(
            f"store: expected HOST:PORT, a path or the URI of a root, got {place!r}"
        )
    text = os.fspath(place)
    if isinstance(place, str) or "://" in text:  # epath.Path has URIs too
        is_path = text in (".", "..", "~")
        if not is_path and not text.startswith(("/", "./", "../", "~/")):
            return text
    elif _BROKEN_URI.match(text):
        raise InvalidFieldError(
            f"store: expected a path, got {place!r}, of which one '/' is lost; give a "
            "URI as text"
        )
    return Path(os.path.abspath(Path(text).expanduser())).as_uri()  # noqa: PTH100 - resolve() would follow links


def storage_at(root: str) -> Storage:
    """Returns the storage at a root."""
    url = urlsplit(root)
    if "#" in root:
        raise InvalidFieldError(
            f"root {root!r}: expected no fragment, got '#{url.fragment}'; write a '#' "
            "of a name as %23"
        )
    match url.scheme:
        case "file" if not url.netloc and url.path and not url.query:
            path = Path(os.path.normpath(unquote(url.path))).as_posix()
            return _local(root, {"driver": FILE_DRIVER, "path": path.rstrip("/") + "/"})
        case "memory" if not (url.netloc or url.path or url.query):
            return _local(root, {"driver": MEMORY_DRIVER})
        case "gs" if len(url.netloc) >= _LEAST_NAME:
            return _gcs(root, url)
        case "s3" if len(url.netloc) >= _LEAST_NAME:
            return _s3(root, url)
    raise InvalidFieldError(
        f"root {root!r}: expected file:///PATH, memory://, gs://BUCKET/PREFIX or "
        "s3://BUCKET/PREFIX"
    )


def is_this_machine(host: str) -> bool:
    """Returns whether a host of a URL or an address is this machine and no other.

    Only ``localhost`` and loopback addresses are: any other name, also one that begins
    like an address or ends in a dot, is what a resolver says, so a stranger may own it.
    """
    host = host.removeprefix("[").removesuffix("]")
    try:
        address = ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def shows_plaintext(url: str) -> bool:
    """Returns whether others can read what is sent to a URL: all but https, and http on
    this machine."""
    parts = urlsplit(url)
    is_private = parts.scheme == "http" and is_this_machine(parts.hostname or "")
    return parts.scheme != "https" and not is_private


def is_writable(storage: Storage) -> bool:
    """Returns whether this process may write to a storage.

    True for a bucket, and for a directory that does not exist yet: only a write shows
    it there.
    """
    path = storage.spec.get("path", "")
    return not storage.is_files or not Path(path).exists() or os.access(path, os.W_OK)


def _local(root: str, spec: Mapping[str, Any]) -> Storage:
    return Storage(name=root, spec=spec, context={}, is_remote=False)


def _gcs(root: str, url: SplitResult) -> Storage:
    known = ("concurrency", "driver", "endpoint", "grpc_endpoint", "userProject")
    options = _options(root, url, known)
    project = options.get("userProject")
    if project == "":
        raise InvalidFieldError(f"root {root!r}: expected userProject=PROJECT, got ''")
    driver = options.get("driver", GCS_DRIVERS[0])
    if driver not in GCS_DRIVERS:
        raise InvalidFieldError(
            f"root {root!r}: expected driver={' or driver='.join(GCS_DRIVERS)}, got "
            f"{driver!r}"
        )
    spec: dict[str, Any] = {"driver": driver}
    if "grpc_endpoint" in options:
        if driver != GRPC_DRIVER:
            raise InvalidFieldError(
                f"root {root!r}: expected grpc_endpoint= with driver={GRPC_DRIVER}, "
                f"got driver={driver}; leave one of them out"
            )
        spec["endpoint"] = options["grpc_endpoint"]
    return _remote(
        url,
        spec=spec,
        endpoint=_endpoint(root, options),
        context={
            "gcs_request_concurrency": {"limit": _concurrency(root, options)},
            "gcs_request_retries": NO_RETRIES,
            **({"gcs_user_project": {"project_id": project}} if project else {}),
        },
        user_project=project,
    )


def _s3(root: str, url: SplitResult) -> Storage:
    options = _options(root, url, ("concurrency", "endpoint", "region"))
    if url.netloc.endswith(_EXPRESS_SUFFIX):
        raise InvalidFieldError(
            f"root {root!r}: expected a general purpose bucket, got a directory bucket "
            "(S3 Express): its lists are in no order; use another bucket"
        )
    # Without this, TensorStore probes the endpoint first, and takes one that does not
    # identify itself for one without conditional writes.
    spec: dict[str, Any] = {"driver": S3_DRIVER, "use_conditional_write": True}
    endpoint = _endpoint(root, options)
    if endpoint is not None:
        spec["endpoint"] = endpoint
    if "region" in options:
        spec["aws_region"] = options["region"]
    return _remote(
        url,
        spec=spec,
        endpoint=endpoint,
        context={
            "s3_request_concurrency": {"limit": _concurrency(root, options)},
            "s3_request_retries": NO_RETRIES,
        },
    )


def _endpoint(root: str, options: Mapping[str, str]) -> str | None:
    """URL of the API; None for the provider's default."""
    if "endpoint" not in options:
        return None
    endpoint = options["endpoint"].rstrip("/")
    if not endpoint.startswith(("http://", "https://")):
        raise InvalidFieldError(
            f"root {root!r}: expected endpoint=http[s]://HOST, got "
            f"{options['endpoint']!r}"
        )
    return endpoint


def _remote(
    url: SplitResult,
    *,
    spec: Mapping[str, Any],
    endpoint: str | None,
    context: Mapping[str, Any],
    user_project: str | None = None,
) -> Storage:
    path = unquote(url.path).strip("/")
    return Storage(
        name=f"{url.scheme}://{url.netloc}/{path}".rstrip("/"),
        spec={**spec, "bucket": url.netloc, "path": f"{path}/" if path else ""},
        context=context,
        endpoint=endpoint,
        user_project=user_project,
        is_remote=True,
    )


def _options(root: str, url: SplitResult, known: Sequence[str]) -> dict[str, str]:
    given = parse_qsl(url.query, keep_blank_values=True)
    options = dict(given)
    unknown = [name for name in options if name not in known]
    if unknown:
        raise InvalidFieldError(
            f"root {root!r}: expected the options {', '.join(known[:-1])} and "
            f"{known[-1]}, got {', '.join(unknown)}"
        )
    if len(options) < len(given):
        raise InvalidFieldError(
            f"root {root!r}: expected each option once, got {url.query!r}; leave all "
            "but one out"
        )
    return options


def _concurrency(root: str, options: Mapping[str, str]) -> int:
    text = options.get("concurrency", str(CONCURRENCY))
    if not text.isdecimal() or not 1 <= int(text) <= MAX_CONCURRENCY:
        raise InvalidFieldError(
            f"root {root!r}: expected concurrency=1 to {MAX_CONCURRENCY}, got {text!r}"
        )
    return int(text)
