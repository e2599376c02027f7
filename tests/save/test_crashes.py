"""Kills at any moment of a save: what was there stays, the next save works.

Once at every write that a save makes, in order, by a bucket that dies there; and
by SIGKILL of real processes at moments drawn at random.
"""

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

import storesvc_client as store
from tests.support.contract import WHOLE, Writer, frame, sums
from tests.support.faulty_bucket import Call, Fault, dies_before
from tests.support.faulty_server import serving
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.slow

RUN = "tests/crash"


def steps(client: store.Client) -> list[int]:
    return [c.step for c in client.run(RUN).checkpoints()]


def content(client: store.Client, step: int) -> bytes:
    ((_, array),) = client.run(RUN).open(step).read(["x"])
    return array.tobytes()


def save(address: str, step: int) -> bool:
    """Saves a step; whether the commit was acknowledged."""
    writer = Writer(address, RUN, step)
    try:
        writer.save()
    except grpc.RpcError:
        return False
    return True


def writes_of_a_save(root: Path) -> int:
    count = 0

    def counting(call: Call) -> Fault:
        nonlocal count
        count += call.changes
        return Fault.NONE

    with serving(root, counting) as address:
        assert save(address, 1)
    return count


def test_a_server_that_dies_before_any_write_leaves_all_or_nothing(
    tmp_path: Path,
) -> None:
    total = writes_of_a_save(tmp_path / "count")
    outcomes = []
    for died_before in range(total):
        root = tmp_path / f"store-{died_before}"
        with serving(root) as address:
            assert save(address, 0)
        with serving(root, dies_before(died_before)) as address:
            acknowledged = save(address, 1)

        with store.connect(root.as_uri()) as client:
            found = steps(client)
            outcomes.append(found)
            assert found in ([0], [1, 0])
            assert client.run(RUN).latest().step == found[0]
            assert not acknowledged or found == [1, 0]
            assert WHOLE == content(client, found[0])
        if found == [0]:
            with serving(root) as address:
                assert save(address, 1)
            with store.connect(root.as_uri()) as client:
                assert [1, 0] == steps(client)
                assert WHOLE == content(client, 1)
    # every death before the record leaves nothing, every later one all
    assert outcomes == sorted(outcomes, key=len)
    assert [0] in outcomes
    assert [1, 0] in outcomes


def test_a_repeated_commit_finishes_what_a_death_cut_off(tmp_path: Path) -> None:
    total = writes_of_a_save(tmp_path / "count")
    for died_before in range(total):
        root = tmp_path / f"store-{died_before}"
        with serving(root, dies_before(died_before)) as address:
            writer = Writer(address, RUN, 1)
            with suppress(grpc.RpcError):
                writer.save()
        if not writer.name:
            continue
        with serving(root) as address:
            again = Writer(address, RUN, 1)
            again.request_id = writer.request_id
            again.begin()
            again_committed = 1 in steps_of(address)
            if not again_committed:
                again.write(frame(0, 1, 2))
                again.finish(sums(0, 1, 2))
            again.commit()
            with store.connect(address) as client:
                assert WHOLE == content(client, 1)


def steps_of(address: str) -> list[int]:
    with store.connect(address) as client:
        try:
            return steps(client)
        except store.NotFoundError:
            return []


SAVING = """
import sys, numpy as np, storesvc_client as store, storesvc_client.trees
for line in sys.stdin:
    address, step, *direct = line.split()
    step = int(step)
    tree = {f"leaf-{i}": np.full(2**21, step * 100 + i, np.float32) for i in range(8)}
    with store.connect(address, direct=direct[0] if direct else None) as client:
        save = client.run("tests/crash").save(step, tree)
        print("begun", flush=True)
        save.result()
    print("saved", flush=True)
"""


class Saver:
    """A process that saves, one step after another, each with a client of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SAVING],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, address: str, step: int, direct: str = "") -> None:
        """Returns once the save is under way."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{address} {step} {direct}\n")
        self._process.stdin.flush()
        assert "begun\n" == self._answer()

    def finish(self) -> None:
        """Waits until the checkpoint is there."""
        assert "saved\n" == self._answer()

    def save(self, address: str, step: int, direct: str = "") -> None:
        """Does both."""
        self.begin(address, step, direct)
        self.finish()

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self.end()

    def end(self) -> int:
        """Ends it in good order, if it still runs, and returns its exit code."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        return self._process.wait(60)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@pytest.fixture(scope="module")
def saver() -> Iterator[Saver]:
    """A process that all tests share, as importing jax takes longer than a save."""
    started = Saver()
    yield started
    assert 0 == started.end()


def check(client: store.Client, step: int) -> None:
    run = client.run(RUN)
    for i, (_, leaf) in enumerate(run.open(step).read([f"leaf-{i}" for i in range(8)])):
        assert (leaf == step * 100 + i).all()


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_client_killed_during_a_save_leaves_the_run_as_it_was(
    start_server: Callable[..., ServerProcess], saver: Saver, *, is_direct: bool
) -> None:
    killed = [Saver() for _ in range(3)]
    server_process = start_server()
    address = server_process.address
    direct = server_process.root.as_uri() if is_direct else ""
    rng = random.Random(3)
    step = 1
    saver.save(address, step, direct)
    with store.connect(address) as client:
        for process in killed:
            process.begin(address, step + 1, direct)
            time.sleep(rng.uniform(0, 0.15))
            process.kill()
            assert steps(client)[0] in (step, step + 1)
            if steps(client)[0] == step:
                assert steps(client) == list(range(step, 0, -1))
                saver.save(address, step + 1, direct)
            step += 1
            assert steps(client) == list(range(step, 0, -1))
            check(client, step)


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_server_killed_during_a_save_leaves_the_run_as_it_was(
    start_server: Callable[..., ServerProcess], saver: Saver, *, is_direct: bool
) -> None:
    server_process = start_server()
    address = server_process.address
    direct = server_process.root.as_uri() if is_direct else ""
    rng = random.Random(4)
    saver.save(address, 1)
    for step in range(2, 5):
        saver.begin(address, step, direct)
        time.sleep(rng.uniform(0, 0.15))
        server_process.kill()
        server_process.start()
        saver.finish()  # it went on at the new server
        with store.connect(address) as client:
            assert steps(client) == list(range(step, 0, -1))
            check(client, step)


def test_a_save_survives_a_graceful_restart(
    start_server: Callable[..., ServerProcess], saver: Saver
) -> None:
    server_process = start_server()
    saver.begin(server_process.address, 1)

    assert 0 == server_process.stop()
    server_process.start()

    saver.finish()
    with store.connect(server_process.address) as client:
        check(client, 1)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Servers that die on purpose log it."""
    caplog.set_level("CRITICAL")
