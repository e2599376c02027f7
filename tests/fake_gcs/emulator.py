"""An emulator as tests hold it: a server on a thread, its faults and its log.

What tests call only appends to lists and sets, or copies them, so that the thread
needs no lock.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from socket import socket
from typing import Self

from tests.fake_gcs.control import Control
from tests.fake_gcs.faults import Action, Faults
from tests.fake_gcs.http import Network
from tests.fake_gcs.json_api import JsonApi
from tests.fake_gcs.log import Log, Logged
from tests.fake_gcs.objects import Buckets
from tests.fake_gcs.server import Api, Server, listening, url_of
from tests.fake_gcs.tokens import Tokens


class Emulator:
    """A storage in memory, which listens while it is entered."""

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
        """Makes one that does not listen yet.

        Args:
            api: Makes what answers requests, of the buckets.
            buckets: The names of buckets to begin with.
            latency_seconds: How long every request waits before it is done.
            bytes_per_second: The rate of the network, in each direction, for all
                connections together.
            stream_bytes_per_second: The rate of each connection, in each direction.
            seconds_between_writes: How long to refuse (429) the next change of the
                same object's name; the real ones take about one a second.
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
        """Serves on the running loop instead, until it is cancelled."""
        await self._server.serve(listener)

    @property
    def url(self) -> str:
        """Where clients find it."""
        assert self._thread is not None, "enter it first"
        return self._thread.url

    def fault(
        self, pattern: str, action: Action, *, times: int = 1, after: int = 0
    ) -> None:
        """Adds a fault.

        Args:
            pattern: Finds something in the "METHOD target" of the requests meant; the
                target is percent-decoded.
            action: What becomes of them.
            times: Of how many; ``ALWAYS``: of all.
            after: How many go unharmed before.
        """
        self._faults.add(pattern, action, times=times, after=after)

    def deny(self, bucket: str) -> None:
        """Denies access to a bucket (403) from now on."""
        self._buckets.deny(bucket)

    def allow(self, bucket: str) -> None:
        """Takes that back."""
        self._buckets.allow(bucket)

    @property
    def log(self) -> list[Logged]:
        """The requests since it was cleared, in the order of their answers.

        A request is there before its client has all of the answer.
        """
        return self._log.entries

    @property
    def pending(self) -> int:
        """Requests that came since the log was cleared and are not answered."""
        return self._log.pending

    @property
    def most_pending(self) -> int:
        """The most of them that there were at once."""
        return self._log.most_pending

    @property
    def stored_bytes(self) -> int:
        """What uploads stored since the log was cleared."""
        return self._log.stored_bytes

    @property
    def sent_bytes(self) -> int:
        """What the bodies of answers held since the log was cleared."""
        return self._log.sent_bytes

    def clear(self) -> None:
        """Forgets the faults to come, and the log."""
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
        latency_seconds: float = 0.0,
        bytes_per_second: float = math.inf,
        stream_bytes_per_second: float = math.inf,
        seconds_between_writes: float = 0.0,
    ) -> None:
        """Makes one that does not listen yet.

        Args:
            buckets: The names of buckets to begin with.
            tokens: The bearer tokens of which every request has to show one, if any.
            ignored: Patterns of the parameters that it ignores, found in "METHOD
                name=value"; it looks at the list at each request.
            latency_seconds: As of ``Emulator``.
            bytes_per_second: As of ``Emulator``.
            stream_bytes_per_second: As of ``Emulator``.
            seconds_between_writes: As of ``Emulator``.
        """
        super().__init__(
            lambda made: JsonApi(made, tokens=tokens, ignored=ignored),
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

    def stop(self) -> None:
        """Breaks all connections."""
        self._loop.call_soon_threadsafe(self._served.cancel)
        self._thread.join()
        self._loop.close()
        self._listener.close()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._served)
