"""Kills jobs, and the replicas that they save through, at ten random moments of twenty
saves in a bucket.

Each job saves the steps of its own run, and is started again when it is killed, as a
scheduler does; so are the replicas. A save that succeeded must be there, to the byte.
No save may fail, as every killed process comes back and the client retries.

``SOAK_SEED`` draws the same victims and moments again.
"""

import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import storesvc_client as store
from soak import job_process
from soak.outcomes import Outcome
from tests.fake_gcs import FakeGcs
from tests.support.restrictions import connect
from tests.support.server_process import ServerProcess

KILLS = 10
JOBS = 2
STEPS = 10
"""Steps of each job."""
REPLICAS = 2
DELAY_SECONDS = 1.5
"""Longest delay from the beginning of a save to a kill: about the length of a save."""
BUCKET = "soak"


class _Job:
    """A job that is started again after kills."""

    def __init__(
        self, run: str, target: str, begun: Callable[[str, int], None]
    ) -> None:
        self.run = run
        self.saved = set[int]()
        """Steps that were acknowledged."""
        self.failed = dict[int, str]()
        """Errors of the steps that failed."""
        self._begun = begun
        self._command = [sys.executable, "-m", "soak.job_process"]
        self._command += [target, run, str(STEPS)]
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._look_after)

    def start(self) -> None:
        """Starts it."""
        self._thread.start()

    def wait(self) -> None:
        """Waits until it has tried all steps."""
        self._thread.join()

    @property
    def is_running(self) -> bool:
        """True if there is a process to kill."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Kills it; it is started again."""
        assert self._process is not None
        self._process.kill()

    def _look_after(self) -> None:
        while True:
            with subprocess.Popen(
                self._command, stdout=subprocess.PIPE, text=True
            ) as self._process:
                assert self._process.stdout is not None
                for line in self._process.stdout:
                    self._note(line)
            if self._process.returncode == 0:
                return

    def _note(self, line: str) -> None:
        what, number, *why = line.split(maxsplit=2)
        step = int(number)
        if what == "begun":
            self._begun(self.run, step)
        elif what == "saved":
            self.saved.add(step)
        else:
            self.failed[step] = " ".join(why)

    def losses(self, client: store.Client) -> list[str]:
        """Returns the failed steps, and how the store differs from its output."""
        run = client.run(self.run)
        found = {checkpoint.step for checkpoint in run.checkpoints()}
        lost = [
            *(f"step {n} was saved and is not there" for n in self.saved - found),
            *(f"step {n} failed: {why}" for n, why in self.failed.items()),
            *(f"step {n} failed and is there" for n in self.failed.keys() & found),
        ]
        missing = set(range(STEPS)) - found - self.failed.keys()
        lost += [f"step {n} was never saved" for n in missing]
        for step in found:
            if not run.verify(step).ok:
                lost.append(f"step {step} is damaged")
            if not job_process.is_whole(run.restore(step), self.run, step):
                lost.append(f"step {step} came back with other bytes")
        return [f"{self.run}: {each}" for each in lost]


class Replica(ServerProcess):
    """A replica that is started again after kills."""

    def kill_and_restart(self) -> None:
        """Kills it, and starts it without waiting until it is ready."""
        self.kill()
        self.launch()


class _Killer:
    """Kills at random moments, which are drawn at the start."""

    def __init__(self, rng: random.Random, replicas: list[Replica]) -> None:
        saves = [(f"soak/job-{n}", s) for n in range(JOBS) for s in range(STEPS)]
        chosen = rng.sample(saves, KILLS)
        self._delays = {save: rng.uniform(0, DELAY_SECONDS) for save in chosen}
        self._rng = rng
        self._replicas = replicas
        self.jobs: list[_Job] = []
        self._timers: list[threading.Timer] = []
        self._lock = threading.Lock()
        self.kills = list[str]()

    def begun(self, run: str, step: int) -> None:
        """Starts the timer of a kill when a save begins for the first time."""
        with self._lock:
            delay = self._delays.pop((run, step), None)
            if delay is None:
                return
            moment = f"{delay:.2f} s into step {step} of {run}"
            self._timers.append(threading.Timer(delay, self._kill, [moment]))
            self._timers[-1].start()

    def wait(self) -> None:
        """Waits for the last kill."""
        for timer in self._timers:
            timer.join()

    def _kill(self, moment: str) -> None:
        with self._lock:
            victims: list[tuple[str, Callable[[], None]]] = [
                (f"replica {number}", replica.kill_and_restart)
                for number, replica in enumerate(self._replicas)
            ]
            victims += [(job.run, job.kill) for job in self.jobs if job.is_running]
            name, kill = self._rng.choice(victims)
            kill()
            self.kills.append(f"{name}, {moment}")
            print(f"  killed {name}, {moment}", flush=True)


def kills() -> Outcome:
    """Kills jobs and replicas while they save."""
    seed = int(os.environ.get("SOAK_SEED") or random.SystemRandom().getrandbits(32))
    print(f"kills: SOAK_SEED={seed}", flush=True)
    with served_replicas() as replicas:
        killer = _Killer(random.Random(seed), replicas)
        target = ",".join(replica.address for replica in replicas)
        killer.jobs = [
            _Job(f"soak/job-{number}", target, killer.begun) for number in range(JOBS)
        ]
        for job in killer.jobs:
            job.start()
        for job in killer.jobs:
            job.wait()
        killer.wait()
        for replica in replicas:
            replica.await_ready()
        with connect(target) as client:
            losses = [loss for job in killer.jobs for loss in job.losses(client)]
    if len(killer.kills) != KILLS:
        losses.append(f"expected {KILLS} kills, got {killer.kills}")
    note = f"{len(killer.kills)} kills; SOAK_SEED={seed}"
    return Outcome(points=JOBS * STEPS, losses=losses, note=note)


@contextmanager
def served_replicas() -> Iterator[list[Replica]]:
    """Yields replicas that serve one store in an emulated bucket."""
    with (
        tempfile.TemporaryDirectory(prefix="storesvc-soak-") as scratch,
        FakeGcs(buckets=[BUCKET]) as gcs,
        ExitStack() as ended,
    ):
        replicas = []
        for number in range(REPLICAS):
            home = Path(scratch) / f"replica-{number}"
            home.mkdir()
            replica = Replica(home, home, uri=f"gs://{BUCKET}/store")
            replica.environment = {
                "TENSORSTORE_GCS_HTTP_URL": gcs.url,
                "GOOGLE_AUTH_TOKEN_FOR_TESTING": "any",
            }
            replica.start()
            ended.callback(replica.kill)
            replicas.append(replica)
        yield replicas
