"""Connections: from a target to a channel, and what every call shares."""

import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc
from google.protobuf.message import Message

from storesvc_client._rpc.certificate_renewal import RenewedChannel
from storesvc_client._rpc.embedded import start_embedded
from storesvc_client._rpc.retry import (
    LEAST_ATTEMPTS,
    PATIENCE_SECONDS,
    patiently,
    until,
)
from storesvc_client._rpc.server_wait import Wait, Waits
from storesvc_client._rpc.target import Target, is_root
from storesvc_client._rpc.tls import Tls, refusal
from storesvc_client._values.durations import NEVER, Deadline
from storesvc_client.errors import (
    InvalidRequestError,
    StoreError,
    UnavailableError,
    translated,
)
from storesvc_proto.v1 import maintenance_service_pb2 as maintenance_api
from storesvc_proto.v1.maintenance_service_pb2_grpc import MaintenanceServiceStub

if TYPE_CHECKING:
    from tenacity import AttemptManager

T = TypeVar("T")

MAX_FRAME_BYTES: Final = 2 << 20
"""Bytes of data in a frame: also the fastest size to ship bytes in."""

_PROBE_SECONDS: Final = 0.5
"""How long a server may take to answer whether it is there."""

_RETRIED: Final = [
    {"service": f"storesvc.v1.{service}", "method": method}
    for service, methods in {
        "CheckpointService": (
            "ListRuns",
            "GetRun",
            "ListCheckpoints",
            "GetCheckpoint",
            "RenewHold",
            "DeleteHold",
        ),
        "UploadService": ("KeepUploadAlive", "CommitUpload", "AbortUpload"),
        "MaintenanceService": ("GetServerInfo",),
    }.items()
    for method in methods
]
"""What may be asked of another server at once, where one is lost. Others are repeated
by ``patiently``; streams go on where they stopped, which gRPC cannot know.

Without gRPC's throttling: what fails with a server is many calls at once, and each of
them is to go on at another one."""
_METHOD_CONFIG: Final = [
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
]
_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # the second try of a call must not come before that of its connection: a worker
    # that dies takes those with it that nobody has accepted
    ("grpc.initial_reconnect_backoff_ms", 100),
    # gRPC's own two minutes would outlast the patience with a server's restart
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # and so would its half a minute, with servers that come back at other addresses
    ("grpc.dns_min_time_between_resolutions_ms", 5_000),
)
_EMBEDDED_OPTIONS: Final = (
    *_OPTIONS,
    ("grpc.service_config", json.dumps({"methodConfig": _METHOD_CONFIG})),
)
_REMOTE_OPTIONS: Final = (
    *_OPTIONS,
    (
        "grpc.service_config",
        json.dumps(
            {
                "methodConfig": _METHOD_CONFIG,
                # over all addresses of a target whose servers say that they serve
                "loadBalancingConfig": [{"round_robin": {}}],
                "healthCheckConfig": {"serviceName": ""},
            }
        ),
    ),
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
        patience: float = math.inf,
        refusal: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.channel = dial(0)
        self._dial = dial
        self._others: list[grpc.Channel] = []
        self._lock = threading.Lock()
        self.address = address
        """What messages call the store."""
        self.timeout = timeout
        """Seconds that a call may take, streams excepted ..."""
        self.patience = patience
        """... and one that is repeated."""
        self.waits = Waits(address, self._answers)
        """The calls that wait for an answer."""
        self.refusal = refusal
        """Asks why the store refuses this client, or this client the store; None: it
        does not."""
        self._end = end
        self._is_open = True

    def close(self) -> None:
        """Ends it; a second time does nothing."""
        if self._is_open:
            self._is_open = False
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

    def call(
        self, method: Callable[..., T], request: Message, deadline: Deadline = NEVER
    ) -> T:
        """Returns the answer to a request.

        Raises:
            StoreError: What the store says, or that it does not answer.
        """
        seconds = self.seconds(deadline)
        with self.waits.during(_name(request), patience=seconds, is_quick=True):
            return self._call(method, request, deadline)

    def ask(
        self, method: Callable[..., T], request: Message, deadline: Deadline = NEVER
    ) -> T:
        """Returns the answer to a request that may be repeated.

        Raises:
            StoreError: What the store says, or that it does not answer, for longer
                than a restart takes, or until the deadline.
        """
        ends = Deadline.after(self.patience)
        deadline = min(deadline, ends, key=lambda each: each.end)

        def act() -> T:
            return self._call(method, request, deadline)

        with self._waiting(_name(request), deadline, is_quick=True) as wait:
            try:  # who is answered needs nothing of what patience imports
                return self._tried(wait, act, deadline)
            except UnavailableError as e:
                if deadline.left <= 0:
                    raise
                told = e
            return until(
                deadline,
                lambda: self._tried(wait, act, deadline),
                least_attempts=LEAST_ATTEMPTS - 1,
                told=told,
            )

    def until(self, call: str, deadline: Deadline, act: Callable[[], T]) -> T:
        """Returns what an act returns, which is repeated as ``attempts`` are.

        Args:
            call: The rpc that it waits for.
            deadline: Until when.
            act: May be repeated.

        Raises:
            UnavailableError: As ``retry.until``.
        """
        with self._waiting(call, deadline) as wait:
            return until(deadline, lambda: self._tried(wait, act, deadline))

    def attempts(
        self, call: str, *, deadline: Deadline = NEVER
    ) -> "Iterator[AttemptManager]":
        """Yields attempts at a call that may be repeated, as ``patiently``; logs what
        is waited for where that takes long.

        Args:
            call: The rpc.
            deadline: Until when.
        """
        with self._waiting(call, deadline) as wait:
            for attempt in patiently(deadline=deadline):
                wait.try_for(self.seconds(deadline))
                yield attempt
                outcome = attempt.retry_state.outcome
                error = outcome.exception() if outcome is not None else None
                if isinstance(error, StoreError):
                    wait.fail(error)

    def _waiting(
        self, call: str, deadline: Deadline, *, is_quick: bool = False
    ) -> AbstractContextManager[Wait]:
        patience = max(0.0, min(PATIENCE_SECONDS, deadline.left))
        return self.waits.during(call, patience=patience, is_quick=is_quick)

    def _tried(self, wait: Wait, act: Callable[[], T], deadline: Deadline) -> T:
        """What an act returns, one attempt of many."""
        wait.try_for(self.seconds(deadline))
        try:
            return act()
        except StoreError as e:
            wait.fail(e)
            raise

    def _call(
        self, method: Callable[..., T], request: Message, deadline: Deadline
    ) -> T:
        with translated(self.address):
            return method(request, timeout=self.seconds(deadline))

    def _answers(self) -> bool:
        """Whether the server answers now."""
        stub = MaintenanceServiceStub(self.channel)
        try:
            stub.GetServerInfo(
                maintenance_api.GetServerInfoRequest(), timeout=_PROBE_SECONDS
            )
        except (grpc.RpcError, ValueError):  # ValueError: the channel is closed
            return False
        return True

    def seconds(self, deadline: Deadline) -> float:
        """Returns how long a call may take."""
        return max(0.0, min(self.timeout, deadline.left))

    def check_open(self) -> None:
        """Refuses to go on with a connection that was ended.

        Raises:
            InvalidRequestError: It was.
        """
        if not self._is_open:
            raise InvalidRequestError(
                f"the client of {self.address} is closed; connect again"
            )


def _name(request: Message) -> str:
    """The rpc that a request is of."""
    return type(request).__name__.removesuffix("Request")


def open_connection(
    target: str,
    *,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    insecure: bool,
    timeout: float,
) -> Connection:
    """Returns a connection to a target; nothing is sent yet.

    Raises:
        InvalidRequestError: The target is neither a root nor HOST:PORT, a certificate
            cannot be used, or what is given for servers is given for a root.
        UnavailableError: A name in a list of servers has no address.
    """
    if is_root(target):
        _check_bare(target, ca=ca, cert=cert, key=key, insecure=insecure)
        server = start_embedded(target, timeout=timeout)
        return Connection(
            lambda number: grpc.insecure_channel(
                server.address, _numbered(_EMBEDDED_OPTIONS, number)
            ),
            target,
            timeout=timeout,
            end=server.close,
            patience=timeout,  # it does not come back from a restart
        )
    servers = Target.parse(target)
    tls = _tls(servers, ca=ca, cert=cert, key=key, insecure=insecure)
    return Connection(
        lambda number: _dial(servers, tls, number),
        target,
        timeout=timeout,
        end=lambda: None,
        refusal=lambda: refusal(servers, tls),
    )


def _check_bare(target: str, **given: object) -> None:
    """Refuses what secures a connection where none leaves this process."""
    useless = [f"{name}=" for name, value in given.items() if value]
    if useless:
        raise InvalidRequestError(
            f"store {target}: expected nothing that secures a connection with a root, "
            f"whose server is in this process, got {', '.join(useless)}; leave it out, "
            "or give HOST:PORT"
        )


def _tls(
    servers: Target,
    *,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    insecure: bool,
) -> Tls | None:
    """What a connection is secured with; None: it is plaintext."""
    is_given = any(file is not None for file in (ca, cert, key))
    if insecure and is_given:
        raise InvalidRequestError(
            f"store {servers.text}: expected insecure or certificates, got both; "
            "plaintext has no use for them"
        )
    if insecure or (servers.is_loopback and not is_given):
        return None
    return Tls(ca=ca, cert=cert, key=key)


def _dial(servers: Target, tls: Tls | None, number: int) -> grpc.Channel:
    options = _numbered(_REMOTE_OPTIONS, number)
    if tls is None:
        return grpc.insecure_channel(servers.address(), options)
    if servers.is_list:
        # the name that each of them answers to is that of the first
        options = (*options, ("grpc.ssl_target_name_override", servers.hosts[0][0]))
    return RenewedChannel(
        tls,
        lambda credentials: grpc.secure_channel(
            servers.address(), credentials, options
        ),
    )


def _numbered(
    options: Sequence[tuple[str, Any]], number: int
) -> Sequence[tuple[str, Any]]:
    """Those of a channel; two of the same options share a socket."""
    return (*options, ("storesvc.channel", number))
