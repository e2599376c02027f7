"""Serves an application over HTTP: until Ctrl-C or SIGTERM, or in a thread."""

import asyncio
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import h11
import uvicorn
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from storesvc_client.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidRequestError,
    LimitError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionError,
    StoreError,
    UnauthenticatedError,
    UnavailableError,
)

HOST: Final = "127.0.0.1"
"""Address of what only this machine reaches."""

LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""Names of this machine in a Host header."""

_STATUSES: Final = (
    (NotFoundError, 404),
    (InvalidRequestError, 400),
    (PermissionDeniedError, 403),
    (UnauthenticatedError, 401),
    ((ConflictError, AlreadyExistsError, PreconditionError), 409),
    (LimitError, 429),
    (UnavailableError, 503),
)
"""HTTP statuses of errors of the store; others are 500."""

REQUEST_SECONDS: Final = 5.0
"""Interval at which connections are looked at: a request must be whole within two."""

MAX_CONNECTIONS: Final = 1000
"""Connections at a time; the requests of others are answered with 503."""

_GRACE_SECONDS: Final = 1
"""Time for requests in flight at the end; streams of events never end by themselves."""


def is_loopback(host: str) -> bool:
    """Returns whether a Host header names this machine: no other site can then point
    its own name at this address and read the answers (DNS rebinding)."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host) in LOOPBACK


def http_status(error: StoreError) -> int:
    return next(
        (status for kinds, status in _STATUSES if isinstance(error, kinds)), 500
    )


class _Protocol(H11Protocol):
    """Closes a connection whose request does not arrive whole in time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look(None)

    def _look(self, before: object) -> None:
        if self.transport.is_closing():
            return
        is_waiting = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        now = (self.cycle,) if is_waiting else None
        if now is not None and now == before:
            self.transport.close()
            return
        self.loop.call_later(REQUEST_SECONDS, self._look, now)


def configuration(app: ASGIApp) -> uvicorn.Config:
    """Returns the configuration of the server of an application."""
    return uvicorn.Config(
        app,
        access_log=False,
        http=_Protocol,
        lifespan="off",
        limit_concurrency=MAX_CONNECTIONS,
        log_level="critical",
        server_header=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
        ws="none",
    )


def bound_socket(port: int, host: str = HOST) -> socket.socket:
    """Returns a socket on a port, by default of this machine; 0 chooses a free one."""
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


class _Server(uvicorn.Server):
    def run(self, sockets: list[socket.socket] | None = None) -> None:
        # what threads of the first request would import; a fifth of its time
        asyncio.run(run_in_threadpool(int))
        super().run(sockets)


@contextmanager
def serve_in_thread(
    app: ASGIApp, listening: socket.socket, tls: ssl.SSLContext | None = None
) -> Iterator[None]:
    """Serves in a thread of this process while the context lasts."""
    config = configuration(app)
    config.load()
    config.ssl = tls
    server = _Server(config)
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listening]}, name="storesvc-http"
    )
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


def serve(app: ASGIApp, listening: socket.socket) -> None:
    """Serves until Ctrl-C or SIGTERM; returns after either."""
    # uvicorn raises the signal that ended it again, for the handler that was there
    earlier = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _Server(configuration(app)).run(sockets=[listening])
    except KeyboardInterrupt:
        return
    finally:
        signal.signal(signal.SIGTERM, earlier)
