"""The multi-host demo: a job of four processes, a bucket, two servers; kills.

    make demo-multihost

Two servers serve one store in an emulated bucket on this machine. A job of four jax
processes trains a small language model, and all of them save it every few steps, each
its own part. One process and one server are killed; the job is restarted, as a
scheduler would, resumes from the newest checkpoint, and ends. Then jobs of other shapes
restore the result. The demo prints its claims, and whether each one holds.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import socket

import storesvc_client as store
from storesvc_client.demo.claims import (
    TOLERANCE,
    Claim,
    History,
    relative_difference,
)
from storesvc_client.demo.job_log import Event, Restored
from storesvc_client.demo.kill_point import is_kill_point
from storesvc_client.demo.processes import DemoError, Trainer, storectl
from tests.fake_gcs import FakeGcs
from tests.support.server_process import ServerProcess

RUN = "demo/multihost-lm"
STEPS = 40
SAVE_EVERY = 10
KILL_AFTER = 20
"""The checkpoint after which a process is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A job: how many processes, of how many devices, in which mesh."""

    processes: int
    devices: int
    mesh: str

    def __str__(self) -> str:
        return f"{self.processes} x {self.devices} ({self.mesh})"


FOUR = Shape(processes=4, devices=2, mesh="dp=2,fsdp=4,tp=1")
TWO = Shape(processes=2, devices=4, mesh="dp=1,fsdp=4,tp=2")
ONE = Shape(processes=1, devices=8, mesh="dp=2,fsdp=2,tp=2")


class Job:
    """The processes of a job."""

    def __init__(
        self,
        name: str,
        shape: Shape,
        directory: Path,
        *arguments: str,
        first: Sequence[str] = (),
    ) -> None:
        """Starts the processes; the first one gets additional arguments."""
        with socket() as free:
            free.bind(("127.0.0.1", 0))
            coordinator = "127.0.0.1:{1}".format(*free.getsockname())
        self.shape = shape
        self._ended = ExitStack()
        self.trainers = [
            self._ended.enter_context(
                Trainer(
                    f"{name} {index}",
                    [
                        *("--mesh", shape.mesh, "--devices", str(shape.devices)),
                        *("--processes", str(shape.processes)),
                        *("--process", str(index), "--coordinator", coordinator),
                        *("--steps", str(STEPS), "--run", RUN, *arguments),
                        *(() if index else first),
                    ],
                    directory,
                )
            )
            for index in range(shape.processes)
        ]

    def history(self) -> History:
        """Returns the events of process 0, once all have succeeded."""
        with ThreadPoolExecutor(len(self.trainers)) as pool:
            events = list(
                pool.map(lambda trainer: list(trainer.events()), self.trainers)
            )
        for trainer in self.trainers:
            trainer.check()
        return History(events[0], exit_code=0)

    def history_until(self, step: int) -> list[Event]:
        """Returns the events of process 0 up to its kill point.

        The others wait too: each of their steps needs process 0.
        """
        events: list[Event] = []
        for event in self.trainers[0].events():
            events.append(event)
            if is_kill_point(events, checkpoint=step):
                break
        return events

    def end(self) -> None:
        """Kills what still runs, as a scheduler does once one process has died."""
        for trainer in self.trainers:
            if trainer.running():
                trainer.kill()
        self._ended.close()


@contextmanager
def _job(
    name: str,
    shape: Shape,
    directory: Path,
    address: str,
    *arguments: str,
    first: Sequence[str] = (),
) -> Iterator[Job]:
    job = Job(name, shape, directory, "--store", address, *arguments, first=first)
    try:
        yield job
    finally:
        job.end()


def _say(text: str) -> None:
    print(text, flush=True)


def _trained(
    servers: Sequence[ServerProcess], address: str, directory: Path
) -> list[Claim]:
    saves = ("--save-every", str(SAVE_EVERY))
    held = ("--hold-after", str(KILL_AFTER))
    with _job("before", FOUR, directory, address, *saves, first=held) as job:
        events = job.history_until(KILL_AFTER)
        job.trainers[2].kill()
        servers[0].kill()
        exit_code = job.trainers[2].exit_code()
    killed = History(events, exit_code=exit_code)
    _say(
        f"{FOUR}: SIGKILL to process 2 and to a server after step {killed.last}; the "
        f"last checkpoint is that of step {killed.committed[-1]}"
    )
    with _job("after", FOUR, directory, address, *saves, "--resume", "latest") as job:
        gone_on = job.history()
    servers[0].start()
    _say(f"{FOUR}: {_restored_text(gone_on.restored)}; trained to {gone_on.last}")
    histories = []
    step = str(killed.committed[-1])
    for shape in (TWO, ONE):
        name = f"elsewhere {shape.processes}"
        with _job(name, shape, directory, address, "--resume", step) as job:
            histories.append(job.history())
        _say(f"{shape}: {_restored_text(histories[-1].restored)}")
    return _claims(killed, gone_on, histories)


def _restored_text(event: Restored | None) -> str:
    if event is None:
        return "restored nothing"
    return (
        f"restored step {event.step} onto {event.mesh}: {event.leaf_count} leaves, "
        f"{event.size_bytes / 2**20:.1f} MiB, in {event.seconds:.2f} s; bitwise what "
        "was saved"
    )


def _claims(
    killed: History, gone_on: History, elsewhere: Sequence[History]
) -> list[Claim]:
    first, last = killed.losses[1], gone_on.losses[STEPS]
    restored = [run.restored for run in (gone_on, *elsewhere)]
    digests = {event.digest for event in restored if event}
    worst = max(
        relative_difference(gone_on, run, step)
        for run in elsewhere
        for step in run.losses
    )
    return [
        Claim(
            text="The model learns, through the kill",
            held=last < 0.7 * first,
            seen=f"{first:.2f} nats a byte at step 1, {last:.2f} at step {STEPS}",
        ),
        Claim(
            text="The job died of SIGKILL, and went on from its last checkpoint",
            held=killed.exit_code == -signal.SIGKILL
            and gone_on.restored is not None
            and gone_on.restored.step == killed.committed[-1],
            seen=f"acknowledged {killed.committed}, resumed from "
            f"{gone_on.restored.step if gone_on.restored else None}",
        ),
        Claim(
            text="The state is bitwise the saved one on 4, 2 and 1 processes",
            held=len(digests) == 1 and all(restored),
            seen=f"digest {' '.join(digests)}",
        ),
        Claim(
            text="On other shapes, every loss is the same but for rounding",
            held=worst <= TOLERANCE,
            seen=f"largest relative difference {worst:.1e}, allowed {TOLERANCE:.0e}",
        ),
    ]


def _whole(root: str) -> Claim:
    """Returns whether every checkpoint in the bucket is intact."""
    with store.connect(root) as client:
        run = client.run(RUN)
        steps = [checkpoint.step for checkpoint in run.checkpoints()]
        verified = [run.verify(step).ok for step in steps]
    return Claim(
        text="Every checkpoint is there, and verifies",
        held=all(verified) and steps == list(range(STEPS, 0, -SAVE_EVERY)),
        seen=f"steps {steps}",
    )


def main() -> int:
    """Runs the demo and returns its exit code: 0 if every claim holds."""
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as place,
        FakeGcs(buckets=["bucket"]) as gcs,
        ExitStack() as ended,
    ):
        os.environ["TENSORSTORE_GCS_HTTP_URL"] = gcs.url
        os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "any"
        directory, root = Path(place), "gs://bucket/demo"
        servers = []
        for number in range(2):
            where = directory / f"server-{number}"
            where.mkdir()
            server = ServerProcess(where, where, uri=root)
            server.start()
            ended.callback(server.kill)
            servers.append(server)
        address = ",".join(server.address for server in servers)
        _say(f"Two servers serve {root} (emulated) at {address}.")
        try:
            claims = [*_trained(servers, address, directory), _whole(root)]
        except DemoError as e:
            _say(f"The demo failed. {e}")
            return 1
        for claim in claims:
            mark = "holds" if claim.held else "FAILS"
            _say(f"  {mark}  {claim.text}\n         {claim.seen}")
        held = all(claim.held for claim in claims)
        for arguments in (("ls",), ("ls", RUN), ("stat", f"{RUN}@latest")):
            _say(f"\n$ storectl --store {root} {' '.join(arguments)}")
            done = storectl("--store", root, *arguments, width=100)
            _say(done.stdout + done.stderr)
            held = held and done.returncode == 0
    seconds = time.monotonic() - began
    _say(f"{'Every claim held' if held else 'Not every claim held'} ({seconds:.0f} s)")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
