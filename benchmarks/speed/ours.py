"""This store through its public client, connected in each of the three ways."""

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import storesvc_client as store
from benchmarks.speed.changing import State
from benchmarks.speed.contenders import Maker, Target
from tests.support.certificates import Authority
from tests.support.server_process import ServerProcess


class Ours:
    """This store, through its client."""

    pids: Sequence[int] = ()

    def __init__(self, client: store.Client, **options: Any) -> None:
        self._client = client
        self.run = client.run("bench/speed")
        """Run of the saved states."""
        self.returned = 0.0
        self._options = options

    def save(self, step: int, state: State) -> None:
        pending = self.run.save(step, state, **self._options)
        self.returned = time.perf_counter()
        pending.result()

    def restore(self, step: int, target: Target) -> Any:
        return self.run.restore(step, like=target)

    def remove(self, *steps: int) -> None:
        """Removes steps, and the data files that no other step uses."""
        for step in steps:
            self.run.delete(step, purge_delay=timedelta(0))
            self.run.purge(step)
        for _ in self._client.collect(grace=timedelta(0)):
            pass

    def close(self) -> None:
        self._client.close()


class Embedded(Ours):
    """An embedded server."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(store.connect((directory / "store").as_uri()), **options)


class Streamed(Ours):
    """A server process, and a client that sends all bytes through it."""

    def __init__(
        self, directory: Path, arguments: Sequence[str] = (), **options: Any
    ) -> None:
        self._server = ServerProcess(directory / "store", directory, *arguments)
        self._server.start()
        self.pids = [self._server.pid]
        try:
            super().__init__(self._connected(), **options)
        except BaseException:
            self._server.stop()
            raise

    @property
    def address(self) -> str:
        """Address of the server."""
        return self._server.address

    def close(self) -> None:
        super().close()
        self._server.stop()

    def _connected(self) -> store.Client:
        return store.connect(self._server.address)


class StreamedTls(Streamed):
    """Streamed over TLS."""

    def __init__(self, directory: Path, **options: Any) -> None:
        authority = Authority(directory)
        pair = authority.issue("server", "127.0.0.1", "localhost")
        self._ca = authority.certificate
        tls = ("--tls-cert", str(pair.certificate), "--tls-key", str(pair.key))
        super().__init__(directory, tls, **options)

    def _connected(self) -> store.Client:
        return store.connect(self._server.address, ca=self._ca)


class Direct(Streamed):
    """A server process, and a client that reads and writes data files directly."""

    def _connected(self) -> store.Client:
        root = self._server.root.as_uri()
        return store.connect(self._server.address, direct=root)


OURS: Final[Mapping[str, Maker]] = {
    "embedded": Embedded,
    "embedded-none": partial(Embedded, snapshot="none"),
    "embedded-none-new": partial(Embedded, snapshot="none", base=None),
    "direct": Direct,
    "direct-none": partial(Direct, snapshot="none"),
    "streamed": Streamed,
    "streamed-none": partial(Streamed, snapshot="none"),
    "streamed-none-tls": partial(StreamedTls, snapshot="none"),
}
"""Contenders by name."""
