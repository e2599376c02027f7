"""R10: two servers commit one step at the same time, from two uploads or from one."""

import random
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from soak.outcomes import Outcome
from tests.support.contract import Writer, frame, sums
from tests.support.restrictions import connect
from tests.support.server_process import ServerProcess

ROUNDS = 500
RUN = "soak/rivals"
REFUSED = (
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.NOT_FOUND,
)


def rivals() -> Outcome:
    """Commits each step at two servers at the same time."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="storesvc-soak-") as scratch:
        root = Path(scratch) / "store"
        servers = []
        for name in ("one", "two"):
            directory = Path(scratch) / name
            directory.mkdir()
            servers.append(ServerProcess(root, directory))
            servers[-1].start()
        addresses = [server.address for server in servers]
        try:
            for step in range(ROUNDS):
                race = _two_uploads if step % 2 else _one_upload
                outcome.add(f"step {step}", race(addresses, step))
            with connect(addresses[0]) as client:
                found = {c.step for c in client.run(RUN).checkpoints()}
                if found != set(range(ROUNDS)):
                    lost = sorted(set(range(ROUNDS)) ^ found)
                    outcome.losses.append(f"lists are wrong in the steps {lost}")
        finally:
            for server in servers:
                server.stop()
    return outcome


def _two_uploads(addresses: list[str], step: int) -> list[str]:
    """Commits two uploads of one step: exactly one wins."""
    start = threading.Barrier(2)
    rng = random.Random(step)
    jitter = [rng.uniform(0, 0.01) for _ in addresses]

    def save(which: int) -> str | None:
        writer = Writer(addresses[which], RUN, step)
        start.wait()
        try:
            writer.begin(labels={"who": str(which)})
            writer.write(frame(0, 1, 2))
            writer.finish(sums(0, 1, 2))
            time.sleep(jitter[which])
            return writer.commit().checkpoint.uid
        except grpc.RpcError as e:
            assert isinstance(e, grpc.Call)
            if e.code() in REFUSED:
                return None
            raise

    with ThreadPoolExecutor(2) as pool:
        won = [uid for uid in pool.map(save, range(2)) if uid]
    if len(won) > 1:
        return [f"both won, as {won}"]
    if not won:  # each upload superseded the other one at its begin
        Writer(addresses[0], RUN, step).save()
        return []
    with connect(addresses[step % 2]) as client:
        uid = client.run(RUN).checkpoint(step).uid
    return [] if uid == won[0] else [f"{won[0]} won, and {uid} is there"]


def _one_upload(addresses: list[str], step: int) -> list[str]:
    """Commits one upload twice: both succeed, with the same response."""
    writers = [Writer(address, RUN, step) for address in addresses]
    writers[0].begin()
    writers[0].write(frame(0, 1, 2))
    writers[0].finish(sums(0, 1, 2))
    writers[1].name, writers[1].epoch = writers[0].name, writers[0].epoch
    start = threading.Barrier(2)

    def commit(writer: Writer) -> str:
        start.wait()
        try:
            return (
                writer.commit().checkpoint.SerializeToString(deterministic=True).hex()
            )
        except grpc.RpcError as e:
            return f"refused: {e}"

    with ThreadPoolExecutor(2) as pool:
        answers = set(pool.map(commit, writers))
    return [] if len(answers) == 1 else [f"one upload got two answers: {answers}"]
