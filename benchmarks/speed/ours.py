"""This store through its public client, connected in each of the three ways."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import storesvc_client as store
from benchmarks.speed.contenders import Maker, Target
from benchmarks.speed.states import State
from storesvc_client._values.options import SnapshotMode
from tests.support.certificates import Authority
from tests.support.server_process import ServerProcess


class Ours:
    """This store, through its client."""

    pids: Sequence[int] = ()
    snapshot: SnapshotMode = "none"
    """Memory for the copy of a state; ``save`` waits until the end, and needs none."""

    def __init__(self, client: store.Client) -> None:
        self._client = client
        self.run = client.run("bench/speed")
        """Run of the saved states."""

    def save(self, step: int, state: State) -> None:
        self.run.save(step, state, base=None, snapshot=self.snapshot).result()

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

    def __init__(self, directory: Path) -> None:
        super().__init__(store.connect((directory / "store").as_uri()))


class Streamed(Ours):
    """A server process, and a client that sends all bytes through it."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._server = ServerProcess(directory / "store", directory, *arguments)
        self._server.start()
        self.pids = [self._server.pid]
        try:
            super().__init__(self._connected())
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

    def __init__(self, directory: Path) -> None:
        authority = Authority(directory)
        pair = authority.issue("server", "127.0.0.1", "localhost")
        self._ca = authority.certificate
        super().__init__(
            directory,
            *("--tls-cert", str(pair.certificate), "--tls-key", str(pair.key)),
        )

    def _connected(self) -> store.Client:
        return store.connect(self._server.address, ca=self._ca)


class Direct(Streamed):
    """A server process, and a client that reads and writes data files directly."""

    def _connected(self) -> store.Client:
        root = self._server.root.as_uri()
        return store.connect(self._server.address, direct=root)


class StreamedInBackground(Streamed):
    """Streamed; ``save`` returns once the state is copied, and training continues."""

    snapshot: SnapshotMode = "host"


class DirectInBackground(Direct):
    """Direct; ``save`` returns once the state is copied, and training continues."""

    snapshot: SnapshotMode = "host"


OURS: Final[Mapping[str, Maker]] = {
    "streamed": Streamed,
    "streamed-tls": StreamedTls,
    "direct": Direct,
    "embedded": Embedded,
    "streamed-async": StreamedInBackground,
    "direct-async": DirectInBackground,
}
"""Contenders by name."""
