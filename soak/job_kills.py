"""Kills processes of a job, and replicas, at ten random moments of twenty joint saves.

A job of four processes saves in a bucket, through replicas. When a process is killed,
the whole job is started again, as a scheduler does; it resumes after the newest
checkpoint. A save that succeeded in any process must be there, to the byte; a save that
failed must not.

``SOAK_SEED`` draws the same victims and moments again.
"""

import os
import random
import time
from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh

import storesvc_client as store
from soak.kills import Replica, served_replicas
from soak.outcomes import Outcome
from tests.support import job_parts
from tests.support.jax_job import JaxJob
from tests.support.restrictions import connect

KILLS = 10
PROCESSES = 4
STEPS = 20
DELAY_SECONDS = 0.5
"""Longest delay from the beginning of a save to a kill: about the length of a save."""


class _Job:
    """A job that is started again after kills."""

    def __init__(self, target: str) -> None:
        self._job = JaxJob("tests.support.job_parts:saves_on", PROCESSES, 1, {})
        self._log = self._job.directory / "log"
        self._log.touch()
        self._job.arguments = {"target": target, "steps": STEPS, "log": str(self._log)}
        self._job.start()

    def logged(self, event: str) -> set[int]:
        """Returns the steps with an event in the log: "begun", "saved" or "failed"."""
        lines = self._log.read_text().splitlines()
        return {int(line.split()[1]) for line in lines if line.startswith(event)}

    def failure(self, step: int) -> str:
        """Returns the log line of a failed step, with its error."""
        start = f"failed {step} "
        lines = self._log.read_text().splitlines()
        return next(line for line in lines if line.startswith(start))

    def is_over(self) -> bool:
        """Returns whether all processes have succeeded; restarts a failed job."""
        codes = [process.poll() for process in self._job.processes]
        if any(code not in (None, 0) for code in codes):
            self._restart()
        return codes == [0] * PROCESSES

    def kill(self, process: int) -> None:
        """Kills a process and then the rest of the job, and starts the job again."""
        self._job.processes[process].kill()
        self._restart()

    def _restart(self) -> None:
        self._job.kill()
        self._job.start()


def job_kills() -> Outcome:
    """Kills processes of a job, and replicas, while all of them save together."""
    seed = int(os.environ.get("SOAK_SEED") or random.SystemRandom().getrandbits(32))
    print(f"job_kills: SOAK_SEED={seed}", flush=True)
    rng = random.Random(seed)
    moments = {
        step: rng.uniform(0, DELAY_SECONDS) for step in rng.sample(range(STEPS), KILLS)
    }
    with served_replicas() as replicas:
        target = ",".join(replica.address for replica in replicas)
        job, kills = _Job(target), 0
        while not job.is_over():
            for step in sorted(job.logged("begun") & moments.keys()):
                time.sleep(moments.pop(step))
                victim = _kill_one(rng, job, replicas)
                print(f"  killed {victim}, in step {step}", flush=True)
                kills += 1
            time.sleep(0.02)
        for replica in replicas:
            replica.await_ready()
        with connect(target) as client:
            losses = _losses(client.run(job_parts.RUN), job)
    if kills != KILLS:
        losses.append(f"expected {KILLS} kills, got {kills}")
    note = f"{kills} kills of {PROCESSES} processes and replicas; SOAK_SEED={seed}"
    return Outcome(points=STEPS, losses=losses, note=note)


def _kill_one(rng: random.Random, job: _Job, replicas: list[Replica]) -> str:
    victims: list[tuple[str, Callable[[], None]]] = [
        (f"replica {number}", replica.kill_and_restart)
        for number, replica in enumerate(replicas)
    ]
    victims += [
        (f"process {index}", partial(job.kill, index)) for index in range(PROCESSES)
    ]
    name, kill = rng.choice(victims)
    kill()
    return name


def _losses(run: store.Run, job: _Job) -> list[str]:
    """Returns the differences between the job's log and the store."""
    found = {checkpoint.step for checkpoint in run.checkpoints()}
    saved, failed = job.logged("saved"), job.logged("failed")
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("row", "column"))
    losses = [
        *(f"step {step} was saved and is not there" for step in saved - found),
        *(f"step {step} was never saved" for step in set(range(STEPS)) - found),
    ]
    for step in found:
        if not run.verify(step).ok:
            losses.append(f"step {step} is damaged")
        expected = job_parts.step_state(mesh, step)
        if wrong := job_parts.differing(expected, run.restore(step, like=expected)):
            losses.append(f"step {step} came back otherwise: {wrong}")
    # the restarted job may have saved a failed step
    losses += [
        f"step {step} is there, but {job.failure(step)}" for step in failed - saved
    ]
    return losses
