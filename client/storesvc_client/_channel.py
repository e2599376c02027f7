"""Connections: from a target to a channel, and what every call shares."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlsplit

import grpc
from google.protobuf.message import Message

from storesvc_client._embedded import start_embedded
from storesvc_client.errors import InvalidRequestError, translated

T = TypeVar("T")

MAX_FRAME_BYTES: Final = 2 << 20
"""Bytes of data in a frame: also the fastest size to ship bytes in."""

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
    # gRPC's own two minutes would outlast the patience with a server's restart
    ("grpc.max_reconnect_backoff_ms", 5_000),
)


class Connection:
    """A channel to a store, and how to end it."""

    def __init__(
        self,
        channel: grpc.Channel,
        address: str,
        *,
        timeout: float,
        end: Callable[[], None],
    ) -> None:
        self.channel = channel
        self.address = address
        """What messages call the store."""
        self.timeout = timeout
        """Seconds that a call may take, streams excepted."""
        self._end = end
        self._is_open = True

    def close(self) -> None:
        """Ends it; a second time does nothing."""
        if self._is_open:
            self._is_open = False
            self._end()

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
    target: str, *, ca: Path | None, insecure: bool, timeout: float
) -> Connection:
    """Returns a connection to a target; nothing is sent yet.

    Raises:
        InvalidRequestError: The target is neither a root nor HOST:PORT, or a
            certificate cannot be read.
    """
    if "://" in target:
        server = start_embedded(target)
        channel = grpc.insecure_channel(server.address, options=_OPTIONS)

        def close() -> None:
            channel.close()
            server.close()

        return Connection(channel, target, timeout=timeout, end=close)
    host, _ = _split(target)
    if insecure or (ca is None and _is_loopback(host)):
        channel = grpc.insecure_channel(target, options=_OPTIONS)
    else:
        channel = grpc.secure_channel(
            target, grpc.ssl_channel_credentials(_read(ca)), options=_OPTIONS
        )
    return Connection(channel, target, timeout=timeout, end=channel.close)


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
