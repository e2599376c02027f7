"""A response whose bytes are read from the store while they are sent.

One thread of a request reads the next piece while the previous one is sent. A client
that goes away, or takes nothing for ``STALL_SECONDS``, ends the reads. Damage, or any
other error, after the first byte ends the connection: the client gets fewer bytes than
Content-Length promised, and never takes them for the file.
"""

import asyncio
import logging
from collections.abc import Generator, Mapping
from contextlib import suppress
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from storesvc.storage.threads import Threads

STALL_SECONDS: Final = 60.0
"""Maximum wait for a client that takes no bytes."""

_PART_BYTES: Final = 1 << 20
"""Bytes that are handed to the socket together."""

_log = logging.getLogger("storesvc_client")


class StreamedResponse(Response):
    """Sends pieces; see above."""

    def __init__(
        self,
        pieces: Generator[memoryview],
        *,
        status: int,
        headers: Mapping[str, str],
        slots: asyncio.Semaphore,
        what: str,
    ) -> None:
        """Creates it; nothing is read.

        Args:
            pieces: Reads the bytes; closed when the response ends.
            status: HTTP status.
            headers: Headers, Content-Length among them.
            slots: Taken while pieces are read.
            what: Name of the file, for the log.
        """
        super().__init__(None, status, headers)
        self._pieces = pieces
        self._slots = slots
        self._what = what

    async def __call__(
        self,
        scope: Scope,  # noqa: ARG002 - the signature of an application
        receive: Receive,
        send: Send,
    ) -> None:
        """Sends the response.

        Raises:
            StoreError: The bytes cannot be read.
            TimeoutError: The client takes none.
        """
        async with self._slots:
            thread = Threads(1, "storesvc-hub")
            gone = asyncio.create_task(_await_end(receive))
            try:
                await self._send(thread, gone, send)
            except Exception as e:
                _log.warning("%s: the response was ended: %s", self._what, e)
                raise
            finally:
                gone.cancel()
                closing = thread.submit(self._pieces.close)
                thread.shutdown(wait=False)
                # the slot is free when nothing is read any more
                await asyncio.shield(asyncio.wrap_future(closing))

    async def _send(
        self, thread: Threads, gone: "asyncio.Task[None]", send: Send
    ) -> None:
        loop = asyncio.get_running_loop()

        def read() -> "asyncio.Future[memoryview | None]":
            return loop.run_in_executor(thread, next, self._pieces, None)

        # before the status, so that an error can still have one
        piece = await read()
        start: dict[str, Any] = {"type": "http.response.start"}
        await send(start | {"status": self.status_code, "headers": self.raw_headers})
        while piece is not None and not gone.done():
            reading = read()
            try:
                for at in range(0, len(piece), _PART_BYTES):
                    if gone.done():
                        break
                    part = bytes(piece[at : at + _PART_BYTES])
                    async with asyncio.timeout(STALL_SECONDS):
                        await send(
                            {
                                "type": "http.response.body",
                                "body": part,
                                "more_body": True,
                            }
                        )
            finally:
                # asyncio reports no error that is left behind when a client goes away
                reading.add_done_callback(_take_error)
            piece = await reading
        if not gone.done():
            await send({"type": "http.response.body", "body": b""})


def _take_error(reading: "asyncio.Future[memoryview | None]") -> None:
    with suppress(asyncio.CancelledError):
        reading.exception()


async def _await_end(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
