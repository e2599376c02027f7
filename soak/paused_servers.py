"""R11: a server is stopped during a commit, and resumes after another took its step.

It can no longer commit. If it is stopped while it writes the slot, it holds the lock of
that file, and the other server waits until it resumes. Either way at most one commit
succeeds, and its checkpoint is the stored one.
"""

import os
import random
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import grpc
from google.protobuf.duration_pb2 import Duration

import storesvc_client as store
from soak.outcomes import Outcome
from tests.support.contract import Writer, frame, sums
from tests.support.server_process import ServerProcess

ROUNDS = 40
LEASE_SECONDS = 1
BLOCKED_SECONDS = 3
"""Longest wait of the other server for a lock before the first one resumes."""
RUN = "soak/paused"


def paused_servers() -> Outcome:
    """Stops a server at random moments of commits, past the lease."""
    outcome = Outcome()
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="storesvc-soak-") as scratch:
        root = Path(scratch) / "store"
        servers = []
        for name in ("paused", "other"):
            directory = Path(scratch) / name
            directory.mkdir()
            servers.append(ServerProcess(root, directory))
            servers[-1].start()
        try:
            for step in range(ROUNDS):
                pause = rng.uniform(0, 0.03)
                point = f"stopped {pause * 1000:.1f} ms into a commit"
                outcome.add(point, _pause(*servers, step=step, pause=pause))
        finally:
            for server in servers:
                server.stop()
    return outcome


def _pause(
    paused: ServerProcess, other: ServerProcess, *, step: int, pause: float
) -> list[str]:
    first = Writer(paused.address, RUN, step)
    first.begin(lease_duration=Duration(seconds=LEASE_SECONDS))
    first.write(frame(0, 1, 2))
    first.finish(sums(0, 1, 2))
    with ThreadPoolExecutor(2) as pool:
        committing = pool.submit(_uid, first)
        time.sleep(pause)
        os.kill(paused.pid, signal.SIGSTOP)
        try:
            if step % 10 == 0:  # past its lease, and collected: it only takes longer
                time.sleep(1.5 * LEASE_SECONDS)
                pool.submit(_collect, other)
            saving = pool.submit(_saved, Writer(other.address, RUN, step))
            wait([saving], BLOCKED_SECONDS)
        finally:
            os.kill(paused.pid, signal.SIGCONT)
        winners = {committing.result(), saving.result()} - {None}
    if not winners:  # the one superseded the other, which then failed
        Writer(other.address, RUN, step).save()
        return []
    with other.connect() as client:
        uid = client.run(RUN).checkpoint(step).uid
    if winners != {uid}:
        return [f"expected one committed checkpoint, {uid}, got {winners}"]
    return []


def _collect(server: ServerProcess) -> None:
    with server.connect() as client, suppress(store.NotFoundError):
        for _ in client.collect(RUN, grace=timedelta()):
            pass


def _saved(writer: Writer) -> str | None:
    try:
        writer.begin()
        writer.write(frame(0, 1, 2))
        writer.finish(sums(0, 1, 2))
    except grpc.RpcError:
        return None
    return _uid(writer)


def _uid(writer: Writer) -> str | None:
    """Commits; returns the UUID of the checkpoint, or None if the commit failed."""
    try:
        return writer.commit().checkpoint.uid
    except grpc.RpcError:
        return None
