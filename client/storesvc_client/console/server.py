"""Serves the console on this machine until Ctrl-C or SIGTERM."""

import signal
import socket
from types import FrameType
from typing import Final, NoReturn

import uvicorn
from starlette.types import ASGIApp

HOST: Final = "127.0.0.1"
"""The console is reached from this machine only."""

_GRACE_SECONDS: Final = 1
"""Time for requests in flight at the end; streams of events never end by themselves."""


def bound_socket(port: int) -> socket.socket:
    """Returns a socket on a port of this machine; 0 chooses a free one.

    Raises:
        OSError: The port is in use, or may not be used.
    """
    return socket.create_server((HOST, port))


def serve(app: ASGIApp, listening: socket.socket) -> None:
    """Serves until Ctrl-C or SIGTERM; returns after either."""
    config = uvicorn.Config(
        app,
        access_log=False,
        lifespan="off",
        log_level="critical",
        server_header=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
        ws="none",
    )
    # uvicorn raises the signal that ended it again, for the handler that was there
    earlier = signal.signal(signal.SIGTERM, _interrupt)
    try:
        uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt:
        return
    finally:
        signal.signal(signal.SIGTERM, earlier)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
