"""Kills at any moment of a save: what was there stays, the next save works.

Once at every write that a save makes, in order, by a bucket that dies there; and
by SIGKILL of real processes at moments drawn at random.
"""

import asyncio
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest

import storesvc_client as store
from storesvc import server
from storesvc.store import Store
from tests.contract import Writer, elements, frame, sums
from tests.faulty_bucket import Call, Fault, FaultyBucket, Plan, dies_before, no_faults
from tests.server_process import ServerProcess

WHOLE = elements(0) + elements(1) + elements(2)
RUN = "tests/crash"


@contextmanager
def serving(root: Path, plan: Plan = no_faults) -> Iterator[str]:
    """Serves a root from a bucket that fails as planned; yields the address."""
    ready: list[str] = []

    async def run() -> None:
        bucket = await FaultyBucket.faulty(root.as_uri())
        opened = await Store.open(bucket)
        bucket.calls.follow(plan)
        async with server.running(opened, "127.0.0.1:0") as port:
            ready.append(f"127.0.0.1:{port}")
            await stop.wait()

    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    while not ready:
        assert thread.is_alive()
        time.sleep(0.005)
    try:
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def steps(client: store.Client) -> list[int]:
    return [c.step for c in client.run(RUN).checkpoints()]


def content(client: store.Client, step: int) -> bytes:
    ((_, array),) = client.run(RUN).read(step, ["x"])
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
import sys, numpy as np, storesvc_client as store
address, step = sys.argv[1], int(sys.argv[2])
tree = {f"leaf-{i}": np.full(2**21, step * 100 + i, np.float32) for i in range(8)}
with store.connect(address) as client:
    save = client.run("tests/crash").save(step, tree)
    print("begun", flush=True)
    save.result()
"""


def check(client: store.Client, step: int) -> None:
    run = client.run(RUN)
    for i, (_, leaf) in enumerate(run.read(step, [f"leaf-{i}" for i in range(8)])):
        assert (leaf == step * 100 + i).all()


def saving(address: str, step: int) -> "subprocess.Popen[str]":
    """A process that saves; returns once the save is under way."""
    process = subprocess.Popen(
        [sys.executable, "-c", SAVING, address, str(step)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == "begun\n"
    return process


def test_a_client_killed_during_a_save_leaves_the_run_as_it_was(
    start_server: Callable[..., ServerProcess],
) -> None:
    address = start_server().address
    rng = random.Random(3)
    step = 1
    assert saving(address, step).wait(60) == 0
    with store.connect(address) as client:
        for _ in range(3):
            process = saving(address, step + 1)
            time.sleep(rng.uniform(0, 0.15))
            process.kill()
            process.wait()
            assert steps(client)[0] in (step, step + 1)
            if steps(client)[0] == step:
                assert steps(client) == list(range(step, 0, -1))
                assert saving(address, step + 1).wait(60) == 0
            step += 1
            assert steps(client) == list(range(step, 0, -1))
            check(client, step)


def test_a_server_killed_during_a_save_leaves_the_run_as_it_was(
    start_server: Callable[..., ServerProcess],
) -> None:
    server_process = start_server()
    address = server_process.address
    rng = random.Random(4)
    assert saving(address, 1).wait(60) == 0
    for step in range(2, 5):
        process = saving(address, step)
        time.sleep(rng.uniform(0, 0.15))
        server_process.kill()
        server_process.start()
        assert process.wait(60) == 0  # it went on at the new server
        with store.connect(address) as client:
            assert steps(client) == list(range(step, 0, -1))
            check(client, step)


def test_a_save_goes_on_through_an_orderly_restart(
    start_server: Callable[..., ServerProcess],
) -> None:
    server_process = start_server()
    process = saving(server_process.address, 1)

    assert 0 == server_process.stop()
    server_process.start()

    assert process.wait(60) == 0
    with store.connect(server_process.address) as client:
        check(client, 1)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Servers that die on purpose log it."""
    caplog.set_level("CRITICAL")
