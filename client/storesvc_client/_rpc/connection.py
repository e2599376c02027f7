"""Connections: the channels to a store, with timeouts, retries and wait logs.

``RunStub`` calls a store about one run, checks the names of its checkpoints, and reads
lists of the server page by page.

The server of a root is started inside this process; this is the only import of the
service's code.

Each call carries metadata: its token, and the span it belongs to. They are asked for in
the thread that begins a call, and are therefore always current. Without a token and
without OpenTelemetry there are none.

Example:
    >>> channel = MetadataChannel(channel, lambda: [("authorization", "Bearer ...")])
"""

import json
import math
import operator
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from storesvc.format.names import CheckpointName, InvalidNameError, RunName, Which
from storesvc_client._rpc.process_exit import check_process, close_at_exit, note_close
from storesvc_client._rpc.retry import PATIENCE_SECONDS, Attempt, Waits, attempts
from storesvc_client._rpc.tls import (
    ForwardingChannel,
    RenewedChannel,
    Target,
    Tls,
    is_root,
    refusal,
)
from storesvc_client._rpc.tokens import Token, TokenSource, token_source
from storesvc_client._telemetry.events import current_traceparent
from storesvc_client._values.arguments import NEVER, Deadline, parse_received
from storesvc_client.errors import (
    DataLossError,
    InvalidRequestError,
    StoreError,
    error_class,
    translate_rpc_errors,
)
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1 import maintenance_service_pb2 as maintenance_api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from storesvc_proto.v1.errors_pb2 import DamagedRecord
from storesvc_proto.v1.maintenance_service_pb2_grpc import MaintenanceServiceStub

if TYPE_CHECKING:
    from storesvc.server.embedded import EmbeddedServer
    from storesvc_proto.v1.upload_service_pb2_grpc import UploadServiceStub


def holds_store(root: str, *, timeout: float) -> bool:
    """Returns whether a store exists at a root; creates none."""
    with _translate_start_errors(root):
        from storesvc.server import embedded

        return embedded.holds_store(root, timeout=timeout)


@contextmanager
def _translate_start_errors(root: str) -> Generator[None]:
    """Translates errors of the embedded server to errors of this library."""
    try:
        from storesvc.server.embedded import StartError
    except ModuleNotFoundError as e:
        raise InvalidRequestError(
            f"store {root!r}: an embedded store needs {e.name}; "
            "pip install 'storesvc[server]'"
        ) from e
    try:
        yield
    except StartError as e:
        kind = error_class(e.code, e.reason)
        raise kind(str(e), reason=e.reason, metadata=e.metadata) from None


TRACEPARENT: Final = "traceparent"
"""Name of the metadata with the span of the caller (W3C Trace Context)."""

Metadata: TypeAlias = Sequence[tuple[str, str]]


def call_metadata(source: TokenSource | None, address: str) -> Callable[[], Metadata]:
    """Returns a function that returns the metadata for a call that begins now, and
    rejects calls in a forked child."""
    process = os.getpid()

    def metadata() -> Metadata:
        check_process(address, process)
        found = list[tuple[str, str]]()
        if source is not None:
            found.append(("authorization", f"Bearer {source()}"))
        if span := current_traceparent():
            found.append((TRACEPARENT, span))
        return found

    return metadata


class MetadataChannel(ForwardingChannel):
    """Delegates calls to a channel, each with the metadata of the time it begins."""

    def __init__(self, channel: grpc.Channel, metadata: Callable[[], Metadata]) -> None:
        self._channel = channel
        self._metadata = metadata

    def _method(self, kind: str, arguments: Any, options: Any) -> Callable[..., Any]:
        method = getattr(self._channel, kind)(*arguments, **options)

        def call(*request: Any, **options: Any) -> Any:
            if added := self._metadata():
                options["metadata"] = (*(options.get("metadata") or ()), *added)
            return method(*request, **options)

        return call


class _InProcessChannel(ForwardingChannel):
    """Makes the calls with one response without the socket of an embedded server."""

    def __init__(self, channel: grpc.Channel, server: "EmbeddedServer") -> None:
        self._channel = channel
        self._server = server
        self._is_open = True

    def _method(self, kind: str, arguments: Any, options: Any) -> Callable[..., Any]:
        if kind not in ("unary_unary", "stream_unary"):
            made: Callable[..., Any] = getattr(self._channel, kind)(
                *arguments, **options
            )
            return made
        (method,) = arguments
        serialize = options["request_serializer"]
        parse = options["response_deserializer"]

        def call(
            request: Any, timeout: float | None = None, metadata: "Metadata" = ()
        ) -> Any:
            if not self._is_open:
                raise ValueError("Cannot invoke RPC on closed channel!")  # as gRPC does
            requests = [request] if kind == "unary_unary" else request
            data = [serialize(one) for one in requests]
            return parse(self._server.call(method, data, timeout, metadata))

        return call

    def close(self) -> None:
        self._is_open = False
        super().close()


T = TypeVar("T")
R = TypeVar("R")

MAX_FRAME_BYTES: Final = 2 << 20
"""Maximum bytes of data in a frame, which is also the size with the best throughput."""

_PROBE_SECONDS: Final = 0.5
"""Timeout of a call that checks whether a server answers."""

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
"""Calls that gRPC may at once repeat on another server if one is lost. Other calls are
retried by ``attempts``; streams are resumed, which gRPC cannot do.

There is no gRPC retry throttling: a lost server fails many calls at a time, and each of
them must be repeated on another server."""
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
    # The first reconnect must come before the second attempt of a call: a replica that
    # dies takes connections with it that it has not accepted yet.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # gRPC's default of two minutes exceeds the deadline for a server's restart ...
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # ... and so does its half minute, for servers that return at other addresses.
    ("grpc.dns_min_time_between_resolutions_ms", 5_000),
)
_NO_PROXY: Final = ("grpc.enable_http_proxy", 0)
"""A proxy elsewhere cannot reach this machine's loopback addresses."""

_EMBEDDED_OPTIONS: Final = (*_OPTIONS, _NO_PROXY)
_REMOTE_OPTIONS: Final = (
    *_OPTIONS,
    (
        "grpc.service_config",
        json.dumps(
            {
                "methodConfig": _METHOD_CONFIG,
                # over all addresses of a target whose servers report SERVING
                "loadBalancingConfig": [{"round_robin": {}}],
                "healthCheckConfig": {"serviceName": ""},
            }
        ),
    ),
)


class Connection:
    """Channels to a store."""

    def __init__(
        self,
        dial: Callable[[int], grpc.Channel],
        address: str,
        *,
        timeout: float,
        end: Callable[[], None] | None = None,
        patience: float = math.inf,
        refusal: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.channel = dial(0)
        self._dial = dial
        self._others: list[grpc.Channel] = []
        self._lock = threading.Lock()
        self.address = address
        """Name of the store in messages."""
        self.timeout = timeout
        """Timeout of a call in seconds, except streams ..."""
        self.patience = patience
        """... and of a call with its retries."""
        self.waits = Waits(address, self._answers)
        """Calls that wait for a response."""
        self.refusal = refusal
        """Returns why server or client reject the other's certificates, None if they do
        not; connects to the server."""
        self._end = end
        self._is_open = True
        self._process = os.getpid()
        self.creates_in_one_call = True
        """False once the server has shown that it does not know CreateCheckpoint."""
        if end is not None:
            close_at_exit(self.close)

    @cached_property
    def checkpoints(self) -> CheckpointServiceStub:
        """The calls that read checkpoints; made once, as that takes as long as a small
        call."""
        return CheckpointServiceStub(self.channel)

    @cached_property
    def uploads(self) -> "UploadServiceStub":
        """The calls that write checkpoints, made once likewise."""
        from storesvc_proto.v1.upload_service_pb2_grpc import UploadServiceStub

        return UploadServiceStub(self.channel)

    @property
    def is_inherited(self) -> bool:
        """True in a forked child of the process that connected."""
        return self._process != os.getpid()

    def close(self) -> None:
        """Closes all channels; repeated calls do nothing."""
        if self._is_open and not self.is_inherited:
            self._is_open = False
            for channel in (self.channel, *self._others):
                channel.close()
            if self._end is not None:
                note_close(self.close)
                self._end()

    def channels(self, count: int) -> list[grpc.Channel]:
        """Returns at most `count` channels for bulk data; the first serves all calls.

        Each has a socket of its own, so that it uses another core at both ends and
        another of the servers that share a port.
        """
        with self._lock:
            while self._is_open and len(self._others) < count - 1:
                self._others.append(self._dial(len(self._others) + 1))
            return [self.channel, *self._others[: count - 1]]

    def call(
        self, method: Callable[..., T], request: Message, deadline: Deadline = NEVER
    ) -> T:
        """Sends a request once and returns the response."""
        seconds = self.seconds(deadline)
        with self.waits.during(_name(request), patience=seconds, is_quick=True):
            return self._call(method, request, deadline)

    def ask(
        self, method: Callable[..., T], request: Message, deadline: Deadline = NEVER
    ) -> T:
        """Sends an idempotent request, retries transient errors; returns the response.

        Raises:
            StoreError: The store returned an error, or did not answer until the
                deadline or for longer than a restart takes.
        """
        ends = Deadline.after(self.patience)
        deadline = min(deadline, ends, key=lambda each: each.end)
        for attempt in self.attempts(_name(request), deadline=deadline, is_quick=True):
            with attempt:
                return self._call(method, request, deadline)
        raise AssertionError

    def retry(
        self, call: str, act: Callable[[], T], *, deadline: Deadline = NEVER
    ) -> T:
        """Returns the result of an idempotent call, which is retried as ``attempts``
        says; translates its errors."""
        for attempt in self.attempts(call, deadline=deadline):
            with attempt, translate_rpc_errors(self.address):
                return act()
        raise AssertionError

    def stream(self, call: str, begin: Callable[[], Any]) -> Generator[Any]:
        """Yields the messages of a stream, whose first one is retried as ``attempts``
        says; cancels it if the caller stops early: the server must stop, too."""

        def start() -> tuple[Any, Any]:
            stream = begin()
            return stream, next(stream, None)

        stream, first = self.retry(call, start)
        try:
            if first is not None:
                yield first
            with translate_rpc_errors(self.address):
                yield from stream
        finally:
            stream.cancel()

    def attempts(
        self, call: str, *, deadline: Deadline = NEVER, is_quick: bool = False
    ) -> Iterator[Attempt]:
        """Yields attempts at an idempotent call, as ``retry.attempts``; logs long
        waits."""
        patience = max(0.0, min(PATIENCE_SECONDS, deadline.left))
        with self.waits.during(call, patience=patience, is_quick=is_quick) as wait:
            for attempt in attempts(deadline=deadline, call=call):
                wait.try_for(self.seconds(deadline))
                yield attempt
                if attempt.error is not None:
                    wait.fail(attempt.error)

    def _call(
        self, method: Callable[..., T], request: Message, deadline: Deadline
    ) -> T:
        with translate_rpc_errors(self.address):
            return method(request, timeout=self.seconds(deadline))

    def _answers(self) -> bool:
        """Returns whether the server answers a small call now."""
        stub = MaintenanceServiceStub(self.channel)
        try:
            stub.GetServerInfo(
                maintenance_api.GetServerInfoRequest(), timeout=_PROBE_SECONDS
            )
        # ValueError: the channel is closed; StoreError: there is no token
        except (grpc.RpcError, ValueError, StoreError):
            return False
        return True

    def seconds(self, deadline: Deadline) -> float:
        """Returns the timeout of a call that must end before a deadline."""
        return max(0.0, min(self.timeout, deadline.left))

    def check_open(self) -> None:
        check_process(self.address, self._process)
        if not self._is_open:
            raise InvalidRequestError(
                f"the client of {self.address} is closed; connect again"
            )


def _name(request: Message) -> str:
    return type(request).__name__.removesuffix("Request")


def open_connection(
    target: str,
    *,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    insecure: bool,
    timeout: float,
    token: "Token | None" = None,
    collect: bool | None = None,
) -> Connection:
    """Returns a connection to a target; sends nothing, except name lookups.

    Raises:
        InvalidRequestError: The target is neither a root nor HOST:PORT, a certificate
            cannot be used, a token would be sent in plaintext, certificates, a token or
            ``insecure`` are given for a root, or ``collect`` for a server.
        UnauthenticatedError: The token cannot be used.
        UnavailableError: A name in a list of servers has no address.
    """
    if collect is not None and not isinstance(collect, bool):
        raise InvalidRequestError(
            f"connect: collect=: expected True, False or None, got {collect!r}"
        )
    if is_root(target):
        _check_bare(target, ca=ca, cert=cert, key=key, token=token, insecure=insecure)
        with _translate_start_errors(target):
            from storesvc.server.embedded import EmbeddedServer

            server = EmbeddedServer(target, timeout=timeout, collect=collect)
        return Connection(
            lambda number: MetadataChannel(
                _InProcessChannel(
                    grpc.insecure_channel(
                        server.address, _number_options(_EMBEDDED_OPTIONS, number)
                    ),
                    server,
                ),
                call_metadata(None, target),
            ),
            target,
            timeout=timeout,
            end=server.close,
            patience=timeout,  # an embedded server does not restart
        )
    if collect is not None:
        raise InvalidRequestError(
            f"connect: expected collect= with the root of a store, got {target}, a "
            "server, whose operator decides (storectl serve --gc-interval); omit it"
        )
    servers = Target.parse(target)
    tls = _tls(servers, ca=ca, cert=cert, key=key, insecure=insecure)
    source = None
    if token is not None:
        if tls is None and not servers.is_loopback:
            raise InvalidRequestError(
                f"store {servers.text}: expected TLS with a token, which plaintext "
                "would show to others; omit insecure and give ca, or omit the token"
            )
        source = token_source(token)
        source()  # a mistyped path is an error now, not in the first save

    def dial(number: int) -> grpc.Channel:
        return MetadataChannel(
            _dial(servers, tls, number), call_metadata(source, target)
        )

    return Connection(
        dial, target, timeout=timeout, refusal=lambda: refusal(servers, tls)
    )


def _check_bare(target: str, **given: object) -> None:
    """Rejects certificates and tokens for a root, whose server runs in this process."""
    useless = [f"{name}=" for name, value in given.items() if value]
    if useless:
        raise InvalidRequestError(
            f"store {target}: expected no TLS options and no token with a root, whose "
            f"server runs in this process, got {', '.join(useless)}; omit them, or "
            "connect to HOST:PORT"
        )


def _tls(
    servers: Target,
    *,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    insecure: bool,
) -> Tls | None:
    """Returns the certificates of a connection; None if it is plaintext."""
    is_given = any(file is not None for file in (ca, cert, key))
    if insecure and is_given:
        raise InvalidRequestError(
            f"store {servers.text}: expected insecure or certificates, got both; "
            "omit one of them"
        )
    if insecure or (servers.is_loopback and not is_given):
        return None
    return Tls(ca=ca, cert=cert, key=key)


def _dial(servers: Target, tls: Tls | None, number: int) -> grpc.Channel:
    options = _number_options(_REMOTE_OPTIONS, number)
    if servers.is_loopback:
        options = (*options, _NO_PROXY)
    if tls is None:
        return grpc.insecure_channel(servers.address(), options)
    if servers.is_list:
        # the certificates of all servers of a list are issued to the first name
        options = (*options, ("grpc.ssl_target_name_override", servers.hosts[0][0]))
    return RenewedChannel(
        tls,
        lambda credentials: grpc.secure_channel(
            servers.address(), credentials, options
        ),
    )


def _number_options(
    options: Sequence[tuple[str, Any]], number: int
) -> Sequence[tuple[str, Any]]:
    """Returns the options of a channel; gRPC shares sockets between equal options."""
    return (*options, ("storesvc.channel", number))


OnDamage: TypeAlias = Callable[[DataLossError], object] | None
"""Called for each row that cannot be read because its record is corrupt; None raises
the error and ends the list."""

FOLLOWING: Final = 990
"""Page size after the first page: the first is small so that its rows arrive soon; the
others are large because each starts with a list request to the storage, and a little
below the 1000 names of its responses, so that it is one."""

_REASON: Final = "CORRUPT_DATA"


def rows(
    ask: Callable[[Any], Any],
    request: Any,
    rows_of: Callable[[Any], Sequence[T]],
    on_damage: OnDamage,
) -> Iterator[T]:
    """Yields the rows of a list in the server's order; changes the request for each
    page."""
    while True:
        page = ask(request)
        yield from _in_order(rows_of(page), page.damaged, on_damage)
        if not page.next_page_token:
            return
        if page.next_page_token == request.page_token:
            raise DataLossError(
                "the server sent a list page whose next page is itself; connect to "
                "another server",
                reason=_REASON,
            )
        request.page_token = page.next_page_token
        request.page_size = FOLLOWING


def _in_order(
    found: Sequence[T], damaged: Sequence[DamagedRecord], on_damage: OnDamage
) -> Iterator[T]:
    at = 0
    for record in damaged:
        yield from found[at : record.position]
        at = record.position
        error = DataLossError(
            record.message, reason=_REASON, metadata={"name": record.name}
        )
        if on_damage is None:
            raise error
        on_damage(error)
    yield from found[at:]


class RunStub:
    """One run and the connection to its store."""

    def __init__(self, connection: Connection, name: RunName) -> None:
        self.name = name
        self.connection = connection
        self.service = connection.checkpoints

    def checkpoint_name(self, which: Which) -> CheckpointName:
        """Returns the name of a checkpoint, which "latest" and tags leave open."""
        try:
            if isinstance(which, str):
                return CheckpointName(self.name, which)
            if isinstance(which, bool):
                raise TypeError
            return CheckpointName(self.name, operator.index(which))
        except TypeError as e:
            raise InvalidRequestError(
                f"{self.name}: expected a step (int), 'latest' or a tag, got {which!r}"
            ) from e
        except InvalidNameError as e:
            raise InvalidRequestError(str(e)) from None

    def step_name(self, which: Which, deadline: Deadline = NEVER) -> CheckpointName:
        """Returns the name of a checkpoint by step; resolves "latest" and tags.

        Raises:
            NotFoundError: There is no such checkpoint.
            UnavailableError: The server does not answer before the deadline.
        """
        name = self.checkpoint_name(which)
        if isinstance(name.which, int):
            return name
        request = api.GetCheckpointRequest(name=name.resource)
        ask = self.connection.ask
        found = ask(self.service.GetCheckpoint, request, deadline).checkpoint
        return parse_received(CheckpointName.from_resource, found.name)

    def ask(self, method: Callable[..., T], request: Message) -> T:
        """Returns the response to an idempotent request; retries transient errors."""
        return self.connection.ask(method, request)

    def rows(
        self,
        method: Callable[..., T],
        request: Any,
        rows_of: Callable[[T], Sequence[R]],
        on_damage: OnDamage,
    ) -> Iterator[R]:
        """Yields the rows of a list call, page by page."""
        return rows(partial(self.ask, method), request, rows_of, on_damage)
