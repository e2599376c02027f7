"""The audit log of a pod: its copy has every line, also when the log is rotated."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import storesvc_client as store
from tests.deploy.manifests import rendered, server_of
from tests.repo.test_deploy_guide import steps
from tests.support.server_process import ServerProcess

PATIENCE_SECONDS = 60.0
STEP = next(step for step in steps() if step.heading == "Audit log")


@contextmanager
def copying(log: Path, place: Path) -> Iterator[None]:
    """Runs the container that copies a log, for the block."""
    spec = server_of(rendered("gke"))["spec"]["template"]["spec"]
    (container,) = spec["initContainers"]
    *shell, script = container["command"]
    with (
        place.open("wb") as written,
        subprocess.Popen(
            [*shell, script.replace("/audit/", f"{log.parent}/")],
            stdout=written,
            stderr=written,
        ) as process,
    ):
        try:
            yield
        finally:
            process.kill()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The log in the volume of a pod; there is none yet."""
    folder = tmp_path / "audit"
    folder.mkdir()
    return folder / "audit.log"


@pytest.fixture
def server(log: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server of the pod that is not started."""
    process = ServerProcess(tmp_path / "store", tmp_path, "--audit-log", str(log))
    yield process
    process.kill()


def save(server: ServerProcess, step: int) -> None:
    with store.connect(server.address) as client:
        client.run("prod/llama").save(step, {"x": np.full(1000, step)}).result()


def wait_until_copied(copy: Path, *files: Path) -> None:
    """Waits until a copy has the lines of files."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while copy.read_bytes() != b"".join(file.read_bytes() for file in files):
        assert time.monotonic() < deadline, copy.read_text()
        time.sleep(0.2)


def rotate(server: ServerProcess, log: Path) -> Path:
    """Rotates the log as the guide does, and saves before the server knows of it."""
    (line,) = (
        line
        for step in steps()
        for line in step.lines
        if step.heading == "Audit log" and "kill -HUP 1" in line
    )
    moves, _, signals = shlex.split(line)[-1].partition(" && ")
    subprocess.run(moves.replace("/audit/", f"{log.parent}/"), shell=True, check=True)
    save(server, 2)
    assert "kill -HUP 1" == signals
    os.kill(server.pid, signal.SIGHUP)
    return log.with_name("audit.old")


def test_the_copy_of_a_rotated_log_is_whole_and_verifies(
    server: ServerProcess, log: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.log"
    with copying(log, copy):
        server.start()
        save(server, 1)
        wait_until_copied(copy, log)

        old = rotate(server, log)
        save(server, 3)
        wait_until_copied(copy, old, log)

    _, line = STEP.lines
    ran = subprocess.run(
        [sys.executable, "-m", "storesvc_client.cli", *shlex.split(line)[1:-1], copy],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    varying = r"[0-9a-f]{64}|\b\d+\b"
    shown = STEP.output.removeprefix("# looks like\n")
    assert re.sub(varying, "N", shown) == re.sub(varying, "N", ran.stdout)
