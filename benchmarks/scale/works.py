"""The works that are counted: each yields its size, and what it costs at that."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any, Final, TypeAlias

import numpy as np

import storesvc_client as store
from benchmarks.scale import laws
from benchmarks.scale.counting import Cost, add_up, count, emulated_bucket
from benchmarks.scale.multiplied import RUN, MultipliedStore
from storesvc.server import embedded
from storesvc.server.app import open_store
from storesvc.server.gc_scheduler import collecting
from storesvc.telemetry.events import (
    CallEnded,
    StoreCollected,
    subscribe,
    unsubscribe,
)
from storesvc_client._job.job import JointSave
from storesvc_client._save import saver
from tests.fake_gcs import ALWAYS, FakeGcs, Status
from tests.support import thread_job
from tests.support.gcs_calls import BUCKET
from tests.support.thread_job import ThreadJob, ThreadProcess

Rows: TypeAlias = Iterator[tuple[int, Cost]]

GATHER_SECONDS: Final = 300.0
LEASE_SECONDS: Final = 600.0
"""The default lease of an upload, in seconds."""
LEAF_BYTES: Final = 1 << 15
"""Bytes of a leaf, of which each process writes two: one data file."""
RETENTION_SECONDS: Final = 3.5
"""Time within which retention is applied after a commit."""
LATE_SECONDS: Final = 12.0
"""Time by which one process is late: the others poll twice or more."""
SHORT_LEASE_SECONDS: Final = 30.0
OUTAGE_SECONDS: Final = 60
SHORT_OUTAGE_SECONDS: Final = 20
"""Length of an outage of fewer processes than 8."""
_WINDOWS: Final = [f"?concurrency={32 + n}" for n in range(1024)]
"""Ceilings of windows: in one process, each ceiling has a window of its own."""
PASS_INTERVAL: Final = timedelta(seconds=1)
PASSES: Final = 4  # of a server; the last one counts


class ProcessThreads:
    """Processes of a job as threads, each with a client and a store of its own."""

    def __init__(
        self, stack: ExitStack, root: str, processes: int, *, is_one: bool = True
    ) -> None:
        """Creates them, with one window of requests if `is_one`, else one for each."""
        thread_job.GATHER_SECONDS = GATHER_SECONDS
        vars(saver)["_joint_save"] = self._find_joint_save
        self._joined = threading.local()
        store.connect(root).close()  # creates the store
        windows = [""] * processes if is_one else _WINDOWS[:processes]
        clients = [store.connect(root + window) for window in windows]
        self._clients = [stack.enter_context(each) for each in clients]

    def _find_joint_save(self, *what: Any) -> JointSave | None:
        process = getattr(self._joined, "process", None)
        return JointSave(process, *what) if process else None

    def save(self, step: int, *, late_seconds: float = 0.0) -> None:
        """Saves a new state in all processes; one may begin later than the others, and
        then they have a short lease."""
        lease = SHORT_LEASE_SECONDS if late_seconds else LEASE_SECONDS
        draw, leaves = np.random.default_rng(step), 2 * len(self._clients)
        state = {f"w{i}": draw.bytes(LEAF_BYTES) for i in range(leaves)}

        def part(process: ThreadProcess) -> None:
            if process.index == process.count - 1:
                time.sleep(late_seconds)
            self.save_part(process, step, state, lease)

        self.run(part)

    def save_part(
        self, process: ThreadProcess, step: int, state: Any, lease: float
    ) -> None:
        """Saves a state in one process."""
        self._joined.process = process
        run = self._clients[process.index].run(str(RUN))
        save = run.save(step, state, distributed=store.Distributed(lease=lease))
        save.result(timeout=GATHER_SECONDS)

    def save_alone(self, process: ThreadProcess, *, step: int) -> None:
        """Saves a state of a process in a run of its own."""
        run = self._clients[process.index].run(f"alone/run-{process.index}")
        state = {"x": np.full(2 << 20, step, np.uint8)}
        run.save(step, state).result(timeout=GATHER_SECONDS)

    def run(self, part: Callable[[ThreadProcess], None]) -> None:
        """Runs all processes."""
        for outcome in ThreadJob(len(self._clients)).run(part):
            if isinstance(outcome, BaseException):
                raise outcome


def save_jointly(sizes: Sequence[int]) -> Rows:
    """P processes save together; the worse of two saves."""
    for processes in sizes:
        with emulated_bucket() as gcs, ExitStack() as stack:
            job = ProcessThreads(stack, f"gs://{BUCKET}/save", processes)
            saves = [count(gcs, partial(job.save, step)) for step in (1, 2)]
            cost = max(saves, key=lambda each: each["requests"])
            # the first one may import
            cost["CPU-s"] = min(each["CPU-s"] for each in saves) / processes
            yield processes, cost


def wait_for_one(sizes: Sequence[int]) -> Rows:
    """P processes save together, one of them is late by 12 s."""
    for processes in sizes:
        with emulated_bucket() as gcs, ExitStack() as stack:
            job = ProcessThreads(stack, f"gs://{BUCKET}/late", processes)
            job.save(1)
            late = partial(job.save, 2, late_seconds=LATE_SECONDS)
            yield processes, count(gcs, late)


def use_many_steps(sizes: Sequence[int]) -> Rows:
    """N steps of a run: calls, each of a new process; a collection after a save."""
    for steps in sizes:
        with emulated_bucket() as gcs:
            made = MultipliedStore(gcs, f"gs://{BUCKET}/steps")
            made.add_steps(steps)
            cost: Cost = {}
            with store.connect(made.root) as collecting:
                _save_one(collecting.run(str(RUN)), steps)
                time.sleep(RETENTION_SECONDS)
                list(collecting.collect())
                calls: dict[str, Callable[[store.Run], Any]] = {
                    "latest": store.Run.latest,
                    "ls": lambda run: _exhaust(run.checkpoints),
                    "ls, 10": lambda run: _exhaust(run.checkpoints, 10),
                    "save": partial(_save_one, step=steps + 1),
                    "collection": lambda _: _exhaust(collecting.collect),
                }
                for name, call in calls.items():
                    with store.connect(made.root) as client:
                        found = count(gcs, partial(call, client.run(str(RUN))))
                    cost |= {f"{name}: {figure}": v for figure, v in found.items()}
            yield steps, cost


def _save_one(run: store.Run, step: int) -> None:
    """Saves a state that is too large for a save in one call."""
    run.save(step, {"x": np.full(2 << 20, step % 251, np.uint8)}).result()


def _exhaust(rows: Callable[[], Iterator[Any]], most: int | None = None) -> None:
    for _ in islice(rows(), most):
        pass


def retain_after_commit(sizes: Sequence[int]) -> Rows:
    """N steps of a run: what a policy adds to a save of 4 processes."""
    for steps in sizes:
        with emulated_bucket() as gcs:
            found = [_save_under(gcs, steps, has_policy=has) for has in (False, True)]
        yield steps, {name: found[1][name] - v for name, v in found[0].items()}


def _save_under(gcs: FakeGcs, steps: int, *, has_policy: bool) -> Cost:
    """Returns the cost of the first save of processes, after one of others."""
    made = MultipliedStore(gcs, f"gs://{BUCKET}/retention-{has_policy}")
    made.add_steps(steps)
    with ExitStack() as stack:
        run = stack.enter_context(store.connect(made.root)).run(str(RUN))
        if has_policy:
            run.retention.set(store.KeepLatest(10**6))
            run.retention.apply()
            time.sleep(RETENTION_SECONDS)
        ProcessThreads(stack, made.root, 4).save(steps)
        time.sleep(RETENTION_SECONDS)
        job = ProcessThreads(stack, made.root, 4)
        again = partial(job.save, steps + 1)
        return count(gcs, again, later_seconds=RETENTION_SECONDS)


def collect_many_runs(sizes: Sequence[int]) -> Rows:
    """R runs of a store: a server's pass in which nothing happened since the last."""
    for runs in sizes:
        with emulated_bucket() as gcs:
            made = MultipliedStore(gcs, f"gs://{BUCKET}/runs")
            made.add_runs(runs)
            yield runs, embedded._run(_count_pass(gcs, made.root))


async def _count_pass(gcs: FakeGcs, root: str) -> Cost:
    marks: list[tuple[int, float]] = []
    ended = asyncio.Event()

    def mark(event: object) -> None:
        if isinstance(event, StoreCollected):
            marks.append((len(gcs.log), time.process_time() - gcs.cpu_seconds))
            ended.set() if len(marks) == PASSES else None

    subscribe(mark)
    async with collecting(await open_store(root), PASS_INTERVAL):
        await ended.wait()
    unsubscribe(mark)
    (first, before), (end, after) = marks[-2:]
    return add_up(gcs.log[first:end]) | {"CPU-s": after - before}


def collect_many_files(sizes: Sequence[int]) -> Rows:
    """M data files of a run: a collection in which nothing happened since the last."""
    program = "from benchmarks.scale.multiplied import main; main()"
    for files in sizes:
        with emulated_bucket() as gcs:
            made = MultipliedStore(gcs, f"gs://{BUCKET}/files")
            made.add_files(files)
            command = [sys.executable, "-c", program, made.root]
            pipe = subprocess.PIPE
            with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
                assert child.stdin
                assert child.stdout
                child.stdout.readline()
                gcs.clear()
                print(file=child.stdin, flush=True)
                cost = json.loads(child.stdout.read())
            yield files, add_up(gcs.log) | cost


def collect_simulated_names(sizes: Sequence[int]) -> Rows:
    """M names of data files, simulated in memory: the collection of a new process."""
    program = (
        "import asyncio, sys; from benchmarks.scale.multiplied import collect_names; "
        "asyncio.run(collect_names(int(sys.argv[1])))"
    )
    for files in sizes:
        command = [sys.executable, "-c", program, str(files)]
        yield files, json.loads(subprocess.check_output(command, text=True))


def join_with_many_leaves(sizes: Sequence[int]) -> Rows:
    """L leaves: what 4 processes send to their stores when they join a save."""
    sent: list[CallEnded] = []

    def keep(event: object) -> None:
        if isinstance(event, CallEnded) and event.method.endswith("/JoinUpload"):
            sent.append(event)

    subscribe(keep)
    with emulated_bucket() as gcs, ExitStack() as stack:
        job = ProcessThreads(stack, f"gs://{BUCKET}/leaves", 4)
        for leaves in sizes:
            key = "layers/block/attention/projection/kernel/{:08d}".format
            state = {key(i): np.full(4, i, np.int32) for i in range(leaves)}
            save = partial(job.save_part, step=leaves, state=state, lease=LEASE_SECONDS)
            sent.clear()
            cost = count(gcs, partial(job.run, save))
            joined = sum(call.received_bytes for call in sent) / 1024
            yield leaves, {"KiB of joins a process": joined / 3, "CPU-s": cost["CPU-s"]}
    unsubscribe(keep)


def meet_an_outage(sizes: Sequence[int]) -> Rows:
    """P processes, each of which saves alone while the bucket answers all with 503."""
    for processes in sizes:
        is_short = processes < laws.LEAST_SIZE
        seconds = SHORT_OUTAGE_SECONDS if is_short else OUTAGE_SECONDS
        with emulated_bucket() as gcs, ExitStack() as stack:
            root = f"gs://{BUCKET}/outage"
            job = ProcessThreads(stack, root, processes, is_one=False)
            job.run(partial(job.save_alone, step=1))
            cost: Cost = {}
            outage = threading.Timer(seconds, _end_outage, (gcs, cost))
            gcs.clear()
            gcs.fault(".", Status(503), times=ALWAYS)
            outage.start()
            save = partial(job.save_alone, step=2)
            outcomes = ThreadJob(processes).run(save)
            ended = time.monotonic()
            outage.join()
            failed = [each for each in outcomes if isinstance(each, BaseException)]
            for error in failed[:1]:
                print(f"  after {seconds} s of 503: {error}", file=sys.stderr)
            yield (
                processes,
                cost
                | {
                    "seconds": seconds,
                    "a second": cost["requests"] / seconds,
                    "last save ends after": ended - cost["ended"],
                    "failed": len(failed),
                },
            )


def _end_outage(gcs: FakeGcs, cost: Cost) -> None:
    """Adds up what was sent in an outage, and ends it."""
    began = [each.began_seconds for each in gcs.log]
    most = max(Counter(int(each - began[0]) for each in began).values())
    cost |= add_up(gcs.log) | {"most in a second": most, "ended": time.monotonic()}
    gcs.clear()
