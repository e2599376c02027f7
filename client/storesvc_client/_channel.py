"""Connections: from a target to a channel, and what every call shares."""

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import grpc
from google.protobuf.message import Message

from storesvc_client._embedded import start_embedded
from storesvc_client._staging import MIN_BUDGET_BYTES, Staging
from storesvc_client.errors import InvalidRequestError, translated

T = TypeVar("T")

MAX_FRAME_BYTES: Final = 2 << 20
"""Bytes of data in a frame: also the fastest size to ship bytes in."""

DEFAULT_STAGING_BYTES: Final = 4 << 30
"""Host memory that saves may take."""

_RETRIED: Final = [
    {"service": f"storesvc.v1.{service}", "method": method}
    for service, methods in {
        "CheckpointService": (
            "ListRuns",
            "GetRun",
            "ListCheckpoints",
            "GetCheckpoint",
        ),
        "UploadService": ("CommitUpload",),
        "MaintenanceService": ("GetServerInfo",),
    }.items()
    for method in methods
]
# Streams are not in it: they resume where they stopped, which gRPC cannot know.
_SERVICE_CONFIG: Final = {
    "methodConfig": [
        {
            "name": _RETRIED,
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "5s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
    "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
}
_OPTIONS: Final = (
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # the second try of a call must not come before that of its connection: a worker
    # that dies takes those with it that nobody has accepted
    ("grpc.initial_reconnect_backoff_ms", 100),
    # gRPC's own two minutes would outlast the patience with a server's restart
    ("grpc.max_reconnect_backoff_ms", 5_000),
)


class Connection:
    """Channels to a store, and how to end them."""

    def __init__(
        self,
        dial: Callable[[int], grpc.Channel],
        address: str,
        *,
        timeout: float,
        end: Callable[[], None],
        staging_bytes: int,
    ) -> None:
        self.channel = dial(0)
        self._dial = dial
        self._others: list[grpc.Channel] = []
        self._lock = threading.Lock()
        self.address = address
        """What messages call the store."""
        self.timeout = timeout
        """Seconds that a call may take, streams excepted."""
        self.files: Path | None = None
        """The root of the store, where this process may reach its data files by
        itself; None: they come and go through the server."""
        self.staging = Staging(staging_bytes)
        """The host memory of saves."""
        self._end = end
        self._is_open = True

    def close(self) -> None:
        """Ends it; a second time does nothing."""
        if self._is_open:
            self._is_open = False
            self.staging.clear()
            for channel in (self.channel, *self._others):
                channel.close()
            self._end()

    def channels(self, count: int) -> list[grpc.Channel]:
        """Returns channels for bulk, at most so many; the first is that of all calls.

        Each has a socket of its own: a core at either end, and one of the servers that
        share a port.
        """
        with self._lock:
            while self._is_open and len(self._others) < count - 1:
                self._others.append(self._dial(len(self._others) + 1))
            return [self.channel, *self._others[: count - 1]]

    def call(self, method: Callable[..., T], request: Message) -> T:
        """Returns the answer to a request.

        Raises:
            StoreError: What the store says, or that it does not answer.
        """
        with translated(self.address):
            return method(request, timeout=self.timeout)

    def check_open(self) -> None:
        """Refuses to go on with a connection that was ended.

        Raises:
            InvalidRequestError: It was.
        """
        if not self._is_open:
            raise InvalidRequestError(
                f"the client of {self.address} is closed; connect again"
            )


def open_connection(
    target: str,
    *,
    ca: Path | None,
    insecure: bool,
    timeout: float,
    staging_bytes: int,
) -> Connection:
    """Returns a connection to a target; nothing is sent yet.

    Raises:
        InvalidRequestError: The target is neither a root nor HOST:PORT, or a
            certificate cannot be read.
    """
    if staging_bytes < MIN_BUDGET_BYTES:
        raise InvalidRequestError(
            f"staging_bytes: expected at least {MIN_BUDGET_BYTES}, got {staging_bytes}"
        )
    if "://" in target:
        server = start_embedded(target)
        return Connection(
            lambda number: grpc.insecure_channel(server.address, _options(number)),
            target,
            timeout=timeout,
            end=server.close,
            staging_bytes=staging_bytes,
        )
    host, _ = _split(target)
    if insecure or (ca is None and _is_loopback(host)):
        credentials = None
    else:
        credentials = grpc.ssl_channel_credentials(_read(ca))

    def dial(number: int) -> grpc.Channel:
        options = _options(number)
        if credentials is None:
            return grpc.insecure_channel(target, options)
        return grpc.secure_channel(target, credentials, options)

    return Connection(
        dial, target, timeout=timeout, end=lambda: None, staging_bytes=staging_bytes
    )


def _options(number: int) -> Sequence[tuple[str, Any]]:
    """Those of a channel; two of the same options share a socket."""
    return (*_OPTIONS, ("storesvc.channel", number))


def _split(target: str) -> tuple[str, int]:
    try:
        url = urlsplit(f"//{target}")
        if url.hostname and url.port and url.netloc == target and not url.username:
            return url.hostname, url.port
    except ValueError:
        pass
    raise InvalidRequestError(
        f"store {target!r}: expected HOST:PORT, file:///PATH, gs://BUCKET/PREFIX or "
        "memory://"
    )


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _read(ca: Path | None) -> bytes | None:
    """PEM of the authority to trust; None: those of the system."""
    if ca is None:
        return None
    try:
        data = ca.read_bytes()
    except OSError as e:
        raise InvalidRequestError(f"ca: cannot read {ca}: {e.strerror}") from e
    if b"-----BEGIN CERTIFICATE" not in data:
        raise InvalidRequestError(f"ca: {ca} holds no certificate in PEM")
    return data
