"""The emulator for tests: a server on a thread, its faults and its log.

Methods that tests call only append to lists and sets, or copy them, so no lock is
needed.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from socket import socket
from typing import Self

from tests.fake_gcs.control import Control, Log, Logged
from tests.fake_gcs.faults import Action, Faults
from tests.fake_gcs.http import Network
from tests.fake_gcs.json_api import JsonApi
from tests.fake_gcs.objects import Buckets
from tests.fake_gcs.server import Api, Server, listening, url_of
from tests.fake_gcs.tokens import Tokens


class Emulator:
    """A storage in memory; a context manager that listens inside its block."""

    def __init__(
        self,
        api: Callable[[Buckets], Api],
        *,
        buckets: Sequence[str] = (),
        latency_seconds: float = 0.0,
        bytes_per_second: float = math.inf,
        stream_bytes_per_second: float = math.inf,
        seconds_between_writes: float = 0.0,
    ) -> None:
        """Makes an emulator that does not listen yet.

        Args:
            api: Makes the API of the buckets.
            buckets: Names of the buckets at the start.
            latency_seconds: Delay of every request before it is executed.
            bytes_per_second: Rate of the network, in each direction, for all
                connections together.
            stream_bytes_per_second: Rate of each connection, in each direction.
            seconds_between_writes: Shortest time between changes of one name, which
                are rejected (429) before; the real storage allows about one a second.
        """
        self._buckets = Buckets(
            time.time, seconds_between_writes=seconds_between_writes
        )
        for name in buckets:
            self._buckets.create(name)
        self._faults = Faults()
        self._log = Log()
        self._server = Server(
            api(self._buckets),
            Control(self._buckets, self._faults, self._log),
            faults=self._faults,
            log=self._log,
            network=Network(latency_seconds, bytes_per_second, stream_bytes_per_second),
        )
        self._thread: _Thread | None = None

    def __enter__(self) -> Self:
        self._thread = _Thread(self)
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._thread is not None
        self._thread.stop()

    async def serve(self, listener: socket) -> None:
        """Serves on the running event loop, without a thread, until it is cancelled."""
        await self._server.serve(listener)

    @property
    def url(self) -> str:
        """URL for clients."""
        assert self._thread is not None, "enter it first"
        return self._thread.url

    def fault(
        self, pattern: str, action: Action, *, times: int = 1, after: int = 0
    ) -> None:
        """Adds a fault.

        Args:
            pattern: Regular expression that is searched in "METHOD target"; the target
                is percent-decoded.
            action: What happens to a matching request.
            times: Number of matching requests that it applies to; ``ALWAYS``: all.
            after: Number of matching requests to skip before.
        """
        self._faults.add(pattern, action, times=times, after=after)

    def deny(self, bucket: str) -> None:
        """Denies access to a bucket (403) from now on."""
        self._buckets.deny(bucket)

    def allow(self, bucket: str) -> None:
        """Allows access to a bucket again."""
        self._buckets.allow(bucket)

    def names(self, bucket: str) -> list[str]:
        """Returns the names of all objects of a bucket, in order."""
        return list(self._buckets.get(bucket).names)

    @property
    def log(self) -> list[Logged]:
        """Requests since the log was cleared, in the order of their responses.

        A request is added before its client has the whole response.
        """
        return self._log.entries

    @property
    def pending(self) -> int:
        """Number of requests that are received and not yet answered."""
        return self._log.pending

    @property
    def most_pending(self) -> int:
        """Largest number of pending requests since the log was cleared."""
        return self._log.most_pending

    @property
    def stored_bytes(self) -> int:
        """Bytes that uploads have stored since the log was cleared."""
        return self._log.stored_bytes

    @property
    def copied_bytes(self) -> int:
        """Bytes that the storage has copied itself since the log was cleared."""
        return self._log.copied_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes of response bodies since the log was cleared."""
        return self._log.sent_bytes

    @property
    def cpu_seconds(self) -> float:
        """CPU of its thread so far, for those who measure the rest of the process."""
        assert self._thread is not None, "enter it first"
        return self._thread.cpu_seconds

    def clear(self) -> None:
        """Removes pending faults, and clears the log."""
        self._faults.clear()
        self._log.clear()


class FakeGcs(Emulator):
    """A Google Cloud Storage.

    with FakeGcs(buckets=["b1"]) as gcs:
        gcs.fault(r"POST /upload.*manifest", Status(503), times=2)
        ...  # clients of gcs.url
        assert {200, 503} == {entry.status for entry in gcs.log}
    """

    def __init__(
        self,
        *,
        buckets: Sequence[str] = (),
        tokens: Tokens | None = None,
        ignored: Sequence[str] = (),
        left_out: Sequence[str] = (),
        latency_seconds: float = 0.0,
        bytes_per_second: float = math.inf,
        stream_bytes_per_second: float = math.inf,
        seconds_between_writes: float = 0.0,
    ) -> None:
        """Makes an emulator that does not listen yet.

        Args:
            buckets: Names of the buckets at the start.
            tokens: Valid bearer tokens, one of which every request needs; None: no
                authentication.
            ignored: Regular expressions, searched in "METHOD name=value", of the
                parameters to ignore; the list is read at each request.
            left_out: Names in lower case of headers that responses of the XML API lack;
                storage-testbench sends neither "etag" nor "last-modified".
            latency_seconds: See ``Emulator``.
            bytes_per_second: See ``Emulator``.
            stream_bytes_per_second: See ``Emulator``.
            seconds_between_writes: See ``Emulator``.
        """
        super().__init__(
            lambda made: JsonApi(
                made, tokens=tokens, ignored=ignored, left_out=left_out
            ),
            buckets=buckets,
            latency_seconds=latency_seconds,
            bytes_per_second=bytes_per_second,
            stream_bytes_per_second=stream_bytes_per_second,
            seconds_between_writes=seconds_between_writes,
        )


class _Thread:
    """Serves on a port that the system chooses."""

    def __init__(self, emulator: Emulator) -> None:
        self._listener = listening("127.0.0.1", 0)
        self.url = url_of(self._listener)
        self._loop = asyncio.new_event_loop()
        self._served = self._loop.create_task(emulator.serve(self._listener))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def cpu_seconds(self) -> float:
        """CPU so far."""
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def stop(self) -> None:
        """Breaks all connections."""
        self._loop.call_soon_threadsafe(self._served.cancel)
        self._thread.join()
        self._loop.close()
        self._listener.close()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._served)
