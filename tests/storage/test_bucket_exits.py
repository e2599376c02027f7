"""A process exits on time while its bucket does not answer."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import storesvc_client as store
from storesvc.server.app import DRAIN_SECONDS
from tests.conftest import gcs_root, s3_root
from tests.fake_gcs import ALWAYS, FakeGcs, Mute, Stall
from tests.fake_s3 import FakeS3
from tests.support.server_process import ServerProcess

TIMEOUT_SECONDS = 3

SOON_SECONDS = 15
"""Maximum seconds of an exit. A busy machine takes most of them; waiting for a bucket
would take twice as many."""

STORECTL = (sys.executable, "-m", "storesvc_client.cli")

LISTING = """
import sys, threading, time
import storesvc_client as store
client = store.connect(sys.argv[1])
print("connected", flush=True)
input()
threading.Thread(target=lambda: list(client.runs()), daemon=True).start()
time.sleep(2)
sys.exit(3)
"""
"""Requests a list that is not answered, and exits while it waits."""

DELETING = """
import asyncio, sys, threading, time
from storesvc.storage.object_bucket import TensorStoreBucket
async def main():
    bucket = await TensorStoreBucket.open(sys.argv[1])
    generation = await bucket.write("a", b"1")
    print("written", flush=True)
    input()
    deleting = asyncio.create_task(bucket.delete("a", generation=generation))
    await asyncio.sleep(2)
    deleting.cancel()
    sys.exit(3)
asyncio.run(main())
"""
"""Requests a deletion that is not answered, and exits while it waits."""

pytestmark = [pytest.mark.emulated, pytest.mark.slow]


@pytest.fixture
def root(gcs: FakeGcs) -> Iterator[str]:
    """The root of a store."""
    gcs.clear()
    root = gcs_root()
    with store.connect(root) as client:
        client.run("tests/exits").save(1, {"x": 1}).result()
    yield root
    gcs.clear()


def started(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def await_asked(gcs: FakeGcs) -> None:
    """Waits for the first request that is not answered."""
    deadline = time.monotonic() + 60
    while not gcs.pending:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("request_line", "fault"),
    [("GET .*/o[?]", Stall()), ("GET .*/o/", Mute()), (".", Stall())],
    ids=["list", "read", "all"],
)
def test_a_command_ends_at_its_timeout_if_the_bucket_does_not_answer(
    root: str, gcs: FakeGcs, request_line: str, fault: Stall | Mute
) -> None:
    gcs.fault(request_line, fault, times=ALWAYS)

    timeout = ("--timeout", str(TIMEOUT_SECONDS))
    process = started(*STORECTL, "--store", root, *timeout, "ls")
    began = time.monotonic()
    out, err = process.communicate(timeout=60)

    assert time.monotonic() - began < SOON_SECONDS
    assert (1, "") == (process.returncode, out)
    (reported,) = (line for line in err.splitlines() if line.startswith("storectl: "))
    assert f"{root}: the storage did not answer within 3 s; retry, or" in reported


@pytest.mark.parametrize("request_line", ["GET .*/o[?]", "GET .*/o/"])
def test_ctrl_c_ends_a_command_whose_bucket_does_not_answer(
    root: str, gcs: FakeGcs, request_line: str
) -> None:
    gcs.fault(request_line, Stall(), times=ALWAYS)
    process = started(*STORECTL, "--store", root, "ls")
    await_asked(gcs)

    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)

    assert time.monotonic() - began < SOON_SECONDS
    assert (130, "") == (process.returncode, out)
    assert "Traceback" not in err


def test_a_process_ends_while_a_list_of_its_bucket_is_not_answered(
    root: str, gcs: FakeGcs
) -> None:
    process = started(sys.executable, "-c", LISTING, root)
    assert process.stdout is not None
    assert "connected\n" == process.stdout.readline()
    gcs.fault("GET .*/o[?]", Stall(), times=ALWAYS)

    began = time.monotonic()
    process.communicate("\n", timeout=60)

    assert time.monotonic() - began < SOON_SECONDS
    assert 3 == process.returncode


def test_a_process_ends_while_a_deletion_on_s3_is_not_answered(s3: FakeS3) -> None:
    process = started(sys.executable, "-c", DELETING, s3_root(s3))
    assert process.stdout is not None
    assert "written\n" == process.stdout.readline()
    s3.fault("DELETE ", Stall(), times=ALWAYS)

    began = time.monotonic()
    process.communicate("\n", timeout=60)

    assert time.monotonic() - began < SOON_SECONDS
    assert 3 == process.returncode


def test_a_server_stops_while_a_list_of_its_bucket_is_not_answered(
    root: str, gcs: FakeGcs, tmp_path: Path
) -> None:
    server = ServerProcess(tmp_path, tmp_path, uri=root)
    server.start()
    gcs.fault("GET .*/o[?]", Stall(), times=ALWAYS)
    asking = started(*STORECTL, "--store", server.address, "ls")
    await_asked(gcs)

    began = time.monotonic()
    code = server.stop()

    assert time.monotonic() - began < DRAIN_SECONDS + SOON_SECONDS
    assert 0 == code
    asking.kill()
    asking.communicate()
