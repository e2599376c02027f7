"""A training process that is killed, or asked to end, and started again."""

import json
import signal
import subprocess
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import storesvc_client as store
from tests.loop import loop_parts
from tests.support.programs import await_condition, started_python

pytestmark = pytest.mark.slow


def training(
    target: str, **arguments: Any
) -> AbstractContextManager[subprocess.Popen[str]]:
    """Starts a process that trains in a loop; kills it in the end."""
    text = json.dumps({"target": target} | arguments)
    return started_python("-m", "tests.loop.loop_parts", text)


def outcome(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Waits for the end of a process, and returns what it did."""
    out, err = process.communicate(timeout=100)
    assert 0 == process.returncode, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_sigkill_loses_the_steps_since_the_last_commit_and_no_more(
    tmp_path: Path,
) -> None:
    target, marker = (tmp_path / "store").as_uri(), tmp_path / "marker"
    with training(target, total=10**6, every=4, marker=str(marker)) as process:
        await_condition(lambda: marker.exists() and marker.read_text(), process)
        await_committed(target, process)
        process.kill()
        process.wait()
    with store.connect(target) as client:
        committed = client.run(loop_parts.RUN).steps()
        assert client.run(loop_parts.RUN).verify("latest").ok

    with training(target, total=committed[-1] + 8, every=4) as process:
        found = outcome(process)

    assert committed[-1] + 1 == found["start"]
    assert committed[-1] + 8 == found["value"]
    assert committed == found["steps"][: len(committed)]


def test_sigterm_saves_the_step_at_which_it_arrives(tmp_path: Path) -> None:
    target, marker = (tmp_path / "store").as_uri(), tmp_path / "marker"
    with training(target, total=10**6, marker=str(marker)) as process:
        await_condition(lambda: marker.exists() and marker.read_text(), process)
        process.terminate()
        found = outcome(process)

    start, last = found["steps"]
    assert 0 == start
    assert last > loop_parts.FIRST_STEPS
    assert f"received SIGTERM at step {last}; saved step {last}" == found["outcome"]

    with training(target, total=last + 3) as process:
        found = outcome(process)
    assert last + 1 == found["start"]
    assert last + 3 == found["value"]


def test_a_second_sigterm_ends_the_process(tmp_path: Path) -> None:
    target, marker = (tmp_path / "store").as_uri(), tmp_path / "marker"
    with training(
        target, total=10**6, marker=str(marker), seconds_per_step=5.0
    ) as process:
        # Each step takes long, so both signals come within one.
        await_committed(target, process)
        process.terminate()
        time.sleep(0.5)
        process.terminate()
        assert -signal.SIGTERM == process.wait(30)


def await_committed(target: str, process: subprocess.Popen[str]) -> None:
    """Waits until a step is committed."""
    with store.connect(target) as client:
        await_condition(client.run(loop_parts.RUN).steps, process)
