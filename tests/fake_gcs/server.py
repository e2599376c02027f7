"""The server: connections on an event loop, each with one request at a time.

One thread executes all requests, each without waiting once it is received in full, so
requests are atomic and no lock is needed.
"""

import asyncio
import logging
import socket
import time
from typing import Protocol

from tests.fake_gcs.control import PREFIX, Control, Log, Logged
from tests.fake_gcs.faults import (
    Action,
    Delay,
    Faults,
    Late,
    Mute,
    Outcome,
    Stall,
    outcome_of,
)
from tests.fake_gcs.http import Connection, EndedError, Network, pieces_of
from tests.fake_gcs.messages import Answer, Request

_logger = logging.getLogger(__name__)

BACKLOG = 512
"""Backlog of connections, as a hundred clients may connect at the same time."""


def listening(host: str, port: int) -> socket.socket:
    """Returns a listening socket; port 0: a port that the system chooses."""
    return socket.create_server((host, port), backlog=BACKLOG)


def url_of(listener: socket.socket) -> str:
    """Returns the URL for clients."""
    host, port = listener.getsockname()
    return f"http://{host}:{port}"


class Api(Protocol):
    """Executes requests."""

    def answer(self, request: Request) -> Answer:
        """Executes a request, and returns the response or an error response."""

    def refused(self, status: int, message: str) -> Answer:
        """Returns the error response to a request that is not executed."""


class Server:
    """Receives requests, applies faults, and sends responses."""

    def __init__(
        self, api: Api, control: Control, *, faults: Faults, log: Log, network: Network
    ) -> None:
        self._api = api
        self._control = control
        self._faults = faults
        self._log = log
        self._network = network

    async def serve(self, listener: socket.socket) -> None:
        """Accepts and serves connections until it is cancelled."""
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as connections:
            while True:
                sock, _ = await loop.sock_accept(listener)
                connections.create_task(self._serve_connection(sock))

    async def _serve_connection(self, sock: socket.socket) -> None:
        with sock:
            connection = Connection(sock, self._network)
            try:
                while True:
                    await self._serve_request(connection, await connection.receive())
            except OSError:
                pass  # clients may leave when they want to

    async def _serve_request(self, connection: Connection, request: Request) -> None:
        if request.path.startswith(PREFIX):
            answer = self._control.answer(request)
            for piece in pieces_of(answer, request.method, len(answer.body)):
                await connection.send(piece)
            return
        began, pending = time.monotonic(), object()
        self._log.begin(pending)
        action = self._faults.next_for(request.line)
        await self._wait(connection, action)
        outcome = outcome_of(action, lambda: self._do(request), self._api.refused)
        if isinstance(action, Mute):
            await connection.hung_up()
        if isinstance(action, Late):
            await asyncio.sleep(action.seconds)
        *first, last = _to_send(outcome, request)
        for piece in first:
            await connection.send(piece)
        # before the last piece, so that a client with the whole response finds it in
        # the log
        self._log.add(pending, _entry(request, outcome, began))
        await connection.send(last)
        if outcome.breaks:
            if outcome.answer is None:
                connection.reset()
            # the part of a response that was sent still arrives before the end
            raise EndedError("a fault ends the connection")

    async def _wait(self, connection: Connection, action: Action | None) -> None:
        """Waits for the latency, and for the delay of a fault."""
        seconds = self._network.latency_seconds
        if isinstance(action, Delay):
            seconds += action.seconds
        if seconds:
            await asyncio.sleep(seconds)
        if isinstance(action, Stall):
            await connection.hung_up()

    def _do(self, request: Request) -> Answer:
        try:
            return self._api.answer(request)
        except Exception as e:
            # a bug of the emulator must not look like a fault
            _logger.exception(request.line)
            return self._api.refused(500, repr(e))


def _to_send(outcome: Outcome, request: Request) -> list[bytes | memoryview]:
    if outcome.answer is None:
        return [b""]
    return pieces_of(outcome.answer, request.method, outcome.sent_bytes)


def _entry(request: Request, outcome: Outcome, began: float) -> Logged:
    return Logged(
        method=request.method,
        target=request.target,
        status=None if outcome.answer is None else outcome.answer.status,
        received_bytes=len(request.body),
        sent_bytes=0 if request.method == "HEAD" else outcome.sent_bytes,
        stored_bytes=outcome.stored_bytes,
        copied_bytes=outcome.copied_bytes,
        began_seconds=began,
        seconds=time.monotonic() - began,
    )
