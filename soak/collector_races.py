"""R15 to R17: garbage collection concurrent with saves, deletions, purges and restores.

Two servers collect without a pause and without a grace period. In the meantime a job
saves steps that share chunks, old steps are deleted and can be purged at once, and
readers put holds on the steps that they restore.
"""

import itertools
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import storesvc_client as store
from soak import promises
from soak.outcomes import Outcome
from tests.support.restrictions import connect
from tests.support.server_process import ServerProcess

SECONDS = 60
KEPT = 4
"""Steps that are not deleted."""


class _Race:
    """Concurrent clients, and the losses that they found."""

    def __init__(self, addresses: list[str]) -> None:
        self._clients = [connect(address) for address in addresses]
        self._newest = -1
        self._stop = threading.Event()
        self.losses: list[str] = []
        self.points = 0
        self.repeated = 0
        self._lock = threading.Lock()

    def run(self) -> None:
        """Runs all clients for ``SECONDS``."""
        self._save(self._clients[0])
        jobs = [self._save, self._delete, self._restore, self._restore]
        jobs += [self._collect] * len(self._clients)
        threads = [
            threading.Thread(target=self._repeat, args=(job, client))
            for job, client in zip(jobs, itertools.cycle(self._clients), strict=False)
        ]
        for thread in threads:
            thread.start()
        time.sleep(SECONDS)
        self._stop.set()
        for thread in threads:
            thread.join()
        kept = range(max(0, self._newest - KEPT), self._newest + 1)
        maybe = range(self._newest + 1)
        for client in self._clients:
            self.losses += promises.losses(client, kept=kept, maybe=maybe)
            client.close()

    def _repeat(
        self, job: Callable[[store.Client], None], client: store.Client
    ) -> None:
        while not self._stop.is_set():
            try:
                job(client)
            except (store.ConflictError, store.UnavailableError):
                self.repeated += 1  # a transient error, which a caller retries
            except store.StoreError as e:
                with self._lock:
                    self.losses.append(f"{job.__name__}: {type(e).__name__}: {e}")

    def _save(self, client: store.Client) -> None:
        promises.save(client, self._newest + 1)
        self._newest += 1
        self.points += 1

    def _delete(self, client: store.Client) -> None:
        run = client.run(promises.RUN)
        for step in range(max(0, self._newest - 3 * KEPT), self._newest - KEPT):
            with suppress(store.NotFoundError):
                run.delete(step, purge_delay=timedelta())
        time.sleep(0.05)

    def _collect(self, client: store.Client) -> None:
        for _ in client.collect("soak", grace=timedelta()):
            self.points += 1

    def _restore(self, client: store.Client) -> None:
        step = max(0, self._newest - self.points % KEPT)
        try:
            with client.run(promises.RUN).holds.create(step, owner="soak") as hold:
                time.sleep(0.05)
                found = hold.open().restore()
        except store.NotFoundError:  # deleted before it could be held
            return
        self.points += 1
        if not promises.is_whole(found, step):
            self.losses.append(f"step {step} came back with other bytes")


def collector_races() -> Outcome:
    """Collects without a pause while other clients save, delete and restore."""
    with tempfile.TemporaryDirectory(prefix="storesvc-soak-") as scratch:
        servers = []
        for name in ("one", "two"):
            directory = Path(scratch) / name
            directory.mkdir()
            servers.append(ServerProcess(Path(scratch) / "store", directory))
            servers[-1].start()
        try:
            race = _Race([server.address for server in servers])
            race.run()
        finally:
            for server in servers:
                server.stop()
    note = f"{race.repeated} calls were repeated"
    return Outcome(points=race.points, losses=race.losses, note=note)
