"""This store, by its public client, in the three ways to connect."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import storesvc_client as store
from storesvc_client._values.options import SnapshotMode
from tests.bench.speed.contenders import Maker, Target
from tests.bench.speed.states import State
from tests.support.server_process import ServerProcess


class Ours:
    """This store, by its client."""

    pids: Sequence[int] = ()
    snapshot: SnapshotMode = "none"
    """Who waits for the end of a save, as here, needs no copy of the state."""

    def __init__(self, client: store.Client) -> None:
        self._client = client
        self.run = client.run("bench/speed")
        """Where the states go."""

    def save(self, step: int, state: State) -> None:
        self.run.save(step, state, base=None, snapshot=self.snapshot).result()

    def restore(self, step: int, target: Target) -> Any:
        return self.run.restore(step, like=target)

    def remove(self, step: int) -> None:
        """Removes a step, and what it alone had stored."""
        self.run.delete(step, purge_delay=timedelta(0))
        self.run.purge(step)
        for _ in self._client.collect(grace=timedelta(0)):
            pass

    def close(self) -> None:
        self._client.close()


class Embedded(Ours):
    """Inside the process."""

    def __init__(self, directory: Path) -> None:
        super().__init__(store.connect((directory / "store").as_uri()))


class Streamed(Ours):
    """A server, and a client over a socket."""

    def __init__(self, directory: Path) -> None:
        self._server = ServerProcess(directory / "store", directory)
        self._server.start()
        self.pids = [self._server.pid]
        try:
            super().__init__(self._connected())
        except BaseException:
            self._server.stop()
            raise

    @property
    def address(self) -> str:
        """Of the server."""
        return self._server.address

    def close(self) -> None:
        super().close()
        self._server.stop()

    def _connected(self) -> store.Client:
        return store.connect(self._server.address)


class Direct(Streamed):
    """A server, and a client that reads and writes the files of the store itself."""

    def _connected(self) -> store.Client:
        root = self._server.root.as_uri()
        return store.connect(self._server.address, direct=root)


class StreamedInBackground(Streamed):
    """Through the server, and the training goes on meanwhile."""

    snapshot: SnapshotMode = "host"


class DirectInBackground(Direct):
    """By itself, and the training goes on meanwhile."""

    snapshot: SnapshotMode = "host"


OURS: Final[Mapping[str, Maker]] = {
    "streamed": Streamed,
    "direct": Direct,
    "embedded": Embedded,
    "streamed-async": StreamedInBackground,
    "direct-async": DirectInBackground,
}
"""By name."""
