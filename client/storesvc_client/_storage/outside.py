"""Places outside a store: parses their URLs, and opens fsspec's file systems for them.

What reads other projects' checkpoints and what exports to them share this, so a URL and
its options mean the same in both.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from storesvc.errors import InvalidFieldError
from storesvc.storage.location import GRPC_DRIVER, Storage, storage_at
from storesvc.storage.remote import TOKEN, find_endpoint
from storesvc_client.errors import (
    InvalidRequestError,
    PreconditionError,
    StoreError,
    UnavailableError,
)

PACKAGES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "gs": "'storesvc[gcs]'",
        "hf": "'storesvc[hf]'",
        "http": "aiohttp",
        "https": "aiohttp",
        "memory": "'storesvc[interop]'",
        "s3": "'storesvc[s3]'",
    }
)
"""Schemes that fsspec opens, and what pip installs for each."""

_ALMOST_URL: Final = re.compile(rf"({'|'.join(PACKAGES)})(?!://)(:|//)")
_QUERY: Final = re.compile(r"(https?://[^\s'\"?]+)\?[^\s'\"]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideFiles:
    """A folder in a file system of fsspec, whose caches are off."""

    url: str
    """URL of the folder, without options."""
    files: Any
    """The file system."""
    folder: str
    """The folder in the form of the file system's paths, without a "/" at its end."""
    storage: Storage | None
    """The bucket as TensorStore opens it; None for other places."""
    endpoint: str | None
    """URL of the API that the file system calls; None for its default."""

    def shares_bucket(self, root: Storage) -> bool:
        """Returns whether a root of a store is in the same bucket."""
        own = self.storage
        return (
            own is not None
            and urlsplit(own.name).scheme == urlsplit(root.name).scheme
            and own.spec["bucket"] == root.spec["bucket"]
            and self.endpoint == find_endpoint(root)
        )


def local_folder(url: str | os.PathLike[str], *, noun: str) -> Path | None:
    """Returns the path of a place on this machine, from a path or ``file:///PATH``;
    None for a URL of ``PACKAGES``."""
    text = os.fspath(url)
    if not text or "\0" in text:
        raise InvalidRequestError(f"{noun}: expected a URL or a path, got {url!r}")
    if (typo := _ALMOST_URL.match(text)) is not None:
        raise InvalidRequestError(
            f"{noun} {text!r}: expected {typo[1]}://... for a URL; write ./{text} for "
            "a path of this name"
        )
    if "://" not in text and not text.startswith("file:"):
        return Path(text)
    parts = urlsplit(text)
    if parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/") or parts.query:
            raise InvalidRequestError(
                f"{noun} {text!r}: expected file:///PATH; write a '?' as %3F"
            )
        return Path(unquote(parts.path))
    if parts.scheme not in PACKAGES or "::" in text:
        raise InvalidRequestError(
            f"{noun} {text!r}: expected a path, file:///PATH, or a URL that begins "
            f"with {', '.join(f'{scheme}://' for scheme in PACKAGES)}"
        )
    return None


def open_outside(url: str, options: Mapping[str, Any], *, noun: str) -> OutsideFiles:
    """Opens the file system of a URL of ``PACKAGES``; sends no request. The URL of a
    bucket has options as the root of a store; `options` take precedence."""
    scheme = urlsplit(url).scheme
    storage, plain = None, url.rstrip("/")
    if scheme in ("gs", "s3"):
        storage = _bucket(url, noun)
        plain = storage.name
    try:
        from fsspec.core import strip_protocol

        given = {**_options(storage), **options}
        # an instance that others share may have lists and a token of earlier
        files = _file_system(scheme)(
            use_listings_cache=False, skip_instance_cache=scheme == "hf", **given
        )
        folder = str(strip_protocol(plain)).rstrip("/")
    except ImportError as e:
        raise InvalidRequestError(
            f"{noun} {plain}: {scheme}:// needs {e.name or 'another package'}; "
            f"pip install {PACKAGES[scheme]}"
        ) from e
    except (TypeError, ValueError) as e:
        raise InvalidRequestError(f"{noun} {plain}: {e}") from e
    inner = given.get("client_kwargs") or {}
    endpoint = inner.get("endpoint_url") or given.get("endpoint_url")
    return OutsideFiles(
        url=plain,
        files=files,
        folder=folder,
        storage=storage,
        endpoint=None if endpoint is None else str(endpoint).rstrip("/"),
    )


def is_denied(e: BaseException) -> bool:
    """Returns whether an error of a file system is a denied access."""
    # gcsfs raises a plain OSError for the status 403
    is_forbidden = isinstance(e, OSError) and str(e).startswith("Forbidden: ")
    return (
        is_forbidden or isinstance(e, PermissionError) or http_status(e) in (401, 403)
    )


def http_status(e: BaseException | None) -> Any:
    """Returns the HTTP status of an error of a file system; None if it has none."""
    response = getattr(e, "response", None)  # of huggingface_hub
    found = getattr(response, "status_code", None)
    return found or getattr(e, "status", getattr(e, "code", None))


def files_error(e: Exception, place: str, *, verb: str, remedy: str) -> StoreError:
    """Returns the error of this library for an error of a file system, which may come
    from any library below it. The verb is what failed, such as "read", and the remedy
    what to do when the storage fails."""
    if is_denied(e):
        return PreconditionError(
            f"{place}: access denied ({error_line(e)}); use credentials that may "
            f"{verb} it"
        )
    done = {"write": "written"}.get(verb, verb)
    return UnavailableError(f"{place}: cannot be {done} ({error_line(e)}); {remedy}")


def error_line(e: BaseException | None) -> str:
    """Returns the first line of the text of an error, or its type; without the queries
    of URLs, which may be signatures that grant access."""
    line = (str(e).strip() or type(e).__name__).splitlines()[0]
    return _QUERY.sub(r"\1", line)[:200]


def name_below(start: str, full: str) -> str:
    """Returns the name of a file or folder right below a prefix; "" if it is not."""
    text = full.lstrip("/").rstrip("/")
    name = text.removeprefix(start)
    return "" if name == text or "/" in name or "?" in name else name


def _bucket(url: str, noun: str) -> Storage:
    try:
        storage = storage_at(url)
    except InvalidFieldError as e:
        raise InvalidRequestError(f"{noun} {url!r}: {e}") from e
    if storage.uses_grpc:
        raise InvalidRequestError(
            f"{noun} {url!r}: expected no driver=, got {GRPC_DRIVER}; other projects' "
            "checkpoints are read and written over HTTP, leave it out"
        )
    return storage


def _file_system(scheme: str) -> Callable[..., Any]:
    """Returns the class of fsspec's file system for a scheme.

    Of gcsfs, the class that only calls the JSON API: that of the registry first asks
    a gRPC service for the type of the bucket, which waits for minutes where ``gs://``
    leads to another endpoint (seen in 2026.10.1).
    """
    if scheme == "gs":
        from gcsfs.core import GCSFileSystem

        of_buckets: Callable[..., Any] = GCSFileSystem
        return of_buckets
    import fsspec

    of_scheme: Callable[..., Any] = fsspec.get_filesystem_class(scheme)
    return of_scheme


def _options(storage: Storage | None) -> dict[str, Any]:
    """Returns fsspec's options for the options of a root, and for what TensorStore
    reads from the environment: both must reach the same storage."""
    if storage is None:
        return {}
    endpoint = find_endpoint(storage)
    found: dict[str, Any] = {}
    if endpoint is not None:
        found["endpoint_url"] = endpoint
    if storage.is_s3:
        region = storage.spec.get("aws_region")
        return {**found, "client_kwargs": {"region_name": region}} if region else found
    if TOKEN in os.environ:  # an emulator's
        found["token"] = "anon"  # noqa: S105 - no secret
    return found
