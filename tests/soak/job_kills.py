"""Ten SIGKILLs at random moments of twenty saves by a job of four processes, of its
processes and of the replicas that they save through, over a bucket.

Where a process is killed, all of the job is started again, as a scheduler does; it goes
on behind the newest checkpoint. A save that any process was told of must be there, to
the byte; one that failed must not.

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
from tests.soak.kills import Replica, served_replicas
from tests.soak.outcomes import Outcome
from tests.support import job_parts
from tests.support.jax_job import JaxJob

KILLS = 10
PROCESSES = 4
STEPS = 20
DELAY_SECONDS = 0.5
"""At most, from the beginning of a save to a kill: about what one takes here."""


class _Job:
    """A job, through kills."""

    def __init__(self, target: str) -> None:
        self._job = JaxJob("tests.support.job_parts:saves_on", PROCESSES, 1, {})
        self._notes = self._job.directory / "told"
        self._notes.touch()
        self._job.arguments = {
            "target": target,
            "steps": STEPS,
            "told": str(self._notes),
        }
        self._job.start()

    def told(self, what: str) -> set[int]:
        """Returns the steps that were begun, saved or given up."""
        lines = self._notes.read_text().splitlines()
        return {int(line.split()[1]) for line in lines if line.startswith(what)}

    def failure(self, step: int) -> str:
        """Returns what a process was told of a step that failed."""
        start = f"failed {step} "
        lines = self._notes.read_text().splitlines()
        return next(line for line in lines if line.startswith(start))

    def is_over(self) -> bool:
        """Whether all processes have ended well; one that has not begins again."""
        codes = [process.poll() for process in self._job.processes]
        if any(code not in (None, 0) for code in codes):
            self._again()
        return codes == [0] * PROCESSES

    def kill(self, process: int) -> None:
        """Kills a process, and then those that it leaves behind."""
        self._job.processes[process].kill()
        self._again()

    def _again(self) -> None:
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
            for step in sorted(job.told("begun") & moments.keys()):
                time.sleep(moments.pop(step))
                victim = _kill_one(rng, job, replicas)
                print(f"  killed {victim}, in step {step}", flush=True)
                kills += 1
            time.sleep(0.02)
        for replica in replicas:
            replica.await_ready()
        with store.connect(target) as client:
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
    """Returns what was told and is not so."""
    found = {checkpoint.step for checkpoint in run.checkpoints()}
    saved, failed = job.told("saved"), job.told("failed")
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
    # what failed was saved again by the next job
    losses += [
        f"step {step} is there, but {job.failure(step)}" for step in failed - saved
    ]
    return losses
