"""The multi-host demo: a job of four processes, a bucket, two servers; kills.

    make demo-multihost

Two servers serve one store in an emulated bucket on this machine, with TLS, a policy
and audit logs; the job has tokens that expire after seconds. A job of four jax
processes trains a small language model, and all of them save it every few steps, each
its own part. One process and one server are killed; the job is restarted, as a
scheduler would, resumes from the newest checkpoint, and ends. Then jobs of other shapes
restore the result. The demo prints its claims, and whether each one holds.
"""

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import socket

from joserfc import jwt
from joserfc.jwk import KeySet

import storesvc_client as store
from storesvc.format.audit_chain import split_lines, verify
from storesvc_client.demo.job import TOLERANCE, Claim, History, relative_difference
from storesvc_client.demo.processes import (
    DemoError,
    Event,
    Restored,
    Trainer,
    is_kill_point,
    storectl,
)
from tests.fake_gcs import FakeGcs
from tests.support.certificates import Authority
from tests.support.server_process import ServerProcess
from tests.support.tokens import KEYS

RUN = "demo/multihost-lm"
STEPS = 40
SAVE_EVERY = 10
KILL_AFTER = 20
"""The checkpoint after which a process is killed."""
TOKEN_SECONDS = 20
"""Life of a token of the job."""
ISSUER = "https://issuer.example"
PRINCIPAL = "k8s:trainer"
POLICY = """
[[issuers]]
name = "cluster"
issuer = "https://issuer.example"
audiences = ["storesvc"]
jwks_file = "{keys}"
leeway = "1s"
principal = "k8s:{{sub}}"

[[bindings]]
role = "writer"
runs = ["demo/*"]
who = ["k8s:trainer"]
"""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Secured:
    """The options of servers and clients that know each other."""

    serving: tuple[str, ...]
    connecting: tuple[str, ...]

    @classmethod
    @contextmanager
    def created(cls, directory: Path) -> "Iterator[Secured]":
        """Creates certificates, keys and a policy; renews the token of the job while
        the context lasts, as a kubelet does."""
        authority = Authority(directory)
        pair = authority.issue("server", "127.0.0.1", "localhost")
        policy, token = directory / "policy.toml", directory / "token"
        keys = directory / "keys.json"
        keys.write_text(json.dumps(KeySet([*KEYS.values()]).as_dict(private=False)))
        policy.write_text(POLICY.format(keys=keys))
        stop = threading.Event()
        renewing = threading.Thread(target=_renew, args=(token, stop))
        _write_token(token)
        renewing.start()
        try:
            yield cls(
                serving=(
                    *("--tls-cert", str(pair.certificate)),
                    *("--tls-key", str(pair.key), "--policy", str(policy)),
                ),
                connecting=(
                    *("--ca", str(authority.certificate)),
                    *("--token-file", str(token)),
                ),
            )
        finally:
            stop.set()
            renewing.join()


def _renew(token: Path, stop: threading.Event) -> None:
    while not stop.wait(TOKEN_SECONDS / 4):
        _write_token(token)


def _write_token(file: Path) -> None:
    now = int(time.time())
    claims = {
        "iss": ISSUER,
        "aud": "storesvc",
        "sub": "trainer",
        "iat": now,
        "exp": now + TOKEN_SECONDS,
    }
    part = file.with_suffix(".part")
    header = {"alg": "ES256", "kid": KEYS["ES256"].kid}
    part.write_text(jwt.encode(header, claims, KEYS["ES256"], algorithms=["ES256"]))
    part.replace(file)


def _audited(directory: Path) -> Claim:
    logs = sorted(directory.glob("server-*/audit.log"))
    found = [
        verify(split_lines(log.read_bytes(), f"{log.parent.name} audit.log"))
        for log in logs
    ]
    entries = [
        json.loads(line) for log in logs for line in log.read_bytes().splitlines()
    ]
    principals = {e["principal"] for e in entries if e.get("method") == "CommitUpload"}
    return Claim(
        text="Each commit is in an unbroken audit log, of the job's own principal",
        held=not any(each.broken for each in found) and principals == {PRINCIPAL},
        seen=f"{sum(each.lines for each in found)} lines, commits of "
        f"{', '.join(sorted(principals))}",
    )


def _trained(
    servers: Sequence[ServerProcess],
    address: str,
    directory: Path,
    connecting: Sequence[str],
) -> list[Claim]:
    saves = ("--save-every", str(SAVE_EVERY), *connecting)
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
        resume = ("--resume", step, *connecting)
        with _job(name, shape, directory, address, *resume) as job:
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
        secured = ended.enter_context(Secured.created(directory))
        servers = []
        for number in range(2):
            where = directory / f"server-{number}"
            where.mkdir()
            log = ("--audit-log", str(where / "audit.log"))
            server = ServerProcess(where, where, *secured.serving, *log, uri=root)
            server.start()
            ended.callback(server.kill)
            servers.append(server)
        address = ",".join(server.address for server in servers)
        _say(
            f"Two servers serve {root} (emulated) at {address}, with TLS and a policy; "
            f"the token of the job expires after {TOKEN_SECONDS} s and is renewed."
        )
        try:
            claims = [
                *_trained(servers, address, directory, secured.connecting),
                _whole(root),
                _audited(directory),
            ]
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
