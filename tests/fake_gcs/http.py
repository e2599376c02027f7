"""HTTP/1.1 over a socket, without unnecessary copies of bodies.

A body is received into the buffer that then stores the object, and an object is sent
from that buffer.
"""

import asyncio
import socket
import struct
import time
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

from tests.fake_gcs.messages import Answer, Body, Request, formatted_head, parse_headers
from tests.fake_gcs.objects import Data

HEAD_BYTES: Final = 1 << 16
PIECE_BYTES: Final = 1 << 20
"""Bytes that are received or sent before other connections get a turn."""
SHORTEST_SLEEP_SECONDS: Final = 0.001
"""Resolution of the event loop's timers."""

_NO_BODY: Final = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)


class EndedError(ConnectionError):
    """The client ended the connection, or sent something other than HTTP."""


class Link:
    """One direction of a network path; all its users share its rate."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0

    async def carry(self, size_bytes: int) -> None:
        """Waits as long as the transfer of these bytes takes."""
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + size_bytes / self._bytes_per_second
        seconds = self._free_at - now
        # 0 gives other connections a turn
        await asyncio.sleep(seconds if seconds >= SHORTEST_SLEEP_SECONDS else 0)


class Stream:
    """One direction of a connection, with its own rate.

    A transfer takes as long as its bytes do at that rate. Time that the emulator loses
    between two pieces, because the machine is busy, is made up by the next ones: a
    network goes on in the meantime.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0

    def begin(self) -> None:
        """Begins a transfer."""
        self._free_at = max(time.monotonic(), self._free_at)

    async def carry(self, size_bytes: int) -> None:
        """Waits until the transfer may have come so many bytes further."""
        self._free_at += size_bytes / self._bytes_per_second
        seconds = self._free_at - time.monotonic()
        # 0 gives other connections a turn
        await asyncio.sleep(seconds if seconds >= SHORTEST_SLEEP_SECONDS else 0)


class Network:
    """The path between the clients and the server."""

    def __init__(
        self,
        latency_seconds: float,
        bytes_per_second: float,
        stream_bytes_per_second: float,
    ) -> None:
        self.latency_seconds = latency_seconds
        """Delay of every request."""
        self.inbound = Link(bytes_per_second)
        self.outbound = Link(bytes_per_second)
        self._stream_bytes_per_second = stream_bytes_per_second

    def stream(self) -> Stream:
        """Returns one direction of a connection."""
        return Stream(self._stream_bytes_per_second)


class Connection:
    """A client's connection."""

    def __init__(self, sock: socket.socket, network: Network) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._network = network
        self._inbound, self._outbound = network.stream(), network.stream()
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        """Received bytes that are not parsed yet."""
        self._is_answering = False

    async def receive(self) -> Request:
        """Returns the next request.

        Raises:
            EndedError: The connection ended.
        """
        self._is_answering = False
        try:
            return await self._receive()
        except ValueError as e:
            raise EndedError("expected HTTP/1.1, got something else") from e

    async def send(self, piece: Data) -> None:
        """Sends a piece of a response."""
        if not self._is_answering:
            self._is_answering = True
            self._outbound.begin()
        await self._outbound.carry(len(piece))
        await self._network.outbound.carry(len(piece))
        await self._loop.sock_sendall(self._socket, piece)

    async def hung_up(self) -> None:
        """Waits until the client closes the connection."""
        while await self._loop.sock_recv(self._socket, PIECE_BYTES):
            pass

    def reset(self) -> None:
        """Resets the connection, so that the client sees an error, not the end."""
        linger_no_time = struct.pack("ii", 1, 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_no_time)
        self._socket.close()

    async def _receive(self) -> Request:
        first, _, lines = (await self._until(b"\r\n\r\n")).partition("\r\n")
        method, target, _ = first.split(" ", 2)
        headers = parse_headers(lines)
        if headers.get("expect", "").lower() == "100-continue":
            await self._loop.sock_sendall(
                self._socket, b"HTTP/1.1 100 Continue\r\n\r\n"
            )
        if headers.get("transfer-encoding", "").lower() == "chunked":
            body: Body = await self._chunks()
        else:
            body = await self._exactly(int(headers.get("content-length", 0)))
        return Request.of(method, target, headers, body)

    async def _until(self, end: bytes) -> str:
        """Reads the text up to a delimiter, and the delimiter."""
        while (found := self._received.find(end)) < 0:
            if len(self._received) > HEAD_BYTES:
                raise EndedError(f"a head of more than {HEAD_BYTES} bytes")
            came = await self._loop.sock_recv(self._socket, HEAD_BYTES)
            if not came:
                raise EndedError("the client ended the connection")
            self._received += came
        text = self._received[:found].decode("latin1")
        del self._received[: found + len(end)]
        return text

    async def _exactly(self, size: int) -> bytearray:
        self._inbound.begin()
        body = bytearray(size)
        at = min(size, len(self._received))
        body[:at] = self._received[:at]
        del self._received[:at]
        await self._carry_in(at)
        rest = memoryview(body)
        while at < size:
            piece = rest[at : at + PIECE_BYTES]
            count = await self._loop.sock_recv_into(self._socket, piece)
            if not count:
                raise EndedError(f"a body of {size} bytes ended after {at}")
            at += count
            await self._carry_in(count)
        return body

    async def _carry_in(self, size_bytes: int) -> None:
        await self._inbound.carry(size_bytes)
        await self._network.inbound.carry(size_bytes)

    async def _chunks(self) -> bytes:
        chunks = []
        while size := int((await self._until(b"\r\n")).partition(";")[0], 16):
            chunks.append(await self._exactly(size))
            await self._until(b"\r\n")
        while await self._until(b"\r\n"):
            pass  # trailers are ignored
        return b"".join(chunks)


def pieces_of(answer: Answer, method: str, body_bytes: int) -> list[bytes | memoryview]:
    """Returns the pieces of a response to send, small ones joined.

    Args:
        answer: The response.
        method: Method of the request.
        body_bytes: Bytes of the body to send; the headers announce the whole body.
    """
    headers = {"date": formatdate(usegmt=True), **answer.headers}
    if answer.status not in _NO_BODY:
        headers["content-length"] = str(len(answer.body))
    head = formatted_head(answer.status, headers)
    if method == "HEAD" or answer.status in _NO_BODY:
        return [head]
    if body_bytes <= HEAD_BYTES:
        return [head + bytes(answer.body[:body_bytes])]
    body = memoryview(answer.body)[:body_bytes]
    starts = range(0, body_bytes, PIECE_BYTES)
    return [head, *(body[start : start + PIECE_BYTES] for start in starts)]
